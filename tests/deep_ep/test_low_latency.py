"""Guards against low-latency calls whose rows, counts, sources or weighted sums differ from Weft's reference."""

from __future__ import annotations

import pytest
from low_latency_cases import against_the_reference, two_micro_batches, waits, with_weights

import weft
from weft.deep_ep.low_latency import room_of
from weft.limits import has_pick_slots

RANKS = (1, 3, 4, *(pytest.param(number, marks=pytest.mark.long) for number in (2, 8)))


@pytest.mark.parametrize("num_ranks", RANKS)
def test_against_the_reference(num_ranks: int) -> None:
    weft.spawn(against_the_reference, num_ranks, device="cpu")


def test_weights_with_the_tokens() -> None:
    weft.spawn(with_weights, 3, device="cpu")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_results_are_not_overwritten(num_ranks: int) -> None:
    weft.spawn(two_micro_batches, num_ranks, device="cpu")


@pytest.mark.parametrize("kind", ["table", "row"])
def test_statistics_of_waits(kind: str) -> None:
    weft.spawn(waits, 2, (kind,), device="cpu")


@pytest.mark.parametrize(
    ("top_k", "num_ranks", "wanted"), [(3, 4, 16), (4, 4, 16), (8, 2, 64), (17, 2, 16), (9, 4, 36)]
)
def test_room_for_picks_of_few_ranks(top_k: int, num_ranks: int, wanted: int) -> None:
    """The slots of small batches hold a row a pick; with far too many picks there are none."""
    assert room_of(16, top_k, num_ranks, "nvlink") == wanted
    assert has_pick_slots(num_ranks, top_k, wanted, 16) == (top_k <= 8 * num_ranks)
    assert room_of(16, top_k, num_ranks, "cpu") == 16
