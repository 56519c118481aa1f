"""Guards against gradients that are lost, and ranks that wait, where a handle is repeated and one rank does not use what
came of it."""

from __future__ import annotations

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
