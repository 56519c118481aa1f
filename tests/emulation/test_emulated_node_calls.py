"""Guards against host code that gives kernels with nodes wrong words: calls of the Python API on one emulated GPU.

Its ranks are in nodes; all is compared bit for bit with weft.reference. No public call opens such windows yet.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_gpu import IDLE, EmulatedRanks
from node_calls import (
    LAYOUTS,
    NODE,
    SMALL,
    check_calls,
    check_gradients,
    check_scales_by_column,
    check_side_values,
    check_sums_in_fp8,
    inputs_here,
    opened,
)

import weft
import weft.call.check
from pool import RankState


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """They share one GPU."""
    monkeypatch.setattr(weft.call.check, "HAS_GPU_NODES", True)
    return EmulatedRanks(monkeypatch)


@pytest.mark.parametrize(("num_ranks", "layout"), [(4, layout) for layout in LAYOUTS] + [(3, "rank_major")])
def test_calls(ranks: Any, num_ranks: int, layout: str) -> None:
    """First dispatches, repeated ones and combines."""
    check_calls(ranks, SMALL, num_ranks, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_side_values(ranks: Any, layout: str) -> None:
    """What a capacity drops has none."""
    check_side_values(ranks, SMALL, layout)


@pytest.mark.parametrize(("num_ranks", "layout"), [(4, "rank_major"), (3, "expert_major")])
def test_sums_in_fp8(ranks: Any, num_ranks: int, layout: str) -> None:
    """Made FP8 once a node."""
    check_sums_in_fp8(ranks, SMALL, num_ranks, layout)


@pytest.mark.parametrize("layout", ["rank_major", "masked"])
def test_scales_by_column(ranks: Any, layout: str) -> None:
    """Given, and asked for."""
    check_scales_by_column(ranks, SMALL, layout)


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
def test_gradients_of_a_dispatch(ranks: Any, layout: str) -> None:
    """Of x and of the weights: one combine with side values."""
    check_gradients(ranks, SMALL, layout)


def refusals(state: RankState, _: Any) -> list[str]:
    """What these windows do not have."""
    x, ids, weights = inputs_here(state, SMALL, 0)
    with opened(state, SMALL) as ep:
        r = ep.dispatch(x, ids, weights, capacity=SMALL.room)
        side = torch.zeros(r.topk_weights.shape)
        wide = torch.zeros(len(x), SMALL.hidden // 16, dtype=torch.float32)
        codes = torch.zeros(len(x), SMALL.hidden, dtype=torch.float8_e4m3fn)
        refused = [
            lambda: ep.dispatch(weft.Quantized(codes, wide), ids, weights, capacity=SMALL.room),
            lambda: ep.combine(r.x, r.handle, weighted=False, side=side, side_lanes="all"),
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
    said = EmulatedRanks(monkeypatch, IDLE).run(4, refusals, [None] * 4)
    assert all(each == said[0] for each in said)
    assert ["between nodes on GPUs" in text for text in said[0]] == [True] * 2


def gradient(state: RankState, options: dict[str, Any]) -> torch.Tensor:
    """Of the rows of a combine."""
    with opened(state, SMALL, **options) as ep:
        r = ep.dispatch(*inputs_here(state, SMALL, 3), mode="throughput")
        rows = r.x.detach().clone().requires_grad_()
        y = ep.combine(rows, r.handle, weighted=False, mode="throughput")
        (y * torch.arange(SMALL.hidden)).sum().backward()
        assert rows.grad is not None
        return rows.grad.clone()


@pytest.mark.long
def test_gradients_of_sums(ranks: Any) -> None:
    """They come along the handle, as those of one node."""
    with_nodes, on_one = (
        ranks.run(4, gradient, [options] * 4) for options in ({}, {"node_ranks": None, "sum_domain": NODE})
    )
    for grad, wanted in zip(with_nodes, on_one, strict=True):
        assert torch.equal(grad, wanted)
