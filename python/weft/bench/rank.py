"""A rank of the suite as its parts see it (the whole is weft.bench.suite_worker.Worker)."""

from __future__ import annotations

from typing import Any, Protocol

import weft
from weft.bench.grouped_gemm import Experts
from weft.bench.options import SuiteOptions
from weft.bench.samples import Samples

__all__ = ["SuiteRank"]


class SuiteRank(Protocol):
    """What small calls and baselines ask of it."""

    comm: weft.Communicator
    options: SuiteOptions
    meeting: Any  # where the ranks meet
    samples: Samples
    on_gpu: bool
    deadline_s: float
    step_y: Any  # result of the step, None before it was made

    def step_experts(self) -> Experts: ...

    def note_memory(self, ep: weft.ExpertParallel, received: Any, y: Any) -> None: ...
