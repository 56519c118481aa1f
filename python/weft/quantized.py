"""Rows that are already quantised, or any opaque bytes with side data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Quantized"]


@dataclass(frozen=True, eq=False)
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
    scales: torch.Tensor | None = None

    def __repr__(self) -> str:
        scales = "None" if self.scales is None else f"{list(self.scales.shape)} {self.scales.dtype}"
        return f"weft.Quantized(data={list(self.data.shape)} {self.data.dtype}, scales={scales})"
