"""Guards against a spare that does not take the place of the dead, and a suspended rank that comes back with other
memory or a wrong word."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from joining_cases import LONG_S, Outer, checked_step, make_ep, mappings, number_of, open_group, run_until
from test_standby import until

import weft


def _spare(outer_comm: Any, spares: Any, gone_on: pathlib.Path) -> tuple[weft.Change, int]:
    """Three ranks and a spare in slot 3; rank 1 is killed."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 3, 4)
    if comm is not None:
        ep = make_ep(comm)
        checked_step(ep, number_of(comm))
        outer.wait()
        outer.wait()
        if comm.rank == 1:
            outer.die(gone_on, 3)
        outer.go_on(gone_on)
        try:
            while True:
                checked_step(ep, number_of(comm))
        except (weft.PeerLost, weft.PeerTimeout):
            # Who has heard of it from another rank alone would begin with the dead, and then go on without the spare.
            until(lambda: 1 in {rank for rank, _, _ in comm._native.detections()})
            change = comm.recover(spares=spares)
        if spares == 0:
            checked_step(ep, number_of(comm))
            if comm.rank == 0:
                comm.propose(admit=[3])
            change = run_until(comm, ep, [0, 2, 3])
    else:
        outer.wait()
        comm = weft.Communicator.join(address, device="cpu")
        ep = make_ep(comm)
        checked_step(ep, 5)
        comm.ready()
        outer.wait()
        outer.go_on(gone_on)
        found = comm.boundary(LONG_S)
        assert found is not None
        change = found
        if spares == 0:
            checked_step(ep, number_of(comm))
    for _ in range(3):
        checked_step(ep, number_of(comm))
        assert comm.boundary(LONG_S) is None
    checked_step(ep, number_of(comm))
    return change, comm.epoch


@pytest.mark.parametrize("spares", ["auto", [3], 0])
def test_a_spare_takes_the_place_of_the_dead(spares: Any, tmp_path: pathlib.Path) -> None:
    """In one step with the recovery, or not at all."""
    seen = weft.spawn(_spare, num_ranks=4, args=(spares, tmp_path), device="cpu", on_failure="return")
    assert isinstance(seen.pop(1), weft.PeerLost)
    for change, _ in seen:
        assert change.active == (0, 2, 3)
        assert change.added == (3,)
    assert len({epoch for _, epoch in seen}) == 1


def _came_with_a_member(outer_comm: Any, gone_on: pathlib.Path) -> tuple[int, ...]:
    """Rank 2 joins, then rank 1, which does not call it: the one in the higher slot does. Rank 2 is a member before it
    has done so; then rank 0 dies."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 1, 3)
    slot = (0, 2, 1)[outer.rank]
    ep = make_ep(comm) if comm is not None else None
    outer.wait()
    for turn in (2, 1):
        if slot == turn:
            comm = weft.Communicator.join(address, slot=slot, device="cpu")
        outer.wait()
    assert comm is not None
    ep = ep or make_ep(comm)
    if slot == 2:
        comm.ready()
    outer.wait()
    if slot == 0:
        comm.propose(admit=[2])
    if slot != 1:
        run_until(comm, ep, [0, 2])
    outer.wait()
    if slot == 1:
        comm.ready()
    outer.wait()
    if slot == 0:
        outer.die(gone_on, 2)
    outer.go_on(gone_on)
    if slot == 2:
        try:
            while True:
                checked_step(ep, number_of(comm))
        except (weft.PeerLost, weft.PeerTimeout):
            change = comm.recover(spares=[1])
    else:
        found = comm.boundary(LONG_S)
        assert found is not None
        change = found
    checked_step(ep, number_of(comm))
    return change.active


def test_a_spare_is_ready_for_who_came_with_it(tmp_path: pathlib.Path) -> None:
    """Also for a member that it was not connected to."""
    seen = weft.spawn(_came_with_a_member, num_ranks=3, args=(tmp_path,), device="cpu", on_failure="return")
    assert isinstance(seen[0], weft.PeerLost)
    assert seen[1:] == [(1, 2)] * 2


def _have_not_met(outer_comm: Any, gone_on: pathlib.Path) -> tuple[int, ...]:
    """The spare in slot 4 joins first, so it finds nobody in slot 3 and calls there later; then ranks 1 and 2 die."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 3, 5)
    ep = make_ep(comm) if comm is not None else None
    for turn in (4, 3):
        outer.wait()
        if outer.rank == turn:
            comm = weft.Communicator.join(address, slot=turn, device="cpu")
    assert comm is not None
    ep = ep or make_ep(comm)
    if outer.rank > 2:
        comm.ready()
    outer.wait()
    if outer.rank in (1, 2):
        outer.die(gone_on, 3)
    outer.go_on(gone_on)
    change: Any = None
    if outer.rank == 0:
        try:
            while True:
                checked_step(ep, number_of(comm))
        except (weft.PeerLost, weft.PeerTimeout):
            until(lambda: {rank for rank, _, _ in comm._native.detections()} >= {1, 2})
            change = comm.recover(spares=[3, 4])
        if 4 not in change.active:
            comm.propose(admit=[4])
    else:
        change = comm.boundary(LONG_S)
    if 4 in change.active:
        checked_step(ep, number_of(comm))
    else:
        run_until(comm, ep, [0, 3, 4])
    return tuple(comm.active_ranks)


def test_spares_that_have_not_met_are_both_kept(tmp_path: pathlib.Path) -> None:
    """One recovery takes in who are connected to each other; the other one is a spare as before."""
    seen = weft.spawn(_have_not_met, num_ranks=5, args=(tmp_path,), device="cpu", on_failure="return")
    assert [type(seen[rank]) for rank in (1, 2)] == [weft.PeerLost] * 2
    assert [seen[rank] for rank in (0, 3, 4)] == [(0, 3, 4)] * 3


def _suspended(comm: Any) -> list[tuple[int, ...]]:
    ep = make_ep(comm)
    checked_step(ep, number_of(comm))
    comm.meet(LONG_S)
    before = mappings()
    changes = []
    if comm.rank == 0:
        comm.propose(suspend=[2])
    changes.append(run_until(comm, ep, [0, 1]) if comm.rank != 2 else _until_suspended(comm, ep))
    if comm.rank == 2:
        assert (comm.is_member, comm.active_ranks) == (False, (2,))
        checked_step(ep, 9)  # alone
        change = comm.boundary(LONG_S)
        assert change is not None
        checked_step(ep, number_of(comm))
        changes.append(change)
    else:
        checked_step(ep, number_of(comm))
        assert comm.membership.standby == (2,)
        comm.meet(LONG_S)  # else the other one may have taken it in again
        if comm.rank == 1:
            comm.propose(resume=[2])
        changes.append(run_until(comm, ep, [0, 1, 2]))
    for _ in range(3):
        assert comm.boundary(LONG_S) is None
        checked_step(ep, number_of(comm))
    assert before <= mappings()
    comm.meet(LONG_S)
    return [change.active for change in changes]


def _until_suspended(comm: Any, ep: Any) -> weft.Change:
    while True:
        change = comm.boundary(LONG_S)
        if change is not None:
            assert change.removed == (2,)
            return change
        checked_step(ep, number_of(comm))


def test_a_rank_is_suspended_and_resumed() -> None:
    """Its memory and connections stay, and so do those of the others."""
    seen = weft.spawn(_suspended, num_ranks=3, device="cpu", max_ranks=3)
    assert seen == [[(0, 1), (0, 1, 2)]] * 3


def _one_after_the_other(outer_comm: Any, has_newcomer: bool) -> tuple[int, ...]:
    """Ranks 2 and 1 are suspended by two changes, or a process joins before rank 1 is; one change takes both in."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2 if has_newcomer else 3, 3)
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, device="cpu")
        ep = make_ep(comm)
        comm.ready()
        outer.wait()
    else:
        ep = make_ep(comm)
        outer.wait()
        outer.wait()
    if comm.rank != 2 and not has_newcomer:
        assert comm.change(suspend=[2]).active == (0, 1)
    if comm.rank != 2:
        assert comm.change(suspend=[1]).active == (0,)
    elif not has_newcomer:
        assert comm.change(suspend=[2]).removed == (2,)
    change = comm.change(resume=[1], admit=[2]) if comm.rank == 0 else comm.boundary(LONG_S)
    assert change is not None
    for _ in range(3):
        checked_step(ep, number_of(comm))
        assert comm.boundary(LONG_S) is None
    outer.wait()
    comm.close()
    return change.active


@pytest.mark.parametrize("has_newcomer", [False, True])
def test_ranks_that_went_out_one_after_the_other_come_in_together(has_newcomer: bool) -> None:
    """The one that was outside before is prepared for the other, too."""
    assert weft.spawn(_one_after_the_other, 3, (has_newcomer,), device="cpu") == [(0, 1, 2)] * 3


def test_spares_that_are_none() -> None:
    """Refused before anything is decided."""

    def refused(comm: Any) -> int:
        for spares in ("none", 1, [7], [0, 0], True):
            with pytest.raises(weft.InvalidArgument, match="spares"):
                comm.recover(spares=spares)
        return comm.epoch

    assert weft.spawn(refused, num_ranks=1, device="cpu", max_ranks=2) == [1]
