"""Guards against a group that sleeps, or a newcomer that does, while ranks come and go: who is asleep says so, and
behind `wake` all is as if nobody had slept."""

from __future__ import annotations

import os
import pathlib
import signal
from typing import Any

import pytest
from joining_cases import LONG_S, Outer, checked_step, make_ep, number_of, open_group, run_until
from test_standby import until

import weft


def _sleeps_and_wakes(comm: weft.Communicator, ep: weft.ExpertParallel) -> None:
    """Alone, whoever it is."""
    comm.sleep()
    for call in (lambda: checked_step(ep, 3), lambda: comm.boundary(0.01), comm.ready):
        with pytest.raises(weft.InvalidState, match=r"asleep; call comm\.wake"):
            call()
    comm.wake()
    checked_step(ep, 4)


def _joins(outer_comm: Any, who: str) -> tuple[int, ...]:
    """The members sleep while rank 2 makes its objects; or rank 2 sleeps before it is ready, or behind that."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, device="cpu")
        ep = make_ep(comm)
        checked_step(ep, 2)
        if who == "newcomer":
            _sleeps_and_wakes(comm, ep)
        comm.ready()
        outer.wait()
        if who == "ready":
            comm.sleep()
            outer.wait()  # it is wanted, and gives its word: it is no less ready
            with pytest.raises(weft.InvalidState, match="asleep"):
                comm.boundary()
            comm.wake()
        else:
            outer.wait()
        change = comm.boundary(LONG_S)
        assert change is not None
        checked_step(ep, number_of(comm))
    else:
        ep = make_ep(comm)
        checked_step(ep, number_of(comm))
        if who == "members":
            comm.sleep()
        outer.wait()
        outer.wait()
        until(lambda: comm.membership.standby == (2,))
        if who == "members":
            for call in (lambda: comm.propose(admit=[2]), comm.boundary):
                with pytest.raises(weft.InvalidState, match="asleep"):
                    call()
            comm.meet(LONG_S)
            comm.wake()
        comm.meet(LONG_S)
        if comm.rank == 0:
            comm.propose(admit=[2])
        outer.wait()
        change = run_until(comm, ep, [0, 1, 2])
    for _ in range(2):
        comm.sleep()
        comm.wake()
        checked_step(ep, number_of(comm))
        assert comm.boundary(LONG_S) is None
    outer.wait()
    comm.close()
    return change.active


@pytest.mark.parametrize("who", ["members", "newcomer", "ready"])
def test_a_rank_joins_beside_sleepers(who: str) -> None:
    """It comes in when all are awake; then all sleep and wake together."""
    assert weft.spawn(_joins, 3, (who,), device="cpu") == [(0, 1, 2)] * 3


def _goes(comm: Any, how: str) -> tuple[int, ...]:
    """Rank 2 leaves, or is suspended, before the others sleep."""
    ep = make_ep(comm)
    checked_step(ep, number_of(comm))
    comm.meet(LONG_S)
    if comm.rank == 2 and how == "leave":
        comm.leave(lambda: checked_step(ep, number_of(comm)))
        return ()
    if comm.rank == 0 and how == "suspend":
        comm.propose(suspend=[2])
    while comm.boundary(LONG_S) is None:
        checked_step(ep, number_of(comm))
    if comm.rank == 2:
        _sleeps_and_wakes(comm, ep)
        change = comm.boundary(LONG_S)
        assert change is not None
        checked_step(ep, number_of(comm))
    else:
        comm.sleep()
        comm.meet(LONG_S)
        comm.wake()
        for _ in range(3):
            checked_step(ep, number_of(comm))
            assert comm.boundary(LONG_S) is None
        if how == "leave":
            return tuple(comm.active_ranks)
        until(lambda: comm.membership.standby == (2,))
        comm.meet(LONG_S)
        if comm.rank == 0:
            comm.propose(resume=[2])
        run_until(comm, ep, [0, 1, 2])
    assert comm.boundary(LONG_S) is None
    checked_step(ep, number_of(comm))
    comm.meet(LONG_S)
    return tuple(comm.active_ranks)


@pytest.mark.parametrize("how", ["leave", "suspend"])
def test_the_others_sleep_when_a_rank_has_gone(how: str) -> None:
    """Who is suspended sleeps by itself, and comes in again."""
    seen = weft.spawn(_goes, 3, (how,), device="cpu", max_ranks=3)
    assert seen == ([(0, 1)] * 2 + [()] if how == "leave" else [(0, 1, 2)] * 3)


def _dies_asleep(outer_comm: Any, gone_on: pathlib.Path) -> tuple[int, ...]:
    """Rank 1 is killed while all members sleep, and the spare, which is awake, takes its place."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 3, 4)
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, standby=True, device="cpu")
        ep = make_ep(comm)
        comm.ready()
        outer.wait()
        outer.go_on(gone_on)
        change = comm.boundary(LONG_S)
        assert change is not None
    else:
        ep = make_ep(comm)
        checked_step(ep, number_of(comm))
        outer.wait()
        outer.wait()
        until(lambda: comm.membership.standby == (3,))
        comm.meet(LONG_S)
        comm.sleep()
        if comm.rank == 1:
            while len(list(gone_on.iterdir())) < 3:
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        outer.go_on(gone_on)
        with pytest.raises((weft.PeerLost, weft.PeerTimeout)):
            comm.meet(LONG_S)
        until(lambda: 1 in {rank for rank, _, _ in comm._native.detections()})
        change = comm.recover(spares=[3])
        assert comm.is_asleep
    assert change.active == (0, 2, 3)
    comm.wake()
    for _ in range(3):
        checked_step(ep, number_of(comm))
        assert comm.boundary(LONG_S) is None
    comm.meet(LONG_S)
    return change.active


def test_a_spare_takes_the_place_of_a_sleeper(tmp_path: pathlib.Path) -> None:
    """It is awake, the others are not: `wake` of all."""
    seen = weft.spawn(_dies_asleep, 4, (tmp_path,), device="cpu", on_failure="return")
    assert isinstance(seen.pop(1), weft.PeerLost)
    assert seen == [(0, 2, 3)] * 3
