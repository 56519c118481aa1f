"""`Plan`: what calls of equal types, shapes and options have in common, and `Planner`, which makes them.

A plan has the spec of a native call, where its results go, and how they become those of the user. It is made once and
found by a key (weft/call/eager.py, weft/call/ops.py); `Runner.run` makes the call, which adds the addresses.
"""

# check: allow-in-file function-size: the tensors of a call pass through

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft import _load
from weft.call.gpu_tensors import column_bytes, row_bytes
from weft.call.spec import BYTES, DTYPE_CODES, MASKED, RANK_MAJOR, Call
from weft.call.state import State
from weft.call.tensors import address
from weft.call.window import Window
from weft.handle import Handle

__all__ = ["Memory", "Plan", "Planner"]

_MOST_PLANS = 256  # of one ExpertParallel
_MADE = (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32)  # that rows and scales are made in


class Memory(NamedTuple):
    """Ordinary tensors for the rows of a result: [..., N, columns]."""

    columns: int
    dtype: torch.dtype
    by_column: bool = False  # scales that lie so

    def of(self, dtype: torch.dtype | None) -> Memory:
        """The same bytes in another dtype, where torch can make tensors of it; else as it is."""
        if dtype not in _MADE or self.by_column:
            return self
        return Memory(self.columns * self.dtype.itemsize // dtype.itemsize, dtype)


@dataclass(slots=True, eq=False)
class Plan:
    """Of calls that share a key. A staged one runs it twice: the first time it sends, then it receives."""

    what: str  # "dispatch" or "combine"
    call: Call
    window: Window
    spec: Any  # of the native call, equal in all calls
    work: Callable[..., Any]  # method of the Runner: (runner, plan, stream, *tensors)
    hidden: int  # columns of the result
    num_tokens: int = 0  # of this rank, in the call that is made
    places: tuple[int, ...] = ()  # in that call: of its tensors, in their order, 0 for what is none
    quantize: int = 0
    names: tuple[str, ...] = ()  # of the tensors, for refusals; none in a backward
    has_scope: bool = False  # its native call needs more around it than a stream
    parts: tuple[Plan, ...] = ()  # of rows that travel in pieces of at most `hidden` columns
    # Of a dispatch:
    is_small: bool = False  # by the kernels for small batches
    overflow: int = 0  # address of what counts dropped picks; 0: nobody counts
    waits: bool = False  # the host waits on the GPU for the counts of the peers
    lead: tuple[int, ...] = ()  # of the rows: with a capacity; of small batches those there is memory for
    room: int = 0  # of small batches: rows that there is memory for
    memory: dict[int, Any] = field(default_factory=dict)  # of small batches: what a first one takes from the heap, by T
    rows: tuple[Memory, ...] = ()  # data, and scales if any: where the heap has none
    shapes: dict[tuple[int, ...], Any] = field(default_factory=dict)  # of these, by the leading lengths
    clears_tail: bool = False  # rows beyond the last become zero
    word_dtype: torch.dtype | None = None  # scales become column-major words
    finishes: bool = False  # its results are not what the native call gives
    # Of a combine:
    weighted: bool = False  # reads the weights received
    # Of eager calls (weft/call/eager.py):
    is_tracked: bool = False
    data_dtype: torch.dtype | None = None  # of the result, if it is no tensor
    scale_dtype: torch.dtype | None = None
    no_scale_columns: bool = False  # the user gave scales without any
    as_bytes: bool = False  # data or scales do not lie as the engine reads them
    may_be_known: bool = False  # found at once by calls that look alike
    back: Plan | None = None  # of its backward


class Planner(State, ABC):
    """Makes the plans of one ExpertParallel: the part of a Runner that knows the arguments of native calls."""

    has_small = False  # kernels for small batches
    tells_need = False  # see tell_need

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.plans: dict[Any, Plan] = {}
        self.calls: dict[tuple[Any, ...], Call] = {}  # by value

    def tell_need(self) -> None:
        """From now on more tokens than fit are told to the other ranks (NeedsRoom), not refused here. On all ranks
        alike, before the first call."""
        self.tells_need = True

    def kept(self, key: Any, plan: Plan) -> Plan:
        """`plan`, which is found again by `key` in `plans`. The oldest makes room."""
        if len(self.plans) >= _MOST_PLANS:
            self.plans.pop(next(iter(self.plans)), None)
        self.plans[key] = plan
        return plan

    def known(self, call: Call) -> Call:
        """The one object for calls of equal values: keys have it by identity."""
        values = tuple(vars(call).values())
        if len(self.calls) >= _MOST_PLANS and values not in self.calls:
            self.calls.pop(next(iter(self.calls)), None)
        return self.calls.setdefault(values, call)

    def first_plan(
        self,
        call: Call,
        x: Tensor,
        scales: Tensor | None,
        quantize: int,
        topk_idx: Tensor,
        *,
        clears_tail: bool = False,
        names: tuple[str, ...] = (),
    ) -> Plan:
        """Of a dispatch with a routing of its own. Tensors like those that its calls have."""
        of_engine = {"tells_need": True} if self.tells_need else {}
        spec = self._dispatch_spec(call, x, scales, quantize, topk_is_int64=topk_idx.dtype == torch.int64, **of_engine)
        plan = self._dispatch_plan(call, spec, type(self)._first, x, quantize, names, clears_tail)
        plan.overflow = address(self.overflow)
        self._fit(plan, x, scales, topk_idx)
        return plan

    def again_plan(
        self,
        call: Call,
        x: Tensor,
        scales: Tensor | None,
        quantize: int,
        *,
        clears_tail: bool = False,
        names: tuple[str, ...] = (),
    ) -> Plan:
        """Of a dispatch that repeats the routing of a handle."""
        spec = self._dispatch_spec(call, x, scales, quantize, cached=True)
        plan = self._dispatch_plan(call, spec, type(self)._again, x, quantize, names, clears_tail)
        plan.overflow = address(self.overflow) if call.counts_dropped else 0
        self._fit(plan, x, scales, None)
        return plan

    def combine_plan(
        self,
        call: Call,
        y: Tensor,
        *,
        weighted: bool,
        has_side: bool = False,
        bias: Tensor | None = None,
        names: tuple[str, ...] = (),
    ) -> Plan:
        """Of a combine."""
        hidden = y.shape[-1]
        of_bias = {}
        if bias is not None:
            of_bias = {"bias_is_2d": bias.dim() == 2, "bias_is_fp32": bias.dtype == torch.float32}
        spec = _load.native().CombineSpec(
            **self._common(call, hidden), dtype=DTYPE_CODES[y.dtype], is_small=call.is_small, has_side=has_side,
            adds_side=call.adds_side, wire_is_fp8=call.wire != 0, order=call.order, sum_domain=self.sum_domain,
            **of_bias,
        )  # fmt: skip
        plan = Plan("combine", call, self.windows[call.window], spec, type(self)._sum, hidden, names=names)
        plan.weighted = weighted and call.layout != RANK_MAJOR
        plan.has_scope = call.is_staged
        self._fit_sum(plan, y, bias, has_side=has_side)
        return plan

    def _dispatch_plan(
        self,
        call: Call,
        spec: Any,
        work: Callable[..., Any],
        x: Tensor,
        quantize: int,
        names: tuple[str, ...],
        clears_tail: bool,
    ) -> Plan:
        window = self.windows[call.window]
        plan = Plan("dispatch", call, window, spec, work, x.shape[1], quantize=quantize, names=names)
        plan.has_scope, plan.is_small = call.is_staged, self.is_small(call)
        if call.capacity >= 0:
            plan.lead = (self.num_local_experts, call.capacity) if call.layout == MASKED else (call.capacity,)
        plan.word_dtype = None if plan.is_small else call.scale_dtype
        plan.clears_tail = clears_tail and call.capacity >= 0
        plan.finishes = plan.clears_tail or plan.word_dtype is not None
        return plan

    def scales_of(self, call: Call, scales: Tensor | None) -> Tensor | None:
        """As plans want to see them: as the engine reads them."""
        return None if scales is None else self._read_scales(call, scales)

    def is_small(self, call: Call) -> bool:
        """Whether the kernels for small batches do it: the cpu engine has none."""
        return call.is_small and self.has_small

    def _fit(self, plan: Plan, x: Tensor, scales: Tensor | None, topk_idx: Tensor | None) -> None:
        """What the engine adds to the plan of a dispatch; `topk_idx`: of a first one."""

    def _fit_sum(self, plan: Plan, y: Tensor, bias: Tensor | None, *, has_side: bool) -> None:
        """What the engine adds to the plan of a combine."""

    def _dispatch_spec(self, call: Call, x: Tensor, scales: Tensor | None, quantize: int, **fields: Any) -> Any:
        code, is_small = DTYPE_CODES.get(x.dtype, BYTES), self.is_small(call)
        if scales is not None:
            fields |= {"scale_row_bytes": row_bytes(scales), "scale_stride": column_bytes(scales)}
            fields["scales_are_fp32"] = scales.dtype == torch.float32
        if call.tells_counts and not fields.get("cached", False):
            fields["tells_counts"] = True
        if is_small and call.scale_dtype is not None and (quantize or scales is not None):
            fields["scale_word_bytes"] = call.scale_dtype.itemsize
        return _load.native().DispatchSpec(
            **self._common(call, x.shape[1] if code != BYTES else self.hidden), dtype=code, is_small=is_small,
            row_bytes=x.shape[1] * x.element_size(), quantize=quantize, zeroes_holes=call.zero_holes, **fields,
        )  # fmt: skip

    def _common(self, call: Call, hidden: int) -> dict[str, Any]:
        """What the specs of both calls have."""
        return {
            "layout": call.layout,
            "alignment": call.alignment,
            "capacity": call.capacity,
            "max_tokens": call.max_tokens,
            "hidden": hidden,
            "num_blocks": call.num_sms,
            "object": self.numbers[call.window],
            "timeout_ns": int(call.deadline_s * 1e9),
            "receives": not call.is_staged,
        }

    def sizes_len(self, layout: int) -> int:
        """Of counts, offsets and the number of rows together."""
        return self.num_local_experts + (self.num_ranks if layout == RANK_MAJOR else self.num_local_experts) + 2

    @abstractmethod
    def _first(
        self,
        plan: Plan,
        stream: int,
        x: Tensor,
        scales: Tensor | None,
        topk_idx: Tensor,
        weights: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Handle]:
        """The native call of a first dispatch: rows, scales, and the handle."""

    @abstractmethod
    def _again(
        self, plan: Plan, stream: int, x: Tensor, scales: Tensor | None, handle: Handle
    ) -> tuple[Tensor, Tensor | None, None]:
        """That of a repeated one."""

    @abstractmethod
    def _sum(self, plan: Plan, stream: int, *tensors: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        """That of a combine, of y, handle, bias, side, `out` and the owner's weights, the last two if given: y [T, H],
        which is `out` if there is one, side [T, K], and where the engine wrote."""

    @abstractmethod
    def _read_scales(self, call: Call, scales: Tensor) -> Tensor:
        """Scales where the engine reads them; column-major ones as they are where it takes them."""
