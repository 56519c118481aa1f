"""Rows by expert, a row a pick: floats of their tokens' owners that travel beside them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["lane_of", "words_of"]


def words_of(weights: Tensor | None) -> Tensor | None:
    """[T, K] floats as the int32 words that travel beside rows."""
    return None if weights is None else weights.to(torch.float32).contiguous().view(torch.int32)


def lane_of(words: Tensor, pick: Tensor) -> Tensor:
    """Of the K words [..., K] beside each row that of its own pick, [...] as fp32; 0 where no row is."""
    lane = pick.clamp(min=0).to(torch.int64)
    found = words.gather(-1, lane[..., None]).squeeze(-1).view(torch.float32)
    return torch.where(pick >= 0, found, 0.0)
