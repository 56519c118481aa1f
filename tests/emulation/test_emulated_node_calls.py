"""Guards against host code that gives kernels with nodes wrong words: calls of the Python API on one emulated GPU.

Its ranks are in nodes; all is compared bit for bit with weft.reference. No public call opens such windows yet.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_gpu import IDLE, EmulatedRanks

import weft
import weft.call.check
from pool import RankState
from weft import reference

LOCAL, TOPK, HIDDEN, TOKENS = 2, 3, 48, 40
NODE = 2
NUM_TOKENS = (40, 21, 0, 33)  # of each rank; of three the last is a node of its own
LAYOUTS = ("rank_major", "expert_major", "masked")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """They share one GPU."""
    monkeypatch.setattr(weft.call.check, "HAS_GPU_NODES", True)
    return EmulatedRanks(monkeypatch)


def opened(state: RankState, **changed: Any) -> weft.ExpertParallel:
    """With nodes of two ranks."""
    shape = {
        "num_experts": LOCAL * state.num_ranks,
        "top_k": TOPK,
        "hidden": HIDDEN,
        "max_tokens_per_rank": TOKENS,
        "num_sms": 1,
    }
    return weft.ExpertParallel(state.comm, **shape, node_ranks=NODE, **changed)


def inputs(rank: int, num_ranks: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a rank: x, ids, weights."""
    generator, num = torch.Generator().manual_seed(16 * seed + rank), NUM_TOKENS[rank]
    x = torch.randn(num, HIDDEN, generator=generator).bfloat16()
    return (
        x,
        torch.randint(-1, LOCAL * num_ranks, (num, TOPK), generator=generator),
        torch.rand(num, TOPK, generator=generator),
    )


def call(state: RankState, layout: str) -> list[tuple[torch.Tensor, ...]]:
    """Of two rounds: rows, the rows of a repetition, sums of both, along handles that were kept."""
    capacity = 12 if layout == "masked" else None
    with opened(state) as ep:
        received = [
            ep.dispatch(*inputs(state.rank, state.num_ranks, seed), layout=layout, capacity=capacity) for seed in (0, 1)
        ]
        seen = []
        for seed, r in enumerate(received):
            again = ep.dispatch(inputs(state.rank, state.num_ranks, 7 + seed)[0], handle=r.handle)
            ys = [ep.combine(rows.clone(), r.handle, weighted=layout != "rank_major") for rows in (r.x, again.x)]
            seen.append((r.x.clone(), r.topk_weights.clone(), again.x.clone(), *ys))
        return seen


@pytest.mark.parametrize(("num_ranks", "layout"), [(4, layout) for layout in LAYOUTS] + [(3, "rank_major")])
def test_calls(ranks: Any, num_ranks: int, layout: str) -> None:
    """First dispatches, repeated ones and combines."""
    outcomes = ranks.run(num_ranks, call, [layout] * num_ranks)
    for seed in (0, 1):
        xs, ids, weights = (
            list(each) for each in zip(*(inputs(rank, num_ranks, seed) for rank in range(num_ranks)), strict=True)
        )
        capacity = 12 if layout == "masked" else None
        wanted = reference.dispatch(xs, ids, weights, num_experts=LOCAL * num_ranks, layout=layout, capacity=capacity)
        others = reference.repeat_dispatch(
            [inputs(rank, num_ranks, 7 + seed)[0] for rank in range(num_ranks)], wanted[0].routing
        )
        sums = [
            reference.combine(rows, wanted[0].routing, weighted=layout != "rank_major", sum_domain=NODE)
            for rows in ([each.x for each in wanted], others)
        ]
        for rank in range(num_ranks):
            x, row_weights, again, y, again_y = outcomes[rank][seed]
            keep = is_kept(layout, wanted[rank])
            assert torch.equal(x.reshape(-1, HIDDEN)[keep], wanted[rank].x.reshape(-1, HIDDEN)[keep])
            assert torch.equal(row_weights, wanted[rank].topk_weights)
            assert torch.equal(again.reshape(-1, HIDDEN)[keep], others[rank].reshape(-1, HIDDEN)[keep])
            assert torch.equal(y, sums[0][rank])
            assert torch.equal(again_y, sums[1][rank])


def is_kept(layout: str, wanted: Any) -> torch.Tensor:
    """Rows that hold something."""
    num_rows = wanted.x.shape[:-1].numel()
    if layout != "masked":
        return torch.arange(num_rows) < wanted.num_rows
    return (torch.arange(wanted.x.shape[1])[None] < wanted.num_tokens_per_expert[:, None]).reshape(-1)


def refusals(state: RankState, _: Any) -> list[str]:
    """What these windows do not have."""
    x, ids, weights = inputs(state.rank, state.num_ranks, 0)
    with opened(state) as ep:
        r = ep.dispatch(x, ids, weights, capacity=40)
        side = torch.zeros(r.topk_weights.shape)
        wide = torch.zeros(len(x), HIDDEN // 16, dtype=torch.float32)
        codes = torch.zeros(len(x), HIDDEN, dtype=torch.float8_e4m3fn)
        refused = [
            lambda: ep.dispatch(weft.Quantized(codes, wide), ids, weights, capacity=40),
            lambda: ep.combine(r.x, r.handle, weighted=False, side=side, side_lanes="all"),
            lambda: ep.combine(r.x, r.handle, weighted=False, wire="fp8"),
        ]
        said = []
        for make in refused:
            with pytest.raises(weft.Unsupported) as found:
                make()
            said.append(str(found.value))
        return said


def test_calls_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alike on all ranks, before anything is sent."""
    monkeypatch.setattr(weft.call.check, "HAS_GPU_NODES", True)
    said = EmulatedRanks(monkeypatch, IDLE).run(len(NUM_TOKENS), refusals, [None] * len(NUM_TOKENS))
    assert all(each == said[0] for each in said)
    assert ["between nodes on GPUs" in text for text in said[0]] == [True] * 3


def gradient(state: RankState, options: dict[str, Any]) -> torch.Tensor:
    """Of the rows of a combine."""
    shape = {"num_experts": LOCAL * state.num_ranks, "top_k": TOPK, "hidden": HIDDEN, "max_tokens_per_rank": TOKENS}
    with weft.ExpertParallel(state.comm, **shape, num_sms=1, **options) as ep:
        r = ep.dispatch(*inputs(state.rank, state.num_ranks, 3), mode="throughput")
        rows = r.x.detach().clone().requires_grad_()
        y = ep.combine(rows, r.handle, weighted=False, mode="throughput")
        (y * torch.arange(HIDDEN)).sum().backward()
        assert rows.grad is not None
        return rows.grad.clone()


def sides(state: RankState, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums and side values."""
    capacity = 40 if layout == "rank_major" else 12 if layout == "masked" else None
    with opened(state) as ep:
        r = ep.dispatch(*inputs(state.rank, state.num_ranks, 5), layout=layout, capacity=capacity)
        y, side = ep.combine(r.x.clone(), r.handle, weighted=False, side=r.topk_weights * 3)
        return y.clone(), side.clone()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_side_values(ranks: Any, layout: str) -> None:
    """What a capacity drops has none."""
    num_ranks, capacity = 4, 40 if layout == "rank_major" else 12 if layout == "masked" else None
    outcomes = ranks.run(num_ranks, sides, [layout] * num_ranks)
    xs, ids, weights = (list(each) for each in zip(*(inputs(rank, 4, 5) for rank in range(num_ranks)), strict=True))
    wanted = reference.dispatch(xs, ids, weights, num_experts=LOCAL * num_ranks, layout=layout, capacity=capacity)
    pairs = reference.combine(
        [each.x for each in wanted],
        wanted[0].routing,
        weighted=False,
        sides=[each.topk_weights * 3 for each in wanted],
        sum_domain=NODE,
    )
    for found, expected in zip(outcomes, pairs, strict=True):
        assert all(torch.equal(*each) for each in zip(found, expected, strict=True))


def trained(state: RankState, layout: str) -> tuple[torch.Tensor, ...]:
    """Rows, and the gradients of x and of the weights, from given ones of what was received."""
    x, ids, weights = inputs(state.rank, state.num_ranks, 4)
    x.requires_grad_(), weights.requires_grad_()
    with opened(state) as ep:
        r = ep.dispatch(x, ids, weights, layout=layout)
        grads = of_received(r.x, r.topk_weights)
        torch.autograd.backward([r.x, r.topk_weights], list(grads))
        assert x.grad is not None
        assert weights.grad is not None
        return x.grad.clone(), weights.grad.clone()


def of_received(x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients that differ from row to row."""
    column = torch.arange(HIDDEN) % 7 - 3
    row = torch.arange(x.shape[:-1].numel()).reshape(*x.shape[:-1], 1) % 5 + 0.5
    return (row * column).to(x.dtype), torch.arange(weights.numel(), dtype=torch.float32).reshape(weights.shape) - 9.5


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
def test_gradients_of_a_dispatch(ranks: Any, layout: str) -> None:
    """Of x and of the weights: one combine with side values."""
    num_ranks = 4
    outcomes = ranks.run(num_ranks, trained, [layout] * num_ranks)
    xs, ids, weights = (list(each) for each in zip(*(inputs(rank, 4, 4) for rank in range(num_ranks)), strict=True))
    received = reference.dispatch(xs, ids, weights, num_experts=LOCAL * num_ranks, layout=layout)
    grads = [of_received(each.x, each.topk_weights) for each in received]
    wanted = reference.dispatch_backward(
        [rows for rows, _ in grads], received[0].routing, [each for _, each in grads], sum_domain=NODE
    )
    for found, expected in zip(outcomes, zip(*wanted, strict=True), strict=True):
        assert all(torch.equal(*each) for each in zip(found, expected, strict=True))


@pytest.mark.long
def test_gradients_of_sums(ranks: Any) -> None:
    """They come along the handle, as those of one node."""
    with_nodes, on_one = (
        ranks.run(4, gradient, [options] * 4) for options in ({"node_ranks": NODE}, {"sum_domain": NODE})
    )
    for grad, wanted in zip(with_nodes, on_one, strict=True):
        assert torch.equal(grad, wanted)
