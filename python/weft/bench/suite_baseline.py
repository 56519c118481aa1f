"""The baselines of the suite: the same jobs over all_to_all_single, and the exchange of packed rows alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from weft.bench.baseline import AllToAll, Received
from weft.bench.cases import EXPERTS, Case
from weft.bench.small_worker import CALLS_IN_GRAPH
from weft.bench.timing import time_calls, time_replays
from weft.verify.check import Mismatch, expect_equal

if TYPE_CHECKING:
    from weft.bench.suite_worker import Worker

_ITERS, _WARMUP = 20, 3
_SAMPLES = 100  # of replays
_MOST_RELATIVE_ERROR = 0.02  # of bf16 sums in another order, of the largest value


def baseline_key(case: Case) -> str:
    """Cases with equal keys have the same baseline: SMs, exact sizes or capacity, and where y lies do not change it."""
    return "/".join(
        (case.op, case.rows, case.layout, str(case.alignment), case.quantize, str(case.tokens), case.routing)
    )


def with_baseline(cases: Iterable[Case]) -> dict[str, Case]:
    """The cases whose baselines are timed, by key: of the sweeps the quarter of the tokens of the targets, and those of
    small batches, whose targets have the same keys.
    """
    return {
        baseline_key(case): case
        for case in cases
        if case.suite not in ("sms", "small") and (case.suite != "tokens" or case.is_quarter)
    }


class Baselines:
    """A process group and what runs over it. A context manager; collective."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.device = worker, worker.comm.device

    def __enter__(self) -> Baselines:
        store = PrefixStore("baselines", self.worker.meeting.store)
        comm = self.worker.comm
        backend = "nccl" if self.worker.on_gpu else "gloo"
        dist.init_process_group(
            backend,
            store=store,
            rank=comm.rank,
            world_size=comm.num_ranks,
            device_id=self.device if self.worker.on_gpu else None,
        )
        return self

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()

    def run(self, case: Case) -> dict[str, Any]:
        """Check, then time; for steps the experts alone too."""
        samples = self.worker.samples
        samples.use(case)
        library = AllToAll(
            num_experts=EXPERTS,
            layout=case.layout,
            alignment=case.alignment,
            quantize=None if case.quantize == "none" else case.quantize,
            capacity=None,
        )
        x = samples.x(case.rows)
        data, scales = (x, None) if isinstance(x, Tensor) else (x.data, x.scales)
        received = library.dispatch(data, samples.topk_idx, samples.topk_weights, scales)
        self._check_rows(case, received.x)
        exchange = self._packed_exchange(case, received)

        def dispatch() -> None:
            library.dispatch(data, samples.topk_idx, samples.topk_weights, scales)

        result: dict[str, Any] = {}
        if case.op == "dispatch":
            result["gpu_us"] = self._time(dispatch)
        elif case.op in ("combine", "both"):
            outputs, want = samples.outputs(dataclasses.replace(case, wire=None))  # the baseline sends rows as they are
            y = library.combine(outputs, received, len(data))
            self._check(case, y, want)

            def combine() -> None:
                library.combine(outputs, received, len(data))

            def both() -> None:
                again = library.dispatch(data, samples.topk_idx, samples.topk_weights, scales)
                library.combine(outputs, again, len(data))

            result["gpu_us"] = self._time(combine if case.op == "combine" else both)
        else:
            result |= self._step(library, data, samples.topk_idx, samples.topk_weights)
        is_graphed = case.is_graphed and self.worker.on_gpu
        result["packed_us"] = self._time_graph(exchange) if is_graphed else self._time(exchange)
        return result

    def _packed_exchange(self, case: Case, received: Received) -> Callable[[], None]:
        """all_to_all_single of rows that are packed already: there, back, or both."""
        hidden = self.worker.options.hidden
        is_narrow = case.rows == "fp8" or case.quantize != "none"
        there = hidden + hidden // 128 * 4 if is_narrow and case.op != "combine" else 2 * hidden

        def exchange(row_bytes: int, sent: list[int], arriving: list[int]) -> Callable[[], None]:
            packed = torch.zeros((sum(sent), row_bytes), dtype=torch.uint8).to(self.device)
            arrived = packed.new_empty((sum(arriving), row_bytes))
            return lambda: dist.all_to_all_single(arrived, packed, arriving, sent)

        first = exchange(there, received.sent, received.received)
        if case.op != "both":
            return first
        second = exchange(2 * hidden, received.received, received.sent)

        def both() -> None:
            first()
            second()

        return both

    def _step(self, library: AllToAll, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> dict[str, Any]:
        experts = self.worker.step_experts()
        first = library.dispatch(x, topk_idx, topk_weights)
        offsets = torch.zeros(len(first.num_tokens_per_expert) + 1, dtype=torch.int32, device=x.device)
        offsets[1:] = first.num_tokens_per_expert.cumsum(0)

        ys: list[Tensor] = []

        def step() -> None:
            ys.clear()
            received = library.dispatch(x, topk_idx, topk_weights)
            ends = torch.zeros_like(offsets)
            ends[1:] = received.num_tokens_per_expert.cumsum(0)
            ys.append(library.combine(experts(received.x, ends), received, len(x)))

        step()
        if self.worker.step_y is not None:
            _check_close("step: y", ys[0], self.worker.step_y)
        return {"gpu_us": self._time(step), "gemm_us": self._time(lambda: experts(first.x, offsets))}

    def _check_rows(self, case: Case, rows: Tensor) -> None:
        """What arrived, in the sampled columns; FP8 as bytes."""
        samples = self.worker.samples
        want = samples.expected(case)[samples.rank].x
        data = want if isinstance(want, Tensor) else want.data.view(torch.uint8)
        expect_equal("all_to_all dispatch: x", samples.cut(rows), data)

    def _check(self, case: Case, y: Tensor, want: Tensor) -> None:
        samples = self.worker.samples
        got = samples.cut(y).cpu()
        if case.layout == "rank_major" or not y.is_cuda:
            expect_equal("all_to_all combine: y", got, want)
            return
        _check_close("all_to_all combine: y", got, want)

    def _time(self, call: Any) -> list[float]:
        meet = self.worker.meeting.wait
        return time_calls(call, iters=_ITERS, warmup=_WARMUP, device=self.device, meet=meet).gpu_us

    def _time_graph(self, call: Callable[[], None]) -> list[float]:
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(CALLS_IN_GRAPH):
                call()
        meet = self.worker.meeting.wait
        return time_replays(graph.replay, num_calls=CALLS_IN_GRAPH, samples=_SAMPLES, meet=meet).gpu_us


def _check_close(name: str, got: Tensor, want: Tensor) -> None:
    error, largest = (got.float() - want.float()).abs().max().item(), want.float().abs().max().item()
    if not error <= _MOST_RELATIVE_ERROR * largest:
        raise Mismatch(f"{name}: off by {error:.4f}, the largest value is {largest:.4f}")
