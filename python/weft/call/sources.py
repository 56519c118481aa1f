"""Who sent what: from the receive plan of a handle to a table by row."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft import _load
from weft.call.spec import RANK_MAJOR
from weft.errors import InternalError

__all__ = ["Sources", "side_of", "sources_of"]


class Sources(NamedTuple):
    """Where the rows of a dispatch came from: int32 tensors of the rows' shape without its last dimension, [N] or
    [L, C]; -1 where there is no row.

    Attributes:
        rank: that sent it.
        token: its number on that rank.
        pick: k of the token's pick; None in rank_major, where a row is a token.
    """

    rank: Tensor
    token: Tensor
    pick: Tensor | None


def sources_of(handle: Any, num_ranks: int, top_k: int, *, is_on_device: bool) -> Sources:
    """Of a weft.Handle. Local; on a GPU some kernels on the current stream, and no host wait."""
    entries = _on_device(handle, num_ranks, top_k) if is_on_device else _on_host(handle, num_ranks, top_k)
    rank, token, rows = entries
    shape, device = handle.rows_shape, handle.sizes.device
    num_rows = math.prod(shape)
    place = torch.where((rows >= 0) & (rows < num_rows), rows, num_rows).to(torch.int64).reshape(-1)

    def by_row(values: Tensor) -> Tensor:
        found = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=rows.device)
        found[place] = values.to(torch.int32).expand(rows.shape).reshape(-1)
        return found[:num_rows].view(shape).to(device)

    lanes = torch.arange(rows.shape[1], dtype=torch.int32, device=rows.device)
    pick = None if handle.call.layout == RANK_MAJOR else by_row(lanes[None])
    return Sources(by_row(rank[:, None]), by_row(token[:, None]), pick)


def _on_host(handle: Any, num_ranks: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rank and token of each (token, source) received, [M], and its rows [M, 1 or K]; -1: none."""
    plan, native = handle.recv_plan, _load.native()
    num_meta_rows = int(plan[native.recv_plan_num_meta_rows])
    at_offsets, first, at_rows = native.recv_plan_places(num_meta_rows, top_k, num_ranks)
    offsets = plan[at_offsets + 1 : at_offsets + 1 + num_ranks].contiguous()
    token = plan[first : first + num_meta_rows]
    number = torch.arange(num_meta_rows, dtype=torch.int32, device=plan.device)
    rank = torch.searchsorted(offsets, number, right=True, out_int32=True)
    if handle.call.layout == RANK_MAJOR:
        return rank, token, number[:, None]
    return rank, token, plan[at_rows : at_rows + num_meta_rows * top_k].view(num_meta_rows, top_k)


def _on_device(handle: Any, num_ranks: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `_on_host`, of every token that a source may have: the plan has places for as many as the window."""
    plan, max_tokens = handle.recv_plan, handle.max_tokens
    width = 1 if handle.call.layout == RANK_MAJOR else top_k
    number = torch.arange(num_ranks * max_tokens, dtype=torch.int32, device=plan.device)
    rank, token = number // max(1, max_tokens), number % max(1, max_tokens)
    places = plan[_load.native().gpu_plan_header :].view(num_ranks, -1, width)
    rows = places[:, :max_tokens].reshape(len(number), width)
    return rank, token, torch.where((token < plan[:num_ranks][rank.to(torch.int64)])[:, None], rows, -1)


def side_of(words: Tensor, topk_idx: Tensor | None, pick: Tensor | None) -> Tensor:
    """Of the K words beside each row those of picks here, 0 elsewhere: fp32 [N, K] by `topk_idx`, or by `pick`."""
    values = words.contiguous().view(torch.float32)
    if topk_idx is not None:
        return torch.where(topk_idx >= 0, values, 0.0)
    if pick is None:
        raise InternalError("rows by expert without their picks")
    mine = values.gather(-1, pick.clamp(min=0).to(torch.int64)[..., None]).squeeze(-1)
    return torch.where(pick >= 0, mine, 0.0)
