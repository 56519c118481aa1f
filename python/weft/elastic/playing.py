"""One phase of a plan, on one of its ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import weft
from weft.elastic.plan import MOMENTS, Phase
from weft.elastic.steps import STEP_DEADLINE_S, Steps

__all__ = ["Report", "play_phase"]

STOPPED_S = 1.0  # deadline of the calls in which somebody is stopped for long


@dataclass
class Report:
    """Of one rank in one phase."""

    rank: int
    epoch: int = 0
    active: tuple[int, ...] = ()  # (): it stands by
    ops: int = 0
    between: int = 0  # steps since the last phase
    wrong: int = 0  # steps with a wrong word
    pause_ms: float = 0.0  # the longest time between two steps, less the median one
    change_ms: float = 0.0  # inside the call that carried the change out
    recover_ms: float = 0.0
    gb_s: float = 0.0  # bytes sent to other ranks by dispatch, over the time inside it
    left: bool = False
    evicted: bool = False
    error: str = ""
    address: str = ""
    leftovers: tuple[str, ...] = field(default_factory=tuple)


def play_phase(me: Steps, phase: Phase | None, proposes: bool) -> Report:
    """To the phase's ranks, then its steps, and what happens in them; None: the end."""
    if phase is None:
        return Report(me.comm.rank, left=True)
    return _Player(me, phase).play(proposes)


class _Player:
    def __init__(self, me: Steps, phase: Phase) -> None:
        self.me, self.comm, self.phase = me, me.comm, phase
        self.report = Report(me.comm.rank)
        self.num_ops = phase.ops or me.load.ops
        self.happens_at = self.num_ops // 2
        self.gaps: list[float] = []
        self.last = time.perf_counter()
        self.has_paused = False

    def play(self, proposes: bool) -> Report:
        comm, phase, report = self.comm, self.phase, self.report
        if not (comm.is_member or phase.spares or phase.stopped):  # else it was told to be ready before
            comm.ready()
        self.is_there = comm.is_member and comm.active_ranks == phase.ranks
        if proposes and not self.is_there:
            self._propose()
        before = self.me.ep.stats()
        try:
            self._work()
        except weft.Evicted as error:
            if comm.rank not in phase.stopped:
                raise
            report.left = report.evicted = True
            report.epoch = error.epoch
            return report
        self.gaps.sort()
        report.pause_ms = (self.gaps[-1] - self.gaps[len(self.gaps) // 2]) * 1e3 if self.gaps else 0.0
        grown = {name: self.me.ep.stats()[name] - before[name] for name in ("bytes_sent", "dispatch_s")}
        report.gb_s = grown["bytes_sent"] / grown["dispatch_s"] / 1e9 if grown["dispatch_s"] else 0.0
        report.epoch, report.address = comm.epoch, comm.address
        report.active = comm.active_ranks if comm.is_member and not report.left else ()
        return report

    def _propose(self) -> None:
        wanted, active = self.phase.ranks, self.comm.active_ranks
        going = [rank for rank in active if rank not in wanted]
        self.comm.propose(
            admit=[rank for rank in wanted if rank not in active],
            remove=[rank for rank in going if rank not in self.phase.standby],
            suspend=[rank for rank in going if rank in self.phase.standby],
            together=self.phase.together,
        )

    def _work(self) -> None:
        comm, phase, report = self.comm, self.phase, self.report
        while (report.ops < self.num_ops or self._is_to_lose()) and not report.left:
            if not comm.is_member and comm.rank in phase.standby:
                if comm.rank not in phase.spares:
                    return
                self._stand_by()
            try:
                if not self.is_there and not self._come_to_boundary():
                    continue
                report.wrong += not self._step()
                report.ops += self.is_there
            except (weft.PeerLost, weft.PeerTimeout):
                begin = time.perf_counter()
                comm.recover(phase.stopped, spares=phase.spares or 0)
                report.recover_ms = (time.perf_counter() - begin) * 1e3
                report.ops = self.happens_at  # all go on from there: one may have had the last step, and another not
            now = time.perf_counter()
            self.gaps.append(now - self.last)
            self.last = now

    def _is_to_lose(self) -> bool:
        """Whether ranks are dead or stopped, or about to be, and this rank has not noticed: they may have done their
        part of this step."""
        return self.is_there and bool(self.phase.lost) and self.comm.active_ranks == self.phase.ranks

    def _stand_by(self) -> None:
        """Until the others have lost a rank: the step that they repeat is the first one of this rank."""
        change = self.comm.boundary(STEP_DEADLINE_S)
        if change is None or self.comm.rank not in change.added:
            raise weft.InvalidState(f"rank {self.comm.rank} stood by, and was not taken in: {change}")
        self.is_there = True
        self.report.ops = self.happens_at
        self.last = time.perf_counter()

    def _come_to_boundary(self) -> bool:
        """Whether a step is due."""
        comm, phase = self.comm, self.phase
        if comm.rank in phase.paused and not self.has_paused:
            self.has_paused = True
            os.kill(os.getpid(), signal.SIGSTOP)
        begin = time.perf_counter()
        change = comm.boundary(STEP_DEADLINE_S)
        if change is None:
            return comm.is_member
        if comm.rank in change.removed:
            self.report.left = comm.rank not in phase.standby
            return False
        if comm.rank in change.added:
            self.last = time.perf_counter()  # it has disturbed nobody so far
        else:
            self.report.change_ms = (time.perf_counter() - begin) * 1e3
        self.is_there = change.active == phase.ranks
        return True

    def _step(self) -> bool:
        phase, rank = self.phase, self.comm.rank
        if not self.is_there or self.report.ops < self.happens_at or self.comm.active_ranks != phase.ranks:
            return self.me.step()
        note: Callable[[str], object] | None = None
        if self.report.ops == self.happens_at:
            if rank in phase.killed:
                note = _Signalled(signal.SIGKILL, phase.at, self.me.shortest_s)
            elif rank in phase.stopped or (rank in phase.paused and not self.has_paused):
                self.has_paused = True
                note = _Signalled(signal.SIGSTOP, phase.at, self.me.shortest_s)
        return self.me.step(note, deadline_s=STOPPED_S if phase.stopped and rank not in phase.stopped else None)


class _Signalled:
    """This process, at a moment of MOMENTS. One that is inside a call is half-way by the shortest such call so far; the
    process goes on behind that call only when the signal was sent."""

    def __init__(self, number: signal.Signals, at: str, shortest_s: dict[str, float]) -> None:
        self.number = number
        self.call, self.is_inside = MOMENTS[at]
        self.after_s = shortest_s.get(self.call, 0.0) / 2
        self.thread: threading.Thread | None = None

    def __call__(self, what: str) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if what != self.call:
            return
        if self.is_inside:
            self.thread = threading.Thread(target=self._send_later, name="weft-elastic", daemon=True)
            self.thread.start()
        else:
            os.kill(os.getpid(), self.number)

    def _send_later(self) -> None:
        time.sleep(self.after_s)
        os.kill(os.getpid(), self.number)
