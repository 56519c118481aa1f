"""A rank of a benchmark as its parts see it (the whole is weft.bench.worker.Worker)."""

from __future__ import annotations

from typing import Any, Protocol

import weft
from weft.bench.cases import Case
from weft.bench.grouped_gemm import Experts
from weft.bench.options import Options, SuiteOptions
from weft.bench.samples import Samples

__all__ = ["BenchRank"]


class BenchRank(Protocol):
    """What small calls, halves and baselines ask of it."""

    comm: weft.Communicator
    options: Options | SuiteOptions
    meeting: Any  # where the ranks meet
    samples: Samples
    on_gpu: bool
    deadline_s: float
    step_y: Any  # result of the step, None before it was made

    def step_experts(self) -> Experts: ...

    def heap_bytes(self, case: Case) -> int: ...

    def settle(self) -> None: ...

    def note_memory(self, ep: weft.ExpertParallel, received: Any, y: Any) -> None: ...
