"""Guards against `change` that waits out its deadline behind another change, or returns that one for its own."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from joining_cases import LONG_S, Outer, checked_step, make_ep, number_of, open_group, rank_2_dies
from test_expert_maps import a_map, opened
from test_proposed_maps import step
from test_standby import until

import weft


def _behind_another(comm: weft.Communicator, is_decided: bool) -> tuple[Any, ...]:
    """Rank 0 has proposed that rank 2 is suspended; all want a map, too, before anybody has come to that boundary."""
    ep = opened(comm)
    if comm.rank == 0:
        ticket = comm.propose(suspend=[2])
        if is_decided:
            assert ticket.wait(LONG_S) == "committed"
    comm.meet(LONG_S)
    change = comm.change(expert_map=a_map(), deadline_s=LONG_S)
    if is_decided:
        assert change.active == (0, 1)
        assert comm.rank == 2 or comm.boundary(LONG_S) is None  # all have passed equally many
    while comm.is_member and comm.active_ranks != (0, 1):
        comm.boundary(LONG_S)
        if comm.is_member:
            step(ep)
    for _ in range(3 * comm.is_member):
        assert comm.boundary(LONG_S) is None
        step(ep)
    if comm.is_member:
        comm.meet(LONG_S)
    return change.map_digest or change.removed, comm.active_ranks


@pytest.mark.parametrize("is_decided", [True, False])
def test_a_change_comes_with_those_before_it(is_decided: bool) -> None:
    """Whether that one is decided already or not; who is let go by it before is told so."""
    seen = weft.spawn(_behind_another, 3, (is_decided,), device="cpu", max_ranks=4)
    assert seen[:2] == [(a_map().digest, (0, 1))] * 2
    assert seen[2] in [(a_map().digest, (2,)), ((2,), (2,))][is_decided:]


def _done_by_another(comm: weft.Communicator) -> tuple[Any, ...]:
    ep = make_ep(comm)
    if comm.rank == 0:
        comm.propose(suspend=[2])
    comm.meet(LONG_S)
    change = comm.change(suspend=[2], deadline_s=LONG_S)
    for _ in range(2 * (comm.rank != 2)):
        checked_step(ep, number_of(comm))
        assert comm.boundary(LONG_S) is None
    if comm.rank != 2:
        comm.meet(LONG_S)
    return change.epoch, change.removed


def test_what_another_change_has_done_is_not_done_again() -> None:
    assert weft.spawn(_done_by_another, 3, device="cpu", max_ranks=4) == [(2, (2,))] * 3


def _newcomer_that_dies(comm: weft.Communicator) -> str:
    with pytest.raises(weft.PeerLost):
        rank_2_dies(comm, lambda: comm.change(admit=[3]))
    assert comm.recover().active == (0, 1)
    comm.meet(LONG_S)
    return repr(comm.change(suspend=[1]).removed)


def test_a_rank_dies_while_others_wait_for_a_newcomer() -> None:
    """They are told at once, and what they wanted is not wanted any more."""
    seen = weft.spawn(_newcomer_that_dies, 3, device="cpu", max_ranks=4, on_failure="return")
    assert seen[:2] == ["(1,)"] * 2


def _outside_again(comm: weft.Communicator) -> tuple[int, ...]:
    """Ranks 2 and 3 are outside; rank 2 comes in and leaves again, and then both are wanted at once."""
    ep = make_ep(comm)
    comm.meet(LONG_S)

    def go(wanted: tuple[int, ...], **ranks: Any) -> None:
        change = comm.change(**ranks, deadline_s=LONG_S) if comm.is_member else comm.boundary(LONG_S)
        assert change is not None
        assert change.active == wanted
        if comm.is_member:
            checked_step(ep, number_of(comm))

    go((0, 1), suspend=[2, 3])
    if comm.rank < 3:
        go((0, 1, 2), resume=[2])
        go((0, 1), suspend=[2])
    go((0, 1, 2, 3), resume=[2, 3])
    return comm.active_ranks


def test_ranks_are_suspended_again_and_resumed_together() -> None:
    """Who was outside all the time prepares for who is outside again."""
    assert weft.spawn(_outside_again, 4, device="cpu", max_ranks=4) == [(0, 1, 2, 3)] * 4


def _all_are_to_go(comm: weft.Communicator, together: bool) -> tuple[int, ...]:
    """Rank 1 has been let go before rank 0 wants to go itself, and ranks 2 and 3 in its place."""
    ep = make_ep(comm)
    change = comm.change(suspend=[2, 3])
    if comm.rank < 2:
        if comm.rank == 1:
            assert comm.propose(suspend=[1]).wait(LONG_S) == "committed"
        comm.meet(LONG_S)
        if comm.rank == 0:
            ticket = comm.propose(suspend=[0], resume=[2, 3], together=together, deadline_s=LONG_S)
            assert ticket.wait(LONG_S) == "withdrawn"
            assert ticket.reason == "without rank 0 none of the active ranks would be left"
        comm.meet(LONG_S)
        while comm.epoch == change.epoch:
            comm.boundary(LONG_S)
    if comm.rank == 0:
        checked_step(ep, number_of(comm))
        comm.change(resume=[1, 2, 3])
    else:
        assert comm.boundary(LONG_S) is not None
    checked_step(ep, number_of(comm))
    return comm.active_ranks


@pytest.mark.parametrize("together", [True, False])
def test_a_change_that_others_have_narrowed_lets_no_rank_begin_alone(together: bool) -> None:
    """Ranks that come in learn where to begin from one that stays."""
    assert weft.spawn(_all_are_to_go, 4, (together,), device="cpu", max_ranks=4) == [(0, 1, 2, 3)] * 4


def _is_outside_already(comm: weft.Communicator, way: str) -> tuple[int, ...]:
    """Rank 2 is suspended, so no change removes it; it closes, or dies."""
    comm.change(suspend=[2])
    if comm.rank == 2:
        assert comm.boundary(0.5) is None
        if way == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        comm.close()
        return ()
    for call in (comm.propose, comm.change):
        with pytest.raises(weft.InvalidArgument, match="remove: rank 2; allowed are active ranks"):
            call(remove=[2])
    assert not comm.broken
    until(lambda: comm.membership.standby == ())
    assert comm.boundary(LONG_S) is None
    until(lambda: comm.membership.safe_to_delete == (2,))
    assert comm.membership.leaving == comm.membership.evicted == ()
    return comm.membership.standby


@pytest.mark.parametrize("way", ["closes", "dies"])
def test_a_suspended_rank_leaves_by_itself(way: str) -> None:
    """Then the others may delete what was its."""
    seen = weft.spawn(_is_outside_already, 3, (way,), device="cpu", max_ranks=3, on_failure="return")
    assert seen[:2] == [()] * 2
    assert seen[2] == () if way == "closes" else isinstance(seen[2], weft.PeerLost)


def _suspended_first(outer_comm: Any) -> Any:
    """Rank 1 comes to the boundary where it is suspended, and waits behind it, before rank 0 comes there."""
    outer = Outer(outer_comm)
    comm, _ = open_group(outer, 2, 2)
    assert comm is not None
    objects = make_ep(comm), make_ep(comm, hidden=64, node_ranks=1)  # the second one takes in no newcomers
    if comm.rank == 0:
        comm.propose(suspend=[1])
    change, found = None, None
    while change is None:
        if comm.rank == 0:
            outer.wait()
        change = comm.boundary(LONG_S)
        if comm.rank == 1:
            found = comm.boundary(1.0) if change is not None else None
            outer.wait()
    outer.wait()
    for each in objects:
        each.close()
    comm.close()
    return change.removed, found


def test_a_suspended_rank_waits_for_members_that_are_behind() -> None:
    """It asks nobody for what they are about to have at their boundary."""
    assert weft.spawn(_suspended_first, 2, device="cpu") == [((1,), None)] * 2
