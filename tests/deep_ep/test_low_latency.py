"""Guards against low-latency calls whose rows, counts, sources or weighted sums differ from Weft's reference."""

from __future__ import annotations

import pytest
from low_latency_cases import against_the_reference, two_micro_batches, waits, with_weights

import weft

RANKS = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_against_the_reference(num_ranks: int) -> None:
    weft.spawn(against_the_reference, num_ranks, device="cpu")


def test_weights_with_the_tokens() -> None:
    weft.spawn(with_weights, 3, device="cpu")


def test_results_are_not_overwritten() -> None:
    weft.spawn(two_micro_batches, 2, device="cpu")


@pytest.mark.parametrize("kind", ["table", "row"])
def test_statistics_of_waits(kind: str) -> None:
    weft.spawn(waits, 2, (kind,), device="cpu")
