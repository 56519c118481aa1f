"""A rank of `weft elastic`: it founds the group or joins it, and does what its parent says, every word against the
reference."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import weft
from weft import reference
from weft.elastic.plan import Phase

__all__ = ["Load", "Report", "Steps", "held_things", "warm_up", "work"]

STEP_DEADLINE_S = 60.0
JOIN_S = 10.0
LEFTOVERS_S = 5.0


@dataclass(frozen=True)
class Load:
    """What a step dispatches and combines: up to `tokens` rows a rank of `hidden` fp32, `top_k` of `experts` a slot."""

    tokens: int = 32
    hidden: int = 64
    experts: int = 2
    top_k: int = 2
    ops: int = 20


@dataclass
class Report:
    """Of one rank in one phase."""

    rank: int
    epoch: int = 0
    active: tuple[int, ...] = ()
    ops: int = 0
    wrong: int = 0  # calls with a wrong word
    pause_ms: float = 0.0  # the longest time between two steps, less the median one
    change_ms: float = 0.0  # inside the call that carried the change out
    recover_ms: float = 0.0
    gb_s: float = 0.0  # bytes sent to other ranks by dispatch, over the time inside it
    left: bool = False
    error: str = ""
    address: str = ""
    leftovers: tuple[str, ...] = field(default_factory=tuple)


class Steps:
    """A dispatch and a combine of the active ranks, again and again: each draws the rows of all from the epoch and the
    number of the step in it, and compares its own with the reference."""

    def __init__(self, comm: weft.Communicator, load: Load) -> None:
        self.comm, self.load = comm, load
        self.ep = weft.ExpertParallel(
            comm,
            num_experts=load.experts * comm.num_ranks,
            top_k=load.top_k,
            hidden=load.hidden,
            max_tokens_per_rank=load.tokens,
            dtype=torch.float32,
            deadline_s=STEP_DEADLINE_S,
        )
        self.count = (0, 0)  # epoch, and steps in it

    def step(self, note: Callable[[str], object] | None = None, mode: str = "auto") -> bool:
        """One dispatch and one combine; whether all words were right. `note` is told which of them begins."""
        comm, ep = self.comm, self.ep
        note = note or str
        epoch, count = self.count
        self.count = comm.epoch, count + 1 if epoch == comm.epoch else 1
        seed = self.count[0] * 100_003 + self.count[1]
        xs, ids, weights = [], [], []
        for slot in range(comm.num_ranks):
            draw = torch.Generator(device="cpu").manual_seed(seed * 1000 + slot)
            tokens = int(torch.randint(1, self.load.tokens + 1, (), generator=draw, dtype=torch.int64, device="cpu"))
            xs.append(torch.randn((tokens, self.load.hidden), generator=draw, dtype=torch.float32, device="cpu"))
            ids.append(
                torch.randint(
                    0, ep.num_experts, (tokens, self.load.top_k), generator=draw, dtype=torch.int64, device="cpu"
                )
            )
            weights.append(torch.randn((tokens, self.load.top_k), generator=draw, dtype=torch.float32, device="cpu"))
        options: dict[str, Any] = {"num_experts": ep.num_experts, "layout": "expert_major"}
        wanted: list[Any] = list(reference.dispatch(xs, ids, weights, active_ranks=comm.active_ranks, **options))
        mine = comm.rank
        outputs = [each.x * (slot + 2) for slot, each in enumerate(wanted)]
        right: Any = reference.combine(outputs, wanted)[mine]
        note("dispatch")
        found: Any = ep.dispatch(xs[mine], ids[mine], weights[mine], layout="expert_major", mode=mode)
        note("combine")
        y = ep.combine(outputs[mine], found.handle, mode=mode)
        note("other")
        return torch.equal(found.x, wanted[mine].x) and torch.equal(y, right)


def warm_up(load: Load) -> None:
    """What each rank needs and a forked one inherits: modules, what is known of the machine, torch at its first call."""
    torch.set_num_threads(1)
    with weft.Communicator.from_allgather(0, 1, lambda mine: [mine], device="cpu") as comm:
        Steps(comm, load).step()


def work(pipe: Connection, rank: int, num_founders: int, slots: int, load: Load) -> None:
    """The life of one rank: its parent sends phases until one is without it."""
    gc.freeze()  # what the parent has made: looking through it would copy its memory
    torch.set_num_threads(1)
    report = Report(rank)
    try:
        _work(pipe, rank, num_founders, slots, load, report)
    except BaseException as error:  # noqa: BLE001  told to the parent
        report.error = f"{type(error).__name__}: {error}"
        pipe.send(report)


def _work(pipe: Connection, rank: int, num_founders: int, slots: int, load: Load, report: Report) -> None:
    if num_founders:

        def share(endpoint: bytes) -> list[bytes]:
            pipe.send(endpoint)
            return list(pipe.recv())

        comm = weft.Communicator.from_allgather(rank, num_founders, share, device="cpu", max_ranks=slots)
    else:
        comm = _join(pipe.recv(), rank)
    me = Steps(comm, load)
    if num_founders:
        pipe.send(comm.address)
    else:
        comm.ready()
    while True:
        phase, proposer = pipe.recv()
        report = _play(me, phase, proposer == rank)
        if report.left:
            me.ep.close()
            comm.close()
            del me, comm
            report.leftovers = _leftovers()
        pipe.send(report)
        if report.left:
            return


def _join(address: str, rank: int) -> weft.Communicator:
    """The last owner of the slot may have ended just now: then it is free in a moment."""
    end = time.monotonic() + JOIN_S
    while True:
        try:
            return weft.Communicator.join(address, slot=rank, device="cpu")
        except weft.InvalidArgument:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def _play(me: Steps, phase: Phase | None, proposes: bool) -> Report:
    """One phase: to its ranks, then its steps; None: the end."""
    comm, load = me.comm, me.load
    report = Report(comm.rank)
    if phase is None:
        report.left = True
        return report
    active = comm.active_ranks if comm.is_member else ()
    if proposes and active != phase.ranks:
        coming = [rank for rank in phase.ranks if rank not in active]
        comm.propose(admit=coming, remove=[rank for rank in active if rank not in phase.ranks])
    gaps: list[float] = []
    last = time.perf_counter()
    is_there = active == phase.ranks
    before = me.ep.stats()
    dies_at = load.ops // 2
    while report.ops < load.ops:
        try:
            if not is_there:
                begin = time.perf_counter()
                change = comm.boundary(STEP_DEADLINE_S)
                if change is not None and comm.rank in change.added:
                    last = time.perf_counter()  # it has disturbed nobody so far
                elif change is not None:
                    report.change_ms = (time.perf_counter() - begin) * 1e3
                if change is not None:
                    if comm.rank in change.removed:
                        report.left = True
                        return report
                    is_there = change.active == phase.ranks
            dies = is_there and comm.rank in phase.killed and report.ops == dies_at
            if comm.is_member or is_there:
                report.wrong += not me.step(_die if dies else None)
                report.ops += is_there
        except (weft.PeerLost, weft.PeerTimeout):
            begin = time.perf_counter()
            comm.recover(spares=0)
            report.recover_ms = (time.perf_counter() - begin) * 1e3
            report.ops = dies_at  # all go on from there: one may have had the last step, and another not
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    gaps.sort()
    report.pause_ms = (gaps[-1] - gaps[len(gaps) // 2]) * 1e3
    grown = {name: me.ep.stats()[name] - before[name] for name in ("bytes_sent", "dispatch_s")}
    report.gb_s = grown["bytes_sent"] / grown["dispatch_s"] / 1e9
    report.epoch, report.active, report.address = comm.epoch, comm.active_ranks, comm.address
    return report


def _die(before: str) -> None:
    if before == "combine":
        os.kill(os.getpid(), signal.SIGKILL)


def _leftovers() -> tuple[str, ...]:
    """What stays of a communicator that was closed: threads that watch peers look up now and then."""
    gc.collect()
    end = time.monotonic() + LEFTOVERS_S
    while (found := held_things()) and time.monotonic() < end:
        time.sleep(0.01)
    return tuple(found)


def held_things() -> list[str]:
    """Memory of Weft that this process maps, or has open."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:weft" in line]
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(("/memfd:weft", "anon_inode:[pidfd]")):
            found.append(f"descriptor of {target}")
    return found + [f"mapping {line.split()[0]}" for line in maps]
