"""The cpu engine's calls: tensors may be anywhere, those not in host memory are copied."""

# check: allow-in-file function-size: the tensors of a call pass through

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft import _load
from weft.call.gpu_tensors import from_dlpack
from weft.call.plan import Plan
from weft.call.runner import Runner
from weft.call.spec import DTYPE_CODES, MASKED, Call
from weft.call.tensors import address
from weft.errors import InternalError
from weft.handle import Handle

if TYPE_CHECKING:
    from weft.call.window import Window

__all__ = ["CpuCalls"]


class CpuCalls(Runner):
    """Every call is complete when it returns."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_elsewhere = self.device.type != "cpu"

    def _read(self, tensor: Tensor) -> Tensor:
        """See Runner."""
        return _host(tensor)

    def _read_scales(self, call: Call, scales: Tensor) -> Tensor:
        """See Runner."""
        return _host(scales)

    def _sum_in_parts(self, plan: Plan, stream: int, *tensors: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        """See Runner: no row is too wide here."""
        raise InternalError("the cpu engine sends whole rows")

    def _first(
        self, plan: Plan, stream: int, x: Tensor, scales: Tensor | None, topk_idx: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Handle]:
        """See Runner."""
        _, num_rows, rows, out_scales, made = plan.window.native.dispatch_first(
            plan.args, stream, plan.num_tokens, x.data_ptr(), 0 if scales is None else scales.data_ptr(),
            topk_idx.data_ptr(), 0 if weights is None else weights.data_ptr(), from_dlpack,
        )  # fmt: skip
        self.counters.rows_sent += made.rows_sent
        self.counters.bytes_sent += made.bytes_sent
        if made.num_bad_ids:
            self.bad_ids = self.bad_ids_text(made.num_bad_ids, made.first_bad_id, made.first_bad_at)
        lead = (self.num_local_experts, plan.call.capacity) if plan.call.layout == MASKED else (num_rows,)
        tie = self.token if self._epoch == self.comm._native.epoch else self.tie()
        handle = Handle._lazily(made, lead, self.num_local_experts, tie, plan.num_tokens, plan.call)
        if self.is_elsewhere:
            handle._move(self.device)
        if self.is_elsewhere or plan.finishes:
            rows, out_scales = self._given(plan, rows, out_scales, handle, is_first=True)
        return rows, out_scales, handle

    def _again(
        self, plan: Plan, stream: int, x: Tensor, scales: Tensor | None, handle: Handle
    ) -> tuple[Tensor, Tensor | None, None]:
        """See Runner."""
        made = handle.__dict__.get("made")
        _, send_plan, recv_plan, recv_plan_len, _ = handle._places() if made is None else made.places
        _, rows, out_scales, rows_sent, bytes_sent = plan.window.native.dispatch_again(
            plan.args, stream, plan.num_tokens, x.data_ptr(), 0 if scales is None else scales.data_ptr(), 0, send_plan,
            recv_plan, recv_plan_len, 0, 0, 0, from_dlpack,
        )  # fmt: skip
        self.counters.rows_sent += rows_sent
        self.counters.bytes_sent += bytes_sent
        if self.is_elsewhere or plan.finishes:
            rows, out_scales = self._given(plan, rows, out_scales, handle, is_first=False)
        return rows, out_scales, None

    def _given(
        self, plan: Plan, rows: Tensor, scales: Tensor | None, handle: Handle, *, is_first: bool
    ) -> tuple[Tensor, Tensor | None]:
        if self.is_elsewhere:
            rows, scales = rows.to(self.device), None if scales is None else scales.to(self.device)
        return self.finished(plan, rows, scales, handle, is_first=is_first)

    def _gradients(
        self, rows: Tensor, y: Tensor | None, weights: Tensor, out: Tensor, grad_weights: Tensor | None
    ) -> None:
        """See Runner."""
        on_host = _host(rows)
        y, weights = None if y is None else _host(y), _host(weights)
        into = out if out.device.type == "cpu" else on_host
        sums = None if grad_weights is None else torch.empty(grad_weights.shape, dtype=torch.float32, device="cpu")
        hidden = rows.shape[-1]
        _load.native().gradients(
            DTYPE_CODES[rows.dtype], hidden, weights.numel(), address(on_host), address(y), address(weights),
            address(into), address(sums),
        )  # fmt: skip
        if into is not out:
            out.copy_(into)
        if grad_weights is not None and sums is not None:
            grad_weights.copy_(sums)

    def empty(self, window: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See Runner."""
        found = self.windows[window].native.empty(list(shape), DTYPE_CODES[dtype])
        if found is None or self.device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.from_dlpack(found)

    def barrier(self, window: Window, deadline_s: float) -> None:
        """See Runner."""
        window.native.barrier(deadline_s)

    def record_stream(self, things: Iterable[Any], stream: Any) -> None:
        """See Runner."""
        for thing in things:
            if isinstance(thing, Handle):
                self.record_stream(thing._tensors(), stream)
            elif thing is not None and thing.is_cuda:
                thing.record_stream(stream)


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous().resolve_neg()
