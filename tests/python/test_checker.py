"""Guards against a checker of `weft verify` that takes wrong words for right ones."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import weft
from weft import reference
from weft.verify.cases import Fixed, draw_case
from weft.verify.check import Mismatch, check_dispatched, expect_equal, poison

NAN = float("nan")


def rows(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


def test_any_nan_is_a_nan_and_no_number_is() -> None:
    other_nan = torch.tensor([0x7FC1, 0x3F80], dtype=torch.int16).view(torch.bfloat16)
    assert expect_equal("x", other_nan, rows(NAN, 1.0)) == 2
    for got, want in ((rows(0.0, 1.0), rows(NAN, 1.0)), (rows(NAN, 1.0), rows(0.0, 1.0))):
        with pytest.raises(Mismatch, match=r"x\[0\]: .* 1 of 2 words differ"):
            expect_equal("x", got, want)


def test_every_bit_counts() -> None:
    with pytest.raises(Mismatch, match=r"x\[1\]: -0x8000"):
        expect_equal("x", rows(1.0, -0.0), rows(1.0, 0.0))
    with pytest.raises(Mismatch, match="expected"):
        expect_equal("x", rows(1.0), rows(1.0, 1.0))
    with pytest.raises(Mismatch, match=r"torch\.float32"):
        expect_equal("x", rows(1.0).float(), rows(1.0))


def test_poison_is_in_every_byte() -> None:
    by_row, by_column = torch.zeros(3, 4), torch.zeros(4, 3).t()
    for tensor in (by_row, by_column, torch.zeros(5, dtype=torch.int64)):
        poison(tensor)
        assert set(tensor.contiguous().view(torch.uint8).flatten().tolist()) == {0xFB}
    assert math.isfinite(by_row[0, 0]), "a NaN would pass for any other"
    poison(None)


@pytest.mark.parametrize("change", ["overflow", "num_rows", "counts", "offsets", "weights", "ids"])
def test_whatever_is_wrong_in_a_dispatch_is_found(ep: weft.ExpertParallel, change: str) -> None:
    case = dataclasses.replace(draw_case(1, Fixed()), layout="rank_major", capacity=4, ranks=1)
    x, ids, weights = torch.rand(6, 16), torch.arange(12).view(6, 2) % 8, torch.rand(6, 2)
    (want,) = reference.dispatch([x], [ids], [weights], num_experts=8, layout="rank_major", capacity=4)
    assert int(want.overflow) > 0
    before = int(ep.dispatch(x, ids, weights, capacity=4).overflow)
    got = ep.dispatch(x, ids, weights, capacity=4)
    assert check_dispatched(case, got, want, before) > 0
    if change == "overflow":
        before += 1
    part = {
        "num_rows": got.num_rows, "counts": got.num_tokens_per_expert, "offsets": got.offsets,
        "weights": got.topk_weights, "ids": got.topk_idx,
    }.get(change)  # fmt: skip
    if part is not None:
        part[(0,) * part.dim()] += 1
    names = {"counts": "num_tokens_per_expert", "weights": "topk_weights", "ids": "topk_idx"}
    with pytest.raises(Mismatch, match=f"^{names.get(change, change)}"):
        check_dispatched(case, got, want, before)
