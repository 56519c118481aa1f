"""The nvlink engine's calls: device pointers, streams, and results in the heap of a GPU window or beside it."""

# check: allow-in-file function-size: the flat arguments of the operators pass through
# check: allow file-size: one place that hands device pointers to the native module

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft import _load
from weft.call.calling import Calling
from weft.call.event import COMPLETE, Event
from weft.call.gpu_tensors import as_tensor, dense, first_rows, from_dlpack, readable
from weft.call.received import Received
from weft.call.runner import Kind, Routing, Runner
from weft.call.running import Running, has_nvtx_tool
from weft.call.scales import empty_by_column, first_by_column
from weft.call.spec import DTYPE_CODES, MASKED, RANK_MAJOR, Call
from weft.call.tensors import address
from weft.errors import InvalidArgument, Unsupported
from weft.handle import ROUTING
from weft.limits import (
    LANDING_SLACK,
    MAX_CAPACITY,
    QUANTIZE_GROUP,
    ROW_MULTIPLE_BYTES,
    landing_row_bytes,
)

if TYPE_CHECKING:
    from weft.call.window import Window
    from weft.communicator import Communicator

__all__ = ["GpuCalls"]

_INT32, _INT64 = 4, 5  # of the native module, beside DTYPE_CODES
_OF_CODE = {code: dtype for dtype, code in DTYPE_CODES.items()} | {_INT32: torch.int32, _INT64: torch.int64}
_FP8 = 1  # code of quantize: scales are fp32, else bytes


class GpuCalls(Runner):
    """Calls are launched on a stream and complete there. The host waits in a dispatch of exact sizes alone."""

    plans_on_device = True

    def __init__(
        self,
        comm: Communicator,
        windows: list[Window],
        numbers: list[int],
        num_experts: int,
        top_k: int,
        hidden: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(comm, windows, numbers, num_experts, top_k, hidden, dtype)
        self.overflow = torch.zeros((), dtype=torch.int64, device=self.device)
        self.max_tokens = windows[0].max_tokens
        self.landing_row_bytes = landing_row_bytes(hidden, dtype)
        self.last_event: Event = COMPLETE
        self.overflow_ptr = address(self.overflow)
        self.names_ranges = has_nvtx_tool()

    # ---- tensors

    def _read(self, tensor: Tensor) -> Tensor:
        """See Runner."""
        return dense(tensor)

    def _read_scales(self, call: Call, scales: Tensor | None) -> Tensor | None:
        """See Runner."""
        return readable(call, scales)

    def _is_written(self, out: Tensor) -> bool:
        """See Runner."""
        return out.data_ptr() % ROW_MULTIPLE_BYTES == 0

    def _running(self, *args: Any, **named: Any) -> Calling:
        """See Runner."""
        return Running(self, *args, **named)

    def _check_capture(self, call: Call) -> None:
        """See Runner."""
        if call.capacity < 0 and torch.cuda.is_current_stream_capturing():
            raise InvalidArgument(
                "capacity is None while a CUDA graph is captured; the number of rows is needed: the host can't wait "
                "for the counts"
            )

    def _gradients(
        self, rows: Tensor, y: Tensor | None, weights: Tensor, out: Tensor, grad_weights: Tensor | None
    ) -> None:
        """See Runner."""
        rows, y, weights = dense(rows), None if y is None else dense(y), dense(weights)
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        self.windows[0].native.gradients(
            stream, DTYPE_CODES[rows.dtype], rows.shape[-1], weights.numel(), address(rows), address(y),
            address(weights), address(out), address(grad_weights),
        )  # fmt: skip

    # ---- around them

    def before_call(self, what: str, call: Call, tie: Tensor | None) -> None:
        """Bad ids are raised where the host waits anyway: by a dispatch of exact sizes."""
        if what == "dispatch" and tie is None and call.capacity < 0:
            super().before_call(what, call, tie)

    def raise_bad_ids(self, remark: str = "") -> None:
        """Raise what an earlier dispatch found in topk_idx, once."""
        self._take_bad_ids()
        super().raise_bad_ids(remark)

    def _take_bad_ids(self) -> None:
        for window in self.windows:
            found = None if window.closed or self.bad_ids else window.native.take_bad_ids()
            if found is not None:
                self.bad_ids = self.bad_ids_text(*found)

    def note_handle(self, handle: Any) -> None:
        """See Runner."""
        super().note_handle(handle)
        call = handle.call
        if call.is_async:
            handle.__dict__["pending"] = self.last_event
        if call.capacity >= 0 and torch.cuda.is_current_stream_capturing():
            handle.__dict__["is_captured"] = True

    def wait(self) -> None:
        """Block the host until the calls made so far have ended; raise what they ended with."""
        for window in self.windows:
            if window.streams is not None and not window.closed:
                window.streams.wait()
                with self.comm.alone("check"):
                    window.native.check()

    def window_stats(self, window: Window) -> dict[str, Any]:
        """See Runner."""
        return {**window.native.stats(), "heap_used": window.native.heap_used, "heap_peak": window.native.heap_peak}

    def empty(self, window: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See Runner."""
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        found = self.windows[window].native.empty(list(shape), DTYPE_CODES[dtype], stream)
        return torch.empty(shape, dtype=dtype, device=self.device) if found is None else as_tensor(found)

    def event(self) -> Event:
        """See Runner."""
        return self.last_event

    def barrier(self, window: Window, deadline_s: float) -> None:
        """See Runner."""
        self.comm.meet(deadline_s)

    def record_stream(self, tensors: Sequence[Tensor], stream: Any) -> None:
        """See Runner."""
        # Of any window, also a closed one: results of one are given to calls of another, and outlive both.
        for tensor in tensors:
            if not tensor.is_cuda or tensor.numel() == 0:
                continue
            if not _load.native().gpu_record_stream(address(tensor), stream.cuda_stream):
                tensor.record_stream(stream)

    # ---- one native call

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
        if call.is_small:
            args = self._dispatch_args(call, x, scales, quantize, topk_idx.shape[0], run.handle)
            args.topk_idx, args.topk_weights = address(topk_idx), address(weights)
            args.overflow, args.topk_is_int64 = self.overflow_ptr, topk_idx.dtype == torch.int64
            return self._first_small(call, args, x, scales, quantize, run)
        kind = kind if kind.is_whole else self.kind(call, x, scales, quantize, topk_idx.dtype)
        native, args = self.windows[call.window].native, kind.first
        addresses = (
            run.handle, topk_idx.shape[0], address(x), address(scales), address(topk_idx),
            address(weights), from_dlpack,
        )  # fmt: skip
        made, ordinary = native.dispatch_first(args, *addresses), None
        if made is None:  # no room in the heap for sizes and send plan
            args.num_tokens = topk_idx.shape[0]
            ordinary = self._ordinary_sizes(call, args)
            args.makes_send_plan = False
            try:
                made = native.dispatch_first(args, *addresses)
            finally:
                args.makes_send_plan = True
        return self.received(call, args, made, x, scales, quantize, ordinary)

    def received(
        self,
        call: Call,
        args: Any,
        made: tuple[Any, ...],
        x: Tensor,
        scales: Tensor | None,
        quantize: int,
        ordinary: tuple[Tensor, Tensor] | None,
    ) -> Received:
        """What a native dispatch has made, with what found no room in the heap; `ordinary`: sizes and send plan that it
        was given."""
        in_heap, num_rows, rows, out_scales, routing = made
        sizes, send_plan, recv_plan, out_weights, out_idx = (routing.tensor(name, from_dlpack) for name in ROUTING)
        if ordinary is not None:
            sizes, send_plan = ordinary
        no_ids = self._no_ids if args.topk_is_int64 else self._ints
        if not in_heap:
            lead = self._lead(call, num_rows)
            rows, out_scales = self._ordinary(lead, x, scales, quantize)
            out_idx, out_weights, recv_plan = self._ordinary_routing(call.layout, lead, no_ids)
            self._unload(call, rows, out_scales, out_idx, out_weights, recv_plan)
        out_scales = self._no_floats if out_scales is None else out_scales
        out_idx = no_ids if out_idx is None else out_idx
        return Received(rows, out_scales, out_idx, out_weights, sizes, send_plan, recv_plan, self.tie())

    def _first_small(
        self,
        call: Call,
        args: Any,
        x: Tensor,
        scales: Tensor | None,
        quantize: int,
        run: Calling,
    ) -> Received:
        """Into tensors for all that may come, rows in ordinary ones; without a capacity the host learns how many."""
        lead = self._small_lead(call)
        args.room = math.prod(lead)
        if args.room > MAX_CAPACITY:
            raise InvalidArgument(f"a result could have {args.room} rows; allowed are {MAX_CAPACITY}: set a capacity")
        rows, out_scales = self._ordinary(lead, x, scales, quantize, call.scale_dtype)
        sizes, send_plan, recv_plan, out_weights, out_idx = self._small_routing(call, args, lead)
        self._give_sizes(args, address(sizes), sizes.shape[0])
        args.out_x, args.out_scales = address(rows), address(out_scales)
        args.out_ids, args.out_weights = address(out_idx), address(out_weights)
        args.send_plan, args.recv_plan = address(send_plan), address(recv_plan)
        parts = (rows, out_scales, out_idx, out_weights)
        result = run.launch(self.windows[call.window].native.dispatch, args, (*parts, sizes, send_plan, recv_plan))
        if call.capacity < 0:
            num_rows = result.result_rows
            rows, out_idx, out_weights = (first_rows(part, num_rows, lead) for part in (rows, out_idx, out_weights))
            if args.scale_word_bytes:
                out_scales = first_by_column(out_scales, num_rows)
            else:
                out_scales = first_rows(out_scales, num_rows, lead)
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
        if call.is_small:
            args = self._dispatch_args(call, x, scales, quantize, x.shape[0], run.handle)
            self._give_sizes(args, address(routing.sizes), routing.sizes.shape[0])
            args.cached, args.num_rows = True, math.prod(routing.lead)
            args.overflow = self.overflow_ptr if call.counts_dropped else 0
            args.send_plan, args.recv_plan = address(routing.send_plan), address(routing.recv_plan)
            rows, out_scales = self._ordinary(routing.lead, x, scales, quantize, call.scale_dtype)
            args.room, args.out_x, args.out_scales = args.num_rows, address(rows), address(out_scales)
            run.launch(self.windows[call.window].native.dispatch, args, (rows, out_scales, *routing[:3]))
            return rows, out_scales
        kind = kind if kind.is_whole else self.kind(call, x, scales, quantize)
        in_heap, in_rows, in_scales, *_ = self.windows[call.window].native.dispatch_again(
            kind.again, run.handle, x.shape[0], address(x), address(scales), address(routing.sizes),
            address(routing.send_plan), address(routing.recv_plan), routing.recv_plan.numel(), math.prod(routing.lead),
            from_dlpack,
        )  # fmt: skip
        if in_heap:
            return in_rows, self._no_floats if in_scales is None else in_scales
        rows, out_scales = self._ordinary(routing.lead, x, scales, quantize)
        self._unload(call, rows, out_scales, recv_plan=routing.recv_plan)
        return rows, out_scales

    def is_one_part(self, call: Call, y: Tensor) -> bool:
        """Whether a combine sends whole rows."""
        return not call.is_small or call.wire != 0 or y.shape[-1] * y.element_size() <= self.landing_row_bytes

    def _ordinary_sizes(self, call: Call, args: Any) -> tuple[Tensor, Tensor]:
        """Ordinary tensors for the sizes and the send plan."""
        sizes = self._ints.new_empty(self._sizes_len(call.layout))
        self._give_sizes(args, address(sizes), sizes.shape[0])
        send_plan = self._ints.new_empty(self._send_plan_len(call.layout, args.num_tokens))
        args.send_plan = address(send_plan)
        return sizes, send_plan

    def small_kind(
        self, call: Call, x: Tensor, scales: Tensor | None, quantize: int, topk_idx: Tensor
    ) -> tuple[Any, Any, tuple[int, ...]]:
        """Of a small-batch dispatch: native arguments and memory that such calls have in common, and the shape of their
        rows without the last dimension, of exact sizes the most."""
        args, lead = self._dispatch_args(call, x, scales, quantize, topk_idx.shape[0], 0), self._small_lead(call)
        args.overflow, args.topk_is_int64 = self.overflow_ptr, topk_idx.dtype == torch.int64
        args.room = math.prod(lead)
        self._give_sizes(args, 0, self._sizes_len(call.layout))
        return args, self.windows[call.window].native.together(self._small_wanted(call, args, lead)), lead

    def _small_wanted(self, call: Call, args: Any, lead: tuple[int, ...]) -> list[tuple[tuple[int, ...], int]]:
        per_row = (*lead, self.top_k) if call.layout == RANK_MAJOR else lead
        return [
            ((self._sizes_len(call.layout),), _INT32),
            ((self._send_plan_len(call.layout, args.num_tokens),), _INT32),
            ((self._recv_plan_len(call.layout),), _INT32),
            (per_row, DTYPE_CODES[torch.float32]),
            (per_row if call.layout == RANK_MAJOR else (0,), _INT64 if args.topk_is_int64 else _INT32),
        ]

    def _small_routing(self, call: Call, args: Any, lead: tuple[int, ...]) -> list[Tensor]:
        """Sizes, both plans, weights and ids: in the heap if there is room, else ordinary tensors."""
        wanted = self._small_wanted(call, args, lead)
        found = self.windows[call.window].native.empty_together(wanted, args.stream, from_dlpack)
        if found is not None:
            return list(found)
        return [self._new(shape, _OF_CODE[code]) for shape, code in wanted]

    def _ordinary_routing(self, layout: int, lead: tuple[int, ...], no_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ordinary tensors for ids of the type of `no_ids`, weights and the receive plan."""
        per_row = (*lead, self.top_k) if layout == RANK_MAJOR else lead
        return (
            no_ids.new_empty(per_row) if layout == RANK_MAJOR else no_ids,
            self._no_floats.new_empty(per_row),
            self._ints.new_empty(self._recv_plan_len(layout)),
        )

    def _ordinary(
        self,
        lead: tuple[int, ...],
        x: Tensor,
        scales: Tensor | None,
        quantize: int,
        words: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Ordinary tensors for rows and scales; `words`: of column-major ones."""
        columns = x.shape[1]
        is_plain = x.dtype in DTYPE_CODES and not quantize
        rows = x.new_empty((*lead, columns)) if is_plain else self._new((*lead, columns), torch.uint8)
        if not quantize and scales is None:
            return rows, self._no_floats
        dtype = torch.float32 if quantize == _FP8 else torch.uint8
        width = -(-columns // QUANTIZE_GROUP) if scales is None else scales.shape[1] * scales.element_size()
        if words is not None:
            return rows, empty_by_column(lead, width * dtype.itemsize, words, self.device)
        return rows, self._new((*lead, width), dtype)

    def _unload(
        self,
        call: Call,
        rows: Tensor,
        scales: Tensor,
        topk_idx: Tensor | None = None,
        weights: Tensor | None = None,
        recv_plan: Tensor | None = None,
    ) -> None:
        args = _load.native().GpuUnloadArgs()
        args.x, args.scales, args.topk_idx = address(rows), address(scales), address(topk_idx)
        args.topk_weights, args.recv_plan = address(weights), address(recv_plan)
        self.windows[call.window].native.unload(args)

    def _send_plan_len(self, layout: int, num_tokens: int) -> int:
        length: int = _load.native().gpu_send_plan_len(num_tokens, self.top_k, self.num_ranks, layout)
        return length

    def _recv_plan_len(self, layout: int) -> int:
        length: int = _load.native().gpu_recv_plan_len(self.max_tokens, self.top_k, self.num_ranks, layout)
        return length

    def _lead(self, call: Call, num_rows: int) -> tuple[int, ...]:
        return (self.num_local_experts, call.capacity) if call.layout == MASKED else (num_rows,)

    def _small_lead(self, call: Call) -> tuple[int, ...]:
        return self._lead(call, call.capacity if call.capacity >= 0 else self._most_rows(call))

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _most_rows(self, call: Call) -> int:
        """Rows of a result without capacity if everything came here."""
        tokens = self.num_ranks * call.max_tokens
        if call.layout == RANK_MAJOR:
            return tokens
        return tokens * self.top_k + min(tokens * self.top_k, self.num_local_experts) * (call.alignment - 1)

    def _columns(self, call: Call, y: Tensor, bias: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
        """y and bias, or their columns in parts whose contributions fit the slots of a small batch: as `_pieces`."""
        room = self.landing_row_bytes // y.element_size()
        if not call.is_small or call.wire or y.shape[-1] <= room:
            return [(dense(y), None if bias is None else dense(bias))]
        self._refuse_staged(call, y.shape[-1] * y.element_size(), self.landing_row_bytes)
        biases = [None] * y.shape[-1] if bias is None else bias.split(room, dim=-1)
        return [
            (dense(rows), None if part is None else dense(part))
            for rows, part in zip(y.split(room, dim=-1), biases, strict=False)
        ]

    def _refuse_staged(self, call: Call, row_bytes: int, room: int) -> None:
        if call.is_staged:
            raise Unsupported("staged=True with rows that travel in pieces", f"{row_bytes} bytes", f"at most {room}")

    def _pieces(self, call: Call, x: Tensor, scales: Tensor | None, quantize: int) -> list[Tensor]:
        """x, or its columns in parts that fit the landing, for rows wider than those that the window is laid out for
        (fp32 rows of a bf16 object, opaque bytes). The same on all ranks, whether the heap has room or not."""
        if quantize:
            return [x]
        row_bytes = x.shape[1] * x.element_size()
        scale_bytes = 0 if scales is None else scales.shape[1] * scales.element_size()
        room = (self.landing_row_bytes - LANDING_SLACK - scale_bytes) // ROW_MULTIPLE_BYTES * ROW_MULTIPLE_BYTES
        if row_bytes <= room:
            return [x]
        if room <= 0:
            most = self.landing_row_bytes - LANDING_SLACK - ROW_MULTIPLE_BYTES
            raise Unsupported("x.scales wider than a row of x", f"{scale_bytes} bytes", f"at most {most}")
        self._refuse_staged(call, row_bytes, room)
        x = x.view(torch.uint8) if x.element_size() == 1 else x  # some dtypes of one byte can't be copied
        columns = room // x.element_size()
        return [part.contiguous() for part in x.split(columns, dim=1)]
