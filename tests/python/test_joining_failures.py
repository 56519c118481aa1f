"""Guards against a death around a join or a leave that wedges the others, loses a slot, or makes a wrong word."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from typing import Any

import pytest
from joining_cases import LONG_S, Outer, checked_step, descriptors, make_ep, mappings, number_of, open_group, run_until

import weft


def _fork_newcomer(address: str, until: str) -> int:
    """A process that joins, comes so far, and is killed there."""
    child = os.fork()
    if child:
        return child
    try:
        comm = weft.Communicator.join(address, device="cpu", placement="off")
        if until != "joined":
            ep = make_ep(comm)
            checked_step(ep, 3)
        if until in ("ready", "taken in"):
            comm.ready()
        if until == "taken in":
            comm.boundary(LONG_S)
        os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(1)


def _newcomer_dies(outer_comm: Any, until: str) -> dict[str, Any]:
    """Rank 0's child joins and dies; then a process of the outer group takes the same slot."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    seen: dict[str, Any] = {"epochs": []}
    if comm is not None:
        ep = make_ep(comm)
        checked_step(ep, number_of(comm))
        comm.meet(LONG_S)
        if comm.rank == 0:
            child = _fork_newcomer(address, until)
            if until != "ready":  # else it may be taken in before it is killed
                ticket = comm.propose(admit=[2], deadline_s=LONG_S)
            if until != "taken in":
                assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
            if until == "ready":
                ticket = comm.propose(admit=[2], deadline_s=LONG_S)
        outer.wait()
        if until == "taken in":
            with pytest.raises((weft.PeerLost, weft.PeerTimeout)):
                run_until(comm, ep, [])
            seen["epochs"].append(comm.recover().active)
            if comm.rank == 0:
                assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
                ticket = comm.propose(admit=[2])
        checked_step(ep, number_of(comm))
        outer.wait()
        change = run_until(comm, ep, [0, 1, 2])
        if comm.rank == 0:
            assert ticket.wait(LONG_S) == "committed"
    else:
        outer.wait()
        outer.wait()
        ends = time.monotonic() + LONG_S
        while True:
            try:
                comm = weft.Communicator.join(address, device="cpu")
                break
            except weft.CapacityExceeded:  # the end of the one before is not noticed yet
                assert time.monotonic() < ends
                time.sleep(0.01)
        ep = make_ep(comm)
        comm.ready()
        found = comm.boundary(LONG_S)
        assert found is not None
        change = found
        checked_step(ep, number_of(comm))
    assert comm.boundary(LONG_S) is None
    checked_step(ep, number_of(comm))
    seen["epochs"].append(change.active)
    outer.wait()
    comm.close()
    return seen


@pytest.mark.parametrize("until", ["joined", "made", "ready", "taken in"])
def test_a_newcomer_dies_and_another_takes_its_slot(until: str) -> None:
    """Before the decision nobody is disturbed; after it one step is lost."""
    seen = weft.spawn(_newcomer_dies, num_ranks=3, args=(until,), device="cpu")
    assert [each["epochs"][-1] for each in seen] == [(0, 1, 2)] * 3
    if until == "taken in":
        assert [each["epochs"][0] for each in seen[:2]] == [(0, 1)] * 2


def _recover_after_a_death(comm: Any, ep: Any) -> None:
    try:
        while True:
            checked_step(ep, number_of(comm))
    except (weft.PeerLost, weft.PeerTimeout):
        comm.recover(spares=0)


def _member_dies(outer_comm: Any, moment: str, gone_on: pathlib.Path) -> tuple[int, ...]:
    """Rank 1 of three dies while rank 3 joins; the preparation of rank 3 serves those left."""
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
        _recover_after_a_death(comm, ep)
        checked_step(ep, number_of(comm))
        if comm.rank == 0:
            comm.propose(admit=[3])
        change = run_until(comm, ep, [0, 2, 3])
    else:
        outer.wait()
        comm = weft.Communicator.join(address, device="cpu")
        ep = make_ep(comm)
        if moment == "when ready":
            comm.ready()
        outer.wait()
        outer.go_on(gone_on)
        if moment == "before ready":
            comm.ready()
        found = comm.boundary(LONG_S)
        assert found is not None
        change = found
        checked_step(ep, number_of(comm))
    for _ in range(3):
        assert comm.boundary(LONG_S) is None
        checked_step(ep, number_of(comm))
    return change.active


@pytest.mark.parametrize("moment", ["before ready", "when ready"])
def test_a_member_dies_while_another_rank_joins(moment: str, tmp_path: pathlib.Path) -> None:
    """The others recover, and the newcomer is taken in afterwards without doing anything anew."""
    seen = weft.spawn(_member_dies, num_ranks=4, args=(moment, tmp_path), device="cpu", on_failure="return")
    assert isinstance(seen.pop(1), weft.PeerLost)
    assert seen == [(0, 2, 3)] * 3


def _leaver_dies(comm: Any) -> tuple[int, ...]:
    ep = make_ep(comm)
    try:
        checked_step(ep, number_of(comm))  # the others may still be in it when rank 2 has done with it
        if comm.rank == 2:
            comm.propose(remove=[2])
            os.kill(os.getpid(), signal.SIGKILL)
        run_until(comm, ep, [0, 1])
    except (weft.PeerLost, weft.PeerTimeout):
        comm.recover()
    for _ in range(3):
        comm.boundary(LONG_S)
        checked_step(ep, number_of(comm))
    return comm.active_ranks


def test_a_rank_that_leaves_dies_before_its_boundary() -> None:
    """As any active rank."""
    seen = weft.spawn(_leaver_dies, num_ranks=3, device="cpu", max_ranks=3, on_failure="return")
    assert isinstance(seen.pop(2), weft.PeerLost)
    assert seen == [(0, 1)] * 2


def _withdrawn(comm: Any) -> tuple[str, str]:
    ep = make_ep(comm)
    ticket = comm.propose(admit=[2], deadline_s=0.2) if comm.rank == 0 else None
    told = ("", "")
    for _ in range(2):
        assert comm.boundary(LONG_S) is None
        checked_step(ep, number_of(comm))
    if ticket is not None:
        told = ticket.wait(LONG_S), ticket.reason
        assert "withdrawn" in repr(ticket)
        comm.propose(admit=[2], deadline_s=0.01)  # the next one may come
    comm.meet(LONG_S)
    return told


def test_a_change_that_nobody_joins_for_is_withdrawn() -> None:
    """At the ticket's deadline, with a reason; nothing has happened."""
    first, _ = weft.spawn(_withdrawn, num_ranks=2, device="cpu", max_ranks=3)
    assert first == ("withdrawn", "rank 2 was not ready by the deadline")


def _held() -> tuple[set[str], set[str], int]:
    return mappings(), descriptors(), len(os.listdir("/proc/self/task"))


def _exceeds(before: tuple[set[str], set[str], int]) -> bool:
    maps, fds, threads = _held()
    return not (maps <= before[0] and fds <= before[1] and threads <= before[2])


def _fork_newcomer_that_closes(address: str) -> int:
    """It closes when it is ready, which is waited for, and lives on."""
    has_closed, tell = os.pipe()
    child = os.fork()
    if child:
        os.close(tell)
        assert os.read(has_closed, 1) == b"1"
        os.close(has_closed)
        return child
    try:
        comm = weft.Communicator.join(address, device="cpu", placement="off")
        ep = make_ep(comm)
        comm.ready()
        ep.close()
        comm.close()
        os.write(tell, b"1")
        signal.pause()
    finally:
        os._exit(1)


def _gone_newcomer(comm: Any, how: str) -> None:
    ep = make_ep(comm)
    checked_step(ep, number_of(comm))
    comm.meet(LONG_S)
    time.sleep(0.3)  # what the start still makes or closes has come to rest
    before = _held()
    comm.meet(LONG_S)
    if comm.rank == 0:
        if how == "killed":
            child = _fork_newcomer(comm.address, "ready")
            assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        else:
            child = _fork_newcomer_that_closes(comm.address)
    comm.meet(LONG_S)  # it was here, and has gone
    ends = time.monotonic() + LONG_S
    while _exceeds(before) and time.monotonic() < ends:
        time.sleep(0.01)
    assert not _exceeds(before)
    comm.meet(LONG_S)
    checked_step(ep, number_of(comm))
    if comm.rank == 0 and how == "closed":
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_a_newcomer_that_is_gone_leaves_nothing(how: str) -> None:
    """Neither memory, nor descriptors, nor threads at those that it had come to."""
    weft.spawn(_gone_newcomer, num_ranks=2, args=(how,), device="cpu", max_ranks=3)
