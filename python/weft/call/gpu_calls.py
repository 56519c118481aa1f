"""The nvlink engine's calls: device pointers, streams, and results in the heap of a GPU window or beside it."""

# check: allow-in-file function-size: the flat arguments of the operators pass through

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from weft import _load
from weft.call.calling import has_nvtx_tool
from weft.call.event import Event
from weft.call.gpu_plans import GpuPlans, split
from weft.call.gpu_tensors import dense, first_rows, from_dlpack, is_by_column
from weft.call.plan import Plan
from weft.call.room import NeedsRoom
from weft.call.scales import first_by_column
from weft.call.spec import RANK_MAJOR, Call
from weft.call.tensors import address
from weft.errors import InvalidArgument
from weft.handle import ROUTING, Handle
from weft.limits import ROW_MULTIPLE_BYTES, landing_row_bytes

__all__ = ["GpuCalls"]

# Addresses of a small batch, of what `ROUTING` has at the end.
_SMALL = (
    "x", "scales", "topk_idx", "topk_weights", "out_x", "out_scales",
    "sizes", "send_plan", "recv_plan", "out_weights", "out_ids",
)  # fmt: skip


class GpuCalls(GpuPlans):
    """Calls are launched on a stream and complete there. The host waits in a dispatch of exact sizes alone."""

    plans_on_device = has_small = True
    alignment = ROW_MULTIPLE_BYTES

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.overflow = torch.zeros((), dtype=torch.int64, device=self.device)
        self.max_tokens = self.windows[0].max_tokens
        self.forward_plan_len = self.windows[0].native.forward_plan_len
        self.landing_row_bytes = landing_row_bytes(self.hidden, self.dtype)
        self.names_ranges = has_nvtx_tool()

    # ---- tensors

    def _read(self, tensor: Tensor) -> Tensor:
        """See Runner."""
        return dense(tensor)

    def _read_scales(self, call: Call, scales: Tensor) -> Tensor:
        """See Runner."""
        return scales if is_by_column(call, scales) and not self.has_nodes else dense(scales)

    def _stream(self) -> int:
        """See Runner."""
        handle: int = torch._C._cuda_getCurrentRawStream(self.device.index)
        return handle

    # ---- around them

    def before_call(self, what: str) -> None:
        """Where the host waits anyway, in a dispatch of exact sizes; a CUDA graph can't record that."""
        if torch.cuda.is_current_stream_capturing():
            raise InvalidArgument(
                "capacity is None while a CUDA graph is captured; the number of rows is needed: the host can't wait "
                "for the counts"
            )
        for window in self.windows:
            found = None if window.closed or self.bad_ids else window.native.take_bad_ids()
            if found is not None:
                self.bad_ids = self.bad_ids_text(*found)
        if self.bad_ids is not None:
            super().before_call(what)

    def raise_bad_ids(self, remark: str = "") -> None:
        """Raise what an earlier dispatch found in topk_idx, once."""
        for window in self.windows:
            found = None if window.closed or self.bad_ids else window.native.take_bad_ids()
            if found is not None:
                self.bad_ids = self.bad_ids_text(*found)
        super().raise_bad_ids(remark)

    def wait(self) -> None:
        """Block the host until the calls made so far have ended; raise what they ended with."""
        for window in self.windows:
            if window.streams is not None and not window.closed:
                window.streams.wait()
                with self.comm.alone("check"):
                    window.native.check()

    def record_stream(self, things: Iterable[Any], stream: Any, also: Iterable[Any] = (), other: Any = None) -> None:
        """See Runner."""
        # Of any window, also a closed one: results of one are given to calls of another, and outlive both.
        record = _load.native().gpu_record_stream
        for those, user in ((things, stream), (also, other)):
            for thing in those:
                if type(thing) is Handle:
                    others = thing.__dict__.get("copies")
                    made = thing.__dict__.get("made")
                    if made is not None:
                        sizes, send_plan, recv_plan, _, weights = made.places
                        for place in (sizes, send_plan, recv_plan, weights):
                            record(place, user.cuda_stream)
                        others = None if others is None else others.values()
                    else:
                        others = thing._tensors()
                    if others:
                        self.record_stream(others, user)
                elif thing is None or not thing.is_cuda or thing.numel() == 0:
                    continue
                elif not record(thing.data_ptr(), user.cuda_stream):
                    thing.record_stream(user)

    # ---- streams

    def _run_in_scope(self, plan: Plan, tensors: tuple[Any, ...]) -> Any:
        """See Runner."""
        streams, is_async = plan.window.streams, plan.call.is_async
        assert streams is not None  # noqa: S101  for mypy
        stream, caller = streams.begin(is_async=is_async)
        if not is_async:
            self.last.event = Event(stream)
            made = plan.work(self, plan, stream.cuda_stream, *tensors)
            self._stage(plan, made, functools.partial(self._receive, plan, stream, tensors, made))
            return made
        device, made = torch.cuda.current_device(), ()  # which a change of streams changes
        torch.cuda.set_stream(stream)
        try:  # results are made there and used on the caller's stream
            made = plan.work(self, plan, stream.cuda_stream, *tensors)
        finally:
            self.last.event = Event(stream, stream.record_event())
            torch.cuda.set_stream(caller)
            if device != self.device.index:
                torch.cuda.set_device(device)
            self.record_stream(tensors, stream, made, caller)
        if isinstance(made[2], Handle):
            made[2].__dict__["pending"] = self.last.event
        return made

    def _receive(self, plan: Plan, first: Any, tensors: tuple[Any, ...], made: tuple[Any, ...]) -> None:
        """The other half of a staged call, on the current stream."""
        assert plan.window.streams is not None  # noqa: S101  for mypy
        stream, _ = plan.window.streams.begin()
        if stream is not first:
            self.record_stream((*tensors, *made), stream)
        plan.window.native.receive(stream.cuda_stream)
        if plan.what == "combine" and made[0] is not made[2]:
            made[0].copy_(made[2])
        self.last.event = Event(stream)

    # ---- what finds no room in the heap

    def _first_beside(
        self, plan: Plan, places: tuple[Any, ...], made: tuple[Any, ...] | None
    ) -> tuple[Tensor, Tensor | None, Handle, Any]:
        """See Runner."""
        ordinary = None
        if made is None:
            ordinary = self._ordinary_sizes(plan)
            made = plan.window.native.dispatch_first(*places, *map(address, ordinary))
            if type(made) is int:
                raise NeedsRoom(made)
        in_heap, num_rows, rows, out_scales, routing = made
        lead = plan.lead or (num_rows,)
        sizes, send_plan = ordinary or (routing.tensor(name, from_dlpack) for name in ROUTING[:2])
        recv_plan, weights, idx = (routing.tensor(name, from_dlpack) for name in ROUTING[2:])
        if not in_heap:
            rows, out_scales = self._ordinary(plan, lead)
            idx, weights, recv_plan = self._ordinary_routing(plan, lead)
            self._unload(plan, rows, out_scales, idx, weights, recv_plan)
        return rows, out_scales, self._handle(plan, lead, sizes, send_plan, recv_plan, weights, idx), routing

    def _again_beside(self, plan: Plan, lead: tuple[int, ...], handle: Handle) -> tuple[Tensor, Tensor | None]:
        """See Runner."""
        rows, scales = self._ordinary(plan, lead)
        self._unload(plan, rows, scales, None, None, handle.recv_plan)
        return rows, scales

    def _handle(self, plan: Plan, lead: tuple[int, ...], *routing: Any) -> Handle:
        """Of tensors in the order of ROUTING."""
        sizes, send_plan, recv_plan, weights, idx = routing
        handle = Handle(
            send_plan, recv_plan, weights, idx if plan.call.layout == RANK_MAJOR else None, sizes,
            self.num_local_experts, self.tie(), plan.num_tokens, plan.call,
        )  # fmt: skip
        handle.__dict__["lead"] = lead
        return handle

    def _first_small(
        self,
        plan: Plan,
        stream: int,
        x: Tensor | None,
        scales: Tensor | None,
        topk_idx: Tensor | None,
        weights: Tensor | None,
        found: tuple[Tensor, Tensor | None, tuple[int, int], Any] | None = None,
    ) -> tuple[Tensor, Tensor | None, Handle]:
        """Into tensors for all that may come, rows in ordinary ones; without a capacity the host learns how many.
        `found`: these tensors, where they are, and the result of the native call, if it was made."""
        call, places = plan.call, plan.places
        if found is None:
            rows, out_scales = self._ordinary(plan, plan.lead)
            into = (
                rows.data_ptr() or address(rows),
                0 if out_scales is None else out_scales.data_ptr() or address(out_scales),
            )
            memory = plan.memory.get(plan.num_tokens) or self._memory(plan)
            made = plan.window.native.dispatch_small(
                plan.spec, memory, stream, plan.num_tokens, *places, plan.overflow, plan.room, *into
            )
        else:
            rows, out_scales, into, made = found
        if type(made) is int:
            raise NeedsRoom(made)
        if made is not None:
            num_rows, routing = made
            lead = plan.lead if call.capacity >= 0 else (num_rows,)
            tie = self.token if self._epoch == self.comm._native.epoch else self.tie()
            handle = Handle._lazily(routing, lead, self.num_local_experts, tie, plan.num_tokens, call)
        else:  # no room in the heap, or a graph is recorded
            parts = self._ordinary_small(plan)
            routing = self._small_beside(plan, stream, (*places, *into, *map(address, parts)))
            if routing.needed_tokens:
                raise NeedsRoom(routing.needed_tokens)
            num_rows = routing.result_rows
            lead = plan.lead if call.capacity >= 0 else (num_rows,)
            if call.capacity < 0:
                parts[3:] = [first_rows(part, num_rows, plan.lead) for part in parts[3:]]
            handle = self._handle(plan, lead, *parts)
            if call.capacity >= 0 and torch.cuda.is_current_stream_capturing():
                handle.__dict__["is_captured"] = True
        if call.tells_counts:
            handle.__dict__["counts"] = tuple(routing.counts or handle.sizes[: self.num_local_experts].tolist())
        if call.capacity < 0:
            first = rows[:num_rows]  # as first_rows
            rows = first if plan.room <= 2 * num_rows else first.clone()
            if out_scales is not None:
                few = first_by_column(out_scales, num_rows) if plan.rows[1].by_column else None
                out_scales = first_rows(out_scales, num_rows, plan.lead) if few is None else few
        if plan.finishes:
            rows, out_scales = self.finished(plan, rows, out_scales, handle, is_first=True)
        return rows, out_scales, handle

    def _small_beside(self, plan: Plan, stream: int, places: tuple[int, ...]) -> Any:
        """The native call with all memory given, and its result."""
        buffers = _load.native().DispatchBuffers(
            stream=stream, num_tokens=plan.num_tokens, overflow=plan.overflow, num_rows=plan.room,
            **dict(zip(_SMALL, places, strict=True)),
        )  # fmt: skip
        return plan.window.native.dispatch(plan.spec, buffers)

    # ---- rows in pieces

    def _first_in_parts(
        self, plan: Plan, stream: int, x: Tensor, scales: Tensor | None, topk_idx: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Handle]:
        first, again = plan.parts[0], plan.parts[1:]
        pieces = split(x, first.hidden)
        _place_parts(plan, pieces, plan.places[1:], (0,))
        rows, out_scales, handle = first.work(self, first, stream, pieces[0], scales, topk_idx, weights)
        parts = [
            self._again(part, stream, piece, None, handle)[0] for part, piece in zip(again, pieces[1:], strict=True)
        ]
        rows, out_scales = self.finished(plan, torch.cat([rows, *parts], dim=-1), out_scales, handle, is_first=True)
        return rows, out_scales, handle

    def _again_in_parts(
        self, plan: Plan, stream: int, x: Tensor, scales: Tensor | None, handle: Handle
    ) -> tuple[Tensor, Tensor | None, None]:
        pieces = split(x, plan.parts[0].hidden)
        _place_parts(plan, pieces, plan.places[1:2], (0,))
        made = [
            self._again(part, stream, piece, scales if part is plan.parts[0] else None, handle)
            for part, piece in zip(plan.parts, pieces, strict=True)
        ]
        rows, out_scales = torch.cat([each[0] for each in made], dim=-1), made[0][1]
        return (*self.finished(plan, rows, out_scales, handle, is_first=False), None)

    def _sum_in_parts(self, plan: Plan, stream: int, *tensors: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        """See Runner."""
        y, handle, bias, side, out, *of_owner = tensors
        columns, sums, side_out = plan.parts[0].hidden, [], None
        biases = [None] * len(plan.parts) if bias is None else bias.split(columns, dim=-1)
        for part, rows, row_bias in zip(plan.parts, y.split(columns, dim=-1), biases, strict=True):
            rows, row_bias = dense(rows), None if row_bias is None else dense(row_bias)
            part.num_tokens, part.places = plan.num_tokens, (address(rows), 0, address(row_bias), address(side))
            total, given, _ = self._sum(part, stream, rows, handle, row_bias, side, None, *of_owner)
            sums.append(total)
            side, side_out = None, given if side_out is None else side_out  # with the first
        total = torch.cat(sums, dim=-1)
        return total if out is None else out.copy_(total), side_out, total


def _place_parts(plan: Plan, pieces: list[Tensor], of_first: tuple[int, ...], of_others: tuple[int, ...]) -> None:
    """Where the parts of a plan find their pieces of x, and what goes with the first piece and with the others."""
    for part, piece in zip(plan.parts, pieces, strict=True):
        part.num_tokens = plan.num_tokens
        part.places = (address(piece), *(of_first if part is plan.parts[0] else of_others))
