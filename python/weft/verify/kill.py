"""`weft verify --kill`: SIGKILL a random rank at a random moment; survivors must see it, rebuild, get the right bits.

With more deaths a trial the next rank is killed once the survivors run again, until as many have died.
The killer is a process of its own, so the moment has nothing to do with what the victim is doing. Times are
CLOCK_MONOTONIC, which all processes of a machine share: from just before kill(2) to the moment PeerLost arrives in each
survivor's Python.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import InvalidArgument
from weft.machine.placement import local
from weft.verify.cases import Case, Fixed, check_environment, check_fixed
from weft.verify.kill_board import Board

if TYPE_CHECKING:
    import torch

    import weft

__all__ = ["KillResult", "percentile", "run_kills"]

_KILL_WITHIN_S = 0.2  # a victim dies at a uniformly random moment of this time, counted from when all ranks run
_DEADLINE_S = 30.0
_GIVE_UP_S = 60.0
_MOST_LEFT_BYTES = 32 << 20  # of GPU memory, after a death: the driver may take some
_MEMORY_BACK_S = 10.0  # the driver gives back what a dead process had when the process ends, half a second or so later


@dataclass(frozen=True)
class KillResult:
    """What became of one kill."""

    trial: int
    death: int  # how many ranks had died in this trial before
    seed: int
    ranks: int
    victim: int
    mode: str  # with `operation` one of kill_calls.OPERATIONS: what the victim was doing
    operation: str
    calls_before: int  # calls the victim's peers had completed since the last death, the largest of them
    detection_us: tuple[float, ...]  # per survivor
    channels: tuple[dict[str, float], ...]  # per survivor: us from the kill to the report of each channel that saw it
    rebuild_us: tuple[float, ...]  # per survivor: comm.rebuild
    # On the victim's GPU after its end and the rebuild, more than before the ranks started; None: survivors share it.
    memory_left_bytes: int | None
    memory_back_us: (
        float | None
    )  # from the kill to the first look that found little left, after the rebuild; None: never
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


@dataclass(frozen=True)
class _Plan:
    """Who dies in a trial, one after the other, and how long after all that are left run."""

    victims: tuple[int, ...]
    delays_s: tuple[float, ...]
    in_graph: bool = False  # calls are replayed

    def left(self, num_ranks: int, death: int) -> tuple[int, ...]:
        """Ranks that live when `death` others have died."""
        return tuple(rank for rank in range(num_ranks) if rank not in self.victims[:death])


def run_kills(*, trials: int, seed: int, fixed: Fixed, device: str = "auto", deaths: int = 1) -> Iterator[KillResult]:
    """Run `trials` trials with `deaths` kills each, one after the other, and yield each kill's result. Not fixed: 4
    ranks, 128 tokens, H = 512, kernels in turn (kill_calls.KILL_MODES), the rest drawn by the seed.
    """
    from weft.verify.kill_calls import draw_kill_case  # torch too, once: each trial's ranks are forked from here

    check_fixed(fixed)
    check_environment()
    defaults = Fixed(ranks=4, tokens=128, hidden=512)
    given = {name: value for name, value in dataclasses.asdict(fixed).items() if value is not None}
    fixed = dataclasses.replace(defaults, **given)
    if not 1 <= deaths < (fixed.ranks or 0):
        raise InvalidArgument(f"deaths={deaths}: allowed is 1 to one less than ranks={fixed.ranks}")
    for trial in range(trials):
        yield from _run_trial(trial, *draw_kill_case(seed + trial, fixed), device, deaths)


def _run_trial(trial: int, case: Case, in_graph: bool, device: str, deaths: int) -> Iterator[KillResult]:
    import weft

    rng = random.Random(f"weft verify kill {case.seed}")
    victims = tuple(rng.sample(range(case.ranks), deaths))
    plan = _Plan(victims, tuple(rng.uniform(0.0, _KILL_WITHIN_S) for _ in victims), in_graph)
    board = Board(case.ranks)
    shared_memory_before = _shared_memory_files()
    gpu_memory_before = {} if device == "cpu" else _gpu_memory()
    args = (board, plan, case.ranks, gpu_memory_before)
    killer = multiprocessing.get_context("fork").Process(target=_kill, args=args, daemon=True)
    killer.start()
    with tempfile.TemporaryDirectory(prefix="weft-kill-") as folder:
        diaries = [Path(folder) / f"rank{rank}.jsonl" for rank in range(case.ranks)]
        try:
            outcomes = weft.spawn(
                _run_rank, num_ranks=case.ranks, args=(case, board, plan, diaries), device=device, on_failure="return"
            )
        finally:
            killer.join()
        seen = [_read_diary(diary) for diary in diaries]
    errors = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)}
    for error in errors.values():
        if isinstance(error, weft.Unsupported):
            raise error
    left = sorted(_shared_memory_files() - shared_memory_before)
    for death in range(deaths):
        problems = [f"left in /dev/shm: {', '.join(left)}"] if left and death == deaths - 1 else []
        for rank in plan.left(case.ranks, death + 1):
            problems += _problems_of(rank, seen[rank], death, None if rank in plan.victims else errors.get(rank))
        survivors = [seen[rank][death] for rank in plan.left(case.ranks, death + 1) if len(seen[rank]) > death]
        yield _result(trial, case, plan, death, board, _Seen(survivors, problems))


@dataclass(frozen=True)
class _Seen:
    """What the survivors of a death saw, and what was wrong."""

    survivors: list[_Survivor]
    problems: list[str]


def _read_diary(diary: Path) -> list[_Survivor]:
    """A rank notes each death as it has come through it: it may die of the next."""
    lines = diary.read_text(encoding="utf-8").splitlines() if diary.exists() else []
    return [_Survivor(**json.loads(line)) for line in lines]


def _problems_of(rank: int, survived: list[_Survivor], death: int, error: BaseException | None) -> list[str]:
    if len(survived) > death:
        problem = survived[death].problem
        return [] if problem is None else [f"rank {rank}: {problem}"]
    return [f"rank {rank}: gave up before" if error is None else f"rank {rank}: {type(error).__name__}: {error}"]


def _result(trial: int, case: Case, plan: _Plan, death: int, board: Board, seen: _Seen) -> KillResult:
    from weft.verify.kill_calls import OPERATIONS

    victim, killed_at_ns = plan.victims[death], board.killed_at_ns(death)
    memory_left, measured_at_ns = board.memory_left(death) or (None, 0)
    is_memory_back = memory_left is not None and memory_left <= _MOST_LEFT_BYTES
    if memory_left is not None and not is_memory_back:
        after_s = (measured_at_ns - killed_at_ns) / 1e9
        seen.problems.append(
            f"{memory_left >> 20} MiB left on the GPU of rank {victim} {after_s:.1f} s after its death"
        )
    saw = [part for part in seen.survivors if part.lost_at_ns]
    mode, operation = OPERATIONS[board.doing(victim)]
    return KillResult(
        trial=trial,
        death=death,
        seed=case.seed,
        ranks=case.ranks - death,
        victim=victim,
        mode=mode,
        operation=operation,
        calls_before=max((part.calls for part in seen.survivors), default=0),
        detection_us=tuple((part.lost_at_ns - killed_at_ns) / 1e3 for part in saw),
        channels=tuple(
            {name: (at_ns - killed_at_ns) / 1e3 for name, at_ns in part.channels_ns.items()} for part in saw
        ),
        rebuild_us=tuple(part.rebuild_ns / 1e3 for part in seen.survivors if part.rebuild_ns),
        memory_left_bytes=memory_left,
        memory_back_us=(measured_at_ns - killed_at_ns) / 1e3 if is_memory_back else None,
        problems=tuple(seen.problems),
    )


def _shared_memory_files() -> set[str]:
    directory = Path("/dev/shm")
    return {entry.name for entry in directory.iterdir()} if directory.is_dir() else set()


def _gpu_memory() -> dict[int, int]:
    """Bytes in use on each GPU that CUDA has here, by NVML's account; empty without NVML. Starts no CUDA."""
    import pynvml

    gpus = local.visible_here()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(gpu.idx) for gpu in gpus]
        return {idx: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for idx, handle in enumerate(handles)}
    finally:
        pynvml.nvmlShutdown()


def _kill(board: Board, plan: _Plan, num_ranks: int, gpu_memory_before: dict[int, int]) -> None:
    """The killer process: again and again waits until all ranks run, kills one, waits until the others are through."""
    for death, (victim, delay_s) in enumerate(zip(plan.victims, plan.delays_s, strict=True)):
        alive = plan.left(num_ranks, death)
        if not _comes_true(functools.partial(board.are_running, alive, death)):
            return
        time.sleep(delay_s)
        board.kill(victim, death)
        survivors = plan.left(num_ranks, death + 1)
        if not _comes_true(functools.partial(board.are_through, survivors, death)):
            return
        num_gpus = len(gpu_memory_before)
        if num_gpus and all((rank - victim) % num_gpus for rank in survivors):  # none that keeps memory on the same GPU
            idx = victim % num_gpus
            _measure_memory_left(board, death, idx, gpu_memory_before[idx])
        board.note_over(death)


def _measure_memory_left(board: Board, death: int, gpu: int, bytes_before: int) -> None:
    """Look until little is left, for some seconds at most: the victim's own memory comes back when its process has
    ended, often later than the survivors have rebuilt. These keep what they have until this is over.
    """
    give_up_at = time.monotonic() + _MEMORY_BACK_S
    while True:
        left = max(0, _gpu_memory()[gpu] - bytes_before)
        board.set_memory_left(death, left)
        if left <= _MOST_LEFT_BYTES or time.monotonic() > give_up_at:
            return
        time.sleep(0.01)


def _comes_true(condition: Callable[[], bool]) -> bool:
    give_up_at = time.monotonic() + _GIVE_UP_S
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.001)
    return True


def _run_rank(comm: object, case: Case, board: Board, plan: _Plan, diaries: list[Path]) -> None:
    """For each death: dispatch and combine until a peer is lost, rebuild with those left, check a whole case."""
    import weft
    from weft.verify.check import DTYPES

    if not isinstance(comm, weft.Communicator):
        raise TypeError(f"comm: {type(comm).__name__}, expected a Communicator")
    with weft.ExpertParallel(
        comm,
        num_experts=case.experts,
        top_k=case.top_k,
        hidden=case.hidden,
        max_tokens_per_rank=max(1, *case.tokens),
        dtype=DTYPES[case.dtype],
        deadline_s=_DEADLINE_S,
    ) as ep:
        for death in range(len(plan.victims)):
            try:
                survivor = _one_death(ep, case, board, plan, death)
                with diaries[comm.rank].open("a", encoding="utf-8") as diary:
                    diary.write(json.dumps(dataclasses.asdict(survivor)) + "\n")
            finally:
                board.note_through(comm.rank, death)
            if survivor.problem is not None or not _comes_true(functools.partial(board.is_over, death)):
                break


def _one_death(ep: weft.ExpertParallel, case: Case, board: Board, plan: _Plan, death: int) -> _Survivor:
    import weft
    from weft.verify.check import check_case
    from weft.verify.kill_calls import Calls

    comm, victim = ep.comm, plan.victims[death]
    calls = Calls(ep, case, plan.in_graph, functools.partial(board.note_doing, comm.rank))
    beside = _Beside(comm.device)
    num_calls = 2
    give_up_at = time.monotonic() + _GIVE_UP_S
    try:
        calls.start()
        board.note_running(comm.rank, death)
        while time.monotonic() < give_up_at:
            calls.run()
            beside.go_on()
            num_calls += 2
    except weft.PeerLost as lost:
        lost_at_ns = time.monotonic_ns()
        named = tuple(lost.ranks)
    else:
        return _Survivor(num_calls, 0, {}, 0, f"saw no PeerLost within {_GIVE_UP_S:.0f} s")
    if named != (victim,):
        return _Survivor(num_calls, lost_at_ns, {}, 0, f"PeerLost names {list(named)}, killed was {victim}")
    beside.check()
    left = plan.left(case.ranks, death + 1)
    rebuild_from_ns = time.monotonic_ns()
    comm.rebuild(left)
    rebuild_ns = time.monotonic_ns() - rebuild_from_ns
    tally = check_case(comm, case, active_ranks=left)
    problem = f"after rebuild: {tally.problems[0]}" if tally.problems else None
    return _Survivor(num_calls, lost_at_ns, _channels(comm, victim), rebuild_ns, problem)


class _Beside:
    """Work of others on the same GPU: it must go on, whatever happens to Weft's calls. Nothing on a CPU."""

    _SIZE = 512

    def __init__(self, device: torch.device) -> None:
        import torch

        self._torch, self._device = torch, device
        self._is_gpu = device.type == "cuda"
        if self._is_gpu:
            self._stream = torch.cuda.Stream(device)
            self._product = torch.ones((self._SIZE, self._SIZE), device=device, dtype=torch.float32)
            torch.cuda.synchronize(device)
            self.go_on()  # the first product loads kernels, for up to seconds in which no call of Weft can raise
            self._stream.synchronize()

    def go_on(self) -> None:
        """A product on a stream of its own."""
        if self._is_gpu:
            with self._torch.cuda.stream(self._stream):
                self._product = self._product @ self._product / self._SIZE

    def check(self) -> None:
        """Raises what CUDA or the allocator has against going on."""
        if not self._is_gpu:
            return
        self.go_on()
        self._stream.synchronize()
        fresh = self._torch.ones(1 << 20, device=self._device)
        if float(self._product[0, 0]) != 1.0 or float(fresh.sum()) != 1 << 20:
            raise RuntimeError("the GPU computes wrongly after a peer was lost")


def _channels(comm: weft.Communicator, victim: int) -> dict[str, int]:
    """When each channel of the control plane reported the victim's death (ns), if the engine tells."""
    detections = getattr(comm._native, "detections", None)
    seen = detections() if callable(detections) else []
    return {str(name): int(time_ns) for rank, name, time_ns in seen if rank == victim}


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the sorted values lie, the nearest rank; 0 if there is none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
