"""Guards against a map of experts that begins on some ranks earlier than on others, with a change or without one: ranks
that go by different maps, newcomers that come in by the old one, and a map that is lost with its proposer."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from joining_cases import LONG_S, Outer, open_group
from test_expert_maps import NUM_SLOTS, Job, a_map, opened, other_map

import weft
from weft import reference


def step(ep: weft.ExpertParallel) -> None:
    """Dispatch and combine; every word against the reference by the map that this rank goes by now."""
    comm, job = ep.comm, Job()
    options: dict[str, Any] = {"layout": "expert_major"}
    wanted = reference.dispatch(
        job.xs, job.ids, job.weights, num_experts=NUM_SLOTS, active_ranks=comm.active_ranks, expert_map=ep.expert_map,
        **options,
    )  # fmt: skip
    r = ep.dispatch(job.xs[comm.rank], job.ids[comm.rank], job.weights[comm.rank], **options)
    assert torch.equal(r.x, wanted[comm.rank].x)
    outputs = [each.x * (rank + 2) for rank, each in enumerate(wanted)]
    assert torch.equal(ep.combine(outputs[comm.rank], r.handle), reference.combine(outputs, wanted)[comm.rank])


def steps_until(ep: weft.ExpertParallel, wanted: weft.ExpertMap) -> tuple[int, weft.Change]:
    """Steps with a boundary before each, until one begins with this map: which it was, and the change."""
    for number in range(100_000):
        change = ep.comm.boundary(LONG_S)
        before = ep.expert_map
        step(ep)
        if change is not None and change.map_digest == wanted.digest:
            assert before == wanted
            return number, change
        assert change is None
    raise AssertionError("never")


def _alone(comm: weft.Communicator, proposers: tuple[int, ...]) -> tuple[int, int]:
    """Two maps, one after the other, without any rank that comes or goes."""
    ep = opened(comm)
    step(ep)
    for name, each in (("first", a_map()), ("second", other_map())):
        old = ep.dispatch(torch.zeros((1, ep.hidden)), torch.zeros((1, ep.top_k), dtype=torch.int64)).handle
        if comm.rank in proposers:
            ticket = comm.propose(expert_map=each, id=name)
        number, change = steps_until(ep, each)
        assert (change.added, change.removed) == ((), ())
        assert ep.expert_map == each
        if comm.rank in proposers:
            assert ticket.wait() == "committed"
            assert comm.propose(expert_map=each, id=name).state == "committed"  # it was carried out
        with pytest.raises(weft.InvalidState):
            ep.dispatch(torch.zeros((1, ep.hidden)), handle=old)
        for _ in range(3):
            assert comm.boundary(LONG_S) is None
            step(ep)
    return number, comm.epoch


@pytest.mark.parametrize("proposers", [(0,), (2,), (0, 1, 2)])
def test_a_map_begins_on_all_ranks_in_one_step(proposers: tuple[int, ...]) -> None:
    """Whoever was given it; with one id it happens once."""
    seen = weft.spawn(_alone, 3, args=(proposers,), device="cpu", max_ranks=4)
    assert len(set(seen)) == 1
    assert seen[0][1] == 3


def _with_a_newcomer(outer_comm: weft.Communicator) -> tuple[Any, ...]:
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 3, 4)
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, device="cpu")
        ep = opened(comm)
        comm.ready()
        change = comm.boundary(LONG_S)
        assert change is not None
        assert ep.expert_map == other_map()
        step(ep)
    else:
        ep = opened(comm)
        ep.set_expert_map(a_map())
        outer.wait()
        if comm.rank == 1:
            comm.propose(admit=[3], remove=[0], expert_map=other_map())
        while True:
            change = comm.boundary(LONG_S)
            if change is not None:
                break
            step(ep)
        if comm.rank != 0:
            step(ep)
    for _ in range(3 * (comm.rank != 0)):
        assert comm.boundary(LONG_S) is None
        step(ep)
    if comm.rank != 0:
        comm.meet(LONG_S)
    comm.close()
    outer.wait()
    return change.active, change.map_digest, change.uncovered


def test_a_newcomer_begins_with_the_map_of_its_change() -> None:
    """In the step in which another rank goes."""
    seen = weft.spawn(_with_a_newcomer, 4, device="cpu")
    assert seen == [((1, 2, 3), other_map().digest, ())] * 4


def _dies(outer_comm: weft.Communicator, proposers: tuple[int, ...], gone_on: pathlib.Path) -> set[str]:
    """The change is decided, and rank 0, which has proposed it, is killed before the others come to its boundary."""
    outer = Outer(outer_comm)
    comm, _ = open_group(outer, 3, 4)
    assert comm is not None
    ep = opened(comm)
    first = ep.expert_map
    if comm.rank in proposers:
        ticket = comm.propose(expert_map=a_map(), id="the map")
    outer.wait()
    if comm.rank == 0:
        while ticket.state != "committed":
            comm.boundary(LONG_S)
        outer.die(gone_on, 2)
    outer.go_on(gone_on)

    def work() -> None:
        assert comm.boundary(LONG_S) is None
        ep.dispatch(torch.zeros((1, ep.hidden)), torch.zeros((1, ep.top_k), dtype=torch.int64))

    with pytest.raises((weft.PeerLost, weft.PeerTimeout)):
        work()
    comm.recover()
    assert ep.expert_map in (first, a_map())
    step(ep)
    return {each.decode() for each in comm.gather(ep.expert_map.digest.encode()).values()}


@pytest.mark.parametrize("proposers", [(0,), (0, 1)])
def test_who_has_proposed_a_map_dies(proposers: tuple[int, ...], tmp_path: pathlib.Path) -> None:
    """All that are left go by one map: the new one, if one of them has it."""
    seen = weft.spawn(_dies, 3, args=(proposers, tmp_path), device="cpu", on_failure="return")
    assert seen[1] == seen[2]
    assert len(seen[1]) == 1
    assert (seen[1] == {a_map().digest}) == (1 in proposers)


def _refused(comm: weft.Communicator) -> None:
    with pytest.raises(weft.InvalidArgument, match="num_logical_experts"):
        comm.propose(expert_map=a_map())
    ep = opened(comm)
    wrong = weft.ExpertMap(torch.zeros((3, 1), dtype=torch.int32, device="cpu") + torch.arange(3)[:, None])
    for given, text in (
        ({"expert_map": wrong}, "logical experts"), ({"expert_map": 7}, "expert_map"),
        ({"expert_map": a_map(), "together": False}, "together"),
        ({"expert_map": a_map(), "remove": [comm.rank]}, "that stays"),
    ):  # fmt: skip
        with pytest.raises(weft.InvalidArgument, match=text):
            comm.propose(**given)
    assert comm.change(expert_map=other_map()).map_digest == other_map().digest  # and all goes on
    step(ep)


def test_what_is_no_map_of_the_objects_is_refused() -> None:
    """Before anybody hears of it."""
    weft.spawn(_refused, 2, device="cpu", max_ranks=4)
