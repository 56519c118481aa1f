"""Random shapes against weft.reference, bit for bit, in ranks started for it. weft.verify.kill: kills in real runs.

Importing this needs no torch; running does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.verify.cases import Case, Fixed, check_environment, check_fixed, draw_case, repeat_command

__all__ = ["Case", "Fixed", "TrialResult", "draw_case", "repeat_command", "run_trials"]


@dataclass(frozen=True)
class TrialResult:
    """What became of one trial. `problems`: texts, each led by the rank that saw it; none means the bits were right."""

    case: Case
    problems: tuple[str, ...]
    num_words: int  # compared, all ranks together

    @property
    def ok(self) -> bool:
        """No rank saw a difference or an error."""
        return not self.problems


@dataclass(frozen=True)
class _RankResult:
    num_words: int
    problems: tuple[str, ...]


def run_trials(*, trials: int, seed: int, fixed: Fixed, device: str = "auto") -> Iterator[TrialResult]:
    """Run `trials` cases, of seeds `seed`, `seed` + 1, ..., and yield each result as it is known.

    Ranks are started once for a group of cases with the same number of ranks. Where an error broke a group, its
    remaining cases run in a new one. Raises InvalidArgument or Unsupported where the fixed values can't be run at all.
    """
    check_fixed(fixed)
    check_environment()
    cases = [draw_case(seed + i, fixed) for i in range(trials)]
    for ranks in sorted({case.ranks for case in cases}):
        waiting = [case for case in cases if case.ranks == ranks]
        while waiting:
            done = _run_group(waiting[:_GROUP_SIZE], ranks, device)
            yield from done
            waiting = waiting[len(done) :]


_GROUP_SIZE = 16  # cases between two progress reports


def _run_group(cases: Sequence[Case], ranks: int, device: str) -> list[TrialResult]:
    """Run cases in one set of ranks up to the end or the first error; at least one result."""
    import torch

    import weft

    # On one GPU processes would take turns.
    isolation = "thread" if device != "cpu" and torch.cuda.device_count() == 1 else "process"
    args = (tuple(cases),)
    per_rank = weft.spawn(
        _run_rank, num_ranks=ranks, args=args, device=device, isolation=isolation, on_failure="return"
    )
    for outcome in per_rank:
        if isinstance(outcome, weft.Unsupported):
            raise outcome
    crashed = tuple(f"rank {r}: {_text(part)}" for r, part in enumerate(per_rank) if isinstance(part, BaseException))
    results = []
    for case_idx, case in enumerate(cases):
        lists = [(r, part) for r, part in enumerate(per_rank) if isinstance(part, list)]
        parts = [(r, part[case_idx]) for r, part in lists if case_idx < len(part)]
        problems = tuple(f"rank {r}: {problem}" for r, part in parts for problem in part.problems)
        complete = len(parts) == ranks
        if not complete:
            problems += crashed or ("a rank left early",)
        results.append(TrialResult(case, problems, sum(part.num_words for _, part in parts)))
        if not complete or any(len(part) == case_idx + 1 for _, part in lists):
            break
    return results


def _run_rank(comm: object, cases: tuple[Case, ...]) -> list[_RankResult]:
    """One rank's cases, up to the first error (a mere difference in the result is none: the ranks stay in step)."""
    import weft
    from weft.machine import where
    from weft.verify.check import check_case

    if not isinstance(comm, weft.Communicator):
        raise TypeError(f"comm: {type(comm).__name__}, expected a Communicator")
    results = []
    for number, case in enumerate(cases, 1):
        if comm.rank == 0:
            where.say(f"{case.ranks} ranks, case {number} of a group of {len(cases)}, {case.layout}")
        try:
            tally = check_case(comm, case)
        except weft.Error as error:
            results.append(_RankResult(0, (_text(error),)))
            break
        results.append(_RankResult(tally.num_words, tuple(tally.problems)))
    return results


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
