"""`Plan`: what calls of equal types, shapes and options have in common, and `Planner`, which makes them.

A plan has the arguments of a native call, where its results go, and how they become those of the user. It is made once
and found by a key (weft/call/eager.py, weft/call/ops.py); `Runner.run` makes the call.
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
from weft.call.spec import BYTES, DTYPE_CODES, RANK_MAJOR, Call
from weft.call.tensors import address
from weft.call.window import Window
from weft.handle import Handle

__all__ = ["Memory", "Plan", "Planner"]

_MOST_PLANS = 256  # of one ExpertParallel


class Memory(NamedTuple):
    """Ordinary tensors for the rows of a result: [..., N, columns]."""

    columns: int
    dtype: torch.dtype
    by_column: bool = False  # scales that lie so


@dataclass(slots=True, eq=False)
class Plan:
    """Of calls that share a key. A staged one runs it twice: the first time it sends, then it receives."""

    what: str  # "dispatch" or "combine"
    call: Call
    window: Window
    args: Any  # of the native call, which fills in addresses and what else differs from call to call
    work: Callable[..., Any]  # method of the Runner: (runner, plan, stream, *tensors)
    hidden: int  # columns of the result
    num_tokens: int = 0  # of this rank, in the call that is made
    quantize: int = 0
    names: tuple[str, ...] = ()  # of the tensors, for refusals; none in a backward
    has_scope: bool = False  # its native call needs more around it than a stream
    parts: tuple[Plan, ...] = ()  # of rows that travel in pieces of at most `hidden` columns
    # Of a dispatch:
    waits: bool = False  # the host waits on the GPU for the counts of the peers
    lead: tuple[int, ...] = ()  # of the rows: with a capacity; of small batches those there is memory for
    memory: dict[int, Any] = field(default_factory=dict)  # of small batches: what a first one takes from the heap, by T
    rows: tuple[Memory, ...] = ()  # data, and scales if any: where the heap has none
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
    back: Plan | None = None  # of its backward


class Planner(ABC):
    """Makes the plans of one ExpertParallel: the part of a Runner that knows the arguments of native calls."""

    has_small = False  # kernels for small batches
    num_experts: int
    num_local_experts: int
    num_ranks: int
    top_k: int
    hidden: int
    windows: list[Window]
    numbers: list[int]
    overflow: Tensor
    plans: dict[Any, Plan]
    calls: dict[tuple[Any, ...], Call]  # by value

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
        args = self._dispatch_args(call, x, scales, quantize)
        args.overflow, args.topk_is_int64 = address(self.overflow), topk_idx.dtype == torch.int64
        args.makes_send_plan = not self.is_small(call)
        plan = self._dispatch_plan(call, args, type(self)._first, x, quantize, names, clears_tail)
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
        args = self._dispatch_args(call, x, scales, quantize)
        args.cached, args.overflow = True, address(self.overflow) if call.counts_dropped else 0
        self._give_sizes(args, 0, self.sizes_len(call.layout))
        plan = self._dispatch_plan(call, args, type(self)._again, x, quantize, names, clears_tail)
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
        args: Any = _load.native().CombineArgs(
            *_common(call, hidden), 0, 0, DTYPE_CODES[y.dtype], 0, 0, 0, 0, call.wire != 0
        )
        args.object, args.has_side = self.numbers[call.window], has_side
        if bias is not None:
            args.bias_is_2d, args.bias_is_fp32 = bias.dim() == 2, bias.dtype == torch.float32
        plan = Plan("combine", call, self.windows[call.window], args, type(self)._sum, hidden, names=names)
        plan.weighted = weighted and call.layout != RANK_MAJOR
        plan.has_scope = call.is_staged
        self._fit_sum(plan, y, bias, has_side=has_side)
        return plan

    def _dispatch_plan(
        self,
        call: Call,
        args: Any,
        work: Callable[..., Any],
        x: Tensor,
        quantize: int,
        names: tuple[str, ...],
        clears_tail: bool,
    ) -> Plan:
        window = self.windows[call.window]
        plan = Plan("dispatch", call, window, args, work, x.shape[1], quantize=quantize, names=names)
        plan.has_scope = call.is_staged
        plan.word_dtype = None if self.is_small(call) else call.scale_dtype
        plan.clears_tail = clears_tail and call.capacity >= 0
        plan.finishes = plan.clears_tail or plan.word_dtype is not None
        return plan

    def scales_of(self, call: Call, scales: Tensor | None) -> Tensor | None:
        """As plans want to see them: as the engine reads them."""
        return None if scales is None else self._read_scales(call, scales)

    def is_small(self, call: Call) -> bool:
        """Whether the kernels for small batches do it: the cpu engine has none."""
        return call.is_small and self.has_small

    def _fit(self, plan: Plan, x: Tensor, scales: Tensor | None, topk_idx: Tensor | None) -> None:  # noqa: B027
        """What the engine adds to the plan of a dispatch; `topk_idx`: of a first one."""

    def _fit_sum(self, plan: Plan, y: Tensor, bias: Tensor | None, *, has_side: bool) -> None:  # noqa: B027
        """What the engine adds to the plan of a combine."""

    def _dispatch_args(self, call: Call, x: Tensor, scales: Tensor | None, quantize: int) -> Any:
        code = DTYPE_CODES.get(x.dtype, BYTES)
        hidden = x.shape[1] if code != BYTES else self.hidden
        args: Any = _load.native().DispatchArgs(
            *_common(call, hidden), 0, x.shape[1] * x.element_size(), code, quantize
        )
        args.object, args.is_small = self.numbers[call.window], self.is_small(call)
        if scales is not None:
            args.scale_row_bytes, args.scale_stride = row_bytes(scales), column_bytes(scales)
            args.scales_are_fp32 = scales.dtype == torch.float32
        if not call.zero_holes:
            args.zeroes_holes = False
        if self.is_small(call) and call.scale_dtype is not None and (quantize or scales is not None):
            args.scale_word_bytes = call.scale_dtype.itemsize
        return args

    def _give_sizes(self, args: Any, counts: int, sizes_len: int) -> None:
        args.counts = counts
        args.offsets, args.num_rows_out = counts + 4 * self.num_local_experts, counts + 4 * (sizes_len - 1)

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
        """That of a combine, of y, handle, bias, side and `out` if given: y [T, H], which is `out` if there is one,
        side [T, K], and where the engine wrote."""

    @abstractmethod
    def _read_scales(self, call: Call, scales: Tensor) -> Tensor:
        """Scales where the engine reads them; column-major ones as they are where it takes them."""


def _common(call: Call, hidden: int) -> tuple[Any, ...]:
    """The first arguments of each native call."""
    return (
        call.layout, call.alignment, call.capacity, call.max_tokens, hidden, 0, call.num_sms,
        int(call.deadline_s * 1e9), 0, call.is_small,
    )  # fmt: skip
