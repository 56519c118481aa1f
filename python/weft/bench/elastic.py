"""Times of ranks that come and go: `weft bench --elastic`; docs/elasticity.md says what others have measured."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.bench.control import begin_calls, operate
from weft.errors import InternalError, InvalidArgument, PeerLost, PeerTimeout

if TYPE_CHECKING:
    import torch

    import weft

Row = dict[str, Any]
Times = dict[str, list[float]]

ELASTIC = {
    "idle_boundary_ms": "boundary() with nothing due",
    "warm_join_pause_ms": "a warm spare is taken in: pause of the others",
    "kill_to_full_strength_ms": "kill -9 until a right result with a spare",
    "kill_to_fewer_ms": "kill -9 until a right result without one",
    "leave_pause_ms": "a rank leaves: pause of the others",
    "step_ms": "a step before a cold join",
    "step_during_cold_join_ms": "a step while a new process starts and joins",
    "map_change_pause_ms": "a new map of experts begins: pause",
    "resize_ms": "resize(): the heap grows by 64 MiB",
    "fetch_ms": "a spare fetches 1 GiB",
    "copy_ms": "it copies the same bytes in its own memory",
    "step_before_fetch_ms": "a step before that fetch",
    "step_during_fetch_ms": "a step while a spare fetches 1 GiB",
}
_STEPS, _BOUNDARIES, _BEFORE, _WAIT_S = 50, 1000, 200, 120.0
_GROWN_BYTES, FETCH_BYTES = 64 << 20, 1 << 30
_LEAVE_S = 0.05  # before a rank dies, for the others to leave the call before, which would raise for it
_COLD = """
import sys
sys.path[:0] = sys.argv[2:]
import weft
from weft.bench.control import begin_calls, operate
comm = weft.Communicator.join(sys.argv[1], device="cpu", standby=True)
ep, x, _ = begin_calls(comm, waits=True)
comm.boundary(120.0)
operate(ep, x)
comm.close()
"""


def elastic(ranks: int, trials: int) -> list[Row]:
    """Time `trials` groups of `ranks` ranks on the cpu engine: a row for each of ELASTIC, with p50_ms, p99_ms, max_ms
    and count. Every result of a step is compared before its time counts. A pause is the time from the end of one step
    to that of the next, less the median of these.

    Raises:
        InvalidArgument: fewer than 3 ranks.
    """
    import weft

    if ranks < 3:
        raise InvalidArgument(f"ranks is {ranks}; allowed are 3 and more: two are killed or leave, and others go on")
    times: Times = {name: [] for name in ELASTIC}
    for _ in range(trials):
        with mmap.mmap(-1, 8) as clock:  # when a victim was killed; shared by the ranks, which are forked
            runs: tuple[tuple[Callable[..., Times], dict[str, Any]], ...] = (
                (_come_and_go, {"standby": 2}),
                (_cold_join, {"max_ranks": ranks + 1}),
                (_maps_and_memory, {"standby": 1}),
            )
            for run, slots in runs:
                told = weft.spawn(run, ranks, (clock,), device="cpu", engine="cpu", on_failure="return", **slots)
                victims = (ranks - 1, ranks) if run is _come_and_go else ()
                for rank, result in enumerate(told):
                    if isinstance(result, BaseException) and rank not in victims:
                        raise result
                    if isinstance(result, dict):
                        for name, all_ms in result.items():
                            times[name] += all_ms
    return [
        {
            "kind": "elastic",
            "ranks": ranks,
            "what": name,
            "p50_ms": statistics.median(all_ms),
            "p99_ms": sorted(all_ms)[min(len(all_ms) - 1, len(all_ms) * 99 // 100)],
            "max_ms": max(all_ms),
            "count": len(all_ms),
        }
        for name, all_ms in times.items()
    ]


class _Steps:
    """A loop of steps and boundaries, and the times between the ends of two steps."""

    def __init__(self, comm: weft.Communicator, ep: weft.ExpertParallel, x: torch.Tensor) -> None:
        self.comm, self.ep, self.x = comm, ep, x
        self.gaps: list[float] = []

    def run(self, until: Callable[[], bool], wanted: tuple[int, ...] | None = None) -> None:
        """To `wanted` active ranks, if it is given, and then until that is so; equal on all ranks."""
        begin = last = time.perf_counter()
        while wanted is not None or not until():
            if last - begin > 2 * _WAIT_S:
                raise PeerTimeout("bench", 0, (), f"no change to ranks {wanted} within {2 * _WAIT_S:g} s")
            change = self.comm.boundary(_WAIT_S)
            if change is not None and change.active == wanted:
                wanted = None
            if change is not None and self.comm.rank in change.removed:
                return
            operate(self.ep, self.x)
            now = time.perf_counter()
            self.gaps.append((now - last) * 1e3)
            last = now

    def some(self, wanted: tuple[int, ...] | None = None) -> float:
        """The longest gap less the median one, of a change to `wanted` and some steps; milliseconds."""
        self.gaps = []
        self.run(self._counted(), wanted)
        return max(self.gaps) - statistics.median(self.gaps)

    def _counted(self) -> Callable[[], bool]:
        left = iter(range(_STEPS))
        return lambda: next(left, None) is None

    def alone(self) -> list[float]:
        """Gaps of `_BEFORE` steps and more, behind some that do not count."""
        self.some()
        gaps: list[float] = []
        while len(gaps) < _BEFORE:
            self.some()
            gaps += self.gaps
        self.gaps = []
        return gaps

    def until_standby(self, slot: int) -> None:
        """Until all active ranks know the spare in that slot: they may take it in."""
        while True:
            known = b"1" if slot in self.comm.membership.standby else b"0"
            if all(said == b"1" for said in self.comm.gather(known).values()):
                return
            time.sleep(0.005)

    def recover_from(self, clock: mmap.mmap, victim: int, spares: str | int) -> float:
        """`victim` kills itself; milliseconds until a right result of those left."""
        if self.comm.rank == victim:
            time.sleep(_LEAVE_S)
            clock[:8] = struct.pack("q", time.monotonic_ns())
            os.kill(os.getpid(), signal.SIGKILL)
        with contextlib.suppress(PeerLost, PeerTimeout):
            while True:
                operate(self.ep, self.x)
        self.comm.recover(spares=spares)
        operate(self.ep, self.x)
        killed_ns: int = struct.unpack("q", clock[:8])[0]
        return (time.monotonic_ns() - killed_ns) / 1e6


def _come_and_go(comm: weft.Communicator, clock: mmap.mmap) -> Times:
    """Of `ranks` founders and two spares: the first comes in; the last founder dies and the second spare takes its
    place; the first spare dies; the second one leaves."""
    first, second = comm.num_ranks - 2, comm.num_ranks - 1
    founders, victim = tuple(range(first)), first - 1
    was_member = comm.is_member
    ep, x, _ = begin_calls(comm, waits=not was_member)
    steps = _Steps(comm, ep, x)
    times: Times = {}
    if was_member:
        begin = time.perf_counter()
        for _ in range(_BOUNDARIES):
            comm.boundary()
        times["idle_boundary_ms"] = [(time.perf_counter() - begin) * 1e3 / _BOUNDARIES]
        steps.until_standby(first)
        if comm.rank == 0:
            comm.propose(admit=[first])
        times["warm_join_pause_ms"] = [steps.some((*founders, first))]
    elif comm.rank == first:
        comm.boundary(_WAIT_S)
        operate(ep, x)
        steps.some()
    if comm.rank != second:
        steps.until_standby(second)
        times["kill_to_full_strength_ms"] = [steps.recover_from(clock, victim, "auto")]
    else:
        comm.boundary(_WAIT_S)
        operate(ep, x)
    comm.meet(_WAIT_S)
    times["kill_to_fewer_ms"] = [steps.recover_from(clock, first, 0)]
    comm.meet(_WAIT_S)
    if comm.rank == 0:
        comm.propose(remove=[second])  # experts of ranks 0 and 1 are those that steps use
    pause_ms = steps.some(tuple(rank for rank in comm.active_ranks if rank != second))
    if comm.rank != second:
        times["leave_pause_ms"] = [pause_ms]
    return times


def _cold_join(comm: weft.Communicator, clock: mmap.mmap) -> Times:
    """Steps alone, and steps while a new interpreter starts, imports torch, joins and makes its objects."""
    del clock
    ep, x, _ = begin_calls(comm)
    steps = _Steps(comm, ep, x)
    before = steps.alone()
    child = None
    if comm.rank == 0:
        comm.propose(admit=[comm.num_ranks - 1], deadline_s=_WAIT_S)
        where = str(Path(__file__).parents[2])
        child = subprocess.Popen([sys.executable, "-c", _COLD, comm.address, where, *sys.path])
    steps.run(lambda: True, tuple(range(comm.num_ranks)))
    if child is not None and child.wait(_WAIT_S) != 0:
        raise InternalError(f"the process that joined ended with exit status {child.returncode}")
    return {"step_ms": before, "step_during_cold_join_ms": steps.gaps[:-1]}  # the last one has the change


def _maps_and_memory(comm: weft.Communicator, clock: mmap.mmap) -> Times:
    """A map of experts that begins with a change, a heap that grows, and a spare that fetches while the others make
    steps."""
    import torch

    import weft

    num_experts = 2 * comm.num_active if comm.is_member else 2 * (comm.num_ranks - 1)
    ep = weft.ExpertParallel(
        comm, num_experts=2 * comm.num_ranks, num_logical_experts=num_experts, top_k=2, hidden=64,
        max_tokens_per_rank=32, max_heap_bytes=2 * _GROWN_BYTES,
    )  # fmt: skip
    if not comm.is_member:
        return _fetch_beside(comm, clock)
    x = torch.full((32, 64), comm.rank + 1.0, dtype=torch.bfloat16, device=comm.device)
    experts = torch.arange(num_experts, dtype=torch.int32, device="cpu")
    ep.set_expert_map(weft.ExpertMap(experts[:, None]))
    steps = _Steps(comm, ep, x)
    if comm.rank == 0:
        comm.share("weights", torch.ones(FETCH_BYTES, dtype=torch.uint8, device="cpu"))
    before = steps.alone()
    comm.propose(expert_map=weft.ExpertMap(experts.roll(2)[:, None]), id="rolled")  # by a rank
    pause_ms = steps.some(comm.active_ranks)
    comm.meet(_WAIT_S)
    begin = time.perf_counter()
    ep.resize(heap_bytes=ep.heap_bytes + _GROWN_BYTES)
    resize_ms = (time.perf_counter() - begin) * 1e3
    _until(lambda: clock[_COPIED] == 1)
    comm.meet(_WAIT_S)
    clock[_WANTED] = 1
    beside: list[float] = []
    is_over = False
    while not is_over:
        steps.some()
        beside += steps.gaps
        is_over = b"0" not in comm.gather(b"%d" % clock[_FETCHED]).values()
    return {
        "map_change_pause_ms": [pause_ms],
        "resize_ms": [resize_ms],
        "step_before_fetch_ms": before,
        "step_during_fetch_ms": beside,
    }


_COPIED, _WANTED, _FETCHED = range(3)  # bytes of the clock: how far the spare and the others are


def _fetch_beside(comm: weft.Communicator, clock: mmap.mmap) -> Times:
    """A copy while the others wait, and a fetch while they do not; pages are there before."""
    import torch

    source, out = (torch.full((FETCH_BYTES,), value, dtype=torch.uint8, device="cpu") for value in (2, 3))
    begin = time.perf_counter()
    out.copy_(source)
    copy_ms = (time.perf_counter() - begin) * 1e3
    del source
    clock[_COPIED] = 1
    _until(lambda: clock[_WANTED] == 1)
    begin = time.perf_counter()
    comm.fetch("weights", 0, out, deadline_s=_WAIT_S)
    fetch_ms = (time.perf_counter() - begin) * 1e3
    if int(out.min()) != 1 or int(out.max()) != 1:
        raise InternalError("a fetch has brought other bytes than were shared")
    clock[_FETCHED] = 1
    return {"fetch_ms": [fetch_ms], "copy_ms": [copy_ms]}


def _until(is_so: Callable[[], bool]) -> None:
    end = time.perf_counter() + _WAIT_S
    while not is_so():
        if time.perf_counter() > end:
            raise PeerTimeout("bench", 0, (), f"a rank did not come within {_WAIT_S:g} s")
        time.sleep(0.001)
