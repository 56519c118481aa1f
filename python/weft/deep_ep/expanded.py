"""Rows by expert, a row a pick, with a name on each: where its pick came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from weft.deep_ep.rows import Form, along, send
from weft.deep_ep.utils.math import as_bytes
from weft.errors import InvalidArgument, InvalidState

if TYPE_CHECKING:
    from weft.expert_parallel import ExpertParallel
    from weft.handle import Dispatched, Handle

__all__ = ["CODE_BASE", "Expanded", "dispatch_expanded", "lanes_along", "names_of_picks", "numbers_of"]

CODE_BASE = 0x40000000  # bits of 2.0: names are finite positive floats
_MOST_NAMES = 0x7F7FFFFF - CODE_BASE


class Expanded(NamedTuple):
    """`x` in the form that was sent; `weights` fp32 [rows], 0 where no pick is, or None; `names` int64 [rows]: (source
    rank * M + token) * K + k, -1 where no pick is."""

    x: Any
    weights: Tensor | None
    names: Tensor
    dispatched: Dispatched


def names_of_picks(topk_idx: Tensor, rank: int, max_tokens: int, num_ranks: int) -> Tensor:
    """fp32 [T, K] whose bits name the pick: they travel in place of the weights.

    Raises:
        InvalidArgument: there are too many picks to be named.
    """
    num_tokens, top_k = topk_idx.shape
    if num_ranks * max_tokens * top_k > _MOST_NAMES:
        raise InvalidArgument(
            f"{num_ranks} ranks with up to {max_tokens} tokens of {top_k} picks; allowed are {_MOST_NAMES} picks in all"
        )
    first = rank * max_tokens * top_k + CODE_BASE
    numbers = torch.arange(first, first + num_tokens * top_k, dtype=torch.int32, device=topk_idx.device)
    return numbers.view(torch.float32).view(num_tokens, top_k)


def numbers_of(names: Tensor, is_pick: Tensor) -> Tensor:
    """int64: what `names_of_picks` numbered, -1 where no pick is."""
    return torch.where(is_pick, names.view(torch.int32).to(torch.int64) - CODE_BASE, -1)


def is_pick(r: Dispatched) -> Tensor:
    """bool [rows] of an expert_major result."""
    offsets, counts = r.offsets, r.num_tokens_per_expert
    rows = torch.arange(r.handle.rows_shape[0], dtype=torch.int32, device=counts.device)
    expert = torch.searchsorted(offsets[1:].contiguous(), rows, right=True).clamp(max=len(counts) - 1)
    return rows < (offsets[:-1] + counts)[expert]


def dispatch_expanded(
    ep: ExpertParallel, form: Form, topk_idx: Tensor, topk_weights: Tensor | None, *, max_tokens: int, **options: Any
) -> Expanded:
    """A dispatch with layout expert_major. `max_tokens`: M of the names; `options` as `ep.dispatch` has them."""
    names = names_of_picks(topk_idx, ep.comm.rank, max_tokens, ep.num_ranks)
    side = None if topk_weights is None else topk_weights.to(torch.float32).contiguous().view(torch.int32)
    sent = send(ep, form, side=side, topk_idx=topk_idx, topk_weights=names, layout="expert_major", **options)
    r = sent.dispatched
    if r is None:
        raise InvalidState("a first dispatch has a result")
    numbers = numbers_of(r.topk_weights, is_pick(r))
    weights = None if sent.side is None else lane_of(sent.side, numbers, ep.top_k)
    return Expanded(sent.x, weights, numbers, r)


def lanes_along(ep: ExpertParallel, handle: Handle, names: Tensor, weights: Tensor, **options: Any) -> Tensor:
    """fp32 [T, K] of the owner -> [rows], along the routing of an expanded handle; 0 where no pick is. Collective."""
    sent = along(ep, handle, as_bytes(weights.to(torch.float32)), **options)
    return lane_of(sent.view(torch.int32), names, ep.top_k)


def lane_of(words: Tensor, names: Tensor, top_k: int) -> Tensor:
    """Of the K words [rows, K] beside each row that of its own pick, as fp32; 0 where no pick is."""
    lane = names.clamp(min=0) % top_k
    found = words.gather(-1, lane[..., None]).squeeze(-1).view(torch.float32)
    return torch.where(names >= 0, found, 0.0)
