"""What came out of a run of the demo, whether it is as it should be, and the same as a dictionary for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from weft.demo.config import DemoConfig

if TYPE_CHECKING:
    from weft.demo.baseline import BaselineResult
    from weft.demo.train import RankResult

LOAD_STEPS = 20
"""Expert load is given for the last steps of the training: one step alone is noisy."""

FALL_STEPS = 40
"""In fewer steps a loss that falls can't be told from one that wavers."""


@dataclass(frozen=True, kw_only=True)
class DemoReport:
    """The result of `weft.demo.run_demo`. `ranks` holds those that lived to the end, in ascending order."""

    config: DemoConfig
    text_source: str
    text_bytes: int
    why_here: str
    ranks: tuple[RankResult, ...]
    baseline: BaselineResult | None
    killed_ns: int | None
    total_s: float
    plots: tuple[Path, ...]
    num_cores: int | None = None
    """CPUs that this process may use; None: not known."""

    @property
    def losses(self) -> tuple[float, ...]:
        """Mean loss over the ranks of every step, in nats a byte."""
        return self.ranks[0].losses

    @property
    def lost_ranks(self) -> dict[int, int]:
        """Ranks that died, and the step in which they did."""
        return {rank: loss.step for loss in self.ranks[0].lost for rank in loss.ranks}

    @property
    def differences(self) -> list[float]:
        """Difference of every step's loss from the baseline's, relative to the latter; empty without a baseline."""
        return [] if self.baseline is None else relative(self.losses, self.baseline.losses)

    @property
    def early_difference(self) -> float:
        """The largest of the first `early_steps` steps; 0 without a baseline."""
        return largest(self.differences[: self.config.early_steps])

    @property
    def overall_difference(self) -> float:
        """The largest, where means of `window` steps are compared; 0 without a baseline."""
        window = self.config.window
        return (
            0.0
            if self.baseline is None
            else largest(relative(*(means(losses, window) for losses in (self.losses, self.baseline.losses))))
        )

    @property
    def problems(self) -> list[str]:
        """What is not as it should be; empty when all is well."""
        found, config = [], self.config
        for what, worst, allowed in (
            (f"of each of the first {config.early_steps} steps", self.early_difference, config.early_tolerance),
            (f"of every {config.window} steps", self.overall_difference, config.tolerance),
        ):
            if not worst <= allowed:
                found.append(
                    f"the loss {what} differs from the baseline's by up to {worst:.3%}, allowed is {allowed:.1%}"
                )
        for name, losses in self._phases().items():
            first, last = mean_of_ends(losses)
            if len(losses) >= FALL_STEPS and not last < first:
                found.append(f"the loss did not fall {name}: {first:.3f} at first, {last:.3f} in the end")
        if self.config.kill_rank is not None and self.config.kill_rank not in self.lost_ranks:
            found.append(f"rank {self.config.kill_rank} was to be killed, but no rank saw it die")
        return found

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong: the exit code of `weft demo`."""
        return not self.problems

    def _phases(self) -> dict[str, tuple[float, ...]]:
        phases = {"in the training": self.losses}
        if self.lost_ranks:
            phases["after the loss of a rank"] = self.losses[max(self.lost_ranks.values()) :]
        return phases

    def load(self, first_step: int, last_step: int) -> list[list[int]]:
        """Picks per expert in steps first_step to last_step - 1, [layers][experts]."""
        steps = self.ranks[0].loads[first_step:last_step]
        return [[sum(picks) for picks in zip(*layer, strict=True)] for layer in zip(*steps, strict=True)]

    def final_load(self) -> list[list[int]]:
        """Picks per expert in the last steps, [layers][experts]."""
        return self.load(max(0, self.config.steps - LOAD_STEPS), self.config.steps)

    def alive_experts(self) -> list[int]:
        """Experts whose rank lives."""
        per_rank = self.config.experts_per_rank
        return [expert for expert in range(self.config.experts) if expert // per_rank not in self.lost_ranks]

    def with_plots(self, plots: tuple[Path, ...]) -> DemoReport:
        """The same report, with the pictures that were drawn from it."""
        return replace(self, plots=plots)

    def as_dict(self) -> dict[str, Any]:
        """One JSON object. Times in seconds unless the key ends in _ms, losses in nats a byte."""
        return {
            "kind": "demo",
            "ok": self.ok,
            "problems": self.problems,
            "config": {
                key: str(value) if isinstance(value, Path) else value for key, value in asdict(self.config).items()
            },
            "text": {"source": self.text_source, "bytes": self.text_bytes},
            "engine": self.ranks[0].engine,
            "placement": self.why_here,
            "losses": list(self.losses),
            "baseline_losses": None if self.baseline is None else list(self.baseline.losses),
            "early_difference": self.early_difference,
            "overall_difference": self.overall_difference,
            "expert_load": self.final_load(),
            "ranks": [self._rank_dict(rank) for rank in self.ranks],
            "train_s": max(rank.train_s for rank in self.ranks),
            "baseline_s": None if self.baseline is None else self.baseline.train_s,
            "total_s": self.total_s,
            "plots": [str(plot) for plot in self.plots],
        }

    def _rank_dict(self, rank: RankResult) -> dict[str, Any]:
        return {
            "rank": rank.rank,
            "device": rank.device,
            "placement": rank.placement,
            **asdict(rank.traffic),
            "generated": rank.generated.decode("utf-8", "replace"),
            "lost": [
                {
                    "step": loss.step,
                    "ranks": list(loss.ranks),
                    "error": loss.error,
                    "seen_after_ms": self.seen_after_ms(loss.seen_ns),
                    "rebuild_ms": loss.rebuild_ms,
                }
                for loss in rank.lost
            ],
        }

    def seen_after_ms(self, seen_ns: int) -> float | None:
        """Time from the kill to the error; None where nobody knows when a rank died."""
        return None if self.killed_ns is None else (seen_ns - self.killed_ns) / 1e6


def mean_of_ends(losses: tuple[float, ...]) -> tuple[float, float]:
    """Means of the first and of the last fifth."""
    part = max(1, len(losses) // 5)
    return fmean(losses[:part]), fmean(losses[-part:])


def means(losses: tuple[float, ...], window: int) -> list[float]:
    """Means of `window` steps each; the last may have fewer."""
    return [fmean(losses[start : start + window]) for start in range(0, len(losses), window)]


def relative(values: Sequence[float], expected: Sequence[float]) -> list[float]:
    """|value - expected| / expected, one by one."""
    return [abs(a - b) / b for a, b in zip(values, expected, strict=True)]


def largest(values: Sequence[float]) -> float:
    """The largest, 0 if there is none; not a number if any is not."""
    return max(values, key=lambda value: (math.isnan(value), value), default=0.0)
