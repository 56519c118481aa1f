"""Guards against kernels with nodes that give other bits on a real GPU than in emulation: four ranks of one GPU as two
nodes, with rows in rings between them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from node_calls import (
    LAYOUTS,
    SMALL,
    Size,
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
)
from small_node_calls import check_small_calls

LARGE = Size(hidden=2048, num_tokens=(512, 210, 0, 333), room=600, expert_room=96, num_sms=8)


@pytest.fixture
def ranks(threads: Any) -> Any:
    """They share one GPU."""
    return threads


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(("num_ranks", "layout"), [(4, layout) for layout in LAYOUTS] + [(3, "rank_major")])
def test_calls(ranks: Any, num_ranks: int, layout: str, size: Size) -> None:
    """First dispatches, repeated ones and combines."""
    check_calls(ranks, size, num_ranks, layout)


@pytest.mark.parametrize("staged", [False, True], ids=["one launch", "two"])
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(("num_ranks", "layout"), [(4, layout) for layout in LAYOUTS] + [(3, "rank_major")])
def test_small_calls(ranks: Any, num_ranks: int, layout: str, size: Size, staged: bool) -> None:
    """Of small batches; the large ones fill the rings of their blocks."""
    check_small_calls(ranks, dataclasses.replace(size, num_sms=max(size.num_sms, 16)), num_ranks, layout, staged=staged)


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


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("layout", ["rank_major", "masked"])
def test_scales_by_column(ranks: Any, layout: str, size: Size) -> None:
    """Given, and asked for."""
    check_scales_by_column(ranks, size, layout)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("num_ranks", [4, 3])
def test_a_bias_and_no_room_in_the_heap(ranks: Any, num_ranks: int, size: Size) -> None:
    """With sources of the rows."""
    check_around(ranks, size, num_ranks)


class CapturedGraph:
    """What calls in `record` launch, again and again."""

    def __init__(self) -> None:
        self._graph, self._stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """The calls in the block are recorded and not made."""
        torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(self._stream):
            self._graph.capture_begin(capture_error_mode="thread_local")
            yield
            self._graph.capture_end()

    def replay(self) -> None:
        """Make the calls."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._graph.replay()
        self._stream.synchronize()

    def destroy(self) -> None:
        """Let go of what the calls use."""
        self._graph.reset()


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_graphs(ranks: Any, size: Size) -> None:
    """Replayed with other inputs, an ordinary call among them."""
    check_graphs(ranks, size, CapturedGraph)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_a_late_rank(ranks: Any, size: Size) -> None:
    """It alone is named; the others go on without it."""
    check_late_rank(ranks, size)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_a_call_that_one_rank_refuses(ranks: Any, size: Size) -> None:
    """By itself, or by the others' headers."""
    check_refused_calls(ranks, size)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_windows_in_flight(ranks: Any, num_ranks: int, size: Size) -> None:
    """Of nodes of one rank."""
    check_windows(ranks, size, num_ranks)


def test_calls_that_are_refused(ranks: Any) -> None:
    """Alike on all ranks, before anything is sent."""
    check_refusals(ranks, SMALL)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_calls_at_the_edge(ranks: Any, size: Size) -> None:
    """They are not refused."""
    check_edges(ranks, size, compares=True)
