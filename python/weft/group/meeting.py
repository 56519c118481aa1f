"""How the ranks of `Communicator.from_env` find each other in a store that may hold keys of earlier rounds.

docs/protocols/bootstrap.md, "Meeting in a store", has the keys and why nothing stale is believed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from weft.errors import Error, InvalidArgument, InvalidState, PeerTimeout, rank_list

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

    from weft.env import Torchrun

__all__ = ["ENDPOINT_BYTES", "Left", "Meeting", "hosts_store", "meet", "meet_by_env"]

ENDPOINT_BYTES = 256
_CALL = struct.Struct("<4sHH16s")  # magic, version, number of ranks, nonce
_MAGIC, _VERSION = b"WEFM", 3
_WAITING, _COMPLETE, _LATE = b"waiting ", b"complete", b"late    "  # all of one length
_ABSENT = bytes(ENDPOINT_BYTES)
_MARK_BYTES = 8

_LOOK_S = (0.002, 0.05)  # between two looks into the store: the first, the longest
_LOOK_S_A_RANK = 0.0005  # the longest of a large group, which would keep a store busy with looks alone
_LINGER_S = 1.0  # of rank 0, for the others to read that it gave up
_STUCK_S = 2.0  # after the deadline, for a look that has not come back
_REOPEN_S = 0.2  # between two tries to reach a store
_GET_S = 1.0  # a key may vanish between the look for it and the reading, which then waits for it
_MOST_FAILURES = 3

T = TypeVar("T")


@dataclass
class Meeting:
    """One rank's call.

    Attributes: `rank` of `num_ranks`; `endpoint` of this call; `deadline` of time.monotonic(); `timeout_s` that led to
    it, for texts; `stop`, when set the rank leaves at its next look.
    """

    rank: int
    num_ranks: int
    endpoint: bytes
    deadline: float
    timeout_s: float
    stop: threading.Event
    where: str = "the store"

    def late(self, ranks: Sequence[int], why: str) -> PeerTimeout:
        """The error of a rank that waited in vain for `ranks`."""
        who = f"{rank_list(ranks)} did not come" if ranks else "the others could not be met"
        text = f"rank {self.rank}: {who} within {self.timeout_s:g} s ({why}); raise timeout_s if that is too short"
        return PeerTimeout("connect", 0, ranks, text)

    def replaced(self) -> InvalidState:
        """The error of a process whose place another one has taken."""
        return InvalidState(
            f"another process has come to {self.where} as rank {self.rank} of {self.num_ranks} after this one (pid "
            f"{os.getpid()}), and the later one counts: was this rank started anew, or do two jobs share MASTER_ADDR "
            "and MASTER_PORT?"
        )


class Left(Exception):
    """`Meeting.stop` was set: the caller has gone."""


def meet(store: Store, me: Meeting) -> list[bytes]:
    """The endpoints of all ranks, none of them older than this call of rank 0. Collective; waits.

    Raises:
        PeerTimeout: naming the ranks that did not come.
        InvalidState: another process came as this rank.
        RuntimeError: the store failed.
    """
    return _host(store, me) if me.rank == 0 else _follow(store, me)


def _host(store: Store, me: Meeting) -> list[bytes]:
    before = _Call.parse(_get(store, "call"))
    if before is not None:
        for key in ("state", "all", *map(str, range(1, before.num_ranks))):
            store.delete_key(f"{before.nonce}/{key}")
    call = _Call(me.num_ranks, os.urandom(16).hex())
    _set(store, "call", call.pack())
    known = [me.endpoint, *[_ABSENT] * (me.num_ranks - 1)]
    told: list[bytes] = []
    for _ in _looks(me):
        if _get(store, "call") != call.pack():
            raise me.replaced()
        present = [_read(store, call, known, rank) for rank in range(1, me.num_ranks)]
        complete = all(present)  # at once: one that came may have left since, or was started anew
        if complete:
            _set(store, f"{call.nonce}/all", b"".join(known))
        if complete or known != told:
            _set(store, f"{call.nonce}/state", (_COMPLETE if complete else _WAITING) + _marks(known))
            told = list(known)
        if complete:
            return known
    if me.stop.is_set():  # the others wait for this rank, whoever else has not come
        known[0] = _ABSENT
    late = [rank for rank in range(me.num_ranks) if known[rank] == _ABSENT]
    _set(store, f"{call.nonce}/state", _LATE + _marks(known))
    _linger(store, call, [rank for rank in range(1, me.num_ranks) if rank not in late])
    if me.stop.is_set():
        raise Left
    raise me.late(late, f"rank 0 waited at {me.where}")


def _read(store: Store, call: _Call, known: list[bytes], rank: int) -> bool:
    """Whether its answer is there; one that has left stays known, for it is not who is waited for."""
    answer = _get(store, f"{call.nonce}/{rank}")
    if answer is None or len(answer) != ENDPOINT_BYTES:
        return False
    known[rank] = answer
    return True


def _linger(store: Store, call: _Call, present: list[int]) -> None:
    end = time.monotonic() + _LINGER_S
    while present and time.monotonic() < end:
        present = [rank for rank in present if store.check([f"{call.nonce}/{rank}"])]
        time.sleep(_LOOK_S[1] / 2)


def _follow(store: Store, me: Meeting) -> list[bytes]:
    nonce = ""
    late, why = [0], f"no call of it at {me.where}"
    try:
        for _ in _looks(me):
            call = _Call.parse(_get(store, "call"))
            if call is not None and call.num_ranks != me.num_ranks:
                why = f"the rank 0 that came to {me.where} has {call.num_ranks} ranks, this one {me.num_ranks}"
            elif call is not None and call.nonce != nonce:
                if nonce:
                    store.delete_key(f"{nonce}/{me.rank}")
                nonce = call.nonce
                _set(store, f"{nonce}/{me.rank}", me.endpoint)
                late, why = [0], f"it does not answer at {me.where}"
            if not nonce:
                continue
            kind, marks = _parse_state(_get(store, f"{nonce}/state"), me.num_ranks)
            if marks and marks[me.rank] == _mark(me.endpoint):
                late = [rank for rank, mark in enumerate(marks) if mark == _mark(_ABSENT)]
                why = f"rank 0 waits for the same at {me.where}"
                endpoints = _pieces(_get(store, f"{nonce}/all") or b"", ENDPOINT_BYTES) if kind == _COMPLETE else []
                if len(endpoints) == me.num_ranks and endpoints[me.rank] == me.endpoint:
                    return endpoints
                if kind == _LATE:
                    raise me.late(late, f"rank 0 gave up at {me.where}")
            mine = _get(store, f"{nonce}/{me.rank}")
            if mine is None:  # an earlier process of this rank took it back
                _set(store, f"{nonce}/{me.rank}", me.endpoint)
            elif mine != me.endpoint:
                nonce = ""
                raise me.replaced()
        if me.stop.is_set():
            raise Left
        raise me.late(late, why)
    finally:
        if nonce:
            with contextlib.suppress(RuntimeError):
                store.delete_key(f"{nonce}/{me.rank}")


def _looks(me: Meeting) -> Iterator[None]:
    """One turn a look into the store, at least one, until the deadline or until the caller has gone."""
    pause_s, longest_s = _LOOK_S[0], max(_LOOK_S[1], _LOOK_S_A_RANK * me.num_ranks)
    while not me.stop.is_set():
        yield
        left_s = me.deadline - time.monotonic()
        if left_s <= 0:
            return
        me.stop.wait(min(pause_s, left_s))
        pause_s = min(1.5 * pause_s, longest_s)


def _set(store: Store, key: str, value: bytes) -> None:
    store.set(key, value)  # type: ignore[arg-type]  # bytes are fine


def _get(store: Store, key: str) -> bytes | None:
    failures = 0
    while store.check([key]):
        try:
            return bytes(store.get(key)) or None  # TCPStore has nothing for a key that is taken back meanwhile
        except RuntimeError:  # taken back between the two, and perhaps written again
            failures += 1
            if failures == _MOST_FAILURES:
                raise
    return None


@dataclass(frozen=True)
class _Call:
    """What rank 0 writes when it comes."""

    num_ranks: int
    nonce: str

    def pack(self) -> bytes:
        return _CALL.pack(_MAGIC, _VERSION, self.num_ranks, bytes.fromhex(self.nonce))

    @classmethod
    def parse(cls, value: bytes | None) -> _Call | None:
        """None if there is none, or one of another version: stale, or it will time out."""
        if value is None or len(value) != _CALL.size:
            return None
        magic, version, num_ranks, nonce = _CALL.unpack(value)
        return cls(num_ranks, nonce.hex()) if (magic, version) == (_MAGIC, _VERSION) else None


def _mark(endpoint: bytes) -> bytes:
    """What stands for an endpoint in a state, which every rank reads again and again; zeros for none."""
    return bytes(_MARK_BYTES) if endpoint == _ABSENT else hashlib.sha256(endpoint).digest()[:_MARK_BYTES]


def _marks(endpoints: Sequence[bytes]) -> bytes:
    return b"".join(map(_mark, endpoints))


def _pieces(value: bytes, size: int) -> list[bytes]:
    return [value[at : at + size] for at in range(0, len(value), size)]


def _parse_state(value: bytes | None, num_ranks: int) -> tuple[bytes, list[bytes]]:
    """Kind and marks; nothing of what has another size."""
    start = len(_WAITING)
    if value is None or len(value) != start + num_ranks * _MARK_BYTES:
        return b"", []
    return value[:start], _pieces(value[start:], _MARK_BYTES)


# ---- torch's store


def meet_by_env(place: Torchrun, endpoint: bytes, timeout_s: float) -> tuple[list[bytes], Store]:
    """`meet` in the store that the environment names; also that store, which rank 0 may host: it must live as long as a
    peer may use it.

    Raises:
        PeerTimeout, InvalidState: as `meet`.
        InvalidArgument: MASTER_PORT is in use by something else on this host, or MASTER_ADDR is no name.
    """
    where = f"MASTER_ADDR:MASTER_PORT {place.address}:{place.port}"
    me = Meeting(
        place.rank, place.num_ranks, endpoint, time.monotonic() + timeout_s, timeout_s, threading.Event(), where
    )
    return _bounded(me, lambda: _meet_at_last(place, me))


def _bounded(me: Meeting, work: Callable[[], T]) -> T:
    """`work` in a thread that is left behind when it does not come back: torch's clients wait without end for a server
    that is stopped, and do not notice Ctrl-C."""
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001  raised in the caller's thread
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="weft-meeting", daemon=True).start()
    try:
        done.wait(max(0.0, me.deadline - time.monotonic()) + _LINGER_S + _STUCK_S)
    except BaseException:
        me.stop.set()
        done.wait(_LINGER_S)  # so that the peers do not wait for this rank
        raise
    me.stop.set()
    if errors:
        raise errors[0]
    if not results:
        raise me.late([0] if me.rank else [], f"{me.where} does not answer")
    return results[0]


def _meet_at_last(place: Torchrun, me: Meeting) -> tuple[list[bytes], Store]:
    """Tries again while the store is not there, or is no more: rank 0 may come late, or anew."""
    import torch.distributed as dist

    while True:
        try:
            store = dist.PrefixStore(f"weft/{place.run_id}", _open(place, me))
            return meet(store, me), store
        except (Error, Left):
            raise
        except (OSError, RuntimeError) as error:
            if time.monotonic() >= me.deadline or me.stop.is_set():
                raise me.late([0] if me.rank else [], f"{me.where} can't be reached: {error}") from error
        me.stop.wait(_REOPEN_S)


def hosts_store(place: Torchrun) -> bool:
    """Whether this rank hosts the store that the environment names, as it does without an agent of torchrun."""
    return place.rank == 0 and not place.has_agent_store


def _open(place: Torchrun, me: Meeting) -> TCPStore:
    """As torch's env:// does, but without its wait for all, which names nobody."""
    import torch.distributed as dist

    left_s = max(me.deadline - time.monotonic(), _REOPEN_S)
    try:
        if not hosts_store(place):  # torch's own client writes lines to stderr while nobody listens
            socket.create_connection((place.address, place.port), min(left_s, _LINGER_S)).close()
        store = dist.TCPStore(
            place.address, place.port, None, hosts_store(place), timedelta(seconds=left_s), wait_for_workers=False,
            multi_tenant=True,
        )  # fmt: skip
    except UnicodeError as error:
        raise InvalidArgument(f"MASTER_ADDR is {place.address!r} in the environment; a host is expected") from error
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise InvalidArgument(
                f"MASTER_PORT is {place.port} in the environment, which another process of this host uses; give a free "
                "port"
            ) from error
        raise
    store.set_timeout(timedelta(seconds=_GET_S))
    return store
