"""Column-major scales: as grouped GEMMs read them with TMA, each column at a multiple of 16 bytes."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["by_column", "empty_by_column", "word_dtype", "words"]

_COLUMN_BYTES = 16  # TMA: strides and addresses are multiples of it


def word_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of column-major scales; of one byte (UE8M0) four make an int32."""
    return torch.int32 if dtype.itemsize == 1 else dtype


def words(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Row-major scales [..., N, S], fp32 or bytes, as words [..., N, W] of `dtype`; a last word is filled up with 0."""
    missing = -scales.shape[-1] * scales.element_size() % dtype.itemsize
    if missing:
        scales = torch.nn.functional.pad(scales, (0, missing))
    return scales.view(dtype)


def empty_by_column(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised, for the words [..., N, W] of row-major scales: strides (ld * W, 1, ld)."""
    num_words = -(-scales.shape[-1] * scales.element_size() // dtype.itemsize)
    lead, step = scales.shape[:-2], _COLUMN_BYTES // dtype.itemsize
    stride = (scales.shape[-2] + step - 1) // step * step
    memory = torch.empty((*lead, num_words * stride), dtype=dtype, device=scales.device)  # padding of each column
    return memory.as_strided((*scales.shape[:-1], num_words), (*[num_words * stride] * len(lead), 1, stride))


def by_column(scales: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A column-major copy of row-major scales as words of `dtype`. None: as they are."""
    return scales if dtype is None else empty_by_column(scales, dtype).copy_(words(scales, dtype))
