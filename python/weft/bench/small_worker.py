"""A rank's part of the suite for small batches: calls with a capacity, on a GPU captured into a CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import weft
from weft.bench.cases import CALLS_IN_GRAPH, Case
from weft.bench.rank import BenchRank
from weft.bench.samples import parts_of
from weft.limits import default_heap_bytes
from weft.verify.check import Mismatch, poison

_RESULTS_ALIVE = CALLS_IN_GRAPH + 4  # what a capture has taken from the heap stays taken


@contextlib.contextmanager
def small_calls(worker: BenchRank, case: Case) -> Iterator[Callable[[], None]]:
    """What a decoding step calls, after its results were right: on a GPU a replay of CALLS_IN_GRAPH such calls, on a
    CPU one of them. With an object of its own: captured results keep their part of the heap. Collective.
    """
    capacity = worker.samples.capacity(case)
    ep = weft.ExpertParallel(
        worker.comm,
        num_experts=case.experts,
        top_k=case.top_k,
        hidden=case.hidden,
        max_tokens_per_rank=case.tokens,
        heap_bytes=_heap_bytes(worker, case, capacity or 0),
        deadline_s=worker.deadline_s,
    )
    with ep, contextlib.ExitStack() as stack:
        calls = Calls(worker, case, ep, capacity)
        stack.callback(calls.drop)
        calls.once()
        wrong = [*calls.problems()]  # raised when no other rank waits for this one any more
        call = calls.once
        if worker.on_gpu:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(CALLS_IN_GRAPH):
                    calls.once()
            stack.callback(graph.reset)
            stack.callback(torch.cuda.synchronize, worker.comm.device)
            call = graph.replay
        for _ in range(2):
            calls.poison()
            call()
        wrong += calls.problems()
        if wrong:
            raise wrong[0]
        worker.note_memory(ep, None if case.op == "combine" else calls.received, calls.y)
        yield call


def _heap_bytes(worker: BenchRank, case: Case, capacity: int) -> int:
    rows = capacity * (case.experts // worker.comm.num_ranks if case.layout == "masked" else 1)
    row_bytes = case.hidden * (1 if case.rows == "fp8" or case.quantize != "none" else 2)
    row_bytes += row_bytes // 16 + 64
    plan_bytes = 4 * worker.comm.num_ranks * case.tokens * case.top_k + 4096
    least = default_heap_bytes(worker.comm.num_ranks, case.top_k, case.hidden, case.tokens, torch.bfloat16)
    return least + _RESULTS_ALIVE * (rows * row_bytes + plan_bytes)


class Calls:
    """dispatch, combine or both. Results of the call before are dropped first."""

    def __init__(self, worker: BenchRank, case: Case, ep: weft.ExpertParallel, capacity: int | None) -> None:
        self.case, self.ep, self.samples = case, ep, worker.samples
        self.options: dict[str, Any] = {"mode": case.mode, "num_sms": case.num_sms or None}
        self.dispatch_options = {
            **self.options,
            "layout": case.layout,
            "alignment": case.alignment,
            "quantize": None if case.quantize == "none" else case.quantize,
            "capacity": capacity,
        }
        self.received: weft.Dispatched | None = None
        self.y: Tensor | None = None
        self.outputs = self.want_y = torch.empty(0, dtype=torch.float32, device="cpu")
        if case.op != "dispatch":
            self.dispatch()
            outputs, self.want_y = self.samples.outputs(case)
            self.outputs = outputs.new_zeros((*parts_of(self.result().x)[0].shape[:-1], outputs.shape[-1]))
            self.outputs[: len(outputs)] = outputs

    def result(self) -> weft.Dispatched:
        """Of the last dispatch."""
        assert self.received is not None  # noqa: S101  for mypy
        return self.received

    def dispatch(self) -> None:
        """ep.dispatch."""
        self.received = None
        x = self.samples.x(self.case.rows)
        self.received = self.ep.dispatch(x, self.samples.topk_idx, self.samples.topk_weights, **self.dispatch_options)

    def once(self) -> None:
        """The call that is timed."""
        if self.case.op != "combine":
            self.dispatch()
        if self.case.op != "dispatch":
            self.y = None
            self.y = self.ep.combine(self.outputs, self.result().handle, **self.options)

    def poison(self) -> None:
        """Fill what the next call must write."""
        if self.case.op != "combine":
            for part in parts_of(self.result().x):
                poison(part)
        if self.y is not None:
            poison(self.y)

    def problems(self) -> list[Mismatch]:
        """What is wrong in the results."""
        try:
            if self.case.op != "combine":
                self.samples.check_dispatched(self.case, self.result())
            if self.y is not None:
                self.samples.check_y(self.y, self.want_y)
        except Mismatch as mismatch:
            return [mismatch]
        return []

    def drop(self) -> None:
        """Let go of every tensor."""
        self.received = self.y = None
