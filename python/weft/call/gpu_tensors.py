"""Tensors as the nvlink engine reads them and gives them back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.call.spec import RANK_MAJOR, Call
from weft.limits import ROW_MULTIPLE_BYTES

__all__ = ["as_tensor", "column_bytes", "dense", "first_rows", "from_dlpack", "is_by_column", "row_bytes"]

from_dlpack = torch._C._from_dlpack


def row_bytes(rows: Tensor | None) -> int:
    """Of [N, columns]; 0 if there are none."""
    return 0 if rows is None else rows.shape[1] * rows.element_size()


def first_rows(tensor: Tensor, num_rows: int, lead: tuple[int, ...]) -> Tensor:
    """Of a tensor with `lead` rows a view, or a copy where much more memory than that would be kept."""
    if tensor.shape[:1] != lead:
        return tensor  # scales or ids that there are none of
    first = tensor.narrow(0, 0, num_rows)
    return first if 2 * num_rows >= tensor.shape[0] else first.clone()


def is_by_column(call: Call, scales: Tensor) -> bool:
    """Column-major ones that the kernel reads as they are, word by word, words of four bytes."""
    lie_so = not scales.is_contiguous() and scales.element_size() == 4 and scales.stride(0) == 1
    return lie_so and (call.is_small or call.layout == RANK_MAJOR)


def column_bytes(scales: Tensor) -> int:
    """From a column to the next, of column-major scales; 0: they lie row by row."""
    return 0 if scales.is_contiguous() else scales.stride(1) * scales.element_size()


def dense(tensor: Tensor) -> Tensor:
    """Contiguous and aligned for bulk copies, with the signs of a negated view."""
    if tensor.is_neg():
        tensor = tensor.detach().resolve_neg()
    if tensor.is_contiguous() and tensor.data_ptr() % ROW_MULTIPLE_BYTES == 0:
        return tensor
    tensor = tensor.detach().contiguous()
    return tensor if tensor.data_ptr() % ROW_MULTIPLE_BYTES == 0 else tensor.clone()


def as_tensor(array: Any) -> Tensor:
    """What the native module has made, without a copy."""
    # Versions of nanobind give a capsule, or an object that makes one; torch.from_dlpack takes longer to see which.
    is_capsule = type(array).__name__ == "PyCapsule"
    tensor: Tensor = torch._C._from_dlpack(array if is_capsule else array.__dlpack__())
    return tensor
