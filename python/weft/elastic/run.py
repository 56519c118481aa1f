"""Plays a plan: starts and ends processes, tells them phases, and collects what they report."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

from weft.elastic.plan import Phase, num_slots
from weft.elastic.worker import Load, Report, warm_up, work
from weft.errors import Error, PeerTimeout

__all__ = ["Played", "play"]

PHASE_S = 300.0


@dataclass(frozen=True)
class Played:
    """What came of one phase; times are of the slowest rank."""

    number: int
    ranks: tuple[int, ...]
    killed: tuple[int, ...]
    active: tuple[int, ...]
    ops: int
    wrong: int
    change_ms: float
    pause_ms: float
    recover_ms: float
    gb_s: float
    leftovers: tuple[str, ...]
    error: str = ""
    address: str = ""  # of the group, for who comes next


@dataclass
class _Process:
    process: ForkProcess
    pipe: Connection

    def receive(self) -> Any:
        if not self.pipe.poll(PHASE_S):
            raise PeerTimeout("elastic", 0, (), f"a rank (pid {self.process.pid}) said nothing for {PHASE_S:g} s")
        try:
            return self.pipe.recv()
        except EOFError:
            return None


def play(phases: list[Phase], load: Load, done: Callable[[Played], object]) -> list[Played]:
    """All phases, in order; `done` is told each.

    Raises:
        PeerTimeout: a rank hangs. Error: a rank could not found the group or join it.
    """
    ranks: dict[int, _Process] = {}
    played = []
    warm_up(load)
    try:
        address = _found(ranks, phases, load)
        for number, phase in enumerate(phases):
            before = tuple(ranks)
            coming = [rank for rank in phase.ranks if rank not in ranks]
            for rank in coming:
                ranks[rank] = _start(rank, 0, num_slots(phases), load)
                ranks[rank].pipe.send(address)
            proposer = min((set(before) & set(phase.ranks)) or set(phase.ranks))
            each = _phase(number, phase, ranks, proposer)
            played.append(each)
            done(each)
            if each.error or each.wrong:
                return played
            address = each.address
        return played
    finally:
        _end(ranks)


def _found(ranks: dict[int, _Process], phases: list[Phase], load: Load) -> str:
    founders = phases[0].ranks
    for rank in founders:
        ranks[rank] = _start(rank, len(founders), num_slots(phases), load)
    endpoints = [_expect(ranks[rank], bytes) for rank in founders]
    for rank in founders:
        ranks[rank].pipe.send(endpoints)
    addresses = [_expect(ranks[rank], str) for rank in founders]
    return str(addresses[0])


def _expect(process: _Process, kind: type) -> Any:
    found = process.receive()
    if isinstance(found, kind):
        return found
    raise Error(found.error if isinstance(found, Report) else "a rank of the plan has ended")


def _start(rank: int, num_founders: int, slots: int, load: Load) -> _Process:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, rank, num_founders, slots, load), daemon=True)
    process.start()
    theirs.close()
    return _Process(process, ours)


def _phase(number: int, phase: Phase, ranks: dict[int, _Process], proposer: int) -> Played:
    for process in ranks.values():
        process.pipe.send((phase, proposer))
    reports: dict[int, Report] = {}
    error = ""
    for rank, process in list(ranks.items()):
        found = process.receive()
        if isinstance(found, Report):
            reports[rank] = found
        if found is None or found.left:
            process.process.join(PHASE_S)
            is_killed = process.process.exitcode == -signal.SIGKILL and rank in phase.killed
            if found is None and not is_killed:
                error = f"rank {rank} ended with exit status {process.process.exitcode}"
            ranks.pop(rank).pipe.close()
    stayed = [report for report in reports.values() if not report.left]
    errors = [f"rank {rank}: {report.error}" for rank, report in reports.items() if report.error]
    active = {report.active for report in stayed}
    if not errors and active != {phase.left}:
        errors = [f"active ranks are {sorted(active)}, not {phase.left}"]
    return Played(
        number,
        phase.ranks,
        phase.killed,
        phase.left,
        max((report.ops for report in stayed), default=0),
        sum(report.wrong for report in reports.values()),
        max((report.change_ms for report in stayed), default=0.0),
        max((report.pause_ms for report in stayed), default=0.0),
        max((report.recover_ms for report in stayed), default=0.0),
        sum(report.gb_s for report in stayed) / max(1, len(stayed)),
        tuple(text for report in reports.values() for text in report.leftovers),
        error or "; ".join(errors),
        next((report.address for report in stayed), ""),
    )


def _end(ranks: dict[int, _Process]) -> None:
    for process in ranks.values():
        try:
            process.pipe.send((None, -1))
        except OSError:  # it has ended
            continue
    for process in ranks.values():
        process.process.join(10.0)
        if process.process.is_alive() and process.process.pid is not None:
            os.kill(process.process.pid, signal.SIGKILL)
            process.process.join()
