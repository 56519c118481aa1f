"""`Call`: what is equal on all ranks in a call, as the native module wants it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = [
    "BYTES",
    "DTYPE_CODES",
    "EXPERT_MAJOR",
    "LEAST_COLUMNS",
    "MASKED",
    "QUANTIZE_CODES",
    "RANK_MAJOR",
    "WIRE_CODES",
    "Call",
    "call_of_numbers",
    "numbers_in_backward",
    "rows_shape",
]

DTYPE_CODES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
QUANTIZE_CODES = {None: 0, "fp8": 1, "fp8_ue8m0": 2, "fp8_pow2": 3}
WIRE_CODES = {None: 0, "fp8": 1}
BYTES = 0
RANK_MAJOR, EXPERT_MAJOR, MASKED = range(3)
LEAST_COLUMNS = 4  # a row of 16 bytes in fp32: what a backward sends where only weights have gradients


@dataclass(frozen=True, eq=False)
class Call:
    """What is equal on all ranks in a call, as the native module wants it, and what is for this rank alone: deadline_s,
    scale_dtype, zero_holes, tells_counts."""

    layout: int
    alignment: int
    capacity: int  # -1: none
    max_tokens: int
    deadline_s: float
    window: int
    num_sms: int = 0  # 0: the engine's business
    wire: int = 0  # combine: code of the format on the wire, 0: that of the rows
    is_async: bool = False  # on a stream of the window
    is_small: bool = False  # by the kernels for small batches
    is_staged: bool = False  # small: send now, receive when `Half.receive` is called
    scale_dtype: torch.dtype | None = None  # dispatch: of column-major scales (weft/call/scales.py); None: row-major
    zero_holes: bool = True  # dispatch, expert_major
    counts_dropped: bool = True  # a dispatch that repeats a routing: picks that it drops go to `overflow`
    order: int = 0  # combine: code of the order of additions
    adds_side: bool = False  # combine: side values of all ranks that hold the token; never traced
    tells_counts: bool = False  # a first dispatch of exact sizes: the host learns the counts, too

    @property
    def numbers(self) -> list[int]:
        """What operators of torch.library take in place of this, beside the deadline."""
        return [
            self.layout, self.alignment, self.capacity, self.max_tokens, self.window, self.num_sms, self.wire,
            int(self.is_small), int(self.counts_dropped), self.order,
        ]  # fmt: skip

    def in_backward(self) -> Call:
        """The same for a backward: rows as they are, on the stream that autograd chose; what it drops is counted."""
        if self.wire or self.is_async or self.capacity >= 0 or self.order:
            return replace(self, wire=0, is_async=False, counts_dropped=False, order=0)
        return self


def call_of_numbers(numbers: Sequence[int], deadline_s: float) -> Call:
    """What `Call.numbers` was made of; options that no traced call has are at their defaults."""
    layout, alignment, capacity, max_tokens, window, num_sms, wire, is_small, counts_dropped, order = numbers
    return Call(
        layout, alignment, capacity, max_tokens, deadline_s, window, num_sms, wire, is_small=bool(is_small),
        counts_dropped=bool(counts_dropped), order=order,
    )  # fmt: skip


def numbers_in_backward(numbers: Sequence[int]) -> list[int]:
    """As `Call.in_backward`."""
    return [*numbers[:6], 0, numbers[7], 0, 0]


def rows_shape(weights: Tensor, layout: int) -> tuple[int, ...]:
    """Of the rows of a dispatch without their last dimension, (N,) or masked (L, C), by the weights received."""
    return tuple(weights.shape[: 2 if layout == MASKED else 1])
