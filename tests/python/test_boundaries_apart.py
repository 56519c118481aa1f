"""Guards against a change that ranks carry out at different boundaries, because some had come to far fewer than others
when it was decided; and against calls that wait for each other then."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
from joining_cases import LONG_S, checked_step, make_ep, number_of
from test_standby import until

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


def _miscount(comm: weft.Communicator, behind: int, done: pathlib.Path) -> Any:
    """Rank `behind` passes one boundary less, then rank 2 is let go in the middle of steps."""
    ep = make_ep(comm)
    comm.meet(LONG_S)
    if comm.rank != behind:
        assert comm.boundary() is None
    for step in range(3):  # without a change it does no harm
        assert comm.boundary() is None
        checked_step(ep, step)
    comm.meet(LONG_S)
    if comm.rank == 0:
        comm.propose(remove=[2])
    try:
        for step in range(3, 100_000):
            change = comm.boundary(LONG_S)
            if change is not None and comm.rank in change.removed:
                until(lambda: len(list(done.iterdir())) == 2)
                return "let go"
            checked_step(ep, step)
    except weft.InvalidState as error:
        text = str(error)
    if comm.rank == 2:
        with pytest.raises(weft.Evicted):
            comm.recover()
        return text
    active = comm.recover().active
    for step in range(3):
        checked_step(ep, step)
        assert comm.boundary() is None
    (done / str(comm.rank)).touch()
    return text, active


@pytest.mark.parametrize("behind", [0, 1, 2])
def test_ranks_that_wait_for_each_other_are_told_their_counts(behind: int, tmp_path: pathlib.Path) -> None:
    """All of them, long before a deadline; `recover` lets them count anew."""
    seen = weft.spawn(_miscount, 3, (behind, tmp_path), device="cpu", max_ranks=3)
    assert [each[1] for each in seen[:2]] == [(0, 1)] * 2
    texts = [each[0] for each in seen[:2]]
    if behind == 2:
        texts.append(seen[2])
    else:
        assert seen[2] == "let go"
    for text in texts:
        counts = re.findall(r"rank (\d) has passed (\d+) and is in epoch (\d)", text)
        (ahead, most, newest), (last, least, epoch) = counts
        assert (int(last), int(newest), int(epoch)) == (behind, 2, 1), text
        assert ahead != last
        assert int(most) > int(least)
        assert "recover()" in text
