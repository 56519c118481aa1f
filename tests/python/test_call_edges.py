"""Guards against calls that are right in the middle of what is allowed and wrong at its edges. On the cpu engine."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from test_errors import IDX, SHAPE, WEIGHTS, X

import weft


def test_bytes_sent_are_rows_with_their_ids_and_weights() -> None:
    """An id and a weight of 4 bytes for each pick go along, not with a handle, which has them."""

    def rank(comm: weft.Communicator) -> None:
        with weft.ExpertParallel(comm, **SHAPE) as ep:
            ids = torch.tensor([[0, 7], [7, 6], [0, 1], [-1, -1], [4, -1]])
            r = ep.dispatch(X, ids)
            num_rows = 3 if comm.rank == 0 else 2  # to the other rank: tokens 0, 1, 4, or 0 and 2
            first = num_rows * (16 * 4 + 2 * 8)
            stats = ep.stats()
            assert (stats["rows_sent"], stats["bytes_sent"]) == (num_rows, first)
            ep.dispatch(X.bfloat16(), handle=r.handle)
            stats = ep.stats()
            assert (stats["rows_sent"], stats["bytes_sent"]) == (2 * num_rows, first + num_rows * 16 * 2)

    weft.spawn(rank, 2)


def test_waits_of_all_windows_are_summed() -> None:
    def rank(comm: weft.Communicator) -> list[float]:
        with weft.ExpertParallel(comm, **SHAPE, num_windows=2) as ep:
            ep.dispatch(X, IDX, window=1)
            if comm.rank == 1:
                time.sleep(0.5)
            ep.dispatch(X, IDX, window=1)
            stats = ep.stats()
            assert len(stats["windows"]) == 2
            waits: list[float] = stats["wait_us"]
            return waits

    first, second = weft.spawn(rank, 2)
    assert first[1] > 200e3
    assert first[0] == second[1] == 0


@pytest.mark.parametrize("side", ["before", "behind"])
@pytest.mark.parametrize("name", ["expert_output", "side", "bias"])
def test_out_may_touch_what_is_read(ep: weft.ExpertParallel, name: str, side: str) -> None:
    handle = ep.dispatch(X, IDX).handle
    shape = {"expert_output": (5, 16), "side": (5, 2), "bias": (5, 16)}[name]
    number = shape[0] * shape[1]
    memory = torch.zeros(80 + number)
    read, out = (memory[:number], memory[number:]) if side == "before" else (memory[80:], memory[:80])
    given = {"expert_output": X, name: read.view(shape)}
    ep.combine(**given, handle=handle, out=out.view(5, 16))
    overlapping = memory[number - 1 :][:80] if side == "before" else memory[1:81]
    with pytest.raises(weft.InvalidArgument, match=f"overlaps {name}"):
        ep.combine(**given, handle=handle, out=overlapping.view(5, 16))


def test_an_empty_capacity_may_be_repeated(ep: weft.ExpertParallel) -> None:
    r = ep.dispatch(X, IDX, capacity=0)
    assert len(ep.dispatch(X, handle=r.handle, capacity=0).x) == 0
    for wrong in (1, 5):
        with pytest.raises(weft.InvalidArgument, match=rf"capacity is {wrong} beside handle; .* that of the handle, 0"):
            ep.dispatch(X, handle=r.handle, capacity=wrong)
    exact = ep.dispatch(X, IDX)
    with pytest.raises(weft.InvalidArgument, match="that of the handle, None"):
        ep.dispatch(X, handle=exact.handle, capacity=0)


def test_most_tokens(ep: weft.ExpertParallel) -> None:
    """As many as are allowed, and one more."""
    for most in (5, 64):
        ids = torch.zeros(most, 2, dtype=torch.int64)
        assert len(ep.dispatch(torch.zeros(most, 16), ids, max_tokens=most).x) == most
        with pytest.raises(
            weft.InvalidArgument, match=rf"x has {most + 1} tokens; allowed are 0 to max_tokens = {most}"
        ):
            ep.dispatch(torch.zeros(most + 1, 16), torch.zeros(most + 1, 2, dtype=torch.int64), max_tokens=most)
    with pytest.raises(weft.InvalidArgument, match="max_tokens is 65; allowed are 0 to max_tokens_per_rank = 64"):
        ep.dispatch(X, IDX, max_tokens=65)
    handle = ep.dispatch(X, IDX).handle
    for number in (4, 6):
        with pytest.raises(
            weft.InvalidArgument, match=f"x has {number} tokens; allowed are 5, the tokens of the handle"
        ):
            ep.dispatch(torch.zeros(number, 16), handle=handle)


def test_widest_opaque_rows(ep: weft.ExpertParallel) -> None:
    """4 * hidden bytes, scales included."""
    ids = IDX[:2]
    data, scales = torch.ones(2, 48, dtype=torch.uint8), torch.ones(2, 4)
    assert ep.dispatch(weft.Quantized(data, scales), ids).x.data.shape == (2, 48)
    with pytest.raises(weft.InvalidArgument, match=r"x has rows of 68 bytes, scales included; allowed are .* = 64"):
        ep.dispatch(weft.Quantized(data, torch.ones(2, 5)), ids)
    with pytest.raises(weft.InvalidArgument, match="x has rows of 80 bytes"):
        ep.dispatch(weft.Quantized(torch.ones(2, 80, dtype=torch.uint8)), ids)
    for num_bytes in (0, 8, 24):
        with pytest.raises(weft.InvalidArgument, match=f"rows of {num_bytes} bytes; allowed are multiples of 16"):
            ep.dispatch(weft.Quantized(torch.ones(2, num_bytes, dtype=torch.uint8)), ids)


def test_plain_sums(ep: weft.ExpertParallel) -> None:
    weights = torch.full((5, 2), 0.25)
    r = ep.dispatch(X, IDX, weights, layout="expert_major")
    plain, weighted = ep.combine(r.x, r.handle, weighted=False), ep.combine(r.x, r.handle)
    assert torch.equal(weighted, 0.25 * plain)
    assert bool(plain.any())


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
def test_side_values_have_no_minus_zero(ep: weft.ExpertParallel, layout: str) -> None:
    """They are sums that begin with +0."""
    r = ep.dispatch(X, IDX, layout=layout)
    side = torch.full(r.topk_weights.shape, -0.0)
    _, sums = ep.combine(r.x, r.handle, side=side)
    assert not bool(torch.signbit(sums).any())


def test_a_repetition_without_gradients_records_nothing(ep: weft.ExpertParallel) -> None:
    handle, x = ep.dispatch(X, IDX).handle, X.clone().requires_grad_()
    with torch.no_grad():
        assert not ep.dispatch(x, handle=handle).x.requires_grad
    assert not x._backward_hooks


def fill_the_heap(ep: weft.ExpertParallel, **options: Any) -> None:
    """With numbers, so that what nobody clears is seen."""
    ids = torch.full((64, 2), 3)
    r = ep.dispatch(torch.full((64, 16), 7.0), ids, layout="expert_major", **options)
    assert bool((r.x[:128] == 7).all())


def test_holes_are_zero_where_gradients_are_tracked(ep: weft.ExpertParallel) -> None:
    """Whatever `zero_holes` says: they are multiplied by gradients of zero, and NaN * 0 is NaN."""
    ids = torch.tensor([[0, 1], [1, 2], [3, 5], [0, 6], [7, 7]])
    options: dict[str, Any] = {"layout": "expert_major", "alignment": 8}
    tracked = X.clone().requires_grad_()
    for x, is_zero in ((X, False), (tracked, True)):
        fill_the_heap(ep)
        first = ep.dispatch(x, ids, WEIGHTS, zero_holes=False, **options)
        is_hole = first.topk_weights.detach() == 0
        assert is_hole.sum() == len(first.x) - 10
        assert bool(first.x.detach()[is_hole].any()) != is_zero
        handle = first.handle
        del first
        fill_the_heap(ep)
        assert bool(ep.dispatch(x, handle=handle, zero_holes=False).x.detach()[is_hole].any()) != is_zero


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_rows_beyond_the_last_are_zero_for_gradients_of_repetitions(ep: weft.ExpertParallel, layout: str) -> None:
    """Compiled, too."""

    def repeat(x: torch.Tensor) -> torch.Tensor:
        return ep.dispatch(x, handle=first.handle).x

    first = ep.dispatch(X, IDX, WEIGHTS, layout=layout, capacity=32)
    counts = first.num_tokens_per_expert.unsqueeze(-1) if layout == "masked" else first.num_rows
    is_empty = torch.arange(32) >= counts
    for call in (repeat, torch.compile(repeat, backend="aot_eager")):
        fill_the_heap(ep)
        rows = call(X.clone().requires_grad_())
        assert rows.requires_grad
        assert not bool(rows.detach()[is_empty].any())
