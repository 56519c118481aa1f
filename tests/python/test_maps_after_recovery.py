"""Guards against ranks that go by different maps of experts behind a recovery, for good: a map that one of them was not
told, was late for, or has installed alone."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from typing import Any

import pytest
from joining_cases import LONG_S, Outer, open_group, wait_until_stopped
from test_expert_maps import a_map, opened, other_map
from test_proposed_maps import step
from test_standby import until

import weft
from weft.group import maps


def _maps_of_all(ep: weft.ExpertParallel) -> set[str]:
    """Behind a step of all: maps that differ are refused in it."""
    step(ep)
    return {each.decode() for each in ep.comm.gather(ep.expert_map.digest.encode()).values()}


def _when_it_has_recovered(comm: Any, then: Any) -> None:
    """Once, before it does anything else."""
    begin = comm._begin_epoch

    def begin_then() -> None:
        begin()
        comm._begin_epoch = begin
        then()

    comm._begin_epoch = begin_then


def _goes_silent(outer_comm: weft.Communicator, where: pathlib.Path) -> set[str]:
    """A map is decided, and nobody has come to its boundary when rank 0 dies. Rank 1, which alone has it then, is
    stopped from its recovery until rank 2 and the spare have come back from theirs."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 3, 4)
    pids = [int(each) for each in outer.tell(str(os.getpid()).encode())]
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, standby=True, device="cpu")
        ep = opened(comm)
        comm.ready()
    else:
        ep = opened(comm)
        outer.wait()
    outer.wait()
    if comm.rank < 2:
        assert comm.propose(expert_map=a_map(), id="the map").wait(LONG_S) == "committed"
    outer.wait()
    if comm.rank == 0:
        outer.die(where, 3)
    outer.go_on(where)
    if comm.rank == 3:
        assert comm.boundary(LONG_S) is not None
        (where / "in").touch()
    else:
        until(lambda: comm.broken)
        if comm.rank == 1:
            _when_it_has_recovered(comm, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        comm.recover()
    if comm.rank == 2:
        until((where / "in").exists)
        wait_until_stopped(pids[1])
        os.kill(pids[1], signal.SIGCONT)
    return _maps_of_all(ep)


def test_a_rank_that_answers_nobody_after_a_recovery(tmp_path: pathlib.Path) -> None:
    """All that recover know the map, a spare too, without asking for it."""
    seen = weft.spawn(_goes_silent, 4, (tmp_path,), device="cpu", on_failure="return")
    assert seen[1:] == [{a_map().digest}] * 3


def _comes_to_it(comm: weft.Communicator) -> weft.Change:
    """The boundary of the change that is due."""
    while True:
        change = comm.boundary(LONG_S)
        if change is not None:
            return change


def _comes_late(outer_comm: weft.Communicator, where: pathlib.Path) -> set[str]:
    """Rank 0 proposes a map alone. Rank 3 begins with it; rank 1 can't get it; rank 2 has not come when rank 0 dies."""
    outer = Outer(outer_comm)
    comm, _ = open_group(outer, 4, 4)
    assert comm is not None
    ep = opened(comm)
    if comm.rank == 0:
        assert comm.propose(expert_map=a_map()).wait(LONG_S) == "committed"
    outer.wait()
    if comm.rank == 0:
        until(lambda: (where / "3").exists() and (where / "1").exists())
        outer.die(where, 3)
    if comm.rank == 3:
        _comes_to_it(comm)
        assert ep.expert_map == a_map()
    if comm.rank == 1:
        ask, maps.asked_contract = maps.asked_contract, _nobody_answers
        with pytest.raises(weft.PeerLost, match=r"recover\(\)"):
            _comes_to_it(comm)
        maps.asked_contract = ask
    outer.go_on(where)
    until(lambda: comm.broken)
    if comm.rank == 2:
        _when_it_has_recovered(comm, lambda: time.sleep(0.3))  # no longer than others may ask it
    comm.recover()
    return _maps_of_all(ep)


def _nobody_answers(native: Any, deadline_s: float, of: Any = ()) -> Any:
    raise weft.PeerLost((), "nobody")


def test_a_rank_that_could_not_get_the_map_of_its_boundary(tmp_path: pathlib.Path) -> None:
    """It is told in the recovery, whoever has come to the boundary and who has not."""
    seen = weft.spawn(_comes_late, 4, (tmp_path,), device="cpu", on_failure="return")
    assert seen[1:] == [{a_map().digest}] * 3


def _half_installed(comm: weft.Communicator, how: str) -> set[str]:
    ep = opened(comm)
    ep.set_expert_map(other_map())
    compare = comm.compare

    def left_behind_it(*given: Any) -> None:
        compare(*given)
        raise KeyboardInterrupt

    if comm.rank == 1:
        comm.compare = left_behind_it  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            ep.set_expert_map(a_map())
        comm.compare = compare  # type: ignore[method-assign]
    else:
        ep.set_expert_map(a_map())
    if how == "recover":
        comm.recover()
    else:
        comm.rebuild(comm.active_ranks)
    return _maps_of_all(ep)


@pytest.mark.parametrize("how", ["recover", "rebuild"])
@pytest.mark.parametrize("max_ranks", [None, 4])  # without it, too
def test_a_map_that_some_have_installed(how: str, max_ranks: int | None) -> None:
    """set_expert_map was left on one of the ranks, behind what all have said: the newest map counts."""
    assert weft.spawn(_half_installed, 4, (how,), device="cpu", max_ranks=max_ranks) == [{a_map().digest}] * 4


def _set_alone(comm: weft.Communicator) -> set[str]:
    """Rank 2 is suspended, and installs maps that are its own business."""
    ep = opened(comm)
    if comm.rank == 0:
        comm.propose(suspend=[2])
    _comes_to_it(comm)
    if comm.rank == 2:
        ep.set_expert_map(a_map())
        ep.set_expert_map(weft.ExpertMap.spread(7, 12, 4))
        assert comm.boundary(LONG_S) is not None
    else:
        ep.set_expert_map(other_map())
        until(lambda: comm.membership.standby == (2,))
        comm.meet(LONG_S)
        comm.recover(spares=[2])
    return _maps_of_all(ep)


def test_what_a_rank_installs_alone_counts_for_nobody() -> None:
    """Taken in again by a recovery, it goes by the map of the members."""
    assert weft.spawn(_set_alone, 3, device="cpu", max_ranks=4) == [{other_map().digest}] * 3


def _hears_of_nobody(outer_comm: weft.Communicator) -> set[str]:
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 4)
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, device="cpu")
        ep = opened(comm)
        comm.ready()
        ask, maps.asked_contract = maps.asked_contract, _nobody_answers
        with pytest.raises(weft.PeerLost, match=r"recover\(\)"):
            comm.boundary(LONG_S)
        maps.asked_contract = ask
    else:
        ep = opened(comm)
        ep.set_expert_map(a_map())
        outer.wait()
        if comm.rank == 0:
            comm.propose(admit=[2])
        _comes_to_it(comm)
    outer.wait()
    comm.recover()
    return _maps_of_all(ep)


def test_a_newcomer_that_nobody_tells_begins_nothing() -> None:
    """It says so, in place of a map that may be another one than the members'."""
    assert weft.spawn(_hears_of_nobody, 3, device="cpu") == [{a_map().digest}] * 3


def _made_since(comm: weft.Communicator) -> tuple[str, str]:
    ep = opened(comm)
    if comm.rank == 0:
        assert comm.propose(expert_map=a_map()).wait(LONG_S) == "committed"
    comm.meet(LONG_S)
    others = [opened(comm, num_logical_experts=number) for number in (5, 6, 9, 10)]
    was = [each.expert_map for each in others]
    change = _comes_to_it(comm)
    assert change.map_digest == ep.expert_map.digest == a_map().digest
    assert [each.expert_map for each in others] == was
    step(ep)
    return comm.epoch, change.epoch


def test_an_object_that_was_made_since_keeps_its_map() -> None:
    """With another number of logical experts, between proposal and boundary; the others begin with the new one."""
    assert weft.spawn(_made_since, 2, device="cpu", max_ranks=4) == [(2, 2)] * 2
