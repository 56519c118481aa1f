"""Guards against wait statistics that blame the wrong rank. Only orders of magnitude are compared."""

from __future__ import annotations

import time

import pytest
import torch

import weft

LATE, LATE_S, NUM_RANKS = 1, 0.4, 3


def waits_for_a_late_rank(comm: weft.Communicator) -> list[float]:
    """What this rank has waited for each, in us, while one rank came late to one of three steps."""
    x = torch.zeros((4, 64), dtype=torch.bfloat16)
    topk_idx = torch.arange(8).reshape(4, 2) % 6
    with weft.ExpertParallel(comm, num_experts=6, top_k=2, hidden=64, max_tokens_per_rank=8) as ep:
        ep.warmup()
        before = ep.stats()["wait_us"]
        for step in range(3):
            if step == 1 and comm.rank == LATE:
                time.sleep(LATE_S)
            r = ep.dispatch(x, topk_idx)
            ep.combine(ep.empty_output(r).zero_(), r.handle)
        stats = ep.stats()
        assert stats["wait_us"] == [sum(window["wait_us"][rank] for window in stats["windows"]) for rank in range(3)]
        return [now - then for now, then in zip(stats["wait_us"], before, strict=True)]


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_the_late_rank_is_waited_for_longest(isolation: str) -> None:
    """Headers that came while others were waited for count only until they came."""
    waits = weft.spawn(waits_for_a_late_rank, num_ranks=NUM_RANKS, device="cpu", isolation=isolation)
    for rank, mine in enumerate(waits):
        assert mine[rank] == 0
        assert all(us >= 0 for us in mine)
        if rank == LATE:
            assert max(mine) < LATE_S * 1e6 / 2
        else:
            assert mine[LATE] > LATE_S * 1e6 * 0.9
            assert all(us < mine[LATE] / 2 for peer, us in enumerate(mine) if peer != LATE)
