"""The handle of a low-latency dispatch of V1 `Buffer`, which may be made again without ranks that were lost."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import torch
from torch import Tensor

from weft.deep_ep.expanded import lane_of
from weft.deep_ep.rows import along, bare

if TYPE_CHECKING:
    from weft.expert_parallel import ExpertParallel
    from weft.handle import Dispatched

__all__ = ["LowLatencyHandle", "source_ranks", "weighted_rows"]


class LowLatencyHandle(tuple):  # type: ignore[type-arg]
    """Of a low-latency dispatch: (src_info, layout_range, M, H, E); the first two are made when they are asked for.

    src_info int32 [L, R M]: source token of each row. layout_range int64 [L, R]: first row << 32 | number of rows, by
    source rank.
    """

    owner: weakref.ref[Any]  # its buffer, which may keep it
    ep: ExpertParallel
    dispatched: Dispatched
    seen: Dispatched  # whose rows the caller has; `dispatched` where it was not made again without ranks that were lost
    output: Tensor | None
    is_by_pick: bool  # whether a combine adds by k, of rows that come one a pick
    again: Callable[[], Dispatched] | None = None
    base, number = 0, 0  # of the journal: what it counts from, and which dispatch of its buffer it was

    def __new__(
        cls, buffer: Any, ep: ExpertParallel, dispatched: Dispatched, max_tokens: int, *, is_by_pick: bool
    ) -> LowLatencyHandle:
        """Handle of a result, which is to have no rows."""
        self = super().__new__(cls, (None, None, max_tokens, ep.hidden, ep.num_experts))
        self.owner, self.ep, self.output = weakref.ref(buffer), ep, None
        self.dispatched = self.seen = dispatched
        self.is_by_pick = is_by_pick
        return self

    def dispatch_again(self) -> None:
        """Collective: without ranks that were lost. The caller has the rows of the first time."""
        if self.again is not None:
            self.dispatched = bare(self.again())

    def placed(self, rows: Tensor) -> Tensor:
        """[L, R M, H] for the caller's rows -> for those of `dispatched`: less those of ranks that were lost."""
        if self.dispatched is self.seen:
            return rows
        ranks = self.seen.sources().rank
        active = torch.zeros(self.ep.num_ranks + 1, dtype=torch.bool, device=rows.device)
        active[list(self.ep.comm.active_ranks)] = True
        order = torch.where(active[ranks], 0, 1).argsort(dim=1, stable=True)  # rank -1, no row, is the last one
        return rows.gather(1, order[..., None].expand(rows.shape))

    @property
    def max_tokens(self) -> int:
        """M of the dispatch."""
        return int(tuple.__getitem__(self, 2))

    def copied(self, rows: Tensor) -> Tensor:
        """[N, H] of the caller's rows [L, R M, H]: those that are there."""
        return rows[self._is_row(rows)]

    def restored(self, copied: Tensor) -> Tensor:
        """[L, R M, H] again; the other rows are 0."""
        rows = copied.new_zeros((*self.seen.handle.rows_shape, copied.shape[-1]))
        rows[self._is_row(rows)] = copied
        return rows

    def _is_row(self, rows: Tensor) -> Tensor:
        places = torch.arange(rows.shape[1], dtype=torch.int64, device=rows.device)
        return places < self.seen.num_tokens_per_expert[:, None]

    def _item(self, idx: int) -> Any:
        if idx == 0:
            return self.seen.sources().token
        if idx == 1:
            ranks = self.seen.sources().rank.to(torch.int64)
            ranks = torch.where(ranks >= 0, ranks, self.ep.num_ranks)
            counts = torch.zeros((len(ranks), self.ep.num_ranks + 1), dtype=torch.int64, device=ranks.device)
            counts.scatter_add_(1, ranks, torch.ones_like(ranks))
            counts = counts[:, :-1]
            return ((counts.cumsum(1) - counts) << 32) | counts
        return tuple.__getitem__(self, idx)

    @overload
    def __getitem__(self, idx: SupportsIndex) -> Any: ...
    @overload
    def __getitem__(self, idx: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, idx: Any) -> Any:
        found = range(5)[idx]
        return tuple(map(self._item, found)) if isinstance(found, range) else self._item(found)

    def __iter__(self) -> Iterator[Any]:
        return map(self._item, range(5))

    def __repr__(self) -> str:
        return f"deep_ep.Buffer low-latency handle({self.dispatched.handle})"


def source_ranks(handle: LowLatencyHandle, late: list[Callable[[], object]]) -> Tensor:
    """int32 [L, R M], 0 where no row is; to be written when the rows are there."""
    ranks = torch.zeros(handle.dispatched.handle.rows_shape, dtype=torch.int32, device=handle.ep.device)
    late.append(lambda: ranks.copy_(handle.seen.sources().rank.clamp(min=0)))
    return ranks


def weighted_rows(handle: LowLatencyHandle, rows: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
    """fp32 [L, R M, H]: rows times the weights of their picks, which their owners send along; absent picks are 0."""
    weights = torch.where(topk_idx >= 0, topk_weights.to(torch.float32), 0.0)
    is_there = (topk_idx >= 0).to(torch.float32)
    sent = torch.cat([weights, is_there], dim=1).contiguous()
    routing, top_k = handle.dispatched.handle, handle.ep.top_k
    got = along(handle.ep, routing, sent.view(torch.uint8), window=routing.window).view(torch.int32)
    pick = handle.dispatched.sources().pick
    assert pick is not None  # noqa: S101  # for mypy
    weight, there = lane_of(got[..., :top_k], pick), lane_of(got[..., top_k:], pick)
    return torch.where((there != 0)[..., None], rows.to(torch.float32) * weight[..., None], 0.0)
