"""Rows that are already quantised, or any opaque bytes with side data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Quantized", "no_rows", "typed"]


@dataclass(frozen=True, eq=False, init=False)  # the constructor that dataclass makes takes twice as long
class Quantized:
    """Data and the scales that belong to it. Given to `dispatch` it passes through unchanged; `dispatch(quantize=...)`
    returns one.

    Args:
        data: [T, B], any dtype of one byte; B a multiple of 16. FP8 data is `torch.float8_e4m3fn`. NVFP4 passes too:
            `torch.float4_e2m1fn_x2` [T, H / 2] with `torch.float8_e4m3fn` scales [T, H / 16].
        scales: [T, S] of any dtype, or None. FP8: one per 128 values along the row (the last group may be shorter),
            fp32, or `torch.float8_e8m0fnu` for UE8M0.

    As a result the leading dimension is N (rank_major, expert_major) or [L, C] (masked). With
    `scale_layout="column_major"` scales have strides (1, ld), masked (ld * W, 1, ld), W columns, with ld = N or C
    rounded up so that a column is a multiple of 16 bytes; what lies in a column beyond N is undefined. Scales of one
    byte (UE8M0) are int32 words there, W = ceil(S / 4): four in a row, the first in the lowest byte, the last word
    filled up with 0.
    """

    data: torch.Tensor
    scales: torch.Tensor | None

    def __init__(self, data: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        fields = self.__dict__
        fields["data"], fields["scales"] = data, scales

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        """`data, scales = quantized`."""
        return iter((self.data, self.scales))

    def __repr__(self) -> str:
        scales = "None" if self.scales is None else f"{list(self.scales.shape)} {self.scales.dtype}"
        return f"weft.Quantized(data={list(self.data.shape)} {self.data.dtype}, scales={scales})"


def no_rows(x: Tensor | Quantized) -> Tensor | Quantized:
    """Rows of the same kind, but none; what is no tensor is left for `dispatch` to refuse."""
    if isinstance(x, Quantized):
        return Quantized(_none_of(x.data), None if x.scales is None else _none_of(x.scales))
    return _none_of(x)


def _none_of(rows: Tensor) -> Tensor:
    return rows[:0] if isinstance(rows, Tensor) and rows.dim() > 0 else rows


def typed(
    rows: Tensor, scales: Tensor, x: Tensor | Quantized, quantize: int, scale_dtype: torch.dtype | None
) -> Tensor | Quantized:
    """What the native module gave, in the dtypes that the caller of dispatch knows; `scale_dtype`: of column-major
    scales, which have theirs."""
    if scale_dtype is not None:
        return Quantized(rows.view(x.data.dtype if isinstance(x, Quantized) else torch.float8_e4m3fn), scales)
    if isinstance(x, Quantized):
        out_scales = None if x.scales is None else _view(scales, x.scales.dtype)
        if x.scales is not None and x.scales.shape[1] == 0:  # nothing was sent
            out_scales = x.scales.new_empty((*rows.shape[:-1], 0))
        return Quantized(_view(rows, x.data.dtype), out_scales)
    if quantize:
        return Quantized(rows.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu) if quantize == 2 else scales)
    return rows


def _view(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values if values.dtype == dtype else values.view(dtype)
