"""Masks of ranks: who is masked is suspended, by all ranks at one boundary, which a low-latency dispatch is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from weft.deep_ep.journal import Journal, Windows
from weft.errors import Evicted, InvalidArgument, InvalidState, PeerLost, PeerTimeout
from weft.group.ticket import Ticket
from weft.group.turns import Process

if TYPE_CHECKING:
    from weft.communicator import Communicator
    from weft.group.membership import Change

__all__ = ["Masks"]

_LOOK_S = 0.001  # of a masked rank in each of its dispatches: whether it has been taken in again

T = TypeVar("T")


class Masks:
    """Of a communicator whose ranks may be suspended. What this rank wants of others is said at its next boundary.

    After a change no handle works, so a dispatch is a boundary only where none is waited for: no dispatch before it is
    open. Ranks count alike.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.was_let_go: Callable[[int], bool] = lambda _: False  # whether the others have removed this incarnation
        self.masked: set[int] = set()  # by changes, or connected without being let in: alike on all members
        self._let_go: set[int] = set()  # incarnations that this rank has removed while they were masked
        self._wanted: dict[int, bool] = {}
        self._ticket: Ticket | None = None
        self.journal = Journal(comm)
        self.is_automatic = False  # ranks that are lost or late in a low-latency call are masked by themselves
        # The next dispatch's: a call that was refused is made again, and a change has begun at a boundary or a meeting.
        self._is_passed = False
        self._said_ready = comm._says_ready
        comm._says_ready = True  # masked, it makes what the others have made since, and says so in its boundaries
        comm.on_change(self._begin_again)

    def close(self) -> None:
        """Of the last buffer: the communicator may be the caller's, and goes on without masks. Local."""
        self._comm._says_ready = self._said_ready
        self._comm._listeners.remove(self._begin_again)
        self.journal.begin(self._comm)
        if self._ticket is not None:
            self._comm.close_ended(_Withdrawal(self._comm, self._ticket))
            self._ticket = None

    def want(self, rank: int, *, mask: bool) -> None:
        """Local: it is proposed at the next boundary.

        Raises:
            InvalidArgument: no rank, or a mask of this one.
        """
        if type(rank) is not int or not 0 <= rank < self._comm.num_ranks or (mask and rank == self._comm.rank):
            raise InvalidArgument(
                f"rank_to_mask is {rank!r}; allowed are ranks, 0 to {self._comm.num_ranks - 1}, and to be masked not "
                f"this one, {self._comm.rank}"
            )
        if rank != self._comm.rank:
            self._wanted[rank] = bool(mask)

    def give_way(self, ranks: Iterable[int]) -> None:
        """To a change that takes `ranks` in: of them nothing is wanted any more, and of others only afterwards."""
        for rank in ranks:
            self._wanted.pop(rank, None)
        if self._ticket is not None:
            self._ticket.withdraw()
            self._ticket = None

    def incarnations_of_masked(self, ranks: Iterable[int]) -> list[int]:
        """Those of `ranks` that are masked."""
        return [self._incarnation(rank) for rank in ranks if rank in self.masked]

    def let_go(self, ranks: Sequence[int], over: Iterable[int]) -> None:
        """They have been removed. Masked ones among them, incarnations `over`: nobody takes these in again."""
        self._let_go.update(over)
        self.masked.difference_update(ranks)

    def is_over(self, rank: int) -> bool:
        """Whether the slot of `rank` has somebody who was removed while it was masked."""
        return self._incarnation(rank) in self._let_go

    def want_all(self) -> None:
        """Nobody masked who is connected."""
        now = self._comm.membership
        self._wanted = {rank: False for rank in (*now.standby, *now.joining) if not self.is_over(rank)}

    def boundary(self, buffer: Any, catch_up: Callable[[], bool]) -> None:
        """Of all ranks, once before each dispatch, however often it is refused. A masked rank does not wait, unless it
        wants to take part again itself. `catch_up` makes what the members have made meanwhile; False: nothing."""
        self.journal.begin_dispatch(buffer)
        if self._is_passed or self.journal.open:
            return
        comm = self._comm
        if comm.is_member:
            self._propose()
            comm.boundary()
            self._is_passed = True
        elif self._look(catch_up) is not None:
            self._wanted.clear()

    def note_dispatch(self, handle: Any) -> None:
        """It has ended here."""
        self._is_passed = False
        self.journal.note_dispatch(handle, lambda: self._dispatch_last(handle))

    def _dispatch_last(self, handle: Any) -> None:
        handle.dispatch_again()
        self._is_passed = False

    def run(self, call: Callable[[], T], seconds: float, windows: Windows | None = None) -> T:
        """`call()`, collective; if masks are automatic again without the ranks that are lost or late in it:
        docs/protocols/masks.md."""
        while True:
            try:
                return call()
            except (PeerLost, PeerTimeout) as error:
                is_local = isinstance(error, PeerTimeout) and not self._comm.broken  # a death is one for all
                if not self.is_automatic or not self._comm.is_member or is_local:
                    raise
                lost = error
            self.journal.mend(self._comm, lost, windows, seconds)

    def _look(self, catch_up: Callable[[], bool]) -> Change | None:
        """Of a masked rank."""
        rank = self._comm.rank
        if self.was_let_go(self._incarnation(rank)):
            text = f"rank {rank}: the others have removed it while it was masked; destroy the buffer"
            raise Evicted(self._comm.epoch, text)
        seconds = None if False in self._wanted.values() else _LOOK_S
        while True:
            try:
                return self._comm.boundary(seconds)
            except InvalidState:  # unless the members have made objects that this rank lacks
                if not catch_up():
                    raise

    def _incarnation(self, rank: int) -> int:
        return int(self._comm._native.incarnation(rank))

    def _propose(self) -> None:
        if not self._wanted:
            return
        active = set(self._comm.active_ranks)
        self._wanted = {rank: mask for rank, mask in self._wanted.items() if mask == (rank in active)}
        if not self._wanted or (self._ticket is not None and self._ticket.state in ("preparing", "proposed")):
            return
        ready = {rank for rank in self._comm.membership.standby if not self.is_over(rank)}
        going = [rank for rank, mask in self._wanted.items() if mask]
        coming = [rank for rank, mask in self._wanted.items() if not mask and rank in ready]
        if going or coming:
            name = f"mask {self._comm.epoch} {sorted(going)} {sorted(coming)}"
            try:
                self._ticket = self._comm.propose(suspend=going, resume=coming, id=name)
            except InvalidState:  # another change of this rank is not decided yet
                self._ticket = None

    def _begin_again(self, change: Change) -> None:
        others = self._comm.membership.standby if self._comm.rank in change.added else ()
        self.masked = {*self.masked, *change.removed, *others}.difference(change.active)
        if not self.journal.is_mending:
            self.journal.begin(self._comm)
        self._is_passed = True  # ranks that come in begin with this dispatch


class _Withdrawal:
    """Of what nobody wants any more: `Communicator.close_ended` calls it, inside a call before the next one."""

    closed = False

    def __init__(self, comm: Communicator, ticket: Ticket) -> None:
        self._comm, self._ticket = comm, ticket

    def close(self) -> None:
        comm = self._comm
        if comm._ticket is self._ticket and not comm._closed and comm._pid == Process.pid:  # not in a forked child
            comm._native.withdraw_change()
        self.closed = True
