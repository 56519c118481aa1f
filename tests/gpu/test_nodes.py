"""Guards against kernels with nodes that give other bits on a real GPU than in emulation: four ranks of one GPU as two
nodes, with rows in rings between them. No public call opens such windows yet."""

from __future__ import annotations

from typing import Any

import pytest
from node_calls import LAYOUTS, SMALL, Size, check_calls, check_gradients, check_side_values, check_sums_in_fp8

import weft.call.check

LARGE = Size(hidden=2048, num_tokens=(512, 210, 0, 333), room=600, expert_room=96, num_sms=8)


@pytest.fixture
def ranks(threads: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """They share one GPU."""
    monkeypatch.setattr(weft.call.check, "HAS_GPU_NODES", True)
    return threads


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(("num_ranks", "layout"), [(4, layout) for layout in LAYOUTS] + [(3, "rank_major")])
def test_calls(ranks: Any, num_ranks: int, layout: str, size: Size) -> None:
    """First dispatches, repeated ones and combines."""
    check_calls(ranks, size, num_ranks, layout)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_side_values(ranks: Any, layout: str, size: Size) -> None:
    """What a capacity drops has none."""
    check_side_values(ranks, size, layout)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(("num_ranks", "layout"), [(4, "rank_major"), (3, "expert_major")])
def test_sums_in_fp8(ranks: Any, num_ranks: int, layout: str, size: Size) -> None:
    """Made FP8 once a node."""
    check_sums_in_fp8(ranks, size, num_ranks, layout)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
def test_gradients_of_a_dispatch(ranks: Any, layout: str, size: Size) -> None:
    """Of x and of the weights: one combine with side values."""
    check_gradients(ranks, size, layout)
