"""`weft verify --kill --rejoin`: one group that lives on while its ranks are killed, and others join in their place.

In each trial a rank dies by SIGKILL at a random moment. In half of them a spare stands by, and the recovery takes it
in; in the others a new process joins in the slot of the dead. Every word of every step is compared. One of the first
ranks, the witness, is spared all the time: what it holds must not grow. Times are CLOCK_MONOTONIC, from just before
kill(2).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import Error, InvalidArgument
from weft.verify.rejoin_board import Word

if TYPE_CHECKING:
    from weft.verify.rejoin_rank import Group

__all__ = ["Held", "RejoinResult", "run_rejoins", "slope"]

_KILL_WITHIN_S = 0.05
_RUNS = 3  # steps in an epoch after which a rank counts as running
_HELD_S = 5.0  # watchers of the dead look up now and then
_GROWS = re.compile(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)  # pages of files come and go


@dataclass(frozen=True)
class Held:
    """What a process holds: descriptors, threads, mappings of Weft's memory; resident bytes, without pages of files."""

    fds: int
    threads: int
    mappings: int
    rss_bytes: int

    def counts(self) -> tuple[int, int, int]:
        return self.fds, self.threads, self.mappings


@dataclass(frozen=True)
class RejoinResult:
    """What became of one kill. Times in us; 0.0: it did not come so far."""

    trial: int
    victim: int
    by: str  # "spare" or "new": who took the place
    mode: str  # with `operation` one of rejoin_rank.DOING: what the victim was doing
    operation: str
    notice_us: float  # to the first survivor's error
    out_us: float  # to the last one's
    right_us: float  # until every survivor has done the next right step
    full_us: float  # the same with as many ranks as before
    witness: Held | None  # when all work again
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """No wrong word, nothing more held than before, and all work again."""
        return not self.problems


@dataclass
class _Process:
    process: ForkProcess
    pipe: Connection


def slope(values: Sequence[float]) -> float:
    """Of the line through the values, least squares, a value."""
    middle = (len(values) - 1) / 2
    spread = sum((at - middle) ** 2 for at in range(len(values)))
    return sum((at - middle) * value for at, value in enumerate(values)) / spread if spread else 0.0


def run_rejoins(
    *, trials: int, seed: int, ranks: int = 4, tokens: int = 32, hidden: int = 64
) -> Iterator[RejoinResult]:
    """Kill `trials` ranks of one group of `ranks`, one after the other; the run ends with the first hang.

    Raises:
        InvalidArgument: `ranks` is not 2 to 31. Error: the group could not be founded.
    """
    if not 2 <= ranks <= 31:
        raise InvalidArgument(f"ranks={ranks}: allowed with --rejoin are 2 to 31")
    from weft.elastic.steps import Load, warm_up  # torch too, once: all ranks are forked from here
    from weft.verify.rejoin_rank import Group

    load = Load(tokens, hidden)
    warm_up(load)
    run = _Run(Group(ranks, load), random.Random(f"weft verify rejoin {seed}"))
    shared_memory_before = _names("/dev/shm")
    try:
        run.found()
        for trial in range(trials):
            result = run.kill_one(trial, is_last=trial == trials - 1, shared_memory_before=shared_memory_before)
            yield result
            if run.is_hung:
                return
    finally:
        run.end()


class _Run:
    def __init__(self, group: Group, draw: random.Random) -> None:
        self._group, self._draw, self._board = group, draw, group.board
        self._live: dict[int, _Process] = {}  # by slot
        self._held: dict[int, tuple[int, tuple[int, int, int]]] = {}  # by slot: pid, and what it held at first
        self._witness = group.ranks - 1
        self.is_hung = False

    def found(self) -> None:
        for slot in range(self._group.ranks):
            self._start(slot, is_founder=True)
        endpoints = []
        for slot in range(self._group.ranks):
            endpoints.append(self._live[slot].pipe.recv())
            if isinstance(endpoints[-1], str):
                raise Error(endpoints[-1])
        for process in self._live.values():
            process.pipe.send(endpoints)

    def kill_one(self, trial: int, *, is_last: bool, shared_memory_before: set[str]) -> RejoinResult:
        board, draw = self._board, self._draw
        problems: list[str] = []
        by = draw.choice(("spare", "new"))
        victim = draw.choice([slot for slot in self._live if slot != self._witness])
        delay_s = draw.uniform(0.0, _KILL_WITHIN_S)
        self._await("all run", self._all_run, problems)
        self._compare_held()
        if by == "spare" and not problems:
            spare = next(slot for slot in range(self._group.slots) if slot not in self._live)
            self._start(spare, is_founder=False)
            self._await("a spare stands by", lambda: board.get(spare, Word.READY) != 0, problems)
        time.sleep(delay_s)
        survivors = [slot for slot in self._live if slot != victim and (by == "new" or slot != spare)]
        for slot in survivors:
            for word in (Word.LOST_AT, Word.NAMED, Word.RECOVERED_AT, Word.RIGHT_AT, Word.FULL_AT):
                board.set(slot, word, 0)
        killed_at_ns = time.monotonic_ns()
        self._kill(victim)
        doing = board.get(victim, Word.DOING)
        if by == "new" and not problems:
            self._start(victim, is_founder=False)
        full = f"all {self._group.ranks} run again"
        self._await(
            full, lambda: self._all_run() and all(board.get(each, Word.FULL_AT) for each in survivors), problems
        )
        for slot in survivors:
            named = board.get(slot, Word.NAMED)
            if named & ~(1 << victim):
                problems.append(f"rank {slot}: PeerLost names a mask {named:#x}, killed was {victim}")
            if board.get(slot, Word.WRONG):
                problems.append(f"rank {slot}: {board.get(slot, Word.WRONG)} steps with a wrong word")
        if not problems:
            problems += self._compare_held()
        witness = _look(self._live[self._witness].process.pid)
        if is_last or problems:
            problems += self._end_all()
            left = sorted(_names("/dev/shm") - shared_memory_before)
            problems += [f"left in /dev/shm: {', '.join(left)}"] if left else []
        from weft.verify.rejoin_rank import DOING

        mode, operation = DOING[doing]
        return RejoinResult(
            trial,
            victim,
            by,
            mode,
            operation,
            self._time(survivors, Word.LOST_AT, killed_at_ns, min),
            self._time(survivors, Word.LOST_AT, killed_at_ns, max),
            self._time(survivors, Word.RIGHT_AT, killed_at_ns, max),
            self._time(survivors, Word.FULL_AT, killed_at_ns, max),
            witness,
            tuple(problems),
        )

    def _time(self, slots: list[int], word: Word, from_ns: int, which: Callable[[list[int]], int]) -> float:
        seen = [self._board.get(slot, word) for slot in slots]
        return (which(seen) - from_ns) / 1e3 if all(seen) else 0.0

    def _start(self, slot: int, *, is_founder: bool) -> None:
        from weft.verify.rejoin_rank import run_rank

        address = "" if is_founder else self._board.told(self._draw.choice(sorted(self._live)))
        self._board.clear(slot)
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=run_rank, args=(theirs, slot, is_founder, self._group), daemon=True)
        process.start()
        theirs.close()
        self._live[slot] = _Process(process, ours)
        if not is_founder:
            ours.send(address)

    def _kill(self, slot: int) -> None:
        process = self._live.pop(slot)
        if process.process.pid is not None:
            os.kill(process.process.pid, signal.SIGKILL)
        process.process.join()
        process.process.close()
        process.pipe.close()

    def _all_run(self) -> bool:
        """As many as there are to be, all in one epoch."""
        board = self._board
        active = sum(1 << slot for slot in self._live)
        epochs = {board.get(slot, Word.EPOCH) for slot in self._live}
        return (
            len(self._live) == self._group.ranks
            and len(epochs) == 1
            and all(board.get(slot, Word.STEPS) >= _RUNS for slot in self._live)
            and all(board.get(slot, Word.ACTIVE) == active for slot in self._live)
        )

    def _await(self, what: str, condition: Callable[[], bool], problems: list[str]) -> None:
        from weft.verify.rejoin_rank import GIVE_UP_S

        end = time.monotonic() + 2 * GIVE_UP_S
        while not problems and not condition():
            for slot, process in self._live.items():
                if process.pipe.poll():
                    problems.append(f"rank {slot}: {self._said(process)}")
                elif process.process.exitcode is not None:
                    problems.append(f"rank {slot} ended with exit status {process.process.exitcode}")
            if time.monotonic() > end:
                problems.append(f"it did not come to pass that {what}")
            time.sleep(0.0005)
        self.is_hung |= bool(problems)

    def _said(self, process: _Process) -> str:
        try:
            return str(process.pipe.recv())
        except EOFError:
            return "ended"

    def _compare_held(self) -> list[str]:
        """Each process against what it held when it was first seen with all at work."""
        problems = []
        end = time.monotonic() + _HELD_S
        for slot, each in self._live.items():
            pid = each.process.pid or 0
            first = self._held.get(slot)
            now = _look(pid).counts()
            if first is None or first[0] != pid:
                self._held[slot] = pid, now
                continue
            while now != first[1] and time.monotonic() < end:
                time.sleep(0.005)
                now = _look(pid).counts()
            if any(more > before for more, before in zip(now, first[1], strict=True)):
                problems.append(f"rank {slot} holds {now} (descriptors, threads, mappings), at first {first[1]}")
        return problems

    def _end_all(self) -> list[str]:
        """In order; what they leave."""
        if self.is_hung:
            return []
        from weft.verify.rejoin_rank import GIVE_UP_S

        self._board.end()
        problems = []
        for slot, process in self._live.items():
            said = self._said(process) if process.pipe.poll(GIVE_UP_S) else "does not end"
            problems += [f"rank {slot}: {said}"] if said else []
        self.is_hung = True
        return problems

    def end(self) -> None:
        """Whatever has happened."""
        for slot in list(self._live):
            self._kill(slot)


def _look(pid: int | None) -> Held:
    folder = Path(f"/proc/{pid}")
    try:
        maps = (folder / "maps").read_text().count("memfd:weft")
        status = (folder / "status").read_text()
        fds, threads = len(os.listdir(folder / "fd")), len(os.listdir(folder / "task"))
    except OSError:  # it has ended
        return Held(0, 0, 0, 0)
    return Held(fds, threads, maps, sum(1024 * int(each) for each in _GROWS.findall(status)))


def _names(folder: str) -> set[str]:
    return set(os.listdir(folder)) if Path(folder).is_dir() else set()
