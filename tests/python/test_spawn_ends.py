"""Guards against ranks of `weft.spawn` that are blamed for what another one did, or do not come to their own end."""

from __future__ import annotations

import gc
import importlib
import os
import pathlib
import signal
import socket
import threading
import time
from typing import Any, cast

import pytest
from test_errors import IDX, SHAPE, X, raised
from test_lifecycle import sum_of_all
from test_standby import until

import weft


def test_a_killed_rank_comes_before_those_that_lost_it() -> None:
    """Though they tell of it sooner: a child of the killed one keeps its channel open for a while."""

    def rank(comm: weft.Communicator) -> None:
        with weft.ExpertParallel(comm, **SHAPE) as ep:
            if comm.rank == 1:
                if os.fork() == 0:
                    time.sleep(3)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
            ep.dispatch(X, IDX)

    with pytest.raises(weft.PeerLost, match=r"rank 1 \(pid \d+\) was killed by SIGKILL") as caught:
        weft.spawn(rank, 2)
    notes = "\n".join(caught.value.__notes__)
    assert "raised by rank 1 of weft.spawn" in notes
    assert "rank 0 ended with PeerLost" in notes


def test_threads_have_time_to_go_on_without_a_failed_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("weft.spawn"), "THREAD_GRACE_S", 60.0)
    all_constructed = threading.Barrier(3)

    def rank(comm: weft.Communicator) -> None:
        shape = {**SHAPE, "num_experts": 6}
        with weft.ExpertParallel(comm, **shape) as ep:
            all_constructed.wait(60)
            if comm.rank == 2:
                raise KeyError("the reason")
            error = None
            while not isinstance(error, weft.PeerLost):
                error = raised(lambda: ep.dispatch(X, IDX % 6))
            time.sleep(1)  # several looks of the parent
            comm.rebuild([0, 1])
            ep.dispatch(X, IDX % 6)

    with pytest.raises(KeyError, match="the reason") as caught:
        weft.spawn(rank, 3, isolation="thread")
    assert caught.value.__notes__ == ["raised by rank 2 of weft.spawn"], "the others came to their end"


def test_a_rank_that_is_done_does_not_leave_the_others() -> None:
    """It is late for what they call, not lost."""

    def rank(comm: weft.Communicator) -> None:
        with weft.ExpertParallel(comm, **SHAPE) as ep:
            ep.dispatch(X, IDX)
            if comm.rank == 1:
                time.sleep(1)
                assert isinstance(raised(lambda: ep.dispatch(X, IDX, deadline_s=1)), weft.PeerTimeout)

    weft.spawn(rank, 2)


def test_a_rank_that_fails_before_it_connects_ends_the_wait_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = weft.Communicator._connect

    def fails_on_rank_1(rank: int, *args: Any, **options: Any) -> weft.Communicator:
        if rank == 1:
            raise KeyError("the reason")
        return connect(rank, *args, **options)

    monkeypatch.setattr(weft.Communicator, "_connect", fails_on_rank_1)
    with pytest.raises(KeyError, match="the reason") as caught:
        weft.spawn(sum_of_all, 3)
    notes = "\n".join(caught.value.__notes__)
    for rank in (0, 2):
        assert f"rank {rank} ended with Error: the parent of this rank, or a rank that had not connected yet" in notes
    assert "went on" not in notes


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_errors_in_place_of_results(isolation: str) -> None:
    def rank(comm: weft.Communicator) -> int:
        if comm.rank == 1:
            raise KeyError("the reason")
        return comm.rank

    first, second, third = weft.spawn(rank, 3, isolation=isolation, on_failure="return")
    assert (first, third) == (0, 2)
    assert isinstance(second, KeyError)


@pytest.mark.parametrize("on_failure", ["return", "raise"])
def test_a_spare_that_was_killed_is_told_of(on_failure: str, tmp_path: pathlib.Path) -> None:
    """As a member: it has not waited until the others had come to their end."""
    pid = tmp_path / "pid"

    def rank(comm: weft.Communicator) -> int:
        if not comm.is_member:
            (tmp_path / "written").write_text(str(os.getpid()))
            (tmp_path / "written").rename(pid)
            comm.ready()
            comm.boundary()
            raise AssertionError("taken in")
        until(lambda: pid.exists() and comm.membership.standby == (2,))
        comm.meet(60.0)
        if comm.rank == 0:
            os.kill(int(pid.read_text()), signal.SIGKILL)
        until(lambda: comm.membership.standby == ())
        return comm.rank

    def run() -> list[Any]:
        return weft.spawn(rank, 2, device="cpu", standby=1, on_failure=on_failure)

    if on_failure == "raise":
        with pytest.raises(weft.PeerLost, match=r"rank 2 \(pid \d+\) was killed by SIGKILL"):
            run()
        return
    *members, spare = run()
    assert members == [0, 1]
    assert isinstance(spare, weft.PeerLost)
    assert "was killed by SIGKILL" in str(spare)


@pytest.mark.parametrize(
    ("error", "was_killed", "is_forgiven"),
    [
        (weft.PeerLost((0,), "the group has ended"), False, True),
        (weft.InvalidState("an object that the members have closed"), False, True),
        (weft.PeerLost((1,), "rank 1 was killed by SIGKILL"), True, False),
        (ValueError("of the spare"), False, False),
    ],
)
def test_which_spares_have_failed(error: Exception, was_killed: bool, is_forgiven: bool) -> None:
    """Of those that waited when the members had come to their end."""
    ends = importlib.import_module("weft.spawn")  # the name itself is the function
    channel = cast("socket.socket", None)
    member, spare = ends._Child(0, -1, channel, was_let_go=True), ends._Child(1, -1, channel, waits=True)
    spare.outcome = ends._Outcome(1, None, error, 1.0, was_killed=was_killed)
    ends._forgive([member, spare], 1)
    assert (spare.outcome.error is None) == is_forgiven


class _Joins:
    """As torch's store: its end waits for a thread, which a forked child does not have."""

    def __init__(self) -> None:
        self.me = self  # only the garbage collector finds it
        self.pid = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_do_not_collect_the_garbage_of_their_parent() -> None:
    gc.collect()
    gc.disable()
    try:
        _Joins()
        assert weft.spawn(_collects, 2) == [True, True]
    finally:
        gc.enable()


def _collects(comm: weft.Communicator) -> bool:
    gc.collect()
    return True
