"""A rank is lost and the others go on, for test_property: what each rank does."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import pytest
import torch
from property_cases import RankPlan, Seen, run_plan

import weft
from pool import RankState


@dataclass
class LossPlan:
    """How a rank is lost before the plan of those left."""

    lost: int
    by: str  # "close", "kill"
    ranks_left: tuple[int, ...]
    plan: RankPlan


def run_after_loss(state: RankState, loss: LossPlan) -> list[Seen] | None:
    """A call of all ranks, the loss of one, ``PeerLost`` on the others, a rebuild, and the plan."""
    options = loss.plan.expert_parallel
    ep = weft.ExpertParallel(state.comm, **options)
    x, ids = (
        torch.zeros((1, options["hidden"]), dtype=options["dtype"], device=state.comm.device),
        torch.zeros((1, options["top_k"]), dtype=torch.int64, device=state.comm.device),
    )
    if state.rank == loss.lost:
        ep.dispatch(x, ids)
        if loss.by == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        state.comm.close()
        return None

    def call_twice() -> None:  # the first one fails already where another rank was later than the lost one
        for _ in range(2):
            ep.dispatch(x, ids)

    with pytest.raises(weft.PeerLost) as caught:
        call_twice()
    assert caught.value.ranks == (loss.lost,)
    state.comm.rebuild(loss.ranks_left)
    return run_plan(state, loss.plan)
