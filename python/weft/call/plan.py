"""Calls along a plan: what was checked for arguments of some types, shapes and options is not checked again.

A plan serves eager calls of the nvlink engine that need no more than one kernel: dispatch and combine, on the stream
of the call before, without gradients, tools that record, async_op or staged. All that may differ between two calls of a
plan is looked at in each. Whoever finds no way here goes the whole one (weft/expert_parallel.py), which makes the plans
and knows every refusal.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.call.event import Event
from weft.call.gpu_calls import GpuCalls
from weft.call.gpu_tensors import first_rows, from_dlpack
from weft.call.options import CombineOptions, DispatchOptions
from weft.call.spec import RANK_MAJOR, Call
from weft.handle import Dispatched, Handle
from weft.limits import QUANTIZE_GROUP, ROW_MULTIPLE_BYTES
from weft.quantized import Quantized, typed
from weft.routing import traces

if TYPE_CHECKING:
    from weft.call.streams import WindowStreams
    from weft.call.window import Window

__all__ = ["Plan", "Quick"]

_MOST_PLANS = 256
_STRIDED = torch.strided


class Plan:
    """Of calls whose types, shapes and options are equal; not to be used before `call` is set."""

    __slots__ = (
        "args",
        "call",
        "hidden",
        "is_plain",
        "memory",
        "num_rows",
        "num_tokens",
        "quantize",
        "rows",
        "streams",
        "weighted",
        "window",
    )

    def __init__(self) -> None:
        self.call: Call | None = None
        self.window: Window
        self.streams: WindowStreams  # of the window
        self.args: Any  # of the native call
        self.memory: Any = None  # small dispatch: what it takes from the heap; `rows` are ordinary tensors
        self.rows: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = ()  # small dispatch: data, and scales if any
        self.quantize = 0
        self.is_plain = True  # dispatch: the rows are a tensor
        self.weighted = False  # combine: reads the weights received
        self.num_tokens = 0  # of this rank
        self.num_rows = 0  # combine: that are read; -1: as many as there are, sizes were exact
        self.hidden = 0  # combine: of the result, [num_tokens, hidden]


def _new_plan(*_: Any) -> Plan:
    return Plan()


class Quick:
    """The plans of one ExpertParallel."""

    def __init__(self, calls: GpuCalls, num_local_experts: int) -> None:
        self._calls, self._device, self._num_local_experts = calls, calls.device, num_local_experts
        self._index = calls.device.index
        self._dispatch_plans = functools.lru_cache(_MOST_PLANS)(_new_plan)
        self._combine_plans = functools.lru_cache(_MOST_PLANS)(_new_plan)

    # ---- dispatch

    def dispatch_plan(self, x: Any, topk_idx: Any, topk_weights: Any, options: DispatchOptions) -> Plan | None:
        """Of these arguments; None if there can't be one."""
        try:
            of_weights = None if topk_weights is None else (type(topk_weights), topk_weights.dtype, topk_weights.shape)
            if type(x) is Tensor:
                of_x: tuple[Any, ...] = (x.dtype, x.shape)
            elif type(x) is Quantized and type(x.data) is Tensor:
                scales = x.scales
                of_scales = None if scales is None else (type(scales), scales.dtype, scales.shape)
                of_x = (x.data.dtype, x.data.shape, of_scales)
            else:
                return None
            if topk_weights is not None and topk_weights.dtype is not torch.float32:  # converted by the whole way
                return None
            of_idx = (type(topk_idx), topk_idx.dtype, topk_idx.shape)
            return self._dispatch_plans(of_x, of_idx, of_weights, options)
        except (AttributeError, TypeError):  # not a tensor
            return None

    def learn_dispatch(
        self, plan: Plan, call: Call, x: Any, sent: tuple[Tensor, Tensor | None], quantize: int, topk_idx: Tensor
    ) -> None:
        """The arguments of the plan were right; `sent`: data and scales of `x` as they travel."""
        data, scales = sent
        plan.num_tokens, plan.is_plain = topk_idx.shape[0], type(x) is Tensor and not quantize
        is_like_given = (scales is None) == (type(x) is Tensor or x.scales is None)
        is_like_given = is_like_given and (scales is None or scales.is_contiguous())
        if call.is_async or call.is_staged or call.scale_dtype is not None or not is_like_given:
            return
        if call.is_small:
            self._learn_small(plan, call, x, sent, quantize, topk_idx)
            return
        kind = self._calls.kind(call, data, scales, quantize, topk_idx.dtype)
        if kind.is_whole and type(topk_idx) is Tensor:
            plan.args, plan.quantize = kind.first, quantize
            self._finish(plan, call)

    def _learn_small(
        self, plan: Plan, call: Call, x: Any, sent: tuple[Tensor, Tensor | None], quantize: int, topk_idx: Tensor
    ) -> None:
        data, scales = sent
        if type(topk_idx) is not Tensor or not self._calls.kind(call, data, scales, quantize).is_whole:
            return
        plan.args, plan.memory, lead = self._calls.small_kind(call, data, scales, quantize, topk_idx)
        plan.quantize = quantize
        columns = (*lead, data.shape[1])
        if quantize:
            scale_dtype = torch.float32 if quantize == 1 else torch.float8_e8m0fnu
            groups = (*lead, -(-data.shape[1] // QUANTIZE_GROUP))
            plan.rows = ((torch.float8_e4m3fn, columns), (scale_dtype, groups))
        elif type(x) is Tensor:
            plan.rows = ((x.dtype, columns),)
        else:
            of_scales = () if x.scales is None else ((x.scales.dtype, (*lead, x.scales.shape[1])),)
            plan.rows = ((x.data.dtype, (*lead, x.data.shape[1])), *of_scales)
        self._finish(plan, call)

    def dispatch(self, plan: Plan, x: Any, topk_idx: Tensor, weights: Tensor | None) -> Dispatched | None:
        """None: nothing has been done."""
        call, calls = plan.call, self._calls
        data, scales = (x, None) if type(x) is Tensor else (x.data, x.scales)
        addresses = [self._address(data), 0, self._address(topk_idx), 0]
        if scales is not None:
            addresses[1] = self._address(scales)
        if weights is not None:
            addresses[3] = self._address(weights)
        if None in addresses or call is None:
            return None
        if torch.is_grad_enabled() and (data.requires_grad or (weights is not None and weights.requires_grad)):
            return None
        stream = self._stream(plan)
        if stream is None or (call.capacity < 0 and torch.cuda.is_current_stream_capturing()):
            return None
        with calls.comm.alone("dispatch"):
            if call.capacity < 0:
                calls.before_call("dispatch", call, None)
            begin = time.perf_counter()
            num_tokens = plan.num_tokens
            if plan.memory is not None:
                return self._small(plan, data, addresses, stream, begin)
            made = plan.window.native.dispatch_first(plan.args, stream, num_tokens, *addresses, from_dlpack)
            if made is None:
                return None  # no room for a send plan: the whole way makes an ordinary one
            event = calls.last_event = Event(plan.streams.last)
            in_heap, num_rows, rows, row_scales, routing = made
            if in_heap:
                num_rows = num_rows if call.capacity < 0 else call.capacity
                handle = Handle._lazily(routing, num_rows, self._num_local_experts, calls.tie(), num_tokens, call)
            else:
                whole = calls.received(call, plan.args, made, data, scales, plan.quantize, None)
                rows, row_scales = whole.x, whole.scales
                handle = Handle(
                    whole.send_plan, whole.recv_plan, whole.topk_weights,
                    whole.topk_idx if call.layout == RANK_MAJOR else None, whole.sizes, self._num_local_experts,
                    whole.tie, num_tokens, call,
                )  # fmt: skip
            calls.counters.num_dispatches += 1
            calls.counters.dispatch_s += time.perf_counter() - begin
        out = rows if plan.is_plain else typed(rows, row_scales, x, plan.quantize, None)
        if call.capacity >= 0:
            calls.note_handle(handle)
        return Dispatched(out, handle, calls.overflow, event, calls)

    def _small(
        self, plan: Plan, x: Tensor, addresses: list[int | None], stream: int, begin: float
    ) -> Dispatched | None:
        calls, call = self._calls, plan.call
        assert call is not None  # noqa: S101  for mypy
        rows = [x.new_empty(shape, dtype=dtype) for dtype, shape in plan.rows]
        places = [each.data_ptr() for each in rows] if len(rows) == 2 else [rows[0].data_ptr(), 0]
        made = plan.window.native.dispatch_small(plan.args, plan.memory, stream, plan.num_tokens, *addresses, *places)
        if made is None:
            return None
        num_rows, routing = made
        if call.capacity >= 0:
            num_rows = call.capacity
        else:
            rows = [first_rows(each, num_rows, each.shape[:1]) for each in rows]
        event = calls.last_event = Event(plan.streams.last)
        calls.counters.num_dispatches += 1
        calls.counters.dispatch_s += time.perf_counter() - begin
        handle = Handle._lazily(routing, num_rows, self._num_local_experts, calls.tie(), plan.num_tokens, call)
        out = rows[0] if plan.is_plain else Quantized(rows[0], rows[1] if len(rows) == 2 else None)
        if call.capacity >= 0:
            calls.note_handle(handle)
        return Dispatched(out, handle, calls.overflow, event, calls)

    # ---- combine

    def combine_plan(self, y: Any, handle: Any, options: CombineOptions) -> Plan | None:
        """Of these arguments, without side, bias and out; None if there can't be one."""
        if type(y) is not Tensor or type(handle) is not Handle or y.shape[:-1] != handle.rows_shape:
            return None
        return self._combine_plans(handle.call, handle.num_tokens, y.dtype, y.shape[-1], options)

    def learn_combine(self, plan: Plan, call: Call, y: Tensor, handle: Handle, *, weighted: bool) -> None:
        """The arguments of the plan were right."""
        if call.is_async or call.is_staged or not self._calls.is_one_part(call, y):
            return
        plan.weighted = weighted and call.layout != RANK_MAJOR
        plan.args = self._calls.combine_kind(call, y.dtype, y.shape[-1])
        plan.num_tokens, plan.hidden = handle.num_tokens, y.shape[-1]
        plan.num_rows = -1 if handle.call.capacity < 0 else y.numel() // plan.hidden
        self._finish(plan, call)

    def combine(self, plan: Plan, y: Tensor, handle: Handle) -> Tensor | None:
        """None: nothing has been done."""
        calls, tie, made = self._calls, handle.tie, handle.__dict__.get("made")
        address = self._address(y)
        weights: int | None = 0
        if plan.weighted:
            weights = self._address(handle.weights) if made is None else made.topk_weights
        if address is None or weights is None or tie is not calls.token:
            return None
        if torch.is_grad_enabled() and (y.requires_grad or tie.requires_grad):
            return None
        stream = self._stream(plan)
        if stream is None:
            return None
        with calls.comm.alone("combine"):
            calls.check_tie("combine", tie)
            begin = time.perf_counter()
            out = y.new_empty((plan.num_tokens, plan.hidden))
            if made is None:
                plans = (handle.send_plan.data_ptr(), handle.recv_plan.data_ptr(), handle.recv_plan.numel())
            else:
                plans = (made.send_plan, made.recv_plan, made.recv_plan_len)
            num_rows = y.shape[0] if plan.num_rows < 0 else plan.num_rows
            plan.window.native.combine_rows(
                plan.args, stream, plan.num_tokens, address, num_rows, weights, *plans, out.data_ptr()
            )
            calls.last_event = Event(plan.streams.last)
            calls.counters.num_combines += 1
            calls.counters.combine_s += time.perf_counter() - begin
        return out

    # ---- both

    def _finish(self, plan: Plan, call: Call) -> None:
        window = self._calls.windows[call.window]
        if window.streams is not None:
            plan.window, plan.streams, plan.call = window, window.streams, call

    def _address(self, tensor: Tensor) -> int | None:
        """None: it is not where the kernel could read it as it lies."""
        if tensor.layout is not _STRIDED or tensor.device != self._device or not tensor.is_contiguous():
            return None
        if tensor.is_neg():
            return None
        address = tensor.data_ptr()
        if address == 0 and tensor.numel() > 0:  # refused by the whole way
            return None
        return None if address % ROW_MULTIPLE_BYTES else address

    def _stream(self, plan: Plan) -> int | None:
        """The current one, if the call before was on it too and nothing stands against a call there."""
        calls = self._calls
        if calls.closed or plan.window.half is not None or traces._recorders:
            return None
        if calls.names_ranges or torch.autograd._profiler_enabled():
            return None
        stream: int = torch._C._cuda_getCurrentRawStream(self._index)
        return stream if stream == plan.streams.last_handle else None
