"""Scores of experts for tests: as even as chance makes them, or with more tokens for rank 0."""
# check: allow-in-file function-size: parameters as in DeepEP

from __future__ import annotations

import torch
from torch import Tensor

from weft.errors import InvalidArgument

__all__ = ["get_precise_scores", "get_unbalanced_scores", "get_weighted_scores"]


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float = 1.0, precise: bool = False
) -> Tensor:
    """fp32 [T, E], on the current GPU where there is one. The `num_topk` best of each row send `ratio` times as many
    tokens to rank 0 as to any other: precisely so, or by weights of chance.

    Raises:
        InvalidArgument: precise, and no number of ranks a token gives this ratio.
    """
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    if precise:
        return get_precise_scores(num_tokens, num_experts, num_ranks, num_topk, ratio, device)
    return get_weighted_scores(num_tokens, num_experts, num_ranks, ratio, device)


def get_weighted_scores(
    num_tokens: int, num_experts: int, num_ranks: int, ratio: float, device: torch.device
) -> Tensor:
    """Random; experts of rank 0 are `ratio` times as likely to be the first choice."""
    scores = torch.rand((num_tokens, num_experts), dtype=torch.float32, device=device)
    if ratio != 1:
        scores[:, : num_experts // num_ranks] **= 1 / ratio
    return scores


def get_precise_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, device: torch.device
) -> Tensor:
    """Every token goes to equally many ranks; how often rank 0 is among them gives the ratio, the others take turns."""
    num_local = num_experts // num_ranks
    least = max(1, -(-num_topk // num_local))
    most = min(num_topk, num_ranks, int((num_ranks - 1) / ratio) + 1)
    if least > most:
        raise InvalidArgument(
            f"ratio is {ratio} with {num_topk} picks of {num_experts} experts on {num_ranks} ranks; a token would go "
            f"to at least {least} and at most {most} ranks"
        )
    tokens = torch.arange(num_tokens, dtype=torch.float64, device=device)
    share = ratio * most / (num_ranks - 1 + ratio)  # of tokens that go to rank 0
    start = torch.rand(2, dtype=torch.float64, device=device)
    at = tokens * share + start[0]
    has_first = ((at + share).floor() > at.floor()).to(torch.int64)
    num_others = most - has_first
    begin = num_others.cumsum(0) - num_others + (start[1] * num_ranks).to(torch.int64)
    turns = torch.arange(most, dtype=torch.int64, device=device)
    chosen = torch.zeros((num_tokens, num_ranks + 1), dtype=torch.bool, device=device)
    if num_ranks > 1:
        others = 1 + (begin[:, None] + turns) % (num_ranks - 1)
        chosen.scatter_(1, torch.where(turns < num_others[:, None], others, num_ranks), True)
    chosen[:, 0] = has_first.to(torch.bool)
    chosen = chosen[:, :num_ranks]
    number = chosen.cumsum(1)  # of the rank among those of its token
    quota = num_topk // most + (number <= num_topk % most).to(torch.int64)
    quota = torch.where(chosen, quota, 0)
    scores = torch.rand((num_tokens, num_ranks, num_local), dtype=torch.float32, device=device)
    place = scores.argsort(dim=2, descending=True).argsort(dim=2)
    return (scores + (place < quota[:, :, None])).view(num_tokens, num_experts)
