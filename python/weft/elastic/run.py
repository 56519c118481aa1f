"""Plays a plan: starts and ends processes, tells them phases, and collects what they report."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from weft.elastic.plan import Phase, num_slots
from weft.elastic.playing import Report
from weft.elastic.steps import Load, Way, warm_up
from weft.elastic.worker import work
from weft.errors import Error, PeerTimeout

__all__ = ["Played", "play"]

PHASE_S = 300.0
PAUSED_S = 0.02
END_S = 10.0


@dataclass(frozen=True)
class Played:
    """What came of one phase; times are of the slowest rank, `killed` are stopped ones, too."""

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
    standby: tuple[int, ...] = ()
    between: int = 0  # steps since the phase before


@dataclass
class _Process:
    process: BaseProcess
    pipe: Connection
    is_active: bool = False

    def receive(self) -> Any:
        if not self.pipe.poll(PHASE_S):
            raise PeerTimeout("elastic", 0, (), f"a rank (pid {self.process.pid}) said nothing for {PHASE_S:g} s")
        try:
            return self.pipe.recv()
        except EOFError:
            return None


def play(phases: Sequence[Phase], load: Load, done: Callable[[Played], object], way: Way | None = None) -> list[Played]:
    """All phases, in order; `done` is told each.

    Raises:
        PeerTimeout: a rank hangs. Error: a rank could not found the group or join it.
    """
    ranks: dict[int, _Process] = {}
    played = []
    way = way or Way()
    warm_up(load)
    try:
        address = _found(ranks, phases, load, way)
        for number, phase in enumerate(phases):
            before = phases[number - 1] if number else None
            for rank in phase.present:
                if rank not in ranks:
                    ranks[rank] = _start(rank, 0, num_slots(phases), load, way)
                    ranks[rank].pipe.send(address)
            for rank in phase.present if phase.spares or phase.stopped else ():  # who is stopped answers nobody
                if not ranks[rank].is_active and before is not None:
                    ranks[rank].pipe.send(("ready", -1))
                    _expect(ranks[rank], str)
            each = _phase(number, phase, ranks, min(set(before.left if before else phase.ranks) & set(phase.ranks)))
            if number == len(phases) - 1 and not each.error:
                each = dataclasses.replace(each, leftovers=each.leftovers + _close_all(ranks))
            played.append(each)
            done(each)
            if each.error or each.wrong:
                return played
            address = each.address
        return played
    finally:
        _end(ranks)


def _found(ranks: dict[int, _Process], phases: Sequence[Phase], load: Load, way: Way) -> str:
    founders = phases[0].ranks
    for rank in founders:
        ranks[rank] = _start(rank, len(founders), num_slots(phases), load, way)
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


def _start(rank: int, num_founders: int, slots: int, load: Load, way: Way) -> _Process:
    ours, theirs = multiprocessing.Pipe()
    options: dict[str, Any] = {"target": work, "args": (theirs, rank, num_founders, slots, load, way), "daemon": True}
    process: BaseProcess
    if way.fresh and not num_founders:
        process = multiprocessing.get_context("spawn").Process(**options)
    else:
        process = multiprocessing.get_context("fork").Process(**options)
    process.start()
    theirs.close()
    return _Process(process, ours)


def _phase(number: int, phase: Phase, ranks: dict[int, _Process], proposer: int) -> Played:
    standing = {rank for rank, process in ranks.items() if not process.is_active}
    for rank, process in ranks.items():
        ends = rank in standing and rank not in phase.present
        process.pipe.send((None if ends else phase, proposer))
    _wake(phase.paused, ranks, PAUSED_S)
    reports: dict[int, Report] = {}
    errors: list[str] = []
    for rank in sorted(ranks, key=lambda each: each in phase.stopped):  # they sleep until the others are done
        if rank in phase.stopped:
            _wake((rank,), ranks, 0.0)
        process = ranks[rank]
        found = process.receive()
        if isinstance(found, Report):
            reports[rank] = found
            process.is_active = bool(found.active)
        if found is None or found.left:
            process.process.join(PHASE_S)
            is_killed = process.process.exitcode == -signal.SIGKILL and rank in phase.killed
            if found is None and not is_killed:
                errors.append(f"rank {rank} ended with exit status {process.process.exitcode}")
            ranks.pop(rank).pipe.close()
    errors += _errors(phase, reports)
    stayed = [report for report in reports.values() if report.active]
    return Played(
        number,
        phase.ranks,
        phase.lost,
        phase.left,
        max((report.ops for report in stayed), default=0),
        sum(report.wrong for report in reports.values()),
        max((report.change_ms for report in stayed), default=0.0),
        max((report.pause_ms for report in stayed), default=0.0),
        max((report.recover_ms for report in stayed), default=0.0),
        sum(report.gb_s for report in stayed) / max(1, len(stayed)),
        tuple(text for report in reports.values() for text in report.leftovers),
        "; ".join(errors),
        next((report.address for report in stayed), ""),
        phase.standing,
        max((report.between for report in reports.values()), default=0),
    )


def _errors(phase: Phase, reports: dict[int, Report]) -> list[str]:
    """What those that have come to the end of the phase find wrong."""
    errors = [f"rank {rank}: {report.error}" for rank, report in reports.items() if report.error]
    if errors:
        return errors
    for rank, report in reports.items():
        wanted = phase.left if rank in phase.left else ()
        if report.active != wanted:
            errors.append(f"rank {rank}: active ranks are {report.active}, not {wanted}")
        if report.evicted != (rank in phase.stopped):
            errors.append(
                f"rank {rank}: it was {'' if report.evicted else 'not '}told that the others went on without it"
            )
        if report.left != (rank not in phase.left + phase.standing):
            errors.append(f"rank {rank}: it has {'' if report.left else 'not '}left")
    missing = set(phase.left + phase.standing + phase.stopped) - set(reports)
    return errors + [f"rank {rank} is not there" for rank in sorted(missing)]


def _wake(ranks: Sequence[int], all_ranks: dict[int, _Process], after_s: float) -> None:
    """Each of `ranks` stops by itself, or has something to say; so long after that it goes on."""
    for rank in ranks:
        process = all_ranks[rank]
        end = time.monotonic() + PHASE_S
        while not (is_stopped := _is_stopped(process.process.pid)) and not process.pipe.poll(0.001):
            if time.monotonic() > end:
                raise PeerTimeout("elastic", 0, (), f"rank {rank} (pid {process.process.pid}) does not stop")
        if is_stopped and process.process.pid is not None:
            time.sleep(after_s)
            os.kill(process.process.pid, signal.SIGCONT)


def _is_stopped(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has ended
        return False


def _close_all(ranks: dict[int, _Process]) -> tuple[str, ...]:
    """Those that are there in the end close; what they leave."""
    for process in ranks.values():
        process.pipe.send((None, -1))
    reports = {rank: process.receive() for rank, process in ranks.items()}
    for process in ranks.values():
        process.process.join(END_S)
    texts = []
    for rank, report in reports.items():
        if report is None:
            texts.append(f"rank {rank} ended before it had closed")
            continue
        texts += report.leftovers
        if report.error:
            texts.append(f"rank {rank}: {report.error}")
        if report.wrong:
            texts.append(f"rank {rank}: {report.wrong} steps behind the last phase had a wrong word")
    return tuple(texts)


def _end(ranks: dict[int, _Process]) -> None:
    """Whatever has happened."""
    for process in ranks.values():
        if process.process.is_alive() and process.process.pid is not None:
            os.kill(process.process.pid, signal.SIGKILL)
        process.process.join()
