"""What the ranks of weft.verify.kill do until one of them dies: dispatch and combine again and again, one at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import weft
from weft.limits import MAX_SMALL_TOKENS
from weft.verify.cases import Case, Fixed, draw_case
from weft.verify.check import make_inputs

__all__ = ["KILL_MODES", "OPERATIONS", "Calls", "draw_kill_case"]

KILL_MODES = ("throughput", "latency", "staged", "graph")  # in turn, unless one is asked for
# Of what a rank was doing when it died: the kernels, how they were launched, and the call.
OPERATIONS = tuple(
    (mode, operation)
    for mode in ("throughput", "small", "small staged", "small graph")
    for operation in ("dispatch", "combine")
)


def draw_kill_case(seed: int, fixed: Fixed) -> tuple[Case, bool]:
    """The case of a trial, and whether its calls are replayed in CUDA graphs. "auto" is one of the two it chooses from.

    Small batches that return before they have received, or are captured, have a capacity for all that may come.
    """
    most = fixed.tokens or 0
    modes = {None: KILL_MODES if most <= MAX_SMALL_TOKENS else KILL_MODES[:1], "auto": KILL_MODES[:2]}
    choices = modes.get(fixed.mode, (fixed.mode,))
    mode = choices[seed % len(choices)]
    case = draw_case(seed, dataclasses.replace(fixed, mode="latency" if mode == "graph" else mode))
    if mode in ("staged", "graph"):
        rows = sum(case.tokens) * (1 if case.layout == "rank_major" else case.top_k)
        rows += case.num_local_experts * (case.alignment - 1)
        case = dataclasses.replace(case, capacity=sum(case.tokens) * case.top_k if case.layout == "masked" else rows)
    return case, mode == "graph"


class Calls:
    """The calls of one rank. `note(number)` is told which of OPERATIONS begins; on a GPU it has ended there when the
    next begins, so the last one noted is the one in which a rank died, or behind which: the outputs of experts are made
    before a combine is noted.
    """

    def __init__(self, ep: weft.ExpertParallel, case: Case, in_graph: bool, note: Callable[[int], None]) -> None:
        mine = make_inputs(case, ep.comm.rank)
        self._inputs = [part.to(ep.device) for part in (mine.x, mine.topk_idx, mine.topk_weights)]
        self._ep, self._case, self._note = ep, case, note
        self._on_gpu = ep.device.type == "cuda"
        self._in_graph = in_graph and self._on_gpu
        self._received: Any = None
        self._y: Any = None
        self._calls: list[Callable[[], Any]] = [self._dispatch, self._combine]

    def start(self) -> None:
        """The first calls, which load what the others need; then the graphs are captured."""
        self.run()
        if not self._in_graph:
            return
        graphs = [torch.cuda.CUDAGraph() for _ in self._calls]
        for graph, call in zip(graphs, self._calls, strict=True):
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                call()
        self._calls = [graph.replay for graph in graphs]

    def run(self) -> None:
        """A dispatch and a combine.

        Raises:
            As they do.
        """
        for number, call in enumerate(self._calls):
            if self._in_graph:
                self._note(self._number(number))
            call()
            if self._in_graph:
                self._ep.check()  # what a replay can't raise
            elif self._on_gpu:
                torch.cuda.current_stream(self._ep.device).synchronize()

    def _number(self, operation: int) -> int:
        options = self._case.later_mode if operation else self._case.dispatch_mode
        mode = "throughput" if options["mode"] == "throughput" else "small"
        mode += " graph" if self._in_graph else " staged" if options["staged"] else ""
        return OPERATIONS.index((mode, ("dispatch", "combine")[operation]))

    def _dispatch(self) -> None:
        case = self._case
        self._received = self._y = None  # one result is alive at a time
        self._note(self._number(0))
        self._received = self._ep.dispatch(
            *self._inputs,
            layout=case.layout,
            alignment=case.alignment,
            capacity=case.capacity,
            quantize=None if case.quantize == "none" else case.quantize,
            **case.dispatch_mode,
        ).wait()

    def _combine(self) -> None:
        output = self._ep.empty_output(self._received)
        output = output.zero_() if self._case.heap_output and not self._in_graph else torch.zeros_like(output)
        if self._on_gpu and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self._ep.device).synchronize()
        self._note(self._number(1))
        combined = self._ep.combine(output, self._received.handle, **self._case.later_mode)
        self._y = combined.wait() if isinstance(combined, weft.Staged) else combined
