"""Guards against a V1 `Buffer` whose rows, ids, weights, counts or sums differ from Weft's reference."""

from __future__ import annotations

import pytest
import torch
from buffer_cases import against_the_reference

import weft

RANKS = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_rows_are_those_of_the_reference(num_ranks: int) -> None:
    weft.spawn(against_the_reference, num_ranks, (torch.bfloat16, False), device="cpu")


def test_other_dtypes_and_duplicates() -> None:
    weft.spawn(against_the_reference, 3, (torch.float32, True), device="cpu")
