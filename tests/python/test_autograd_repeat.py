"""Guards against gradients that are lost, and ranks that wait, where a handle is repeated and one rank leaves out what
came of it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from test_autograd import HIDDEN, LAYOUTS, Inputs, make_ep
from torch import Tensor

import weft

NUM_RANKS = 4


def of_last_rank(comm: weft.Communicator, y: Tensor, *, is_used: bool) -> Tensor:
    """The loss of a result that the last rank leaves out, or multiplies by zero, which is to give the same."""
    if comm.rank < NUM_RANKS - 1:
        return (y * (1.0 + comm.rank)).sum()
    return (y * 0).sum() if is_used else y.new_zeros(())


def compare(run: Any, comm: weft.Communicator) -> None:
    """`run(is_used)` gives gradients; what was not used may have none in place of zeros."""
    wanted, found = run(is_used=True), run(is_used=False)
    assert any(grad is not None and bool(grad.any()) for grad in wanted)
    for idx, (want, got) in enumerate(zip(wanted, found, strict=True)):
        if want is not None:
            got = torch.zeros_like(want) if got is None else got
            torch.testing.assert_close(got, want, msg=lambda text, idx=idx: f"rank {comm.rank}, leaf {idx}: {text}")


@pytest.mark.parametrize("uses_first", [False, True])
@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_repeated_rows_without_gradients_in_an_unused_result(layout: str, *, uses_first: bool) -> None:
    def rank(comm: weft.Communicator) -> None:
        def run(*, is_used: bool) -> list[Tensor | None]:
            inputs, scale = Inputs(comm.rank), torch.full((HIDDEN,), 1.5).requires_grad_()
            x = inputs.x * 1
            first = ep.dispatch(x, inputs.topk_idx, inputs.topk_weights, **LAYOUTS[layout])
            second = ep.dispatch(inputs.x.detach() + 1, handle=first.handle)
            y = ep.combine(second.x * scale, second.handle)
            loss = x.sum() + of_last_rank(comm, y, is_used=is_used)
            (loss + first.x.square().sum() if uses_first else loss).backward()
            return [inputs.x.grad, inputs.topk_weights.grad, scale.grad]

        with make_ep(comm) as ep:
            compare(run, comm)

    weft.spawn(rank, NUM_RANKS, isolation="thread")


@pytest.mark.parametrize("variant", ["plain", "uses_first", "no_weights", "x2_first", "same_x", "again"])
@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_unused_result_of_a_repeated_dispatch(layout: str, variant: str) -> None:
    """The backward of the repeated dispatch runs before that of the first, which has the weights."""

    def rank(comm: weft.Communicator) -> None:
        def run(*, is_used: bool) -> list[Tensor | None]:
            inputs, scale = Inputs(comm.rank), torch.full((HIDDEN,), 1.5).requires_grad_()
            other = (inputs.x.detach() + 1).requires_grad_()
            x2 = other * 1 if variant == "x2_first" else None
            x = inputs.x * 1
            weights = None if variant == "no_weights" else inputs.topk_weights
            first = ep.dispatch(x, inputs.topk_idx, weights, **LAYOUTS[layout])
            x2 = x if variant == "same_x" else other * 1 if x2 is None else x2
            second = ep.dispatch(x2, handle=first.handle)
            if variant == "again":
                second = ep.dispatch(torch.tanh(x2), handle=second.handle)
            h = torch.tanh(second.x * scale)
            if layout == "rank_major":
                h = h * first.topk_weights.sum(1, keepdim=True)
            loss = x.sum() + x2.sum() + of_last_rank(comm, ep.combine(h, second.handle), is_used=is_used)
            (loss + first.x.square().sum() if variant == "uses_first" else loss).backward()
            assert bool(inputs.topk_weights.grad is None) == (variant == "no_weights" or not used(comm, is_used))
            return [inputs.x.grad, other.grad, inputs.topk_weights.grad, scale.grad]

        def used(comm: weft.Communicator, is_used: bool) -> bool:
            return is_used or variant == "uses_first" or comm.rank < NUM_RANKS - 1

        with make_ep(comm) as ep:
            compare(run, comm)

    weft.spawn(rank, NUM_RANKS, isolation="thread")


@pytest.mark.parametrize("order", ["combine_between", "combines_last"])
def test_unused_results_of_a_handle_and_its_repetition(order: str) -> None:
    def rank(comm: weft.Communicator) -> None:
        def run(*, is_used: bool) -> list[Tensor | None]:
            inputs, scale = Inputs(comm.rank), torch.full((HIDDEN,), 1.5).requires_grad_()
            other = (inputs.x.detach() + 1).requires_grad_()
            x = inputs.x * 1
            first = ep.dispatch(x, inputs.topk_idx, inputs.topk_weights, layout="expert_major")
            y = ep.combine(first.x * scale, first.handle) if order == "combine_between" else None
            x2 = other * 1
            second = ep.dispatch(x2, handle=first.handle)
            y = ep.combine(first.x * scale, first.handle) if y is None else y
            y2 = ep.combine(second.x * first.x * scale, second.handle)
            (x.sum() + x2.sum() + of_last_rank(comm, y + y2, is_used=is_used)).backward()
            return [inputs.x.grad, other.grad, inputs.topk_weights.grad, scale.grad]

        with make_ep(comm) as ep:
            compare(run, comm)

    weft.spawn(rank, NUM_RANKS, isolation="thread")


@pytest.mark.parametrize("also", ["", "outputs", "first"])
@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_the_newer_of_two_combines_is_unused(layout: str, also: str) -> None:
    """Its backward runs before that of the older one, which autograd visits here."""

    def rank(comm: weft.Communicator) -> None:
        def run(*, is_used: bool) -> list[Tensor | None]:
            inputs = Inputs(comm.rank)
            scales = [torch.full((HIDDEN,), 1.5 + idx).requires_grad_() for idx in range(3)]
            r = ep.dispatch(inputs.x * 1, inputs.topk_idx, inputs.topk_weights, **LAYOUTS[layout])
            outputs = [torch.tanh(r.x * scale) for scale in scales]
            ys = [ep.combine(each, r.handle) for each in outputs]
            used = ys[0].square().sum() * (2.0 + comm.rank)
            if also == "outputs":
                used = used + outputs[1].sum()
            if also == "first":
                used = used + r.x.square().sum() + inputs.x.sum()
            (used + of_last_rank(comm, ys[1], is_used=is_used) + of_last_rank(comm, ys[2], is_used=True)).backward()
            return [inputs.x.grad, inputs.topk_weights.grad, *(scale.grad for scale in scales)]

        with make_ep(comm) as ep:
            compare(run, comm)

    weft.spawn(rank, NUM_RANKS, isolation="thread")


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_a_handle_repeated_with_what_came_of_its_combine(layout: str) -> None:
    """Two layers on one routing, with experts of their own."""

    def rank(comm: weft.Communicator) -> None:
        def run(*, is_used: bool) -> list[Tensor | None]:
            inputs = Inputs(comm.rank)
            scales = [torch.full((HIDDEN,), 1.5 + idx).requires_grad_() for idx in range(2)]
            first = ep.dispatch(inputs.x * 1, inputs.topk_idx, inputs.topk_weights, **LAYOUTS[layout])
            y = ep.combine(first.x * scales[0], first.handle)
            x2 = torch.tanh(y)
            second = ep.dispatch(x2, handle=first.handle)
            y2 = ep.combine(torch.tanh(second.x * scales[1]), second.handle)
            (x2.sum() + of_last_rank(comm, y2, is_used=is_used)).backward()
            return [inputs.x.grad, inputs.topk_weights.grad, *(scale.grad for scale in scales)]

        with make_ep(comm) as ep:
            compare(run, comm)

    weft.spawn(rank, NUM_RANKS, isolation="thread")


def test_backwards_one_after_the_other(ep: weft.ExpertParallel) -> None:
    """Two backwards in a row give the gradients of one."""
    grads = []
    for is_apart in (False, True):
        inputs, scale = Inputs(0), torch.full((HIDDEN,), 1.5).requires_grad_()
        other = (inputs.x.detach() + 1).requires_grad_()
        first = ep.dispatch(inputs.x * 1, inputs.topk_idx, layout="expert_major")
        y = ep.combine(first.x * scale, first.handle)
        second = ep.dispatch(other * 1, handle=first.handle)
        y2 = ep.combine(torch.tanh(second.x * scale), second.handle)
        if is_apart:
            y.sum().backward()
            y2.sum().backward()
        else:
            (y.sum() + y2.sum()).backward()
        grads.append([inputs.x.grad, other.grad, scale.grad])
        gc.collect()
        assert not ep.calls.unused
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two)
