"""Guards against memory figures that are off by a term, and against `supports` that is wrong at a bound."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from weft.limits import MAX_SMALL_TOKENS, default_heap_bytes, memory, most_small_tokens

SHAPE: dict[str, Any] = {
    "num_ranks": 4, "num_experts": 8, "top_k": 3, "hidden": 64, "max_tokens_per_rank": 10, "dtype": "float32"
}  # fmt: skip
ROW = 64 * 4 + 8 * 3  # values, and the id and weight of each pick


def test_figures_of_a_layer_to_the_byte() -> None:
    figures = memory(**SHAPE, heap_bytes=0)
    assert figures["rows_bytes"] == 10 * 3 * ROW, "a token reaches as many ranks as it has picks"
    assert figures["rows_worst_bytes"] == 10 * 4 * ROW, "every rank sends all its tokens here"
    plans = 4 * 10 * (4 + 3)  # a number for each token of a rank and each rank, and for each pick
    assert figures["handle_bytes"] == plans + 8 * 10 * 3
    assert figures["layers_bytes"] == figures["rows_bytes"] + figures["handle_bytes"]
    assert memory(**{**SHAPE, "num_ranks": 2}, heap_bytes=0)["rows_bytes"] == 10 * 2 * ROW, "two ranks, three picks"


def test_layers_are_kept_while_training_only() -> None:
    one = memory(**SHAPE, heap_bytes=0)["layers_bytes"]
    assert memory(**SHAPE, heap_bytes=0, num_layers=7)["layers_bytes"] == one
    assert memory(**SHAPE, heap_bytes=0, num_layers=7, training=True)["layers_bytes"] == 7 * one


def test_what_lies_in_the_heaps_is_counted_once() -> None:
    heap = 100_000
    figures = memory(**SHAPE, heap_bytes=heap, num_windows=2, num_layers=100, training=True)
    assert figures["layers_bytes"] > 2 * heap
    window = figures["control_bytes"] + figures["staging_bytes"] + heap
    assert figures["windows_bytes"] == 2 * window
    assert figures["total_bytes"] == 2 * window + figures["layers_bytes"] - 2 * heap
    small = memory(**SHAPE, heap_bytes=1 << 30)
    assert small["total_bytes"] == small["windows_bytes"], "less than nothing is not taken off"


def test_heap_without_a_size() -> None:
    """Four results of the worst case, in whole pages."""
    assert default_heap_bytes(4, 3, 64, 1000, "float32") == -(-4 * 1000 * 4 * ROW // 4096) * 4096
    assert default_heap_bytes(2, 3, 64, 1000, "float32") == -(-4 * 1000 * 3 * ROW // 4096) * 4096
    assert default_heap_bytes(2, 3, 64, 0, "float32") == 1 << 20


def test_small_tokens() -> None:
    given = (0, 1, MAX_SMALL_TOKENS, MAX_SMALL_TOKENS + 1)
    assert [most_small_tokens(each) for each in given] == [1, 1, MAX_SMALL_TOKENS, MAX_SMALL_TOKENS]
    assert [most_small_tokens(1000, asked) for asked in (1, 900, 2000)] == [1, 900, 1000]
    shape = {**SHAPE, "max_tokens_per_rank": 2000, "engine": "nvlink"}
    staging = [memory(**shape, small_tokens=asked)["staging_bytes"] for asked in (None, MAX_SMALL_TOKENS, 1024)]
    assert staging[0] == staging[1] < staging[2]


@pytest.mark.parametrize(
    ("least", "beyond"),
    [
        ({"deadline_s": 1e-9}, {"deadline_s": 0}),
        ({"deadline_s": 1e9}, {"deadline_s": 1.1e9}),
        ({"num_windows": 2, "window": 1}, {"num_windows": 2, "window": 2}),
        ({"max_tokens_per_rank": 8, "max_tokens": 8}, {"max_tokens_per_rank": 8, "max_tokens": 9}),
        ({"num_ranks": 4, "num_experts": 8}, {"num_ranks": 4, "num_experts": 10}),
        ({"hidden": 8, "dtype": "bfloat16"}, {"hidden": 12, "dtype": "bfloat16"}),
        ({"hidden": 16, "quantize": "fp8"}, {"hidden": 24, "quantize": "fp8"}),
        ({"hidden": 16, "wire": "fp8"}, {"hidden": 24, "wire": "fp8"}),
        ({"engine": "nvlink", "num_ranks": 16}, {"engine": "nvlink", "num_ranks": 17, "num_experts": 17}),
        ({"mode": "latency", "max_tokens": 512}, {"mode": "latency", "max_tokens": 513}),
        ({"staged": True, "capacity": 4}, {"staged": True, "async_op": True}),
        ({"staged": True, "max_tokens": 900, "small_tokens": 900}, {"staged": True, "max_tokens": 900}),
        ({"small_tokens": 1}, {"small_tokens": 0}),
        ({"layout": "masked", "capacity": 0}, {"layout": "masked", "capacity": None}),
        ({"layout": "expert_major", "alignment": 8}, {"layout": "rank_major", "alignment": 8}),
    ],
    ids=str,
)
def test_supports_at_its_bounds(least: dict[str, Any], beyond: dict[str, Any]) -> None:
    assert weft.supports(**least)
    assert not weft.supports(**beyond)


def test_a_group_may_have_more_ranks_than_a_layer() -> None:
    def rank(comm: weft.Communicator) -> tuple[int, ...]:
        text = "num_ranks is 65; allowed: 1 to 64, though a Communicator may have 1024"
        with pytest.raises(weft.InvalidArgument, match=text):
            weft.ExpertParallel(comm, num_experts=65, top_k=1, hidden=64, max_tokens_per_rank=1)
        if comm.rank == 3:
            return ()
        return comm.recover(evict=[3]).active

    left = tuple(each for each in range(65) if each != 3)
    results = weft.spawn(rank, 65, isolation="thread")
    assert results == [() if each == 3 else left for each in range(65)]
