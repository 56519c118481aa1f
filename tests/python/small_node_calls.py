"""Small batches between nodes: what a rank calls, and what must come of it. For tests on emulated and real GPUs."""

from __future__ import annotations

from typing import Any

import torch
from node_calls import LOCAL, NODE, Size, inputs_here, inputs_of_all, is_kept, opened, rows_of

from pool import RankState
from weft import reference


def capacity_of(size: Size, layout: str) -> int | None:
    """Small batches by expert have one, too."""
    return size.room if layout == "expert_major" else size.capacity(layout)


def small(state: RankState, case: tuple[Size, str, bool]) -> list[tuple[torch.Tensor, ...]]:
    """As `call`, of small batches: in one launch, or in two."""
    size, layout, staged = case
    capacity, weighted = capacity_of(size, layout), layout != "rank_major"
    options: dict[str, Any] = {"staged": True} if staged else {"mode": "latency"}
    seen, most = [], max(size.num_tokens)
    # The last node's rank adds for all: of three ranks it has places for a part of the window's tokens.
    with opened(state, size, max_tokens_per_rank=2 * most, small_tokens=2 * most) as ep:
        for seed in (0, 1):
            first = {"layout": layout, "capacity": capacity, "max_tokens": most}
            r = ep.dispatch(*inputs_here(state, size, seed), **first, **options)
            if staged:
                r.wait()
            again = ep.dispatch(inputs_here(state, size, 7 + seed)[0], handle=r.handle, **options)
            if staged:
                again.wait()
            ys = []
            for rows in (r.x, again.x):
                y = ep.combine(rows.clone(), r.handle, weighted=weighted, **options)
                ys.append((y.wait() if staged else y).clone())
            seen.append((r.x.clone(), r.topk_weights.clone(), again.x.clone(), *ys))
    return seen


def check_small_calls(ranks: Any, size: Size, num_ranks: int, layout: str, *, staged: bool) -> None:
    """First dispatches, repeated ones and combines."""
    outcomes = ranks.run(num_ranks, small, [(size, layout, staged)] * num_ranks)
    capacity, weighted = capacity_of(size, layout), layout != "rank_major"
    for seed in (0, 1):
        wanted = reference.dispatch(
            *inputs_of_all(size, num_ranks, seed), num_experts=LOCAL * num_ranks, layout=layout, capacity=capacity
        )
        others = reference.repeat_dispatch(inputs_of_all(size, num_ranks, 7 + seed)[0], wanted[0].routing)
        sums = [
            reference.combine(rows, wanted[0].routing, weighted=weighted, sum_domain=NODE)
            for rows in ([each.x for each in wanted], others)
        ]
        for rank in range(num_ranks):
            x, row_weights, again, y, again_y = outcomes[rank][seed]
            keep = is_kept(layout, wanted[rank])
            assert torch.equal(rows_of(x)[keep], rows_of(wanted[rank].x)[keep])
            assert torch.equal(row_weights, wanted[rank].topk_weights)
            assert torch.equal(rows_of(again)[keep], rows_of(others[rank])[keep])
            assert torch.equal(y, sums[0][rank])
            assert torch.equal(again_y, sums[1][rank])
