"""What a run of the demo is made of: one frozen value, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weft.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Everything `weft.demo.run_demo` can be told. The defaults take about half a minute on two cores.

    Raises `weft.InvalidArgument` naming the field, the value and what is allowed, when the values do not fit together.
    """

    num_ranks: int = 4
    steps: int = 120
    """Training steps."""
    layers: int = 2
    hidden: int = 128
    """Width of a token's row; a multiple of 8, and of 16 per attention head."""
    heads: int = 4
    context: int = 128
    """Bytes of text a sequence has."""
    sequences_per_rank: int = 4
    """Sequences a rank trains on in one step, so `sequences_per_rank * context` tokens are dispatched per call."""
    experts: int = 32
    top_k: int = 4
    expert_groups: int = 4
    """Groups of the DeepSeek-V3 gate; a token's experts come from `top_groups` of them."""
    top_groups: int = 2
    expert_hidden: int = 128
    learning_rate: float = 6e-3
    bias_rate: float = 2e-2
    """Step by which the gate's selection bias moves towards an even load."""
    seed: int = 0
    device: str = "auto"
    """"auto" takes GPUs if there are any, else the CPU; "cpu" and "cuda" insist."""
    placement: Literal["auto", "process", "off"] = "process"
    """Binding of the ranks to cores and memory: all of each process, Weft's own threads, or nothing."""
    text: Path | None = None
    """File to learn from; None takes a text found on this machine."""
    prompt: str = "The "
    generate: int = 160
    """Bytes of text each rank writes in the end; 0 writes none."""
    baseline: bool = True
    """Also train the same model on one rank in plain torch, and compare the losses."""
    tolerance: float = 0.05
    """Largest accepted difference of the loss from the baseline's, relative to the latter, between means of `window`
    steps. Sums in another order round differently; in time that turns a close choice of experts the other way, and the
    runs drift apart."""
    window: int = 10
    early_tolerance: float = 1e-3
    """The same for each of the first `early_steps` steps alone, in which nothing has drifted yet."""
    early_steps: int = 5
    kill_rank: int | None = None
    """Rank to kill with SIGKILL in the middle of the training, None for none."""
    plot: Path | None = None
    """Folder for PNG pictures of losses and load, None for none."""
    record: Path | None = None
    """File for a trace of the routing, for `weft bench --trace`, None for none."""

    def __post_init__(self) -> None:
        for name, low in _AT_LEAST.items():
            _require(getattr(self, name) >= low, name, getattr(self, name), f"at least {low}")
        _require(
            self.hidden % (16 * self.heads) == 0, "hidden", self.hidden, f"a multiple of 16 x heads = {16 * self.heads}"
        )
        _require(
            self.experts % self.num_ranks == 0, "experts", self.experts, f"a multiple of num_ranks = {self.num_ranks}"
        )
        _require(
            self.experts % self.expert_groups == 0,
            "experts",
            self.experts,
            f"a multiple of expert_groups = {self.expert_groups}",
        )
        _require(
            self.top_groups <= self.expert_groups,
            "top_groups",
            self.top_groups,
            f"1 to expert_groups = {self.expert_groups}",
        )
        room = self.top_groups * (self.experts // self.expert_groups)
        _require(
            self.top_k <= room,
            "top_k",
            self.top_k,
            f"1 to {room}, the experts of top_groups = {self.top_groups} groups",
        )
        _require(self.device in ("auto", "cpu", "cuda"), "device", self.device, "auto, cpu or cuda")
        _require(self.placement in ("auto", "process", "off"), "placement", self.placement, "auto, process or off")
        _require(self.prompt != "", "prompt", self.prompt, "at least one character")
        _require(self.tolerance > 0, "tolerance", self.tolerance, "more than 0")
        _require(self.early_tolerance > 0, "early_tolerance", self.early_tolerance, "more than 0")
        if self.kill_rank is not None:
            _require(
                0 <= self.kill_rank < self.num_ranks,
                "kill_rank",
                self.kill_rank,
                f"0 to {self.num_ranks - 1}, a rank of the run",
            )
            _require(
                self.num_ranks >= 2, "num_ranks", self.num_ranks, "at least 2 with kill_rank: somebody must survive"
            )
            _require(self.steps >= 4, "steps", self.steps, "at least 4 with kill_rank")

    @property
    def experts_per_rank(self) -> int:
        return self.experts // self.num_ranks

    @property
    def tokens_per_rank(self) -> int:
        """Tokens a rank dispatches in one call."""
        return self.sequences_per_rank * self.context

    @property
    def kill_step(self) -> int:
        """The step in which `kill_rank` dies: the middle of the training."""
        return self.steps // 2


_AT_LEAST = {
    "num_ranks": 1,
    "steps": 1,
    "layers": 1,
    "hidden": 16,
    "heads": 1,
    "context": 8,
    "sequences_per_rank": 1,
    "experts": 1,
    "top_k": 1,
    "expert_groups": 1,
    "top_groups": 1,
    "expert_hidden": 1,
    "generate": 0,
    "window": 1,
    "early_steps": 1,
}


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise InvalidArgument(f"{name}={value!r}: must be {allowed}")
