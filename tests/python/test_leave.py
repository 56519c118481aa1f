"""Guards against a rank that wants to leave and hangs, leaves later all the same, or leaves nobody behind."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from joining_cases import LONG_S, checked_step, make_ep, number_of, stop

import weft


def _meanwhile(comm: Any) -> int:
    """Rank 0 is stopped, so it gives no word; rank 1 gives up, and both go on. Rank 2 wakes rank 0."""
    ep = make_ep(comm)
    pids = [int(pid) for pid in comm.gather(str(os.getpid()).encode()).values()]
    count = 0

    def passes() -> None:
        nonlocal count
        count += 1
        time.sleep(0.01)

    if comm.rank == 1:
        stop(pids[0])
        with pytest.raises(weft.PeerTimeout, match="rank 1: the ranks did not come to a boundary in time"):
            comm.leave(passes, deadline_s=0.5)
        os.kill(pids[0], signal.SIGCONT)
        count += 1  # the last boundary has no step behind it
    counts = comm.gather(str(count).encode(), deadline_s=LONG_S)
    if comm.rank != 1:
        for _ in range(int(counts[1])):
            assert comm.boundary(LONG_S) is None
    for _ in range(5):
        checked_step(ep, number_of(comm))
        assert comm.boundary(LONG_S) is None
    assert comm.active_ranks == (0, 1, 2)
    comm.meet(LONG_S)
    if comm.rank == 1:
        left: weft.Change = comm.leave(lambda: checked_step(ep, number_of(comm)))
        return len(left.active)
    while (change := comm.boundary(LONG_S)) is None:
        checked_step(ep, number_of(comm))
    return len(change.active)


def test_a_rank_gives_up_to_leave() -> None:
    """At its deadline it is a member as before, and may leave later."""
    assert weft.spawn(_meanwhile, 3, device="cpu", max_ranks=3) == [2] * 3


def test_the_last_rank_can_not_leave() -> None:
    def rank(comm: Any) -> int:
        with pytest.raises(weft.InvalidArgument, match="leaves none of the active ranks"):
            comm.leave()
        checked_step(make_ep(comm), 3)
        return int(comm.num_active)

    assert weft.spawn(rank, 1, device="cpu", max_ranks=2) == [1]


def _all_leave(comm: Any) -> str:
    ep = make_ep(comm)
    comm.meet(LONG_S)
    try:
        comm.leave(deadline_s=LONG_S)
    except weft.PeerTimeout as error:
        assert "none of the active ranks would be left" in str(error)
    except weft.InvalidArgument as error:
        assert "leaves none of the active ranks" in str(error)
    else:
        return "left"
    while comm.active_ranks != (comm.rank,):  # the others' changes are decided, and take effect at their boundaries
        comm.boundary(LONG_S)
    checked_step(ep, number_of(comm))
    return "stays"


def test_all_leave_at_once() -> None:
    """One of them stays, whoever it is, and works."""
    assert sorted(weft.spawn(_all_leave, 3, device="cpu", max_ranks=3)) == ["left", "left", "stays"]


def _killed(comm: Any) -> tuple[str, int]:
    """Rank 2 is stopped when rank 1 wants to leave, and killed before it has given its word."""
    ep = make_ep(comm)
    pids = [int(pid) for pid in comm.gather(str(os.getpid()).encode()).values()]
    if comm.rank == 2:
        signal.pause()

    def step() -> None:
        if comm.rank == 1 and comm.epoch == 1:
            os.kill(pids[2], signal.SIGKILL)
        checked_step(ep, number_of(comm))

    def works() -> None:
        while True:
            assert comm.boundary(LONG_S) is None
            step()

    state = ""
    if comm.rank == 1:
        stop(pids[2])
    with pytest.raises(weft.PeerLost):
        comm.leave(step) if comm.rank == 1 else works()
    if comm.rank == 1:
        state = comm._ticket.state
    assert comm.recover().active == (0, 1)
    for _ in range(20):
        step()
        assert comm.boundary(LONG_S) is None
    comm.meet(LONG_S)
    if comm.rank == 1:
        return state, len(comm.leave(step).active)
    while (change := comm.boundary(LONG_S)) is None:
        step()
    return state, len(change.active)


def test_a_rank_is_killed_while_another_one_leaves() -> None:
    """That one is a member as before behind the recovery, and leaves when it asks again."""
    seen = weft.spawn(_killed, 3, device="cpu", max_ranks=3, on_failure="return")
    assert isinstance(seen[2], weft.PeerLost)
    assert seen[:2] == [("", 1), ("withdrawn", 1)]


def _step_fails(comm: Any) -> bool:
    ep = make_ep(comm)

    def fails() -> None:
        raise KeyError("of the caller")

    if comm.rank == 1:
        with pytest.raises(KeyError):
            comm.leave(fails)
        is_decided = comm._ticket.state == "committed"
    else:
        assert comm.boundary(LONG_S) is None
        is_decided = False
    is_decided = any(said == b"1" for said in comm.gather(b"1" if is_decided else b"0").values())
    for _ in range(10):
        checked_step(ep, number_of(comm))
        change = comm.boundary(LONG_S)
        if change is not None:
            assert is_decided
            return comm.rank in change.active or comm.rank == 1
    return not is_decided


def test_a_step_fails_while_a_rank_leaves() -> None:
    """It leaves if that was decided, and else it does not."""
    assert weft.spawn(_step_fails, 2, device="cpu", max_ranks=2) == [True, True]
