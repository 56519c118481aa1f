"""The baselines of the suite: the same jobs over all_to_all_single, and the exchange of packed rows alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from weft.bench.baseline import AllToAll
from weft.bench.cases import EXPERTS, Case
from weft.bench.timing import time_calls
from weft.verify.check import Mismatch, expect_equal

if TYPE_CHECKING:
    from weft.bench.suite_worker import Worker

_ITERS, _WARMUP = 20, 3
_MOST_RELATIVE_ERROR = 0.02  # of bf16 sums in another order, of the largest value


def baseline_key(case: Case) -> str:
    """Cases with equal keys have the same baseline: SMs, exact sizes or capacity, and where y lies do not change it."""
    return "/".join(
        (case.op, case.rows, case.layout, str(case.alignment), case.quantize, str(case.tokens), case.routing)
    )


def with_baseline(cases: Iterable[Case]) -> dict[str, Case]:
    """The cases whose baselines are timed, by key: of the sweeps only the quarter of the tokens of the targets."""
    return {
        baseline_key(case): case
        for case in cases
        if case.suite != "sms" and (case.suite != "tokens" or case.is_quarter)
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
        packed = torch.zeros((sum(received.sent), _row_bytes(case, samples.hidden)), dtype=torch.uint8).to(self.device)
        arrived = packed.new_empty((sum(received.received), packed.shape[1]))

        def exchange() -> None:
            dist.all_to_all_single(arrived, packed, received.received, received.sent)

        def dispatch() -> None:
            library.dispatch(data, samples.topk_idx, samples.topk_weights, scales)

        result: dict[str, Any] = {}
        if case.op == "dispatch":
            result["gpu_us"] = self._time(dispatch)
        elif case.op == "combine":
            outputs, want = samples.outputs(dataclasses.replace(case, wire=None))  # the baseline sends rows as they are
            y = library.combine(outputs, received, len(data))
            self._check(case, y, want)
            result["gpu_us"] = self._time(lambda: library.combine(outputs, received, len(data)))
        else:
            result |= self._step(library, data, samples.topk_idx, samples.topk_weights)
        result["packed_us"] = self._time(exchange)
        return result

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


def _check_close(name: str, got: Tensor, want: Tensor) -> None:
    error, largest = (got.float() - want.float()).abs().max().item(), want.float().abs().max().item()
    if not error <= _MOST_RELATIVE_ERROR * largest:
        raise Mismatch(f"{name}: off by {error:.4f}, the largest value is {largest:.4f}")


def _row_bytes(case: Case, hidden: int) -> int:
    is_narrow = case.op == "dispatch" and (case.rows == "fp8" or case.quantize != "none")
    return hidden + hidden // 128 * 4 if is_narrow else 2 * hidden
