"""Guards against a spare, a newcomer or a proposer that is stopped: it must disturb nobody, and go on when it is awake
again; against a proposal that stands although it was taken back; and against spares that fail by what members do
meanwhile."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
from joining_cases import (
    LONG_S,
    Outer,
    checked_step,
    make_ep,
    number_of,
    open_group,
    run_until,
    stop,
    wait_until_stopped,
)
from test_standby import until

import weft
from weft.group import windows


def _steps(comm: Any, ep: Any, count: int) -> None:
    """Nothing changes at their boundaries."""
    for _ in range(count):
        assert comm.boundary(LONG_S) is None
        checked_step(ep, number_of(comm))


def _pid_of(where: pathlib.Path, rank: int) -> int:
    return int((where / str(rank)).read_text())


# ---- a proposal that stands


def _takes_back(comm: Any, where: pathlib.Path) -> list[str]:
    ep = make_ep(comm)
    (where / str(comm.rank)).write_text(str(os.getpid()))
    comm.meet(LONG_S)
    states = []
    if comm.rank == 0:
        stop(_pid_of(where, 1))  # it gives no word
        ticket = comm.propose(remove=[1])
        until(lambda: ticket.state == "proposed")
        states += [ticket.withdraw(), ticket.state, ticket.reason]
        os.kill(_pid_of(where, 1), signal.SIGCONT)
    _steps(comm, ep, 20)
    comm.meet(LONG_S)
    if comm.rank == 0:
        assert comm.active_ranks == (0, 1)
        states.append(ticket.wait(LONG_S))
        comm.propose(remove=[1])
    run_until(comm, ep, [0])
    return states


def test_a_proposal_that_stands_is_taken_back(tmp_path: pathlib.Path) -> None:
    """Nothing comes of it, though all could agree later; another one may be proposed."""
    seen = weft.spawn(_takes_back, 2, (tmp_path,), device="cpu", max_ranks=2)
    assert seen[0] == ["withdrawn", "withdrawn", "it was taken back", "withdrawn"]


# ---- stopped, and awake again


def _waits(comm: Any, where: pathlib.Path, when: str) -> tuple[int, ...]:
    """Rank 2 is stopped while it makes its objects, or when it stands by; the others want it, and work on."""
    ticket: Any = None
    if not comm.is_member:
        (where / "2").write_text(str(os.getpid()))
        (where / "2").rename(where / "2 joined")
        if when == "joining":
            os.kill(os.getpid(), signal.SIGSTOP)
    ep = make_ep(comm)
    if not comm.is_member:
        assert comm.boundary() is not None
    else:
        until(lambda: (where / "2 joined").exists())
        pid = int((where / "2 joined").read_text())
        if when == "joining":
            wait_until_stopped(pid)
        else:
            until(lambda: comm.membership.standby == (2,))
        comm.meet(LONG_S)
        if comm.rank == 0:
            stop(pid)
            ticket = comm.propose(admit=[2])
        _steps(comm, ep, 30)
        comm.meet(LONG_S)
        if comm.rank == 0:
            assert ticket.state in ("preparing", "proposed")
            os.kill(pid, signal.SIGCONT)
        while comm.boundary(LONG_S) is None:
            checked_step(ep, number_of(comm))
    checked_step(ep, number_of(comm))
    _steps(comm, ep, 5)
    if ticket is not None:
        assert ticket.state == "committed"
    return tuple(comm.active_ranks)


@pytest.mark.parametrize("when", ["joining", "ready"])
def test_a_spare_is_stopped(when: str, tmp_path: pathlib.Path) -> None:
    """The others work on without it; awake again it comes in."""
    assert weft.spawn(_waits, 2, (tmp_path, when), device="cpu", standby=1) == [(0, 1, 2)] * 3


def _proposes(comm: Any, where: pathlib.Path, is_left_out: bool) -> Any:
    """Rank 0 is stopped behind its proposal."""
    ep = make_ep(comm)
    (where / str(comm.rank)).write_text(str(os.getpid()))
    comm.meet(LONG_S)
    if comm.rank == 0:
        wanted = {"admit": [3]} if is_left_out else {"remove": [2]}
        ticket = comm.propose(**wanted)
        os.kill(os.getpid(), signal.SIGSTOP)
        if is_left_out:
            with pytest.raises(weft.Evicted):
                until(lambda: comm.boundary(LONG_S) is not None)
            return ticket.wait(LONG_S), ticket.reason
        run_until(comm, ep, [0, 1])
        return ticket.wait(LONG_S), ticket.reason
    if comm.rank == 1 or is_left_out:  # rank 1 may wake it at once
        wait_until_stopped(_pid_of(where, 0))
    if is_left_out:
        comm.recover([0])
        checked_step(ep, number_of(comm))
        _steps(comm, ep, 20)
        comm.meet(LONG_S)
    if comm.rank == 1:
        os.kill(_pid_of(where, 0), signal.SIGCONT)
    if not is_left_out:
        run_until(comm, ep, [0, 1])
    return tuple(comm.active_ranks)


@pytest.mark.parametrize("is_left_out", [False, True])
def test_a_proposer_is_stopped(is_left_out: bool, tmp_path: pathlib.Path) -> None:
    """What it wanted happens, if the others have waited; else it is told that it is no member any more."""
    seen = weft.spawn(_proposes, 3, (tmp_path, is_left_out), device="cpu", max_ranks=4)
    if is_left_out:
        assert seen == [("withdrawn", "this rank is no member of the group any more"), (1, 2), (1, 2)]
    else:
        assert seen == [("committed", ""), (0, 1), (2,)]


# ---- what members do meanwhile


def _closes_one(outer_comm: Any) -> tuple[int, ...]:
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    heap: dict[str, Any] = {"heap_bytes": 4096, "max_heap_bytes": 1 << 20}
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, standby=True, device="cpu")
    first, second = make_ep(comm, **heap), make_ep(comm, hidden=64)
    if outer.rank < 2:
        outer.wait()
        until(lambda: comm.membership.standby == (2,))
        comm.meet(LONG_S)
        second.close()
        first.resize(heap_bytes=1 << 18)  # it has to map that, too
        until(lambda: comm.membership.standby == (2,))
        comm.meet(LONG_S)
        if comm.rank == 0:
            comm.propose(admit=[2])
        run_until(comm, first, [0, 1, 2])
    else:
        assert comm.boundary() is not None
        checked_step(first, number_of(comm))
        with pytest.raises(weft.InvalidState):
            checked_step(second, 1)
    _steps(comm, first, 3)
    outer.wait()
    comm.close()
    return tuple(comm.active_ranks)


def test_members_close_an_object_that_a_spare_has_made() -> None:
    """It is of no use to the spare any more, which stands by and comes in all the same."""
    assert weft.spawn(_closes_one, 3, device="cpu") == [(0, 1, 2)] * 3


def _is_slow(outer_comm: Any) -> int:
    """Rank 1 comes out of the constructor late: it says what it has made when the spare has looked twice."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    looks = []
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, standby=True, device="cpu")

        def look(seconds: float) -> None:
            looks.append(seconds)
            if len(looks) == 2:
                outer.wait()
            time.sleep(seconds)

        windows.time = SimpleNamespace(monotonic=time.monotonic, sleep=look)  # type: ignore[assignment]
        ep = make_ep(comm)
    else:
        if comm.rank == 1:
            publish = comm._publish_contract
            comm._publish_contract = lambda: None  # type: ignore[method-assign]
        ep = make_ep(comm)
        outer.wait()
        outer.wait()
        if comm.rank == 1:
            publish()
    outer.wait()
    ep.close()
    comm.close()
    return len(looks)


def test_a_spare_waits_for_all_members_to_have_made_an_object() -> None:
    """One that is late would not know the window that is offered to it."""
    seen = weft.spawn(_is_slow, 3, device="cpu")
    assert seen[:2] == [0, 0]
    assert seen[2] >= 2


def _comes_in_beside(address: str, where: pathlib.Path) -> tuple[weft.Communicator, weft.ExpertParallel]:
    """Rank 2 joins and comes in while rank 1 is stopped."""
    stop(_pid_of(where, 1))
    (where / "stopped").touch()
    try:
        comm = weft.Communicator.join(address, slot=2, device="cpu", timeout_s=LONG_S / 4)
        ep = make_ep(comm)
        comm.ready()
        change = comm.boundary(LONG_S)
    finally:
        os.kill(_pid_of(where, 1), signal.SIGCONT)
    assert change is not None
    assert change.active == (0, 2)
    checked_step(ep, number_of(comm))
    return comm, ep


def _sleeps_beside(outer_comm: Any, where: pathlib.Path) -> tuple[int, ...]:
    """Rank 1 has joined, and is stopped while rank 2 joins and comes in; then it comes in, too."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 1, 3)
    if outer.rank == 1:
        comm = weft.Communicator.join(address, slot=1, device="cpu")
        (where / "1").write_text(str(os.getpid()))
    if outer.rank == 0:
        ep = make_ep(comm)
    outer.wait()
    if outer.rank == 2:
        comm, ep = _comes_in_beside(address, where)
    assert comm is not None
    if outer.rank == 1:
        ep = make_ep(comm)
        comm.ready()
        assert comm.boundary(LONG_S) is not None
        checked_step(ep, number_of(comm))
    if outer.rank == 0:
        checked_step(ep, number_of(comm))
        comm.propose(admit=[2])
        run_until(comm, ep, [0, 2])
        comm.propose(admit=[1])
    if outer.rank != 1:
        run_until(comm, ep, [0, 1, 2])
    outer.wait()
    comm.close()
    return comm.active_ranks


def test_a_newcomer_is_stopped_beside_another_one(tmp_path: pathlib.Path) -> None:
    """It holds up nobody, whatever its slot."""
    assert weft.spawn(_sleeps_beside, 3, (tmp_path,), device="cpu") == [(0, 1, 2)] * 3


def _comes_in_before(outer_comm: Any, where: pathlib.Path) -> tuple[int, ...]:
    """Rank 1 is ready and waits; it is stopped while rank 2, connected to it, makes its object and comes in."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 1, 3)
    if comm is not None:
        ep = make_ep(comm)
    outer.wait()
    if outer.rank == 1:
        (where / "1").write_text(str(os.getpid()))
        comm = weft.Communicator.join(address, slot=1, device="cpu")
        ep = make_ep(comm)
        comm.ready()
    outer.wait()
    if outer.rank == 2:
        comm = weft.Communicator.join(address, slot=2, device="cpu", timeout_s=LONG_S / 4)
        until(lambda: 1 in comm.membership.standby)  # it has asked, and found nothing that it lacks
        stop(_pid_of(where, 1))
        try:
            ep = make_ep(comm)
            assert 1 not in comm.membership.standby
            comm.ready()
            change = comm.boundary(LONG_S)
        finally:
            os.kill(_pid_of(where, 1), signal.SIGCONT)
        assert change is not None
        assert change.active == (0, 2)
        checked_step(ep, number_of(comm))
    assert comm is not None
    if outer.rank == 1:
        assert comm.boundary(LONG_S) is not None
        checked_step(ep, number_of(comm))
    elif outer.rank == 0:
        comm.propose(admit=[2])
        run_until(comm, ep, [0, 2])
        comm.propose(admit=[1])
    if outer.rank != 1:
        run_until(comm, ep, [0, 1, 2])
    outer.wait()
    comm.close()
    return comm.active_ranks


def test_a_newcomer_that_is_ready_is_stopped_beside_another_one(tmp_path: pathlib.Path) -> None:
    """It prepares for that one as a member when it is awake."""
    assert weft.spawn(_comes_in_before, 3, (tmp_path,), device="cpu") == [(0, 1, 2)] * 3


def _member_sleeps(outer_comm: Any, where: pathlib.Path) -> tuple[int, ...]:
    """Rank 1, a member, is stopped when rank 2 comes to it; rank 0 goes on without it, and with rank 2."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    if outer.rank == 1:
        (where / "1").write_text(str(os.getpid()))
    if comm is not None:
        ep = make_ep(comm)
        checked_step(ep, number_of(comm))
    outer.wait()
    if outer.rank == 2:
        comm, ep = _comes_in_beside(address, where)
    assert comm is not None
    if outer.rank == 0:
        until(lambda: (where / "stopped").exists() and comm.membership.joining == (2,))
        assert comm.recover(evict=[1], spares=0).active == (0,)
        checked_step(ep, number_of(comm))
        comm.propose(admit=[2])
        run_until(comm, ep, [0, 2])
    active = comm.active_ranks
    if outer.rank == 1:
        with pytest.raises(weft.Evicted):  # as soon as it hears of it
            until(lambda: comm.boundary(LONG_S) is not None)
    outer.wait()
    comm.close()
    return active


def test_a_member_is_stopped_before_a_newcomer_has_met_it(tmp_path: pathlib.Path) -> None:
    """The others leave it out, and the newcomer goes on with them."""
    seen = weft.spawn(_member_sleeps, 3, (tmp_path,), device="cpu")
    assert [seen[0], seen[2]] == [(0, 2)] * 2
