"""Guards against a change that ranks carry out at different boundaries, because some had come to far fewer than others
when it was decided."""

from __future__ import annotations

import pytest
from joining_cases import LONG_S, checked_step, make_ep, number_of

import weft

APART = 5000


def _are_apart(comm: weft.Communicator, is_ahead: bool) -> tuple[int, tuple[int, ...]]:
    """Ranks that make no calls together may come to boundaries unequally often. Rank 0, far ahead or far behind, lets
    rank 2 go; a step follows, and one more change."""
    ep = make_ep(comm)
    comm.meet(LONG_S)
    if (comm.rank == 0) == is_ahead:
        for _ in range(APART):
            assert comm.boundary() is None
    comm.meet(LONG_S)
    if comm.rank == 0:
        assert comm.propose(remove=[2]).wait(LONG_S) == "committed"
    comm.meet(LONG_S)
    change = None
    while change is None:
        change = comm.boundary(LONG_S)
    if comm.rank == 2:
        return change.boundary, change.active
    checked_step(ep, number_of(comm))
    if comm.rank == 0:
        comm.propose(remove=[1])
    while True:  # they count alike again
        last = comm.boundary(LONG_S)
        if last is not None and comm.rank in last.removed:
            break
        checked_step(ep, number_of(comm))
        if last is not None:
            break
    assert last.active == (0,)
    return change.boundary, change.active


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_change_between_ranks_that_are_far_apart(is_ahead: bool) -> None:
    """It takes effect ahead of the furthest, at one boundary for all."""
    (found,) = set(weft.spawn(_are_apart, 3, (is_ahead,), device="cpu", max_ranks=3))
    assert found[0] > APART
    assert found[1] == (0, 1)
