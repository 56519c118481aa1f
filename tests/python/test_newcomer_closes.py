"""Guards against a rank outside the group that closes an object behind `ready()` and is taken in without it, which
breaks the next operation of the members; and against words that are taken back by whom they are not."""

from __future__ import annotations

import gc
import os
import pathlib
import warnings
from typing import Any

import pytest
from joining_cases import LONG_S, Outer, checked_step, make_ep, number_of, open_group, run_until
from test_standby import until

import weft

STEPS = 50


def _goes_on(comm: weft.Communicator, ep: weft.ExpertParallel) -> None:
    """Members, none of whom takes anybody in."""
    for _ in range(STEPS):
        assert comm.boundary(LONG_S) is None
        checked_step(ep, number_of(comm))


def _lacks_it(comm: weft.Communicator) -> None:
    """Whatever it asks, and as often as it asks."""
    for call in (comm.boundary, comm.ready, comm.boundary):
        with pytest.raises(weft.InvalidState, match=r"windows that this rank has not: \d.* make the objects"):
            call()


def _closes(outer_comm: Any, how: str) -> tuple[int, ...]:
    """Rank 2 is ready, and closes its only object; a change wants it before or after that."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, standby=how == "spare", device="cpu")
        ep = make_ep(comm)
        checked_step(ep, 7)
        comm.ready()
        outer.wait()
        outer.wait()  # the members have seen it
        if how == "dropped":
            del ep
            gc.collect()
        else:
            ep.close()
        _lacks_it(comm)
        outer.wait()
        outer.wait()  # they have gone on
        ep = make_ep(comm)
        checked_step(ep, 8)
        comm.ready()
        change = comm.boundary(LONG_S)
        assert change is not None
        checked_step(ep, number_of(comm))
    else:
        ep = make_ep(comm)
        outer.wait()
        outer.wait()
        until(lambda: comm.membership.standby == (2,))
        outer.wait()
        outer.wait()  # it has closed the object
        until(lambda: comm.membership.standby == ())
        assert comm.membership.joining == (2,)
        comm.meet(LONG_S)
        ticket = comm.propose(admit=[2]) if comm.rank == 0 else None
        _goes_on(comm, ep)
        comm.meet(LONG_S)
        assert ticket is None or ticket.state == "preparing"
        outer.wait()
        change = run_until(comm, ep, [0, 1, 2])
        assert ticket is None or ticket.state == "committed"
    for _ in range(3):
        assert comm.boundary(LONG_S) is None
        checked_step(ep, number_of(comm))
    outer.wait()
    comm.close()
    return change.active


@pytest.mark.parametrize("how", ["newcomer", "spare", "dropped"])
def test_an_object_is_closed_behind_ready(how: str) -> None:
    """The members go on, and take it in when it has made the object again."""
    assert weft.spawn(_closes, 3, (how,), device="cpu") == [(0, 1, 2)] * 3


def _suspended(comm: Any, seen: pathlib.Path) -> tuple[int, ...]:
    ep = make_ep(comm)
    checked_step(ep, number_of(comm))
    assert comm.change(suspend=[2]).removed == (2,)
    if comm.rank == 2:
        ep.close()
        _lacks_it(comm)
        until(lambda: len(list(seen.iterdir())) == 2)  # once it has the object it stands by again
        ep = make_ep(comm)
        change = comm.boundary(LONG_S)
        assert change is not None
        checked_step(ep, number_of(comm))
    else:
        until(lambda: comm.membership.standby == ())
        (seen / str(comm.rank)).touch()
        comm.meet(LONG_S)
        if comm.rank == 0:
            comm.propose(resume=[2])
        change = run_until(comm, ep, [0, 1, 2])
    assert comm.boundary(LONG_S) is None
    checked_step(ep, number_of(comm))
    comm.meet(LONG_S)
    return tuple(change.added)


def test_a_suspended_rank_closes_an_object(tmp_path: pathlib.Path) -> None:
    """It is a newcomer again."""
    assert weft.spawn(_suspended, 3, (tmp_path,), device="cpu", max_ranks=3) == [(2,)] * 3


def _is_no_spare(outer_comm: Any, gone_on: pathlib.Path) -> tuple[int, ...]:
    """Rank 1 is killed when the spare in slot 3 has closed its object."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 3, 4)
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, standby=True, device="cpu")
        ep = make_ep(comm)
        comm.ready()
        outer.wait()
        ep.close()
        _lacks_it(comm)
        outer.wait()
        outer.go_on(gone_on)
        until(lambda: (gone_on / "recovered 0").exists() and (gone_on / "recovered 2").exists())
        ep = make_ep(comm)
        assert comm.boundary(LONG_S) is not None
        checked_step(ep, number_of(comm))
    else:
        ep = make_ep(comm)
        outer.wait()
        outer.wait()
        outer.wait()
        until(lambda: comm.membership.standby == ())
        comm.meet(LONG_S)
        if comm.rank == 1:
            outer.die(gone_on, 3)
        outer.go_on(gone_on)
        with pytest.raises((weft.PeerLost, weft.PeerTimeout)):
            run_until(comm, ep, [0, 2])
        assert comm.recover(spares=[3]).active == (0, 2)
        checked_step(ep, number_of(comm))
        (gone_on / f"recovered {comm.rank}").touch()
        if comm.rank == 0:
            comm.propose(admit=[3])
        run_until(comm, ep, [0, 2, 3])
    for _ in range(3):
        assert comm.boundary(LONG_S) is None
        checked_step(ep, number_of(comm))
    comm.meet(LONG_S)
    return comm.active_ranks


def test_a_spare_without_its_object_is_none(tmp_path: pathlib.Path) -> None:
    """The recovery goes on without it, and a later change takes it in."""
    seen = weft.spawn(_is_no_spare, 4, (tmp_path,), device="cpu", on_failure="return")
    assert isinstance(seen.pop(1), weft.PeerLost)
    assert seen == [(0, 2, 3)] * 3


def _child_drops(outer_comm: Any) -> tuple[int, ...]:
    """A child of rank 2 collects what it has of the object."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, device="cpu")
        ep = make_ep(comm)
        comm.ready()
        outer.wait()
        outer.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            del ep
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        for member in (0, 1):  # what was said before is heard before this is answered
            comm._native.ask_contract(LONG_S, [member])
        outer.wait()
        outer.wait()
        change = comm.boundary(LONG_S)
        assert change is not None
        checked_step(ep, number_of(comm))
    else:
        ep = make_ep(comm)
        outer.wait()
        outer.wait()
        until(lambda: comm.membership.standby == (2,))
        outer.wait()
        outer.wait()
        assert comm.membership.standby == (2,)
        outer.wait()
        if comm.rank == 0:
            comm.propose(admit=[2])
        change = run_until(comm, ep, [0, 1, 2])
    outer.wait()
    comm.close()
    return change.active


def test_a_child_drops_its_copy_of_an_object() -> None:
    """It speaks for nobody."""
    assert weft.spawn(_child_drops, 3, device="cpu") == [(0, 1, 2)] * 3


def _closes_all(outer_comm: Any, how: str) -> tuple[int, ...]:
    """Rank 2 is ready and wanted, and closes its communicator; then it joins once more."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    if comm is None:
        outer.wait()
        first = weft.Communicator.join(address, device="cpu")
        left = make_ep(first)
        first.ready()
        outer.wait()
        outer.wait()
        if how == "object first":
            left.close()
        first.close()
        outer.wait()
        outer.wait()
        comm = weft.Communicator.join(address, device="cpu")
        ep = make_ep(comm)
        comm.ready()
        change = comm.boundary(LONG_S)
        assert change is not None
        checked_step(ep, number_of(comm))
    else:
        ep = make_ep(comm)
        outer.wait()
        outer.wait()
        until(lambda: comm.membership.standby == (2,))
        outer.wait()
        outer.wait()
        until(lambda: (comm.membership.standby, comm.membership.joining) == ((), ()))
        comm.meet(LONG_S)
        if comm.rank == 0:
            comm.propose(admit=[2])
        _goes_on(comm, ep)
        outer.wait()
        change = run_until(comm, ep, [0, 1, 2])
    outer.wait()
    comm.close()
    return change.active


@pytest.mark.parametrize("how", ["object first", "all at once"])
def test_a_newcomer_closes_its_communicator(how: str) -> None:
    """As it ends: the members take the next one in that slot in."""
    assert weft.spawn(_closes_all, 3, (how,), device="cpu") == [(0, 1, 2)] * 3
