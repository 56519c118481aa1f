"""Guards against backwards that run in another order than those of the peers, twice, or with values that are gone."""

from __future__ import annotations

import pytest
import torch
from test_autograd import HIDDEN, LAYOUTS, Inputs, count_records, make_ep
from test_autograd_repeat import NUM_RANKS, compare, of_last_rank
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_two_newer_combines_are_unused(layout: str) -> None:
    """Their backwards run newest first, as on ranks that use them; else each gets the gradients of the other."""

    def rank(comm: weft.Communicator) -> None:
        def run(*, is_used: bool) -> list[Tensor | None]:
            inputs = Inputs(comm.rank)
            scales = [torch.full((HIDDEN,), 1.5 + idx).requires_grad_() for idx in range(3)]
            r = ep.dispatch(inputs.x * 1, inputs.topk_idx, inputs.topk_weights, **LAYOUTS[layout])
            ys = [ep.combine(torch.tanh(r.x * scale), r.handle) for scale in scales]
            newer = (of_last_rank(comm, factor * y, is_used=is_used) for factor, y in ((1.0, ys[1]), (-7.0, ys[2])))
            (ys[0].square().sum() + sum(newer)).backward()
            return [inputs.x.grad, inputs.topk_weights.grad, *(scale.grad for scale in scales)]

        with make_ep(comm) as ep:
            compare(run, comm)

    weft.spawn(rank, NUM_RANKS, isolation="thread")


def test_an_unused_result_whose_expert_output_was_changed(ep: weft.ExpertParallel) -> None:
    inputs = Inputs(0)
    r = ep.dispatch(inputs.x * 1, inputs.topk_idx, inputs.topk_weights, layout="expert_major")
    h = r.x * 2
    ep.combine(h, r.handle)
    h.detach().zero_()
    with pytest.raises(weft.InvalidState, match="expert_output was changed in place after combine"):
        h.sum().backward()


def test_an_expert_output_outlives_the_epoch_of_its_combine(ep: weft.ExpertParallel) -> None:
    """What else it is used for has a backward; the combine has none any more."""
    inputs, scale = Inputs(0), torch.full((HIDDEN,), 1.5).requires_grad_()
    r = ep.dispatch(inputs.x * 1, inputs.topk_idx, inputs.topk_weights, layout="expert_major")
    rows = r.x.detach().clone()
    h = rows * scale
    y = ep.combine(h, r.handle)
    ep.comm.rebuild([0])
    h.sum().backward()
    torch.testing.assert_close(scale.grad, rows.sum(0))
    with pytest.raises(weft.InvalidState, match="the handle is of epoch"):
        y.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_layers_leave_nothing(ep: weft.ExpertParallel, use_reentrant: bool) -> None:
    """The graph of a recomputation dies before it has had a backward, and is no result that was not used."""
    expert = nn.Linear(HIDDEN, HIDDEN)

    def layer(x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        r = ep.dispatch(x, topk_idx, topk_weights, layout="expert_major")
        return x + ep.combine(torch.tanh(expert(r.x)), r.handle)

    for _ in range(3):
        inputs = Inputs(0)
        given = (inputs.x, inputs.topk_idx, inputs.topk_weights)
        checkpoint(layer, *given, use_reentrant=use_reentrant).square().sum().backward()
        assert count_records() == 0
        stats = ep.stats()
        assert stats["windows"][0]["heap_used"] == 0
    assert (stats["num_dispatches"], stats["num_combines"]) == (9, 9), "three of each in a step"
