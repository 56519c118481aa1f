"""The plans of the nvlink engine: memory of small batches, rows in pieces, and ordinary tensors for what finds no room
in the heap of a window.
"""

# check: allow-in-file function-size: the tensors of a call pass through

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft import _load
from weft.call.plan import Memory, Plan
from weft.call.runner import Runner
from weft.call.scales import column_rows, empty_by_column
from weft.call.spec import DTYPE_CODES, RANK_MAJOR, Call
from weft.call.tensors import address
from weft.errors import InvalidArgument, Unsupported
from weft.handle import Handle
from weft.limits import LANDING_SLACK, MAX_CAPACITY, QUANTIZE_GROUP, ROW_MULTIPLE_BYTES

__all__ = ["GpuPlans", "split"]

_INT32, _INT64 = 4, 5  # of the native module, beside DTYPE_CODES
_OF_CODE = {code: dtype for dtype, code in DTYPE_CODES.items()} | {_INT32: torch.int32, _INT64: torch.int64}
_MOST_SHAPES = 16  # of a plan; with exact sizes each call may have its own
_UE8M0 = 2  # code of quantize: scales are bytes, else fp32


class GpuPlans(Runner):
    """The part of GpuCalls that makes plans, and memory for them."""

    max_tokens: int
    landing_row_bytes: int
    forward_plan_len: int  # int32 that a send plan has behind it

    @abstractmethod
    def _first_small(
        self, plan: Plan, stream: int, x: Tensor, scales: Tensor | None, topk_idx: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Handle]:
        """As `_first`, of a small batch."""

    @abstractmethod
    def _first_in_parts(
        self, plan: Plan, stream: int, x: Tensor, scales: Tensor | None, topk_idx: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Handle]:
        """As `_first`, of rows in pieces."""

    @abstractmethod
    def _again_in_parts(
        self, plan: Plan, stream: int, x: Tensor, scales: Tensor | None, handle: Handle
    ) -> tuple[Tensor, Tensor | None, None]:
        """As `_again`, of rows in pieces."""

    def _fit(self, plan: Plan, x: Tensor, scales: Tensor | None, topk_idx: Tensor | None) -> None:
        """See Runner."""
        call, quantize = plan.call, plan.quantize
        plan.waits = topk_idx is not None and call.capacity < 0
        plan.has_scope = call.is_async or call.is_staged
        words = call.scale_dtype if call.is_small else None
        plan.rows = _rows(x, scales, quantize, words)
        columns = self._piece(call, x, scales, quantize)
        if columns < x.shape[1]:
            pieces = split(x, columns)
            more = replace(call, counts_dropped=False)  # the first piece has counted
            one = self.again_plan(call, pieces[0], scales, 0)
            if topk_idx is not None:
                one = self.first_plan(call, pieces[0], scales, 0, topk_idx)
            one.word_dtype, one.finishes = None, False  # `plan` sees to it
            plan.work = type(self)._again_in_parts if topk_idx is None else type(self)._first_in_parts
            plan.parts = (one, *(self.again_plan(more, piece, None, 0) for piece in pieces[1:]))
        elif call.is_small and topk_idx is not None:
            plan.lead, plan.work = plan.lead or (self._most_rows(call),), type(self)._first_small
            plan.room = room = math.prod(plan.lead)
            if room > MAX_CAPACITY:
                raise InvalidArgument(f"a result could have {room} rows; allowed are {MAX_CAPACITY}: set a capacity")

    def _fit_sum(self, plan: Plan, y: Tensor, bias: Tensor | None, *, has_side: bool) -> None:
        """See Runner."""
        call, columns = plan.call, self.landing_row_bytes // y.element_size()
        plan.has_scope = call.is_async or call.is_staged
        if self.has_domains or (self.has_nodes and call.wire):
            columns -= columns % QUANTIZE_GROUP  # with FP8 on the wire rows travel as they are, and groups stay whole
        if (
            self.has_nodes
        ):  # places of rails are as wide as those of the landing; the native module refuses what is wider
            if plan.hidden * y.element_size() <= self.landing_row_bytes or columns == 0:
                return
        elif not call.is_small or (call.wire and not self.has_domains) or plan.hidden <= columns:
            return
        self._refuse_staged(call, plan.hidden * y.element_size(), self.landing_row_bytes)
        biases = [None] * plan.hidden if bias is None else bias.split(columns, dim=-1)
        plan.parts = tuple(
            self.combine_plan(call, rows, weighted=plan.weighted, has_side=has_side and idx == 0, bias=biases[idx])
            for idx, rows in enumerate(y.split(columns, dim=-1))
        )

    def _memory(self, plan: Plan) -> Any:
        """Of a small batch of so many tokens."""
        plan.memory[plan.num_tokens] = made = plan.window.native.together(self._small_wanted(plan))
        return made

    def _small_wanted(self, plan: Plan) -> list[tuple[tuple[int, ...], int]]:
        """In the order of ROUTING."""
        call, lead = plan.call, plan.lead
        per_row = (*lead, self.top_k) if call.layout == RANK_MAJOR else lead
        return [
            ((self.sizes_len(call.layout),), _INT32),
            ((self._send_plan_len(call.layout, plan.num_tokens),), _INT32),
            ((self._recv_plan_len(call.layout),), _INT32),
            (per_row, DTYPE_CODES[torch.float32]),
            (per_row if call.layout == RANK_MAJOR else (0,), _INT64 if plan.spec.topk_is_int64 else _INT32),
        ]

    def _piece(self, call: Call, x: Tensor, scales: Tensor | None, quantize: int) -> int:
        """Columns of x that travel together: all, or as many as fit the landing, of rows wider than those that the
        window is laid out for (fp32 rows of a bf16 object, opaque bytes). The same on all ranks, whether the heap has
        room or not."""
        columns: int = x.shape[1]
        row_bytes, scale_bytes = columns * x.element_size(), 0
        if scales is not None:
            scale_bytes = scales.shape[1] * scales.element_size()
        room = (self.landing_row_bytes - LANDING_SLACK - scale_bytes) // ROW_MULTIPLE_BYTES * ROW_MULTIPLE_BYTES
        if quantize or row_bytes <= room:
            return columns
        if room <= 0:
            most = self.landing_row_bytes - LANDING_SLACK - ROW_MULTIPLE_BYTES
            raise Unsupported("x.scales wider than a row of x", f"{scale_bytes} bytes", f"at most {most}")
        self._refuse_staged(call, row_bytes, room)
        return room // x.element_size()

    def _refuse_staged(self, call: Call, row_bytes: int, room: int) -> None:
        if call.is_staged:
            raise Unsupported("staged=True with rows that travel in pieces", f"{row_bytes} bytes", f"at most {room}")

    def _most_rows(self, call: Call) -> int:
        """Rows of a result without capacity if everything came here."""
        tokens = self.num_ranks * call.max_tokens
        if call.layout == RANK_MAJOR:
            return tokens
        return tokens * self.top_k + min(tokens * self.top_k, self.num_local_experts) * (call.alignment - 1)

    def _send_plan_len(self, layout: int, num_tokens: int) -> int:
        length: int = _load.native().gpu_send_plan_len(num_tokens, self.top_k, self.num_ranks, layout)
        return length + self.forward_plan_len

    def _recv_plan_len(self, layout: int) -> int:
        length: int = _load.native().gpu_recv_plan_len(self.max_tokens, self.top_k, self.num_ranks, layout)
        return length

    # ---- ordinary tensors, for what finds no room in the heap

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._ints.new_empty(shape, dtype=dtype)

    def _ordinary_small(self, plan: Plan) -> list[Tensor]:
        """For what a small batch takes from the heap."""
        return [self._new(shape, _OF_CODE[code]) for shape, code in self._small_wanted(plan)]

    def _ordinary_sizes(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """For the sizes and the send plan."""
        length = self._send_plan_len(plan.call.layout, plan.num_tokens)
        return self._new((self.sizes_len(plan.call.layout),), torch.int32), self._new((length,), torch.int32)

    def _ordinary_routing(self, plan: Plan, lead: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """For ids, weights and the receive plan."""
        is_rank_major = plan.call.layout == RANK_MAJOR
        per_row = (*lead, self.top_k) if is_rank_major else lead
        return (
            self._new(per_row if is_rank_major else (0,), torch.int64 if plan.spec.topk_is_int64 else torch.int32),
            self._new(per_row, torch.float32),
            self._new((self._recv_plan_len(plan.call.layout),), torch.int32),
        )

    def _ordinary(self, plan: Plan, lead: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """For rows and scales."""
        made: list[Any] = [None, None]
        for idx, (like, shape, strides) in enumerate(plan.shapes.get(lead) or _shapes(plan, lead, self._ints)):
            if strides:  # with which new_empty takes two thirds of its time
                made[idx] = like.new_empty_strided(shape, strides)
            else:
                columns, dtype, _ = plan.rows[idx]
                made[idx] = empty_by_column(lead, columns * dtype.itemsize, dtype, self.device)
        return made[0], made[1]

    def _unload(
        self,
        plan: Plan,
        rows: Tensor,
        scales: Tensor | None,
        topk_idx: Tensor | None,
        weights: Tensor | None,
        recv_plan: Tensor,
    ) -> None:
        to = _load.native().DispatchBuffers(
            out_x=address(rows), out_scales=address(scales), out_ids=address(topk_idx), out_weights=address(weights),
            recv_plan=address(recv_plan),
        )  # fmt: skip
        plan.window.native.unload(to)


def _shapes(plan: Plan, lead: tuple[int, ...], like: Tensor) -> tuple[tuple[Any, ...], ...]:
    """Of rows and scales: a tensor of the dtype, shape, strides; no strides if the memory ends behind the last element:
    of scales that lie by column, whose columns are filled up."""
    found = []
    for columns, dtype, is_by_column in plan.rows:
        inner, step = ((1, lead[-1]), columns * lead[-1]) if is_by_column else ((columns, 1), lead[-1] * columns)
        strides = () if is_by_column and column_rows(lead[-1], dtype) != lead[-1] else (step, *inner)[2 - len(lead) :]
        found.append((like.new_empty(0, dtype=dtype), (*lead, columns), strides))
    if len(plan.shapes) >= _MOST_SHAPES:
        plan.shapes.clear()
    plan.shapes[lead] = made = tuple(found)
    return made


def _rows(x: Tensor, scales: Tensor | None, quantize: int, words: torch.dtype | None) -> tuple[Memory, ...]:
    """Of the result of a dispatch of such rows; `words`: of scales that are column-major."""
    is_plain = x.dtype in DTYPE_CODES and not quantize
    data = Memory(x.shape[1], x.dtype if is_plain else torch.uint8)
    if not quantize and scales is None:
        return (data,)
    columns, dtype = -(-x.shape[1] // QUANTIZE_GROUP), torch.float32 if quantize not in (0, _UE8M0) else torch.uint8
    if scales is not None:
        columns = scales.shape[1] * scales.element_size()
    if words is not None:
        return data, Memory(-(-columns * dtype.itemsize // words.itemsize), words, True)
    return data, Memory(columns, dtype)


def split(x: Tensor, columns: int) -> list[Tensor]:
    """Columns of x in pieces."""
    x = x.view(torch.uint8) if x.element_size() == 1 else x  # some dtypes of one byte can't be copied
    return [part.contiguous() for part in x.split(columns, dim=1)]
