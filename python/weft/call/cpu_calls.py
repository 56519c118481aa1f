"""The cpu engine's calls: tensors may be anywhere, those not in host memory are copied."""

# check: allow-in-file function-size: the flat arguments of the operators pass through

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft import _load
from weft.call.calling import Calling
from weft.call.event import COMPLETE, Event
from weft.call.gpu_tensors import from_dlpack
from weft.call.received import Received
from weft.call.runner import Kind, Routing, Runner
from weft.call.spec import DTYPE_CODES, Call, changed
from weft.call.tensors import address
from weft.handle import ROUTING

if TYPE_CHECKING:
    from weft.call.window import Window

__all__ = ["CpuCalls"]


class CpuCalls(Runner):
    """Every call is complete when it returns."""

    def dispatch(self, call: Call, *args: Any) -> Received:
        """See Runner."""
        return super().dispatch(_in_one_way(call), *args)

    def dispatch_again(self, call: Call, *args: Any) -> tuple[Tensor, Tensor]:
        """See Runner."""
        return super().dispatch_again(_in_one_way(call), *args)

    def _read(self, tensor: Tensor) -> Tensor:
        """See Runner."""
        return _host(tensor)

    def _read_scales(self, call: Call, scales: Tensor | None) -> Tensor | None:
        """See Runner."""
        return None if scales is None else _host(scales)

    def _is_written(self, out: Tensor) -> bool:
        """See Runner."""
        return out.device.type == "cpu"

    def _given(self, tensor: Tensor) -> Tensor:
        """See Runner."""
        return tensor.to(self.device)

    def _running(self, *args: Any, **named: Any) -> Calling:
        """See Runner."""
        return Calling(self, *args, **named)

    def _pieces(self, call: Call, x: Tensor, scales: Tensor | None, quantize: int) -> list[Tensor]:
        """See Runner."""
        return [x]

    def _columns(self, call: Call, y: Tensor, bias: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
        """See Runner."""
        return [(_host(y), None if bias is None else _host(bias))]

    def _first(
        self,
        call: Call,
        kind: Kind,
        x: Tensor,
        scales: Tensor | None,
        topk_idx: Tensor,
        weights: Tensor | None,
        quantize: int,
        run: Calling,
    ) -> Received:
        """See Runner."""
        _, _, rows, out_scales, routing = self.windows[call.window].native.dispatch_first(
            kind.first, 0, topk_idx.shape[0], address(x), address(scales), address(topk_idx), address(weights),
            from_dlpack,
        )  # fmt: skip
        self.counters.add_sent(routing.rows_sent, routing.bytes_sent)
        if routing.num_bad_ids:
            self.bad_ids = self.bad_ids_text(routing.num_bad_ids, routing.first_bad_id, routing.first_bad_at)
        sizes, send_plan, recv_plan, out_weights, out_idx = (routing.tensor(name, from_dlpack) for name in ROUTING)
        out_scales = self._no_floats if out_scales is None else out_scales
        out_idx = topk_idx.new_empty(0) if out_idx is None else out_idx
        rows, out_scales, out_idx, out_weights, sizes = map(
            self._given, (rows, out_scales, out_idx, out_weights, sizes)
        )
        return Received(rows, out_scales, out_idx, out_weights, sizes, send_plan, recv_plan, self.tie())

    def _again(
        self,
        call: Call,
        kind: Kind,
        x: Tensor,
        scales: Tensor | None,
        routing: Routing,
        quantize: int,
        run: Calling,
    ) -> tuple[Tensor, Tensor]:
        """See Runner."""
        _, rows, out_scales, *sent = self.windows[call.window].native.dispatch_again(
            kind.again, 0, x.shape[0], address(x), address(scales), 0, address(routing.send_plan),
            address(routing.recv_plan), routing.recv_plan.numel(), 0, from_dlpack,
        )  # fmt: skip
        self.counters.add_sent(*sent)
        return self._given(rows), self._given(self._no_floats if out_scales is None else out_scales)

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

    def event(self) -> Event:
        """See Runner."""
        return COMPLETE

    def barrier(self, window: Window, deadline_s: float) -> None:
        """See Runner."""
        window.native.barrier(deadline_s)

    def record_stream(self, tensors: Sequence[Tensor], stream: Any) -> None:
        """See Runner."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)


def _in_one_way(call: Call) -> Call:
    """There are no other kernels for small batches here."""
    return changed(call, is_small=False) if call.is_small else call


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous()
