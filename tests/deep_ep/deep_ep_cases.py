"""Inputs of all ranks, equal on each: what a rank passes, and what the reference is given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Data:
    """Entries by rank; E experts, K picks a token, H values a row."""

    num_ranks: int
    num_experts: int
    xs: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]

    @property
    def num_local(self) -> int:
        return self.num_experts // self.num_ranks


def make(
    num_ranks: int,
    *,
    num_local: int = 3,
    top_k: int = 4,
    hidden: int = 64,
    tokens: int = 13,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    duplicates: bool = False,
    even: bool = False,
) -> Data:
    """T differs between ranks unless `even`; some picks are -1; `duplicates`: a token may pick an expert twice."""
    generator = torch.Generator(device="cpu").manual_seed(1000 * num_ranks + seed)
    num_experts = num_ranks * num_local
    xs, ids, weights = [], [], []
    for rank in range(num_ranks):
        count = tokens if even else max(0, tokens - 5 * rank)
        x = torch.randn((count, hidden), generator=generator, dtype=torch.float32, device="cpu")
        if duplicates or num_experts < top_k:
            picked = torch.randint(num_experts, (count, top_k), generator=generator, dtype=torch.int64, device="cpu")
        else:
            scores = torch.rand((count, num_experts), generator=generator, dtype=torch.float32, device="cpu")
            picked = scores.topk(top_k, dim=1).indices
        absent = torch.rand((count, top_k), generator=generator, dtype=torch.float32, device="cpu") < 0.15
        xs.append(x.to(dtype))
        ids.append(torch.where(absent, -1, picked))
        weights.append(torch.rand((count, top_k), generator=generator, dtype=torch.float32, device="cpu"))
    return Data(num_ranks, num_experts, xs, ids, weights)
