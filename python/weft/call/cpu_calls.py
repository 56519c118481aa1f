"""The cpu engine's calls: tensors may be anywhere, those not in host memory are copied."""

# check: allow-in-file function-size: the flat arguments of the operators pass through

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft import _load
from weft.call import half
from weft.call.event import COMPLETE, Event
from weft.call.received import Received
from weft.call.runner import Calling, NativeCalls
from weft.call.scales import by_column
from weft.call.spec import BYTES, DTYPE_CODES, MASKED, RANK_MAJOR, Call
from weft.call.tensors import address
from weft.routing import traces

if TYPE_CHECKING:
    from weft.call.window import Window

__all__ = ["CpuCalls"]


class CpuCalls(NativeCalls):
    """Every call is complete when it returns."""

    def dispatch(
        self,
        call: Call,
        x: Tensor,
        scales: Tensor | None,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        quantize: int,
        clear_tail: bool,
    ) -> Received:
        """See NativeCalls."""
        num_tokens, _ = topk_idx.shape
        x, scales, topk_idx = _host(x), None if scales is None else _host(scales), _host(topk_idx)
        weights = None if topk_weights is None else _host(topk_weights)
        sizes, (counts, offsets, num_rows) = self.new_sizes(call.layout, "cpu")
        plan_len = _load.native().send_plan_len(num_tokens, self.top_k, self.num_ranks, self.num_local_experts)
        send_plan = torch.empty(plan_len, dtype=torch.int32, device="cpu")
        with self.alone("dispatch"), Calling(self, "dispatch", call):
            if traces._recorders:
                traces._note(topk_idx, weights, self.comm.rank, self.num_experts)
            result = self.windows[call.window].native.dispatch(
                **_rows(x, scales, quantize, self.hidden),
                num_tokens=num_tokens,
                topk_ptr=address(topk_idx),
                topk_is_int64=topk_idx.dtype == torch.int64,
                weights_ptr=address(weights),
                send_plan_ptr=address(send_plan),
                recv_plan_ptr=0,
                recv_plan_len=0,
                cached=False,
                **_shared(call),
                object=self.numbers[call.window],
                counts_ptr=address(counts),
                offsets_ptr=address(offsets),
                num_rows_ptr=address(num_rows),
                overflow_ptr=address(self.overflow),
                zeroes_holes=call.zero_holes,
            )
            self._count_sent(result)
            if result.num_bad_ids:
                self.bad_ids = self.bad_ids_text(result.num_bad_ids, result.first_bad_id, result.first_bad_at)
            tie = self.tie()
        half.note(self, "dispatch", call)
        rows, out_weights = _tensor(result.x), _tensor(result.topk_weights)
        out_scales = by_column(_tensor(result.scales).to(self.device), call.scale_dtype)
        out_idx = _tensor(result.topk_idx) if call.layout == RANK_MAJOR else topk_idx.new_empty(0)
        recv_plan = _tensor(result.recv_plan)
        if clear_tail:
            filled = counts if call.layout == MASKED else num_rows
            clear_tails(call.layout, rows, filled)
            clear_tails(call.layout, out_weights, filled)
            if call.layout == RANK_MAJOR:
                out_idx[result.num_rows :] = -1
        received = Received(rows, out_scales, out_idx, out_weights, sizes, send_plan, recv_plan, tie)
        if self.device.type == "cpu":
            return received
        return Received._make([*(part.to(self.device) for part in received[:5]), send_plan, recv_plan, tie])

    def dispatch_again(
        self,
        call: Call,
        x: Tensor,
        scales: Tensor | None,
        send_plan: Tensor,
        recv_plan: Tensor,
        tie: Tensor,
        sizes: Tensor,
        rows_shape: tuple[int, ...],
        num_tokens: int,
        clear_tail: bool,
        quantize: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """See NativeCalls."""
        x, scales = _host(x), None if scales is None else _host(scales)
        with self.alone("dispatch"), Calling(self, "dispatch", call, tie):
            result = self.windows[call.window].native.dispatch(
                **_rows(x, scales, quantize, self.hidden),
                num_tokens=num_tokens,
                topk_ptr=0,
                topk_is_int64=False,
                weights_ptr=0,
                send_plan_ptr=address(send_plan),
                recv_plan_ptr=address(recv_plan),
                recv_plan_len=recv_plan.numel(),
                cached=True,
                **_shared(call),
                object=self.numbers[call.window],
                counts_ptr=0,  # the first dispatch has counted
                offsets_ptr=0,
                num_rows_ptr=0,
                overflow_ptr=address(self.overflow) if call.counts_dropped else 0,
                zeroes_holes=call.zero_holes,
            )
            self._count_sent(result)
        half.note(self, "dispatch", call)
        rows = _tensor(result.x)
        if clear_tail:
            filled = sizes[: self.num_local_experts] if call.layout == MASKED else sizes[-1]
            clear_tails(call.layout, rows, filled)
        return rows.to(self.device), by_column(_tensor(result.scales).to(self.device), call.scale_dtype)

    def combine(
        self,
        call: Call,
        y: Tensor,
        weights: Tensor | None,
        send_plan: Tensor,
        recv_plan: Tensor,
        tie: Tensor,
        bias: Tensor | None,
        side: Tensor | None,
        num_tokens: int,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See NativeCalls."""
        hidden = y.shape[-1]
        y, bias = _host(y), None if bias is None else _host(bias)
        weights, side = None if weights is None else _host(weights), None if side is None else _host(side)
        into = out if out is not None and out.device.type == "cpu" else y.new_empty(num_tokens, hidden)
        side_shape = (num_tokens, self.top_k) if side is not None else (0,)
        side_out = torch.empty(side_shape, dtype=torch.float32, device="cpu")
        with self.alone("combine"), Calling(self, "combine", call, tie):
            self.windows[call.window].native.combine(
                y_ptr=address(y),
                num_rows=y.numel() // hidden,
                weights_ptr=address(weights),
                has_side=side is not None,
                side_ptr=address(side),
                bias_ptr=address(bias),
                bias_is_2d=bias is not None and bias.dim() == 2,
                bias_is_fp32=bias is not None and bias.dtype == torch.float32,
                out_ptr=address(into),
                side_out_ptr=address(side_out) if side is not None else 0,
                num_tokens=num_tokens,
                send_plan_ptr=address(send_plan),
                recv_plan_ptr=address(recv_plan),
                recv_plan_len=recv_plan.numel(),
                dtype=DTYPE_CODES[y.dtype],
                hidden=hidden,
                weighted=weights is not None,
                wire_is_fp8=call.wire != 0,
                **_shared(call),
                object=self.numbers[call.window],
            )
        half.note(self, "combine", call)
        if out is not None and out is not into:
            out.copy_(into)
        return into.to(self.device) if out is None else out, side_out.to(self.device)

    def _gradients(
        self, rows: Tensor, y: Tensor | None, weights: Tensor, out: Tensor, grad_weights: Tensor | None
    ) -> None:
        """See NativeCalls."""
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
        """See NativeCalls."""
        num_rows, columns = math.prod(shape[:-1]), shape[-1]
        found = self.windows[window].native.empty(num_rows, columns, DTYPE_CODES[dtype])
        if found is None or self.device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.from_dlpack(found).view(shape)

    def event(self) -> Event:
        """See NativeCalls."""
        return COMPLETE

    def barrier(self, window: Window, deadline_s: float) -> None:
        """See NativeCalls."""
        window.native.barrier(deadline_s)

    def record_stream(self, tensors: Sequence[Tensor], stream: Any) -> None:
        """See NativeCalls."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)

    def _count_sent(self, result: Any) -> None:
        self.counters.rows_sent += result.rows_sent
        self.counters.bytes_sent += result.bytes_sent


def clear_tails(layout: int, rows: Tensor, filled: Tensor) -> None:
    """Zero, in place, the rows that hold no data: training multiplies them by zero gradients, and NaN * 0 is NaN.

    `filled` is num_tokens_per_expert [L] for masked, else num_rows [].
    """
    if layout != MASKED:
        rows[int(filled) :].zero_()
        return
    for expert, count in enumerate(filled.tolist()):
        rows[expert, count:].zero_()


def _shared(call: Call) -> dict[str, Any]:
    return {
        "layout": call.layout,
        "alignment": call.alignment,
        "capacity": call.capacity,
        "max_tokens": call.max_tokens,
        "deadline_s": call.deadline_s,
    }


def _rows(x: Tensor, scales: Tensor | None, quantize: int, hidden: int) -> dict[str, Any]:
    code = DTYPE_CODES.get(x.dtype, BYTES)
    return {
        "x_ptr": address(x),
        "scales_ptr": address(scales),
        "dtype": code,
        "quantize": quantize,
        "row_bytes": x.shape[1] * x.element_size(),
        "scale_row_bytes": 0 if scales is None else scales.shape[1] * scales.element_size(),
        "hidden": x.shape[1] if code != BYTES else hidden,
    }


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous()


def _tensor(array: Any) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device="cpu") if array is None else torch.from_dlpack(array)
