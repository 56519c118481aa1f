"""Column-major scales: as grouped GEMMs read them with TMA, each column at a multiple of 16 bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["by_column", "column_rows", "empty_by_column", "first_by_column", "word_dtype", "words"]

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


def empty_by_column(lead: Sequence[int], num_bytes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised, for `num_bytes` of scales a row of [*lead], as words of `dtype`: [..., N, W] with strides
    (ld * W, 1, ld)."""
    num_words, ld = -(-num_bytes // dtype.itemsize), column_rows(lead[-1], dtype)
    memory = torch.empty((*lead[:-1], num_words * ld), dtype=dtype, device=device)  # padding of each column
    return memory.as_strided((*lead, num_words), (*[num_words * ld] * (len(lead) - 1), 1, ld))


def column_rows(num_rows: int, dtype: torch.dtype) -> int:
    """From a column to the next."""
    step = _COLUMN_BYTES // dtype.itemsize
    return (num_rows + step - 1) // step * step


def first_by_column(scales: Tensor, num_rows: int) -> Tensor:
    """The first rows of memory made for more, in which they lie as if it was made for them; a copy where much more
    memory than that would be kept."""
    num_words, dtype = scales.shape[-1], scales.dtype
    first = scales.as_strided((num_rows, num_words), (1, column_rows(num_rows, dtype)))
    if 2 * num_rows >= scales.shape[0]:
        return first
    return empty_by_column((num_rows,), num_words * dtype.itemsize, dtype, scales.device).copy_(first)


def by_column(scales: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A column-major copy of row-major scales as words of `dtype`. None: as they are."""
    if dtype is None:
        return scales
    num_bytes = scales.shape[-1] * scales.element_size()
    return empty_by_column(scales.shape[:-1], num_bytes, dtype, scales.device).copy_(words(scales, dtype))
