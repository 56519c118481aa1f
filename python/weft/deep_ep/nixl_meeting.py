"""How ranks of a `nixl_buffer` find each other: in a store, where each leaves its group's address for newcomers."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from weft import env
from weft.deep_ep.errors import refused
from weft.deep_ep.ranks import options_of_environment
from weft.errors import CapacityExceeded, InvalidArgument, InvalidState, PeerLost, PeerTimeout, rank_list
from weft.group.meeting import Left, Meeting, meet

if TYPE_CHECKING:
    from torch.distributed import Store

    from weft.communicator import Communicator

__all__ = ["MeetingPlace"]

_LOOK_S = 0.02
_GET_S = 1.0  # a key may go between the look for it and the reading, which then waits for it
_REFUSED = "refused:"
_STORE_S = 10.0  # for one question to a store that is opened here


class MeetingPlace:
    """Keys of one store, of one rank: `member/RANK` of each member, with the number of the group's slots; the meeting
    of the founders; `gone/GROUP/EPOCH/RANK` of each rank that lets others go, as long as it does; and
    `over/INCARNATION` of who was let go while it was masked."""

    def __init__(self, rank: int, store: Any = None, group: Any = None) -> None:
        """`store`: of torch.distributed; None: that of `group`, or what WEFT_DEEP_EP_STORE names, or that of
        torch.distributed's default group.

        Raises:
            InvalidState: there is none.
        """
        import torch.distributed as dist

        self._rank = rank
        self._dead: dict[int, bytes] = {}  # addresses at which nobody answers
        self._store: Store = dist.PrefixStore("weft/nixl", _client(store if store is not None else _found_store(group)))

    def enter(self, wanted: Sequence[int], max_ranks: int, timeout_s: float) -> Communicator:
        """As a member of a new group of exactly `wanted`, or as a newcomer of the group that one of them is in.

        Raises:
            InvalidArgument: that group has another number of slots.
            NotSupported: there is no group, and the ranks are not those from 0 on.
            PeerTimeout: naming who did not come. As `weft.Communicator.join`, and its constructors.
        """
        deadline = time.monotonic() + timeout_s
        others = [rank for rank in wanted if rank != self._rank]
        while True:
            shown = self._shown_by(others)
            if shown is not None:
                joined = self._joined(*shown, max_ranks, deadline)
                if joined is not None:
                    return joined
            elif list(wanted) == list(range(len(wanted))):
                founded = self._founded(len(wanted), others, max_ranks, deadline)
                if founded is not None:
                    return founded
            elif 0 not in wanted:
                raise refused(
                    f"connect_ranks of {rank_list(wanted)}",
                    "none of them is in a group",
                    "the first ranks begin with 0",
                )
            if time.monotonic() > deadline:
                raise PeerTimeout(
                    "connect", 0, tuple(others), f"rank {self._rank}: {rank_list(others)} did not come within "
                    f"{timeout_s:g} s"
                )  # fmt: skip
            time.sleep(_LOOK_S)

    def show(self, comm: Communicator) -> None:
        """This rank is a member: newcomers find the group here."""
        _set(self._store, f"member/{self._rank}", f"{comm.num_ranks} {comm.address}".encode())

    def hide(self) -> None:
        """Not any more. Local; a store that is gone is nobody's loss."""
        self._drop(f"member/{self._rank}")

    @contextlib.contextmanager
    def agreed_removal(self, comm: Communicator, gone: Sequence[int], deadline_s: float) -> Iterator[None]:
        """Inside, all ranks that are left let `gone` go, so that none is inside a call; a further death ends the wait.

        Each notes an attempt and whom it lets go, and takes that back behind it. Who finds another list notes instead
        which attempts it has refused: those end alike, and others wait for the next attempt of both.
        """
        place = f"gone/{comm._native.group().hex()}/{comm.epoch}/"
        attempt = secrets.token_hex(8)
        _set(self._store, f"{place}{self._rank}", f"{attempt} {rank_list(gone)}".encode())
        try:
            self._wait_for_removal(comm, place, (attempt, gone), deadline_s)
            yield
        except InvalidArgument:
            raise
        except BaseException:
            self._drop(f"{place}{self._rank}")
            raise
        self._drop(f"{place}{self._rank}")

    def let_go(self, incarnations: Sequence[int]) -> None:
        """Of ranks that were removed while they were masked: nothing else tells them."""
        for incarnation in incarnations:
            _set(self._store, f"over/{incarnation}", b"1")

    def was_let_go(self, incarnation: int) -> bool:
        """Whether the others have removed the masked rank with this number."""
        return _get(self._store, f"over/{incarnation}") is not None

    def _wait_for_removal(
        self, comm: Communicator, place: str, mine: tuple[str, Sequence[int]], deadline_s: float
    ) -> None:
        attempt, gone = mine
        left = [rank for rank in comm.active_ranks if rank not in (*gone, self._rank)]
        end = time.monotonic() + deadline_s
        while True:
            late = []
            dead = {rank for rank, _, _ in comm._native.detections()}
            for rank in left:
                head, _, theirs = (_get(self._store, f"{place}{rank}") or b"").decode().partition(" ")
                is_refused = head.startswith(_REFUSED)
                if attempt in head or (head and not is_refused and theirs != rank_list(gone)):
                    _set(self._store, f"{place}{self._rank}", f"{_REFUSED}{head} {rank_list(gone)}".encode())
                    raise InvalidArgument(
                        f"remove_ranks: {rank_list(gone)} on this rank, {theirs} on rank {rank}. It must be equal on "
                        "all ranks that stay"
                    )
                if (not head or is_refused) and rank not in dead:
                    late.append(rank)
            if not late:
                return
            if time.monotonic() > end:
                raise PeerTimeout("remove_ranks", 0, tuple(late), f"remove_ranks: {rank_list(late)} did not call it")
            time.sleep(_LOOK_S)

    def _drop(self, key: str) -> None:
        with contextlib.suppress(RuntimeError, OSError):
            self._store.delete_key(key)

    def _shown_by(self, ranks: Sequence[int]) -> tuple[int, bytes] | None:
        for rank in ranks:
            found = _get(self._store, f"member/{rank}")
            if found is not None and self._dead.get(rank) != found:
                return rank, found
        return None

    def _joined(self, rank: int, shown: bytes, max_ranks: int, deadline: float) -> Communicator | None:
        """None: nobody answers, or this rank's slot is not free yet."""
        from weft.communicator import Communicator

        num_slots, _, address = shown.decode().partition(" ")
        different = InvalidArgument(
            f"num_ranks is {max_ranks} on this rank, which joins, and {num_slots} in the group. It must be equal on "
            "all ranks"
        )
        options = options_of_environment()
        options["timeout_s"] = max(deadline - time.monotonic(), 1.0)
        try:
            joined = Communicator.join(address, slot=self._rank, **options)
        except PeerLost:
            self._dead[rank] = shown
            return None
        except (CapacityExceeded, InvalidArgument, InvalidState, PeerTimeout) as error:
            if isinstance(error, InvalidArgument) and num_slots != str(max_ranks):  # it may have no slot at all
                raise different from error
            if time.monotonic() > deadline:  # its last owner has the slot still
                raise
            return None
        if joined.num_ranks != max_ranks:
            joined.close()
            raise different
        return joined

    def _founded(self, num_ranks: int, others: Sequence[int], max_ranks: int, deadline: float) -> Communicator | None:
        """None: a group is there by now, without this rank."""
        from weft.communicator import Communicator

        stop = threading.Event()
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_LOOK_S):
                with contextlib.suppress(RuntimeError, OSError):
                    if self._shown_by(others) is not None:
                        stop.set()
                        return

        options = options_of_environment()
        seconds = options["timeout_s"] = max(deadline - time.monotonic(), 1.0)

        def share(mine: bytes) -> list[bytes]:
            return meet(self._store, Meeting(self._rank, num_ranks, mine, deadline, seconds, stop))

        threading.Thread(target=watch, name="weft-nixl-meeting", daemon=True).start()
        try:
            return Communicator.from_allgather(self._rank, num_ranks, share, max_ranks=max_ranks, **options)
        except Left:
            return None
        finally:
            done.set()


def _client(store: Store) -> Store:
    """Another client of the same store, with short waits: the caller's may wait for minutes."""
    client: Store = store.clone()  # type: ignore[attr-defined]  # its stub does not know it
    if client is not store:
        client.set_timeout(timedelta(seconds=_GET_S))
    return client


def _found_store(group: Any) -> Store:
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    if group is not None:
        return c10d._get_process_group_store(group)
    named = env.deep_ep().store
    if named:
        return _opened(named)
    if dist.is_available() and dist.is_initialized():
        return c10d._get_process_group_store(c10d._get_default_group())
    raise InvalidState(
        "connect_ranks: nothing says where the ranks meet; give tcp_store_group= or group=, set WEFT_DEEP_EP_STORE to "
        "host:port or a path, or call torch.distributed.init_process_group"
    )


def _opened(named: str) -> Store:
    """A file by its path, else the client of a TCPStore.

    Raises:
        InvalidArgument: it can't be reached, or is neither.
    """
    import torch.distributed as dist

    host, _, port = named.rpartition(":")
    try:
        if not host or "/" in named:
            return dist.FileStore(named, -1)
        return dist.TCPStore(host, int(port), None, False, timedelta(seconds=_STORE_S), wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise InvalidArgument(
            f"WEFT_DEEP_EP_STORE is {named!r} in the environment; allowed are host:port of a TCPStore that runs, and "
            f"the path of a file: {error}"
        ) from error


def _set(store: Store, key: str, value: bytes) -> None:
    store.set(key, value)  # type: ignore[arg-type]  # bytes are fine


def _get(store: Store, key: str) -> bytes | None:
    """None: there is none, or it is being taken back."""
    with contextlib.suppress(RuntimeError):
        if store.check([key]):
            return bytes(store.get(key)) or None
    return None
