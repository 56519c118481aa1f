"""Guards against host code that gives kernels with nodes wrong words: calls of the Python API on one emulated GPU.

Its ranks are in nodes; all is compared bit for bit with weft.reference.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_gpu import IDLE, EmulatedRanks, Graph
from node_calls import (
    LAYOUTS,
    NODE,
    SMALL,
    check_around,
    check_calls,
    check_edges,
    check_gradients,
    check_graphs,
    check_late_rank,
    check_refusals,
    check_refused_calls,
    check_scales_by_column,
    check_side_values,
    check_sums_in_fp8,
    check_windows,
    inputs_here,
    opened,
)
from small_node_calls import check_small_calls

from pool import RankState


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """They share one GPU."""
    return EmulatedRanks(monkeypatch)


@pytest.mark.parametrize(("num_ranks", "layout"), [(4, layout) for layout in LAYOUTS] + [(3, "rank_major")])
def test_calls(ranks: Any, num_ranks: int, layout: str) -> None:
    """First dispatches, repeated ones and combines."""
    check_calls(ranks, SMALL, num_ranks, layout)


@pytest.mark.parametrize("staged", [False, True], ids=["one launch", "two"])
@pytest.mark.parametrize(("num_ranks", "layout"), [(4, layout) for layout in LAYOUTS] + [(3, "rank_major")])
def test_small_calls(ranks: Any, num_ranks: int, layout: str, staged: bool) -> None:
    """Of small batches."""
    check_small_calls(ranks, SMALL, num_ranks, layout, staged=staged)


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


def test_a_bias_and_no_room_in_the_heap(ranks: Any) -> None:
    """With sources of the rows."""
    check_around(ranks, SMALL, 4)


def test_graphs(ranks: Any) -> None:
    """Replayed with other inputs, an ordinary call among them."""
    check_graphs(ranks, SMALL, Graph)


def test_a_late_rank(ranks: Any) -> None:
    """It alone is named; the others go on without it."""
    check_late_rank(ranks, SMALL)


def test_a_call_that_one_rank_refuses(ranks: Any) -> None:
    """By itself, or by the others' headers."""
    check_refused_calls(ranks, SMALL)


def test_windows_in_flight(ranks: Any) -> None:
    """Of nodes of one rank."""
    check_windows(ranks, SMALL, 2)


def test_calls_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alike on all ranks, before anything is sent."""
    check_refusals(EmulatedRanks(monkeypatch, IDLE), SMALL)


def test_calls_at_the_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not refused."""
    check_edges(EmulatedRanks(monkeypatch, IDLE), SMALL, compares=False)


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
