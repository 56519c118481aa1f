"""The baseline of `weft bench`: the same job in plain torch over torch.distributed.all_to_all_single.

What a careful user writes without Weft: one row per (token, destination rank), so a row crosses once however many
experts of that rank it has; ids and weights travel in one tensor beside the rows. Results have Weft's layout and, the
sums being made in the same order, Weft's bits: `weft bench` compares them before it times.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from weft import reference

_PIECE_ROWS = 256


@dataclass(frozen=True)
class Received:
    """One rank's rows in the layout asked for, and what the way back needs."""

    x: Tensor  # rank_major, expert_major [N, H]; masked [L, C, H]; FP8 as bytes
    scales: Tensor | None  # beside x: fp32, UE8M0 as bytes
    topk_idx: Tensor | None  # rank_major: [N, K] local ids
    topk_weights: Tensor  # rank_major [N, K], expert_major [N], masked [L, C]
    num_tokens_per_expert: Tensor
    token: Tensor  # [rows sent] token of each row sent, by destination rank
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    pick_row: Tensor | None  # other layouts: [picks] row as it arrived, by row, then k
    pick_place: Tensor | None  # other layouts: [picks] its place in x, seen as rows


class AllToAll:
    """dispatch and combine over the default process group. Every rank calls the same thing in the same order."""

    def __init__(self, *, num_experts: int, layout: str, alignment: int, quantize: str | None, capacity: int | None):
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.num_local = num_experts // self.num_ranks
        self.layout, self.alignment = layout, alignment
        self.quantize, self.capacity = quantize, capacity

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, scales: Tensor | None = None) -> Received:
        """Send rows, and their scales if they come quantised, to the ranks of their experts; the host waits for the
        counts.
        """
        if self.quantize is not None:
            x, scales = reference.quantize_fp8(x, ue8m0=self.quantize == "fp8_ue8m0", pow2=self.quantize == "fp8_pow2")
        x, scales = _movable(x), None if scales is None else _movable(scales)
        num_tokens, top_k = topk_idx.shape
        owner = torch.where(topk_idx >= 0, topk_idx // self.num_local, self.num_ranks)
        goes_to = torch.zeros((self.num_ranks + 1, num_tokens), dtype=torch.bool, device=x.device)
        goes_to[
            owner.flatten(), torch.arange(num_tokens, device=x.device, dtype=torch.int64).repeat_interleave(top_k)
        ] = True
        destination, token = goes_to[: self.num_ranks].nonzero(as_tuple=True)
        sent_counts = goes_to[: self.num_ranks].sum(dim=1)
        received_counts = torch.empty_like(sent_counts)
        dist.all_to_all_single(received_counts, sent_counts)
        sent, received = sent_counts.tolist(), received_counts.tolist()

        here = owner[token] == destination[:, None]
        local_ids = torch.where(here, topk_idx[token] - destination[:, None] * self.num_local, -1)
        record = torch.empty((len(token), 2 * top_k), dtype=torch.int32, device=x.device)
        record[:, :top_k] = local_ids
        record[:, top_k:] = torch.where(here, topk_weights[token], 0.0).view(torch.int32)
        rows = self._exchange(x.index_select(0, token), sent, received)
        row_scales = None if scales is None else self._exchange(scales.index_select(0, token), sent, received)
        record = self._exchange(record, sent, received)
        ids, weights = record[:, :top_k], record[:, top_k:].view(torch.float32)
        counts = torch.bincount(ids[ids >= 0], minlength=self.num_local)
        ids = ids.to(topk_idx.dtype)
        arrived = Received(rows, row_scales, ids, weights, counts, token, sent, received, None, None)
        return arrived if self.layout == "rank_major" else self._permute(arrived, ids)

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        arrived = torch.empty((sum(received), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        dist.all_to_all_single(arrived, rows, received, sent)
        return arrived

    def _permute(self, arrived: Received, ids: Tensor) -> Received:
        """Rows as they arrived -> one row per pick, by expert."""
        counts = arrived.num_tokens_per_expert
        row, k = (ids >= 0).nonzero(as_tuple=True)
        expert = ids[row, k].to(torch.int64)
        by_expert, order = expert.sort(stable=True)
        index = torch.empty_like(order)  # of each pick among its expert's
        index[order] = (
            torch.arange(len(order), device=ids.device, dtype=torch.int64) - (counts.cumsum(0) - counts)[by_expert]
        )
        if self.layout == "masked":
            capacity = self.capacity or 0
            kept = index < capacity
            row, k, expert, index = row[kept], k[kept], expert[kept], index[kept]
            place = expert * capacity + index
            shape: tuple[int, ...] = (self.num_local, capacity)
            counts = counts.clamp(max=capacity)
        else:
            padded = (counts + self.alignment - 1) // self.alignment * self.alignment
            place = (padded.cumsum(0) - padded)[expert] + index
            shape = (int(padded.sum()),)
        scales = arrived.scales
        return dataclasses.replace(
            arrived,
            x=_scatter(arrived.x.index_select(0, row), place, shape),
            scales=None if scales is None else _scatter(scales.index_select(0, row), place, shape),
            topk_idx=None,
            topk_weights=_scatter(arrived.topk_weights[row, k], place, shape),
            num_tokens_per_expert=counts,
            pick_row=row,
            pick_place=place,
        )

    def combine(self, outputs: Tensor, to: Received, num_tokens: int) -> Tensor:
        """Bring expert outputs (in x's layout) back and sum them: y [T, H]."""
        hidden, dtype = outputs.shape[-1], outputs.dtype
        if to.pick_row is not None and to.pick_place is not None:
            outputs = self._partial_sums(outputs.view(-1, hidden), to, to.pick_row, to.pick_place)
        back = self._exchange(outputs, to.received, to.sent)
        y = torch.zeros((num_tokens, hidden), dtype=torch.float32, device=outputs.device)
        start = 0
        for count in to.sent:  # a token appears once in each rank's part, so the order of additions is by rank
            y.index_add_(0, to.token[start : start + count], back[start : start + count].to(torch.float32))
            start += count
        return y.to(dtype)

    def _partial_sums(self, outputs: Tensor, to: Received, pick_row: Tensor, pick_place: Tensor) -> Tensor:
        """Weighted outputs of the picks, summed per row in fp32: in k order, in pieces that stay in a CPU's cache; on a
        GPU all at once, by atomic additions in any order.
        """
        weights = to.topk_weights.view(-1)[pick_place]
        partial = torch.zeros((sum(to.received), outputs.shape[1]), dtype=torch.float32, device=outputs.device)
        piece_rows = max(1, len(pick_row)) if outputs.is_cuda else _PIECE_ROWS
        pieces = zip(*(part.split(piece_rows) for part in (pick_row, pick_place, weights)), strict=True)
        for row, place, weight in pieces:
            products = outputs.index_select(0, place).to(torch.float32).mul_(weight[:, None])
            partial.index_add_(0, row, products)
        return partial.to(outputs.dtype)


def _scatter(values: Tensor, place: Tensor, shape: tuple[int, ...]) -> Tensor:
    """values [picks, ...] -> [*shape, ...], zero where no pick is."""
    out = torch.zeros((*shape, *values.shape[1:]), dtype=values.dtype, device=values.device)
    out.view(-1, *values.shape[1:]).index_copy_(0, place, values)
    return out


def _movable(values: Tensor) -> Tensor:
    """Values of a 1-byte type as bytes: torch and gloo move no float8."""
    return values.view(torch.uint8) if values.element_size() == 1 else values
