"""The calls between tensors and the native module: once for both engines. What differs between them, streams, rows in
pieces, and results that find no room, is in call/gpu_calls.py and call/cpu_calls.py.

Nothing here knows autograd or torch.library.
"""

# check: allow-in-file function-size: the tensors of a call pass through

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from weft.call.calling import Calling
from weft.call.event import Event
from weft.call.gpu_tensors import as_tensor, from_dlpack
from weft.call.half import Half
from weft.call.plan import Plan, Planner
from weft.call.room import NeedsRoom
from weft.call.scales import by_column
from weft.call.spec import DTYPE_CODES, MASKED, RANK_MAJOR
from weft.call.state import by_key
from weft.call.tensors import address, plain
from weft.errors import InternalError, InvalidState
from weft.handle import Handle

__all__ = ["Runner", "by_token"]

_is_profiled = torch.autograd._profiler_enabled


class Runner(Planner):
    """Makes the calls of one ExpertParallel."""

    alignment = 1  # of tensors that the engine reads as they lie
    is_elsewhere = False  # tensors lie where the engine can't read them
    names_ranges = False  # a profiler listens that knows no other names

    # ---- a call

    def run(
        self,
        plan: Plan,
        tie: Tensor | None,
        *tensors: Any,
        is_named: bool = False,
        num_tokens: int = -1,
        places: tuple[int, ...] = (),
    ) -> Any:
        """Make the call of a plan; `tie`: of the handle among `tensors`, which `_first`, `_again` and `_sum` list.
        Results are theirs. `num_tokens`, `places`: of the tensors, if they are known to lie where the engine reads
        them."""
        if not is_named and (self.names_ranges or _is_profiled()):
            with Calling(plan.what, plan.call, tells_nvtx=self.names_ranges):
                return self.run(plan, tie, *tensors, is_named=True, num_tokens=num_tokens, places=places)
        what, window, comm = plan.what, plan.window, self.comm
        if self.closed:
            self.raise_if_closed(what)
        if not places:
            lie_well, found = not self.is_elsewhere, []
            try:
                for each in tensors:
                    place = 0
                    if each is not None and type(each) is not Handle:
                        place = each.data_ptr()
                        if place == 0 or place % self.alignment or not each.is_contiguous() or each.is_neg():
                            lie_well = False
                    found.append(place)
            except RuntimeError:  # it has no memory
                lie_well = False
            if not lie_well:
                tensors = self._readable(plan, tensors)
                found = [each.data_ptr() if isinstance(each, Tensor) else 0 for each in tensors]
            places = tuple(found)
            num_tokens = tensors[1].num_tokens if what == "combine" else tensors[0].shape[0]
        with comm.alone(what):
            plan.num_tokens, plan.places = num_tokens, places
            if tie is not None and (tie is not self.token or self._epoch != comm._native.epoch):
                self.check_tie(what, tie)
            if window.half is not None:
                self.raise_if_staged(what, plan.call.window)
            if plan.waits or self.bad_ids is not None:
                self.before_call(what)
            begin, stream, streams = perf_counter(), 0, window.streams
            if plan.has_scope:
                made = self._run_in_scope(plan, tensors)
            else:
                if streams is not None:
                    stream = torch._C._cuda_getCurrentRawStream(streams.index)
                    known = stream == streams.last_handle
                    at, last = streams.last if known else streams.begin()[0], self.last
                    if last.event._event is not None or last.event._stream is not at:
                        last.event = Event(at)  # else nobody has asked for it: calls share it
                made = plan.work(self, plan, stream, *tensors)
            counters, seconds = self.counters, perf_counter() - begin  # calls that failed do not count
            if what == "dispatch":
                counters.num_dispatches += 1
                counters.dispatch_s += seconds
            else:
                counters.num_combines += 1
                counters.combine_s += seconds
        return made

    def _run_in_scope(self, plan: Plan, tensors: tuple[Any, ...]) -> Any:
        """A staged call, or one on the window's own stream."""
        made = plan.work(self, plan, 0, *tensors)
        self._stage(plan, made, None)
        return made

    def _stage(self, plan: Plan, made: Any, rest: Callable[[], None] | None) -> None:
        """A staged call has sent; `rest`: receives, None if it has done that already."""
        half = plan.window.half = Half(self, plan.what, plan.call, self.tie(), rest)
        if isinstance(made[2], Handle):
            made[2].__dict__["pending"] = half

    def _readable(self, plan: Plan, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same values where the engine reads them."""
        read = list(tensors)
        for idx, each in enumerate(tensors[:4]):  # behind them there are but `out` and owner's weights
            if not isinstance(each, Tensor):
                continue
            each = plain(each, plan.names[idx]) if idx < len(plan.names) else each
            if each.element_size() == 1 and each.is_contiguous():
                each = each.view(torch.uint8)  # some dtypes of one byte can't be copied
            is_scales = idx == 1 and plan.what == "dispatch"
            read[idx] = self._read_scales(plan.call, each) if is_scales else self._read(each)
            address(read[idx])
        return tuple(read)

    # ---- native calls

    def _first(
        self,
        plan: Plan,
        stream: int,
        x: Tensor | None,
        scales: Tensor | None,
        topk_idx: Tensor | None,
        weights: Tensor | None,
        found: tuple[tuple[Any, ...], Any] | None = None,
    ) -> tuple[Tensor, Tensor | None, Handle]:
        """See Planner. `found`: what the native call was given, and its result, if it was made."""
        if found is None:
            places: tuple[Any, ...] = (
                plan.spec, stream, plan.num_tokens, *plan.places, plan.overflow, from_dlpack
            )  # fmt: skip
            if self.has_map:
                table = self.experts.table(self.comm._active)  # held until this returns
                places = (*places, 0, 0, address(table))
            made = plan.window.native.dispatch_first(*places)
        else:
            places, made = found
        if type(made) is int:
            raise NeedsRoom(made)
        if made is None or not made[0]:
            rows, out_scales, handle, routing = self._first_beside(plan, places, made)
        else:
            _, num_rows, rows, out_scales, routing = made
            tie = self.token if self._epoch == self.comm._native.epoch else self.tie()
            lead = plan.lead or (num_rows,)
            handle = Handle._lazily(routing, lead, self.num_local_experts, tie, plan.num_tokens, plan.call)
        if plan.call.tells_counts:
            counts = routing.counts or handle.sizes[: self.num_local_experts].tolist()
            handle.__dict__["counts"] = tuple(counts)
        if not self.plans_on_device:
            self.counters.rows_sent += routing.rows_sent
            self.counters.bytes_sent += routing.bytes_sent
            if routing.num_bad_ids:
                self.bad_ids = self.bad_ids_text(routing.num_bad_ids, routing.first_bad_id, routing.first_bad_at)
            if self.is_elsewhere:
                handle._move(self.device)
                rows, out_scales = rows.to(self.device), None if out_scales is None else out_scales.to(self.device)
        elif routing.is_captured:
            handle.__dict__["is_captured"] = True
        if plan.finishes:
            rows, out_scales = self.finished(plan, rows, out_scales, handle, is_first=True)
        return rows, out_scales, handle

    def _again(
        self, plan: Plan, stream: int, x: Tensor, scales: Tensor | None, handle: Handle
    ) -> tuple[Tensor, Tensor | None, None]:
        """See Planner."""
        lead: tuple[int, ...] = handle.__dict__.get("lead") or handle.rows_shape
        made = handle.__dict__.get("made")
        sizes, send_plan, recv_plan, recv_plan_len, _ = handle._places() if made is None else made.places
        into: tuple[Tensor | None, Tensor | None] = (None, None)
        if plan.is_small:
            into = self._ordinary(plan, lead)
        rows, out_scales = into
        in_heap, in_rows, in_scales, rows_sent, bytes_sent = plan.window.native.dispatch_again(
            plan.spec, stream, plan.num_tokens, *plan.places[:2], plan.overflow, sizes, send_plan, recv_plan,
            recv_plan_len, math.prod(lead),
            0 if rows is None else rows.data_ptr() or address(rows),
            0 if out_scales is None else out_scales.data_ptr() or address(out_scales), from_dlpack,
        )  # fmt: skip
        if rows is None:
            rows, out_scales = (in_rows, in_scales) if in_heap else self._again_beside(plan, lead, handle)
        if not self.plans_on_device:
            self.counters.rows_sent += rows_sent
            self.counters.bytes_sent += bytes_sent
            if self.is_elsewhere:
                rows, out_scales = rows.to(self.device), None if out_scales is None else out_scales.to(self.device)
        if plan.finishes:
            rows, out_scales = self.finished(plan, rows, out_scales, handle, is_first=False)
        return rows, out_scales, None

    def _sum(
        self,
        plan: Plan,
        stream: int,
        y: Tensor,
        handle: Handle,
        bias: Tensor | None,
        side: Tensor | None,
        out: Tensor | None = None,
        owner_weights: Tensor | None = None,
        owner_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """See Planner."""
        if plan.parts:
            return self._sum_in_parts(plan, stream, y, handle, bias, side, out, owner_weights, owner_ids)
        side_out = None if side is None else self._no_floats.new_empty((plan.num_tokens, self.top_k))
        is_into = out is not None and not self.is_elsewhere and out.data_ptr() % self.alignment == 0
        total = out if out is not None and is_into else None
        if total is None:  # with strides new_empty takes two thirds of its time
            total = y.new_empty_strided((plan.num_tokens, plan.hidden), (plan.hidden, 1))
        made = handle.__dict__.get("made")
        _, send_plan, recv_plan, recv_plan_len, weights = handle._places() if made is None else made.places
        on_host = self._read(handle.weights) if self.is_elsewhere and plan.weighted else None
        weights = on_host.data_ptr() if on_host is not None else weights if plan.weighted else 0
        y_at, _, bias_at, side_at = plan.places[:4]
        plan.window.native.combine_rows(
            plan.spec, stream, plan.num_tokens, y_at, y.numel() // plan.hidden, weights, send_plan, recv_plan,
            recv_plan_len, total.data_ptr() or address(total), bias_at, side_at,
            0 if side_out is None else side_out.data_ptr() or address(side_out),
            *(() if owner_weights is None else (address(owner_weights),)),
            *(() if owner_ids is None else (address(owner_ids), owner_ids.dtype is torch.int64)),
        )  # fmt: skip
        if self.is_elsewhere:
            total, side_out = total.to(self.device), None if side_out is None else side_out.to(self.device)
        return total if out is None or out is total else out.copy_(total), side_out, total

    def gradients(
        self, rows: Tensor, y: Tensor | None, weights: Tensor, *, in_place: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """From the gradients of a weighted combine's result at this rank's rows to those of its inputs, in one pass.

        Local; nothing is sent. The bits are the same on both engines.

        Args:
            rows: [N, H] or [L, C, H], gradient of the token that each row belongs to; `in_place`: the result is
                written there if they are contiguous.
            y: the expert outputs, of the same shape and dtype; None: weights need no gradient.
            weights: fp32 [N] or [L, C].

        Returns:
            Gradients of y (product in fp32, rounded once) and of weights (dot product in fp32).
        """
        given = rows.contiguous()
        rows, y, weights = self._read(given), None if y is None else self._read(y), self._read(weights)
        out = rows if in_place or self.is_elsewhere else torch.empty_like(rows)  # elsewhere `rows` is a copy
        dots = None if y is None else torch.empty_like(weights)
        self.windows[0].native.gradients(
            self._stream(), DTYPE_CODES[rows.dtype], rows.shape[-1], weights.numel(), address(rows), address(y),
            address(weights), address(out), address(dots),
        )  # fmt: skip
        if self.is_elsewhere:
            out, dots = out.to(self.device), None if dots is None else dots.to(self.device)
        return out, dots

    def empty(self, window: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised, in the heap of the window if there is room."""
        found = None
        if not self.is_elsewhere:
            found = self.windows[window].native.empty(list(shape), DTYPE_CODES[dtype], self._stream())
        return torch.empty(shape, dtype=dtype, device=self.device) if found is None else as_tensor(found)

    # ---- what differs between engines

    @abstractmethod
    def _read(self, tensor: Tensor) -> Tensor:
        """The same values where the engine reads them: contiguous, aligned."""

    def _stream(self) -> int:
        """The current one."""
        return 0

    def _first_beside(
        self, plan: Plan, places: tuple[Any, ...], made: tuple[Any, ...] | None
    ) -> tuple[Tensor, Tensor | None, Handle, Any]:
        """As `_first`, where the heap has no room: `made` of rows; None: of sizes and send plan either. And what the
        native call gave."""
        raise InternalError("the cpu engine finds other memory itself")

    def _again_beside(self, plan: Plan, lead: tuple[int, ...], handle: Handle) -> tuple[Tensor, Tensor | None]:
        """Rows and scales of a repeated dispatch for which the heap has no room."""
        raise InternalError("the cpu engine finds other memory itself")

    def _ordinary(self, plan: Plan, lead: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """For rows and scales, beside the heap."""
        raise InternalError("the cpu engine finds other memory itself")

    def _sum_in_parts(self, plan: Plan, stream: int, *tensors: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        """As `_sum`, of rows in pieces."""
        raise InternalError("the cpu engine sends whole rows")

    @abstractmethod
    def record_stream(self, things: Iterable[Any], stream: Any, also: Iterable[Any] = (), other: Any = None) -> None:
        """The memory of these tensors, and of what these handles have, is in use on `stream`; of those in `also` on
        `other`."""

    # ---- results

    def finished(
        self, plan: Plan, rows: Tensor, scales: Tensor | None, handle: Handle, *, is_first: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Rows and scales of a dispatch whose plan clears the tail or wants column-major scales."""
        if plan.clears_tail:  # which rows hold no data, bool [N] or [L, C], without asking the device how many do
            layout, sizes = plan.call.layout, handle.sizes
            is_masked = layout == MASKED
            number = torch.arange(rows.shape[1 if is_masked else 0], dtype=torch.int32, device=self.device)
            tail = number >= (sizes[: self.num_local_experts].unsqueeze(-1) if is_masked else sizes[-1])
            rows.masked_fill_(tail.unsqueeze(-1), 0)
            if is_first and layout != RANK_MAJOR:  # whose ids and weights say it
                handle.weights.masked_fill_(tail, 0)
        return rows, scales if plan.word_dtype is None or scales is None else by_column(scales, plan.word_dtype)


def by_token(token: Tensor) -> Runner:
    """The object whose `token` or `tie` this is.

    Raises:
        InvalidState: its ExpertParallel is gone.
    """
    calls: Runner | None = by_key(int(token[0]))
    if calls is None:
        raise InvalidState("the ExpertParallel of this operation is gone: keep it as long as its handles and graphs")
    return calls
