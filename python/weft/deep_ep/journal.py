"""What low-latency calls keep, so that they can be made again without ranks that were lost: docs/protocols/masks.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weft.errors import PeerLost, PeerTimeout, rank_list
from weft.log import logger

if TYPE_CHECKING:
    from weft.communicator import Communicator

__all__ = ["Journal", "Windows"]

Windows = tuple[Callable[[], bool], Callable[[], object]]  # of a call: whether they are there, and what forgets them
_KEPT = 2  # dispatches of a buffer that are waited for


class Journal:
    """Of a communicator whose ranks may be masked. A dispatch is known by its handle, which can make it again."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.is_mending = False
        self.begin(comm)

    def begin(self, comm: Communicator) -> None:
        """The membership has changed: handles are void, and all ranks count from here on."""
        self.open: list[Any] = []
        self._before: list[Any] = []  # open before the last call
        self._last: Callable[[], object] | None = None  # makes that one again
        self._base, self._position = comm.epoch, 0

    def begin_dispatch(self, buffer: Any) -> None:
        """Before anything of it can fail: nobody combines the dispatch before the last one of this buffer any more."""
        least = buffer._num_dispatches - _KEPT + 1
        self.open = [each for each in self._owned() if each.owner() is not buffer or each.number >= least]

    def forget(self, buffer: Any) -> None:
        """It ends, by its user's will or with its last reference: on all ranks between the same two calls."""
        self.open = [each for each in self._owned() if each.owner() is not buffer]

    def _owned(self) -> list[Any]:
        return [each for each in self.open if each.owner() is not None]

    def has_lost(self, handle: Any) -> bool:
        """Whether a dispatch has to be made again for a further combine. Alike on all ranks."""
        if handle.again is None or handle.base != self._base:
            return False
        return int(handle.dispatched.handle.tie[1]) != self._comm.epoch

    def note_dispatch(self, handle: Any, again: Callable[[], object]) -> None:
        """It has ended here."""
        self._note(again)
        buffer = handle.owner()
        handle.base, handle.number = self._base, buffer._num_dispatches
        buffer._num_dispatches += 1
        self.open.append(handle)

    def note_combine(self, handle: Any, again: Callable[[], object] | None) -> None:
        """It has ended here."""
        self._note(again)
        self.open = [each for each in self.open if each is not handle]

    def _note(self, again: Callable[[], object] | None) -> None:
        self._before, self._last = list(self.open), again
        self._position += 1

    def mend(self, comm: Communicator, error: PeerLost | PeerTimeout, windows: Windows | None, seconds: float) -> None:
        """Go on without the ranks of `error`, to where this rank's call begins again. `windows` of that call.

        Raises:
            `error`: on all ranks, they can't come to the same call; or half of them or more are late: this one may be
            the one that is early. PeerTimeout: a rank did not come to that. As `weft.Communicator.recover`.
        """
        late = _late_in(error, comm)
        before = comm.active_ranks
        self.is_mending = True
        try:
            while True:
                try:
                    comm.recover(late, spares=0, deadline_s=seconds)
                    late = ()
                    is_ahead = self._compare(comm, error, windows, seconds)
                except PeerLost as lost:
                    if lost is error:
                        raise
                    continue
                try:
                    self._repeat(is_ahead=is_ahead)
                except (PeerLost, PeerTimeout) as lost:
                    late = _late_in(lost, comm)
                    continue
                break
        except BaseException:
            self.begin(comm)
            raise
        finally:
            self.is_mending = False
        gone = [rank for rank in before if rank not in comm.active_ranks]
        logger.warning("deep_ep: rank %d goes on without %s: %s", comm.rank, rank_list(gone), error)

    def _compare(self, comm: Communicator, error: Exception, windows: Windows | None, seconds: float) -> bool:
        """Whether this rank has ended the call that others make again."""
        mine = json.dumps([self._base, self._position, windows is None or windows[0]()]).encode()
        told = [json.loads(each) for each in comm.gather(mine, deadline_s=seconds).values()]
        least = min(position for _, position, _ in told)
        if any(base != self._base or position > least + 1 for base, position, _ in told):
            raise error
        if self._position > least:
            return True
        if windows is not None and not all(has for _, position, has in told if position == least):
            windows[1]()
        return False

    def _repeat(self, *, is_ahead: bool) -> None:
        for handle in self._before if is_ahead else self.open:
            handle.dispatch_again()
        if is_ahead and self._last is not None:
            self._last()


def _late_in(error: PeerLost | PeerTimeout, comm: Communicator) -> tuple[int, ...]:
    """Whom a recovery is to leave out besides the dead: fewer than half of the active ranks, else `error` is raised."""
    if not isinstance(error, PeerTimeout):
        return ()
    late = set(error.peers)
    if not late or 2 * len(late.intersection(comm.active_ranks)) >= len(comm.active_ranks):
        raise error
    return tuple(error.peers)
