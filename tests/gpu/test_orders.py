"""Guards against combines on GPUs that add in another order than was asked for, and against a rank without room for its
tokens that others wait for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from order_cases import checked_orders
from test_matrix import pool  # noqa: F401  a fixture

import weft
from pool import RankState
from weft.call.room import NeedsRoom


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_orders_of_sums(pool: Any, num_ranks: int, dtype: torch.dtype) -> None:  # noqa: F811
    """By last pick, and by pick with weights of the owner, every layout and both kinds of kernels."""
    pool.run(num_ranks, checked_orders, [dtype] * num_ranks)


def needs(state: RankState, mode: str) -> list[int]:
    """What each call needs; 0: it goes well."""
    found, device = [], state.comm.device
    with weft.ExpertParallel(state.comm, num_experts=8, top_k=2, hidden=64, max_tokens_per_rank=32) as ep:
        ep.calls.tell_need()
        for turn in range(6):
            num_tokens = 33 + 10 * state.rank if turn in (1, 4) or (turn == 3 and state.rank == 1) else 32
            x = torch.ones((num_tokens, 64), dtype=torch.bfloat16, device=device)
            ids = torch.zeros((num_tokens, 2), dtype=torch.int64, device=device)
            try:
                r = ep.dispatch(x, ids, mode=mode)
            except NeedsRoom as need:
                found.append(need.num_tokens)
                continue
            found.append(0)
            assert torch.equal(ep.combine(r.x, r.handle), x)
        ep.check()
    return found


@pytest.mark.parametrize("mode", ["throughput", "latency"])
def test_every_rank_knows_who_needs_most(pool: Any, mode: str) -> None:  # noqa: F811
    """One rank, and all."""
    assert pool.run(2, needs, [mode] * 2) == [[0, 43, 0, 43, 43, 0]] * 2


def replays_too_large(state: RankState, _: object) -> str:
    """A graph whose call needs room: a later call says so on every rank, and the one behind it goes well."""
    device = state.comm.device
    x = torch.ones((9 if state.rank else 4, 64), dtype=torch.bfloat16, device=device)
    ids = torch.zeros((len(x), 2), dtype=torch.int64, device=device)
    with weft.ExpertParallel(state.comm, num_experts=8, top_k=2, hidden=64, max_tokens_per_rank=8) as ep:
        ep.calls.tell_need()
        few = (x[:4], ids[:4])
        ep.dispatch(*few, capacity=32)
        graph, text = torch.cuda.CUDAGraph(), ""
        with torch.cuda.graph(graph):
            ep.dispatch(x, ids, capacity=32)
        graph.replay()
        torch.cuda.synchronize()
        state.comm.meet(10)
        try:
            ep.dispatch(*few, capacity=32)
        except weft.InvalidArgument as error:
            text = str(error)
        assert ep.dispatch(*few).x.shape[0] == 4 * state.comm.num_ranks or state.rank
    return text


def test_under_capture_a_later_call_says_it(processes: Any) -> None:
    """As an InvalidArgument of all ranks."""
    for text in processes.run(2, replays_too_large, [None] * 2):
        assert "a rank has 9 tokens" in text
