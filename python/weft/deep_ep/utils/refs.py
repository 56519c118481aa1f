"""What V2's dispatch and combine give, by torch.distributed alone: oracles of tests, over the default group.

`combine` adds in the order that DeepEP's own tests expect: within a rank by lane, ranks by their last lane, bias
first.
"""
# check: allow-in-file function-size: parameters as in DeepEP

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["combine", "dispatch", "generate_pre_combine_data", "ordered_accumulate"]

_PERIOD = 251  # of the values: bf16 has them exactly


def _gathered(values: Tensor, max_tokens: int) -> Tensor:
    """[T, ...] of every rank, T up to max_tokens -> [R, max_tokens, ...]."""
    as_bytes = values.contiguous().view(torch.uint8) if values.dim() == 2 else values
    padded = torch.zeros((max_tokens, as_bytes.shape[1]), dtype=torch.uint8, device=values.device)
    padded[: len(values)] = as_bytes
    found = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(found, padded)
    return torch.stack(found).view(values.dtype)


def dispatch(
    x: Any, topk_idx: Tensor, topk_weights: Tensor, num_max_tokens_per_rank: int, num_experts: int
) -> tuple[Any, Tensor, Tensor, Tensor, list[int]]:
    """(rows, local ids, weights, source rank * M + token of each row int32, rows of each source), by source and token.
    Collective."""
    rank, num_ranks, most = dist.get_rank(), dist.get_world_size(), num_max_tokens_per_rank
    num_local = num_experts // num_ranks
    count = torch.full((1, 1), len(topk_idx), dtype=torch.int64, device=topk_idx.device)
    counts = _gathered(count, 1).view(-1)
    ids = _gathered(topk_idx, most) - rank * num_local
    is_token = torch.arange(most, dtype=torch.int64, device=ids.device) < counts[:, None]
    here = (ids >= 0) & (ids < num_local) & is_token[..., None]
    goes = here.any(-1)
    local = torch.where(here, ids, -1)[goes]
    parts = [_gathered(each, most)[goes] for each in (x if isinstance(x, tuple) else (x,))]
    sources = goes.view(-1).nonzero()[:, 0].to(torch.int32)
    weights = _gathered(topk_weights, most)[goes]
    return tuple(parts) if isinstance(x, tuple) else parts[0], local, weights, sources, goes.sum(1).tolist()


def generate_pre_combine_data(
    src_token_global_idx: Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> Tensor:
    """bf16 [n, K, H]: what pick k of a token gives, equal on all ranks."""
    tokens = src_token_global_idx.to(torch.int64)[:, None, None]
    picks = torch.arange(num_topk, dtype=torch.int64, device=tokens.device)[None, :, None]
    columns = torch.arange(hidden, dtype=torch.int64, device=tokens.device)
    mixed = tokens * 7919 + picks * 104729 + columns * 31 + (tokens + 1) * (picks + 3) * 17
    return ((mixed % _PERIOD - _PERIOD // 2).to(torch.float32) / 64).to(torch.bfloat16)


def ordered_accumulate(y: Tensor) -> Tensor:
    """bf16 [n, K, H] -> [n, H]: lanes added in order in fp32 from 0, rounded once."""
    total = torch.zeros((y.shape[0], y.shape[2]), dtype=torch.float32, device=y.device)
    for lane in range(y.shape[1]):
        total = total + y[:, lane].to(torch.float32)
    return total.to(torch.bfloat16)


def combine(
    y: Tensor,
    topk_idx: Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: Any = None,
    reduce_in_rank: bool = True,
    reduce_in_scaleup: bool = False,
) -> Tensor:
    """bf16 [T, K, H] of a token's picks -> [T, H]. `reduce_in_rank`: first within a rank, counted at its last lane.

    `reduce_in_scaleup`: then within a node, likewise.
    """
    num_local = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    ranks = torch.where(topk_idx >= 0, topk_idx // num_local, -1)
    parts = torch.where((ranks >= 0)[..., None], y, 0.0)
    if reduce_in_rank:
        parts = _reduced(parts, ranks)
    if reduce_in_scaleup:
        parts = _reduced(parts, torch.where(ranks >= 0, ranks // num_scaleup_ranks, -1))
    total = torch.zeros((len(y), y.shape[2]), dtype=torch.float32, device=y.device)
    for each in bias if isinstance(bias, (tuple, list)) else (bias,):
        total = total if each is None else total + each.to(torch.float32)
    for lane in range(y.shape[1]):
        total = total + parts[:, lane].to(torch.float32)
    return total.to(torch.bfloat16)


def _reduced(parts: Tensor, owners: Tensor) -> Tensor:
    """[T, K, H], of lanes [T, K] of one owner the sum, at its last lane; else 0."""
    sums = torch.zeros_like(parts)
    for lane in range(parts.shape[1]):
        mine = owners == owners[:, lane : lane + 1]
        is_last = ~mine[:, lane + 1 :].any(1)
        total = ordered_accumulate(torch.where(mine[..., None], parts, 0.0))
        sums[:, lane] = torch.where(is_last[:, None], total, 0.0)
    return sums
