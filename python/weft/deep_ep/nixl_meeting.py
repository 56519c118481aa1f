"""How ranks of a `nixl_buffer` find each other: in a store, where each leaves its group's address for newcomers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from weft import env
from weft.deep_ep.errors import refused
from weft.deep_ep.ranks import options_of_environment
from weft.errors import CapacityExceeded, InvalidArgument, InvalidState, PeerLost, PeerTimeout, rank_list
from weft.meeting import Left, Meeting, meet

if TYPE_CHECKING:
    from torch.distributed import Store

    from weft.communicator import Communicator

__all__ = ["MeetingPlace"]

_LOOK_S = 0.02
_GET_S = 1.0  # a key may go between the look for it and the reading, which then waits for it
_STORE_S = 10.0  # for one question to a store that is opened here


class MeetingPlace:
    """Keys of one store, of one rank: `address/RANK` of each rank that is a member, the meeting of the founders, and
    `gone/EPOCH/RANK` of each rank that lets others go."""

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
            NotSupported: there is no group, and the ranks are not those from 0 on.
            PeerTimeout: naming who did not come. As `weft.Communicator.join`, and its constructors.
        """
        deadline = time.monotonic() + timeout_s
        others = [rank for rank in wanted if rank != self._rank]
        while True:
            address = self._address_of(others)
            if address is not None:
                joined = self._joined(*address, deadline)
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

    def show(self, address: str) -> None:
        """This rank is a member: newcomers find the group here."""
        _set(self._store, f"address/{self._rank}", address.encode())

    def hide(self) -> None:
        """Not any more. Local; a store that is gone is nobody's loss."""
        with contextlib.suppress(RuntimeError, OSError):
            self._store.delete_key(f"address/{self._rank}")

    def meet_those_left(self, comm: Communicator, gone: Sequence[int], deadline_s: float) -> None:
        """Wait until all ranks that are left let `gone` go, so that none is inside a call. A further death ends it."""
        left = [rank for rank in comm.active_ranks if rank not in gone]
        key = f"gone/{comm.epoch}/"
        _set(self._store, key + str(self._rank), rank_list(gone).encode())
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            told = {rank: _get(self._store, key + str(rank)) for rank in left}
            other = [rank for rank, said in told.items() if said not in (None, rank_list(gone).encode())]
            if other:
                raise InvalidArgument(
                    f"remove_ranks: {rank_list(gone)} on this rank, {(told[other[0]] or b'').decode()} on rank "
                    f"{other[0]}. It must be equal on all ranks that stay"
                )
            dead = {rank for rank, _, _ in comm._native.detections()}
            if all(said is not None or rank in dead for rank, said in told.items()):
                return
            time.sleep(_LOOK_S)
        late = [rank for rank, said in told.items() if said is None]
        raise PeerTimeout("remove_ranks", 0, tuple(late), f"remove_ranks: {rank_list(late)} did not call it")

    def _address_of(self, ranks: Sequence[int]) -> tuple[int, bytes] | None:
        for rank in ranks:
            found = _get(self._store, f"address/{rank}")
            if found is not None and self._dead.get(rank) != found:
                return rank, found
        return None

    def _joined(self, rank: int, address: bytes, deadline: float) -> Communicator | None:
        """None: nobody answers, or this rank's slot is not free yet."""
        from weft.communicator import Communicator

        options = options_of_environment()
        options["timeout_s"] = max(deadline - time.monotonic(), 1.0)
        try:
            return Communicator.join(address.decode(), slot=self._rank, **options)
        except PeerLost:
            self._dead[rank] = address
        except (CapacityExceeded, InvalidArgument, InvalidState, PeerTimeout):  # its last owner has the slot still
            if time.monotonic() > deadline:
                raise
        return None

    def _founded(self, num_ranks: int, others: Sequence[int], max_ranks: int, deadline: float) -> Communicator | None:
        """None: a group is there by now, without this rank."""
        from weft.communicator import Communicator

        stop = threading.Event()
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_LOOK_S):
                with contextlib.suppress(RuntimeError, OSError):
                    if self._address_of(others) is not None:
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
