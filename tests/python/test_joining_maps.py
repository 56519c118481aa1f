"""Guards against a rank that comes in by another map of experts than the members go by, and against a change that hides
which experts nobody has."""

from __future__ import annotations

import os
import pathlib
import signal
from typing import Any

import torch
from joining_cases import Outer, open_group, wait_until_stopped
from test_expert_maps import Job, opened
from test_standby import until

import weft


def _handed(outer_comm: weft.Communicator, kind: str) -> tuple[Any, ...]:
    """Two founders in three slots; the third rank joins, or is suspended and comes back, and is told of no map."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2 if kind == "joins" else 3, 3)
    shape: dict[str, Any] = {"num_experts": None, "num_logical_experts": 7, "min_ranks": 1}
    changes: list[weft.Change] = []
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, standby=True, device="cpu")
        ep = opened(comm, **shape)
        made_with = ep.expert_map
        comm.ready()
        outer.wait()  # it is ready
        outer.wait()  # and the others go by another map
    else:
        comm.on_change(changes.append)
        ep = opened(comm, **shape)
        made_with = ep.expert_map
        if kind == "joins":
            ep.set_expert_map(Late.first)
            outer.wait()
            outer.wait()
        else:
            _until(comm, lambda: comm.propose(suspend=[2]), (0, 1))
        if comm.rank != 2:
            ep.set_expert_map(Late.second)
        outer.wait()
    if comm.rank == 2:
        assert comm.boundary() is not None
    else:
        _until(comm, lambda: comm.propose(admit=[2]), (0, 1, 2))
    assert ep.num_experts == 21
    handed = ep.expert_map
    job = Job(num_ids=7)
    r = ep.dispatch(job.xs[comm.rank], job.ids[comm.rank], job.weights[comm.rank])  # maps that differ are refused
    ep.combine(r.x, r.handle)
    outer.wait()
    comm.close()
    return made_with, handed, [change.uncovered for change in changes]


class Late:
    """7 logical experts on 3 slots of 7 physical ones: as those that were there go by them."""

    first = weft.ExpertMap.spread(7, 21, 3, [0, 1])
    second = weft.ExpertMap(torch.tensor([[0], [1], [7], [8], [14], [15], [-1]], device="cpu"))


def _until(comm: weft.Communicator, propose: Any, active: tuple[int, ...]) -> None:
    if comm.rank == 0:
        propose()
    while True:
        change = comm.boundary(60.0)
        if change is not None:
            assert change.active == active
            return


def test_a_newcomer_is_handed_the_map() -> None:
    """What it constructs with, and what was installed until it was taken in."""
    seen = weft.spawn(_handed, 3, ("joins",), device="cpu")
    spread = weft.ExpertMap.spread(7, 21, 3, [0, 1])
    assert [made for made, _, _ in seen] == [spread, spread, Late.first]
    assert [handed for _, handed, _ in seen] == [Late.second] * 3
    assert [uncovered for _, _, uncovered in seen] == [[(6,)], [(6,)], []]


def test_a_suspended_rank_is_handed_the_map() -> None:
    """It missed set_expert_map. A change names the logical experts that nobody has."""
    seen = weft.spawn(_handed, 3, ("suspended",), device="cpu")
    spread = weft.ExpertMap.spread(7, 21, 3)
    assert [made for made, _, _ in seen] == [spread] * 3
    assert [handed for _, handed, _ in seen] == [Late.second] * 3
    gone = (5, 6)  # of rank 2 in the first map
    assert [uncovered for _, _, uncovered in seen] == [[gone, (6,)]] * 3


def _lowest_slots(comm: weft.Communicator) -> Any:
    """Ranks 0 and 1 are suspended and come back together: neither knows the map that rank 2 has installed."""
    ep = opened(comm, num_experts=None, num_logical_experts=7, min_ranks=1)
    if comm.rank == 2:
        comm.propose(suspend=[0, 1])
    change = None
    while change is None:
        change = comm.boundary(60.0)
    if comm.rank == 2:
        ep.set_expert_map(Late.second)
        comm.propose(admit=[0, 1])
    change = None
    while change is None:
        change = comm.boundary(60.0)
    job = Job(num_ids=7)
    r = ep.dispatch(job.xs[comm.rank], job.ids[comm.rank])
    ep.combine(r.x, r.handle)
    comm.meet(60.0)
    return ep.expert_map


def test_ranks_that_come_back_together_ask_one_that_was_there() -> None:
    assert weft.spawn(_lowest_slots, 3, device="cpu", max_ranks=3) == [Late.second] * 3


def _stopped(comm: weft.Communicator, where: pathlib.Path) -> Any:
    """Rank 0 is stopped while the spare wants to ask it for the map; rank 1 goes on without it."""
    ep = opened(comm, num_experts=None, num_logical_experts=7, min_ranks=1)
    if comm.is_member:
        (where / str(comm.rank)).write_text(str(os.getpid()))
        until(lambda: comm.membership.standby == (2,))
        comm.meet(60.0)
    if comm.rank == 0:
        comm.on_change(lambda change: os.kill(os.getpid(), signal.SIGSTOP))
        comm.propose(admit=[2])
    pid = int((where / "0").read_text()) if comm.rank == 1 else 0
    if comm.rank == 1:
        wait_until_stopped(pid)
    while True:
        change = comm.boundary(60.0)
        if change is not None:
            break
    if comm.rank == 1:
        (where / "here").touch()
        comm.recover([0], deadline_s=30.0)
        os.kill(pid, signal.SIGKILL)
    if comm.rank == 2:
        until((where / "here").exists)  # else rank 1 may hear of that deadline at its boundary
        try:
            while True:
                ep.dispatch(Job(num_ids=7).xs[2], Job(num_ids=7).ids[2], deadline_s=2.0)
        except (weft.PeerLost, weft.PeerTimeout):
            comm.recover([0], deadline_s=30.0)
    return comm.active_ranks


def test_a_stopped_member_holds_up_no_rank_that_asks_for_the_map(tmp_path: pathlib.Path) -> None:
    seen = weft.spawn(_stopped, 2, (tmp_path,), device="cpu", standby=1, on_failure="return")
    assert isinstance(seen[0], weft.PeerLost)
    assert seen[1:] == [(1, 2), (1, 2)]
