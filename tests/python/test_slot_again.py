"""Guards against a rank that is taken for the one that had its slot before, which left and closed, or was left out."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
from typing import Any

import pytest
from joining_cases import LONG_S, Outer, checked_step, make_ep, number_of, open_group, wait_until_stopped
from test_standby import until

import weft


def _is_free(address: str, found: list[weft.Communicator], slot: int = 1) -> bool:
    """That slot, which is joined then."""
    with contextlib.suppress(weft.InvalidArgument):
        found.append(weft.Communicator.join(address, slot=slot, standby=True, device="cpu"))
    return bool(found)


def _closes_early(outer_comm: Any) -> int:
    """Rank 1 leaves and closes before rank 0 has come to the boundary; the third process takes its slot."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 2)
    found: list[weft.Communicator] = []
    if comm is None:
        outer.wait()
        until(lambda: _is_free(address, found))
        (comm,) = found
        ep = make_ep(comm)
        assert comm.boundary() is not None
    elif comm.rank == 1:
        ep = make_ep(comm)
        checked_step(ep, 1)
        while comm.boundary(LONG_S) is None:
            pass
        comm.close()
        outer.wait()
    else:
        ep = make_ep(comm)
        checked_step(ep, 1)
        assert comm.propose(remove=[1]).wait(LONG_S) == "committed"
        until(lambda: any(rank == 1 for rank, _, _ in comm._native.detections()))
        while comm.boundary(LONG_S) is None:
            pass
        outer.wait()
        comm.change(admit=[1])
    steps = 0
    while outer.rank != 1 and steps < 3:
        checked_step(ep, number_of(comm))
        steps += 1
    outer.wait()
    comm.close()
    return steps


def test_a_slot_whose_owner_closed_before_the_others_let_it_go() -> None:
    assert weft.spawn(_closes_early, num_ranks=3, device="cpu") == [3, 0, 3]


def _wakes_up(outer_comm: Any, where: pathlib.Path) -> list[str]:
    """Rank 2 is stopped and left out; a fourth process wants its slot, and gets it when that one has closed."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 3, 3)
    told: list[str] = []
    if comm is None:
        until((where / "left out").exists)
        for slot in (2, None):
            with pytest.raises((weft.InvalidArgument, weft.CapacityExceeded)) as refused:
                weft.Communicator.join(address, slot=slot, device="cpu")
            told.append(str(refused.value))
        (where / "refused").touch()
        found: list[weft.Communicator] = []
        until(lambda: _is_free(address, found, 2))
        (comm,) = found
        ep = make_ep(comm)
        assert comm.boundary() is not None
    elif comm.rank == 2:
        ep = make_ep(comm)
        checked_step(ep, 1)
        (where / "pid").write_text(str(os.getpid()))
        (where / "pid").rename(where / "2")
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(weft.Evicted):
            until(lambda: comm.boundary(LONG_S) is not None)
        with pytest.raises(weft.Evicted):
            checked_step(ep, 2)
        comm.close()
        (where / "closed").touch()
        until((where / "taken").exists)  # by now another one has the slot
        for call in (comm.boundary, lambda: checked_step(ep, 2), comm.recover, lambda: comm.gather(b"")):
            with pytest.raises(weft.InvalidState, match="closed"):
                call()
    else:
        ep = make_ep(comm)
        checked_step(ep, 1)
        until((where / "2").exists)
        pid = int((where / "2").read_text())
        wait_until_stopped(pid)
        comm.recover([2])
        checked_step(ep, number_of(comm))
        if comm.rank == 0:
            (where / "left out").touch()
            until((where / "refused").exists)
            os.kill(pid, signal.SIGCONT)
        comm.meet(LONG_S)
        assert comm.change(admit=[2]).added == (2,)
        (where / "taken").touch()
    if outer.rank != 2:
        for _ in range(3):
            checked_step(ep, number_of(comm))
            assert comm.boundary(LONG_S) is None
    outer.wait()
    comm.close()
    return told


def test_a_process_that_wakes_up_when_its_slot_is_taken(tmp_path: pathlib.Path) -> None:
    """While it lives and has not closed its slot is nobody else's. It learns that it was left out, and what it does
    later disturbs nobody."""
    told = weft.spawn(_wakes_up, 4, (tmp_path,), device="cpu")[3]
    assert "slot is 2, which another process has" in told[0]
    assert "the group is full: all 3 slots are taken" in told[1]
