"""Arithmetic of DeepEP's tests: differences, sizes, FP8 casts, scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "align",
    "aligned",
    "as_bytes",
    "calc_diff",
    "ceil_div",
    "count_bytes",
    "create_grouped_scores",
    "hash_tensor",
    "hash_tensors",
    "inplace_unique",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "safe_div",
]

_GROUP = 128
_MOST = 448.0
_LEAST_AMAX = 1e-4


def as_bytes(values: Tensor) -> Tensor:
    """uint8, the last dimension in bytes. `contiguous()` alone keeps any stride of a dimension of one element."""
    values = values.contiguous()
    if values.stride(-1) != 1:
        values = values.clone(memory_format=torch.contiguous_format)
    return values.view(torch.uint8)


def calc_diff(x: Tensor, y: Tensor) -> float:
    """1 - 2 sum(a b) / sum(a a + b b) in fp64, with a = x + 1 and b = y + 1: 0 where they are equal."""
    a, b = x.to(torch.float64) + 1, y.to(torch.float64) + 1
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def align(a: int, b: int) -> int:
    """The next multiple of b from a."""
    return -(-a // b) * b


def aligned(counts: list[int], multiple: int) -> list[int]:
    """The next multiple from each."""
    return counts if multiple == 1 else [-(-each // multiple) * multiple for each in counts]


def safe_div(a: float, b: float) -> float:
    """a / b; 0 where b is 0."""
    return a / b if b else 0


def count_bytes(*tensors: Any) -> int:
    """Of tensors, and of those in tuples and lists; None counts 0."""
    total = 0
    for each in tensors:
        if isinstance(each, (tuple, list)):
            total += count_bytes(*each)
        elif each is not None:
            total += each.numel() * each.element_size()
    return total


def hash_tensor(t: Tensor) -> int:
    """The sum of its int32 words."""
    return int(as_bytes(t).view(torch.int32).sum().item())


def hash_tensors(*tensors: Any) -> int:
    """Of several, each by `hash_tensor`, exclusive-or; None counts 0."""
    total = 0
    for each in tensors:
        if isinstance(each, (tuple, list)):
            total ^= hash_tensors(*each)
        elif each is not None:
            total ^= hash_tensor(each)
    return total


def per_token_cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[m, n] -> (e4m3 [m, n], fp32 [m, ceil(n / 128)]): scale = amax / 448 of 128 values, amax at least 1e-4."""
    num_rows, num_columns = x.shape
    num_groups = ceil_div(num_columns, _GROUP)
    padded = torch.nn.functional.pad(x, (0, num_groups * _GROUP - num_columns))
    groups = padded.view(num_rows, num_groups, _GROUP).to(torch.float32)
    most = groups.abs().amax(dim=2).clamp(min=_LEAST_AMAX)
    largest = torch.full_like(most, _MOST)  # a number and a tensor divide by way of a rounded reciprocal
    data = (groups * (largest / most)[..., None]).to(torch.float8_e4m3fn)
    return data.view(num_rows, num_groups * _GROUP)[:, :num_columns].contiguous(), most / largest


def per_token_cast_back(x_fp8: Tensor, x_scales: Tensor) -> Tensor:
    """(e4m3 [m, n], scales fp32 or four exponents in an int32) -> bf16 [m, n]."""
    num_rows, num_columns = x_fp8.shape
    if num_rows == 0:
        return x_fp8.to(torch.bfloat16)
    if x_scales.dtype == torch.int32:
        exponents = as_bytes(x_scales).to(torch.int32)
        x_scales = (exponents << 23).view(torch.float32)
    num_groups = ceil_div(num_columns, _GROUP)
    values = torch.nn.functional.pad(x_fp8.to(torch.float32), (0, num_groups * _GROUP - num_columns))
    scaled = values.view(num_rows, num_groups, _GROUP) * x_scales.reshape(num_rows, -1)[:, :num_groups, None]
    return scaled.to(torch.bfloat16).view(num_rows, num_groups * _GROUP)[:, :num_columns].contiguous()


def inplace_unique(x: Tensor, num_slots: int) -> None:
    """Each row of int [m, n] keeps its different values of 0 to num_slots - 1, in front; the rest becomes -1."""
    seen = torch.zeros((x.shape[0], num_slots + 1), dtype=torch.bool, device=x.device)
    seen.scatter_(1, torch.where((x >= 0) & (x < num_slots), x, num_slots).to(torch.int64), True)
    order = torch.arange(num_slots, dtype=x.dtype, device=x.device)
    values = torch.where(seen[:, :num_slots], order, -1).sort(dim=1, descending=True).values
    width = min(num_slots, x.shape[1])
    x.fill_(-1)
    x[:, :width] = values[:, :width]


def create_grouped_scores(scores: Tensor, group_idx: Tensor, num_groups: int) -> Tensor:
    """[m, E] scores, 0 outside of the groups of experts that `group_idx` [m, g] names."""
    num_tokens, num_experts = scores.shape
    chosen = torch.zeros((num_tokens, num_groups), dtype=torch.bool, device=scores.device)
    chosen.scatter_(1, group_idx, True)
    mask = chosen[:, :, None].expand(num_tokens, num_groups, num_experts // num_groups)
    return scores * mask.reshape(scores.shape)
