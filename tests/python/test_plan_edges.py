"""Guards against calls along a plan that do otherwise than the first of their kind, where something is unusual; on both
engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from simulated_gpus import SimulatedRanks
from test_quick import inputs, make
from torch import Tensor

import weft
from pool import RankState


@pytest.fixture(params=["cpu", "nvlink"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """run(work): `work(state)` on two ranks of an engine."""
    if request.param == "nvlink":
        ranks: Any = SimulatedRanks(monkeypatch)
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: -1)  # no tool listens
        return lambda work: ranks.run(2, lambda state, _: work(state), [None] * 2)  # type: ignore[return-value]

    def on_cpu(work: Any) -> None:
        weft.spawn(lambda comm: work(RankState(comm.rank, {2: comm}, 2)), 2, device="cpu", isolation="thread")

    return on_cpu  # type: ignore[return-value]


def test_gradients_of_weights_of_a_negated_view(run: Any) -> None:
    def work(state: RankState) -> None:
        x, ids, weights = inputs(state.rank)
        with make(state) as ep:

            def gradients(*, is_view: bool) -> tuple[Tensor, Tensor]:
                leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
                r = ep.dispatch(leaves[0], ids, leaves[1], layout="expert_major")
                y = torch._neg_view(r.x * 1.5) if is_view else r.x * -1.5
                ep.combine(y, r.handle).float().sum().backward()
                assert leaves[0].grad is not None
                assert leaves[1].grad is not None
                return leaves[0].grad, leaves[1].grad

            wanted = gradients(is_view=False)
            assert bool(wanted[1].any())
            for _ in range(3):
                found = gradients(is_view=True)
                assert all(torch.equal(got, want) for got, want in zip(found, wanted, strict=True))

    run(work)
