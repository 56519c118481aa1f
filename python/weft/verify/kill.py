"""`weft verify --kill`: SIGKILL a random rank at a random moment; survivors must see it, rebuild, get the right bits.

The killer is a process of its own, so the moment has nothing to do with what the victim is doing. Times are
CLOCK_MONOTONIC, which all processes of a machine share: from just before kill(2) to the moment PeerLost arrives in each
survivor's Python.
"""

from __future__ import annotations

import dataclasses
import mmap
import multiprocessing
import os
import random
import signal
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.verify.cases import Case, Fixed, check_environment, check_fixed, draw_case

if TYPE_CHECKING:
    import weft

__all__ = ["KillResult", "percentile", "run_kills"]

_KILL_WITHIN_S = 0.2  # the victim dies at a uniformly random moment of this time, counted from when all ranks run
_DEADLINE_S = 30.0
_WORD = struct.Struct("q")


@dataclass(frozen=True)
class KillResult:
    """What became of one kill."""

    trial: int
    seed: int
    ranks: int
    victim: int
    calls_before: int  # calls the victim's peers had completed, the largest of them
    detection_us: tuple[float, ...]  # per survivor
    channels: tuple[dict[str, float], ...]  # per survivor: us from the kill to the report of each channel that saw it
    rebuild_us: tuple[float, ...]  # per survivor: comm.rebuild
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Every survivor raised PeerLost naming the victim, rebuilt and got the right bits; nothing was left behind."""
        return not self.problems


@dataclass(frozen=True)
class _Survivor:
    calls: int
    lost_at_ns: int
    channels_ns: dict[str, int]
    rebuild_ns: int
    problem: str | None


class _Board:
    """A page shared by the ranks and the killer: a pid per rank, then the time of the kill."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def set_pid(self, rank: int) -> None:
        _WORD.pack_into(self._page, rank * _WORD.size, os.getpid())

    def pids(self) -> list[int]:
        return [_WORD.unpack_from(self._page, rank * _WORD.size)[0] for rank in range(self._ranks)]

    def stamp(self) -> None:
        _WORD.pack_into(self._page, self._ranks * _WORD.size, time.monotonic_ns())

    def killed_at_ns(self) -> int:
        return int(_WORD.unpack_from(self._page, self._ranks * _WORD.size)[0])


def run_kills(*, trials: int, seed: int, fixed: Fixed, device: str = "auto") -> Iterator[KillResult]:
    """Run `trials` kills and yield each result. Not fixed: 4 ranks, 128 tokens, H = 512, the rest drawn by the seed."""
    check_fixed(fixed)
    check_environment()
    defaults = Fixed(ranks=4, tokens=128, hidden=512)
    given = {name: value for name, value in dataclasses.asdict(fixed).items() if value is not None}
    fixed = dataclasses.replace(defaults, **given)
    for trial in range(trials):
        yield _run_kill(trial, draw_case(seed + trial, fixed), device)


def _run_kill(trial: int, case: Case, device: str) -> KillResult:
    import weft

    rng = random.Random(f"weft verify kill {case.seed}")
    victim, delay_s = rng.randrange(case.ranks), rng.uniform(0.0, _KILL_WITHIN_S)
    board = _Board(case.ranks)
    shared_memory_before = _shared_memory_files()
    killer = multiprocessing.get_context("fork").Process(target=_kill, args=(board, victim, delay_s), daemon=True)
    killer.start()
    try:
        outcomes = weft.spawn(
            _run_rank, num_ranks=case.ranks, args=(case, board, victim), device=device, on_failure="return"
        )
    finally:
        killer.join()
    for outcome in outcomes:
        if isinstance(outcome, weft.Unsupported):
            raise outcome
    problems = []
    survivors = []
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        if not isinstance(outcome, _Survivor):
            problems.append(f"rank {rank}: {type(outcome).__name__}: {outcome}")
            continue
        survivors.append(outcome)
        if outcome.problem is not None:
            problems.append(f"rank {rank}: {outcome.problem}")
    left = sorted(_shared_memory_files() - shared_memory_before)
    if left:
        problems.append(f"left in /dev/shm: {', '.join(left)}")
    saw = [part for part in survivors if part.lost_at_ns]
    return KillResult(
        trial=trial,
        seed=case.seed,
        ranks=case.ranks,
        victim=victim,
        calls_before=max((part.calls for part in survivors), default=0),
        detection_us=tuple((part.lost_at_ns - board.killed_at_ns()) / 1e3 for part in saw),
        channels=tuple(
            {name: (at_ns - board.killed_at_ns()) / 1e3 for name, at_ns in part.channels_ns.items()} for part in saw
        ),
        rebuild_us=tuple(part.rebuild_ns / 1e3 for part in survivors if part.rebuild_ns),
        problems=tuple(problems),
    )


def _shared_memory_files() -> set[str]:
    directory = Path("/dev/shm")
    return {entry.name for entry in directory.iterdir()} if directory.is_dir() else set()


def _kill(board: _Board, victim: int, delay_s: float) -> None:
    """The killer process: waits until all ranks run, then kills one."""
    give_up_at = time.monotonic() + 60.0
    while not all(board.pids()):
        if time.monotonic() > give_up_at:
            return
        time.sleep(0.001)
    time.sleep(delay_s)
    pid = board.pids()[victim]
    board.stamp()
    os.kill(pid, signal.SIGKILL)


def _run_rank(comm: object, case: Case, board: _Board, victim: int) -> _Survivor:
    """Dispatch and combine until a peer is lost; then rebuild with those left and check a whole case."""
    import torch

    import weft
    from weft.verify.check import DTYPES, check_case, make_inputs

    if not isinstance(comm, weft.Communicator):
        raise TypeError(f"comm: {type(comm).__name__}, expected a Communicator")
    mine = make_inputs(case, comm.rank)
    quantize = None if case.quantize == "none" else case.quantize
    options: dict[str, Any] = {"layout": case.layout, "alignment": case.alignment, "capacity": case.capacity}
    calls = 0
    with weft.ExpertParallel(
        comm,
        num_experts=case.experts,
        top_k=case.top_k,
        hidden=case.hidden,
        max_tokens_per_rank=max(1, *case.tokens),
        dtype=DTYPES[case.dtype],
        deadline_s=_DEADLINE_S,
    ) as ep:
        x, topk_idx, topk_weights = (part.to(comm.device) for part in (mine.x, mine.topk_idx, mine.topk_weights))
        give_up_at = time.monotonic() + 60.0
        try:
            while time.monotonic() < give_up_at:
                received = ep.dispatch(x, topk_idx, topk_weights, quantize=quantize, **options)
                output = ep.empty_output(received)
                ep.combine(torch.zeros_like(output), received.handle)
                calls += 2
                if calls == 2:
                    board.set_pid(comm.rank)
        except weft.PeerLost as lost:
            lost_at_ns = time.monotonic_ns()
            named = tuple(lost.ranks)
        else:
            return _Survivor(calls, 0, {}, 0, "saw no PeerLost within 60 s")
        if named != (victim,):
            return _Survivor(calls, lost_at_ns, {}, 0, f"PeerLost names {list(named)}, killed was {victim}")
    left = tuple(rank for rank in range(case.ranks) if rank != victim)
    rebuild_from_ns = time.monotonic_ns()
    comm.rebuild(left)
    rebuild_ns = time.monotonic_ns() - rebuild_from_ns
    tally = check_case(comm, case, active_ranks=left)
    problem = f"after rebuild: {tally.problems[0]}" if tally.problems else None
    return _Survivor(calls, lost_at_ns, _channels(comm, victim), rebuild_ns, problem)


def _channels(comm: weft.Communicator, victim: int) -> dict[str, int]:
    """When each channel of the control plane reported the victim's death (ns), if the engine tells."""
    detections = getattr(comm._native, "detections", None)
    seen = detections() if callable(detections) else []
    return {str(name): int(time_ns) for rank, name, time_ns in seen if rank == victim}


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the sorted values lie, the nearest rank; 0 if there is none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
