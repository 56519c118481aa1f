"""The baselines of cases: the same jobs over all_to_all_single, and the exchange of packed rows alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

import weft
from weft.bench.all_to_all import AllToAll, Received
from weft.bench.cases import CALLS_IN_GRAPH, ONE_SHAPE, Case
from weft.bench.rank import BenchRank
from weft.bench.timing import PROFILED, Times, profile_calls, time_calls, time_replays
from weft.verify.check import Mismatch, expect_equal

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
        if not case.is_halved and case.suite not in ("sms", "small") and (case.suite != "tokens" or case.is_quarter)
    }


class Baselines:
    """A process group, with a name of its own, and what runs over it. A context manager; collective."""

    def __init__(self, worker: BenchRank, name: str) -> None:
        self.worker, self.device, self.name = worker, worker.comm.device, name

    def __enter__(self) -> Baselines:
        store = PrefixStore(f"baselines {self.name}", self.worker.meeting.store)
        comm = self.worker.comm
        if self.worker.on_gpu and torch.cuda.device_count() < comm.num_ranks:
            have, need = f"{torch.cuda.device_count()} GPUs", f"{comm.num_ranks}, one a rank for NCCL; or --no-baseline"
            raise weft.Unsupported("the all_to_all_single baseline", have, need)
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
        """Check, then time; of suites the packed exchange too, and for steps the experts alone."""
        call, received = self._checked(case)
        if case.suite == ONE_SHAPE:
            return dataclasses.asdict(self._time(call, self.worker.options.iters, self.worker.options.warmup))
        result = {"gpu_us": self._time(call).gpu_us}
        if case.op == "step":
            experts, offsets = self.worker.step_experts(), _offsets(received)
            result["gemm_us"] = self._time(lambda: experts(received.x, offsets)).gpu_us
        exchange = self._packed_exchange(case, received)
        is_graphed = case.is_graphed and self.worker.on_gpu
        result["packed_us"] = self._time_graph(exchange) if is_graphed else self._time(exchange).gpu_us
        return result

    def profile(self, case: Case) -> float | None:
        """Microseconds of a call in which the GPU ran something, if the driver gives records."""
        call, _ = self._checked(case)
        work = profile_calls(call, iters=PROFILED, meet=self.worker.meeting.wait)
        return None if work is None else work.kernel_us

    def _checked(self, case: Case) -> tuple[Callable[[], Any], Received]:
        """What is timed, after its results were right, and what a dispatch receives."""
        samples = self.worker.samples
        samples.use(case)
        library = AllToAll(
            num_experts=case.experts,
            layout=case.layout,
            alignment=case.alignment,
            quantize=None if case.quantize == "none" else case.quantize,
            capacity=samples.capacity(case) if case.layout == "masked" else None,
        )
        x = samples.x(case.rows)
        data, scales = (x, None) if isinstance(x, Tensor) else (x.data, x.scales)

        def dispatch() -> Received:
            return library.dispatch(data, samples.topk_idx, samples.topk_weights, scales)

        received = dispatch()
        self._check_rows(case, received)
        if case.op == "dispatch":
            return dispatch, received
        if case.op == "step":
            experts = self.worker.step_experts()

            def step() -> Tensor:
                again = dispatch()
                return library.combine(experts(again.x, _offsets(again)), again, len(data))

            if self.worker.step_y is not None:
                _check_close("step: y", step(), self.worker.step_y)
            return step, received
        outputs, want = samples.outputs(dataclasses.replace(case, wire=None))  # the baseline sends rows as they are
        self._check(case, library.combine(outputs, received, len(data)), want)
        if case.op == "combine":
            return lambda: library.combine(outputs, received, len(data)), received
        return lambda: library.combine(outputs, dispatch(), len(data)), received

    def _packed_exchange(self, case: Case, received: Received) -> Callable[[], None]:
        """all_to_all_single of rows that are packed already: there, back, or both."""
        hidden = case.hidden
        is_narrow = case.rows == "fp8" or case.quantize != "none"
        there = hidden + hidden // 128 * 4 if is_narrow and case.op != "combine" else 2 * hidden

        def exchange(row_bytes: int, sent: list[int], arriving: list[int]) -> Callable[[], None]:
            packed = torch.zeros((sum(sent), row_bytes), dtype=torch.uint8, device="cpu").to(self.device)
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

    def _check_rows(self, case: Case, received: Received) -> None:
        """What arrived, in the sampled columns; FP8 as bytes."""
        samples = self.worker.samples
        want = samples.expected(case)[samples.rank]
        data = want.x if isinstance(want.x, Tensor) else want.x.data.view(torch.uint8)
        pairs = [("x", samples.cut(received.x), data)]
        if received.scales is not None and isinstance(want.x, weft.Quantized) and want.x.scales is not None:
            scales, wanted = received.scales, want.x.scales
            scales = scales if scales.element_size() > 1 else scales.view(torch.uint8)
            wanted = wanted if wanted.element_size() > 1 else wanted.view(torch.uint8)
            pairs.append(("scales", scales[..., samples.groups.to(scales.device)], wanted))
        for name, got, expected in pairs:
            if case.layout == "masked":
                got, expected = samples.picks_of(want, got), samples.picks_of(want, expected)
            expect_equal(f"all_to_all dispatch: {name}", got, expected)

    def _check(self, case: Case, y: Tensor, want: Tensor) -> None:
        samples = self.worker.samples
        got = samples.cut(y).cpu()
        if case.layout == "rank_major" or not y.is_cuda:
            expect_equal("all_to_all combine: y", got, want)
            return
        _check_close("all_to_all combine: y", got, want)

    def _time(self, call: Any, iters: int = _ITERS, warmup: int = _WARMUP) -> Times:
        return time_calls(call, iters=iters, warmup=warmup, device=self.device, meet=self.worker.meeting.wait)

    def _time_graph(self, call: Callable[[], None]) -> list[float]:
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(CALLS_IN_GRAPH):
                call()
        meet = self.worker.meeting.wait
        return time_replays(graph.replay, num_calls=CALLS_IN_GRAPH, samples=_SAMPLES, meet=meet).gpu_us


def _offsets(received: Received) -> Tensor:
    """Of the groups of the experts' rows, as the grouped GEMMs read them."""
    counts = received.num_tokens_per_expert
    offsets = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
    offsets[1:] = counts.cumsum(0)
    return offsets


def _check_close(name: str, got: Tensor, want: Tensor) -> None:
    error, largest = (got.float() - want.float()).abs().max().item(), want.float().abs().max().item()
    if not error <= _MOST_RELATIVE_ERROR * largest:
        raise Mismatch(f"{name}: off by {error:.4f}, the largest value is {largest:.4f}")
