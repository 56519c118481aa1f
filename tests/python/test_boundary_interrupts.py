"""Guards against a Ctrl-C that is not heard inside of calls of a group whose ranks come and go, or that leaves the rank
unusable, its slot taken, or the others disturbed."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from joining_cases import LONG_S, Outer, checked_step, make_ep, number_of, open_group, run_until, wait_until_stopped

import weft

LAST = 15  # epoch
_INSIDE_S = 0.1  # from the call of the function to its wait; nothing depends on it


@contextlib.contextmanager
def interrupted(name: str) -> Iterator[None]:
    """SIGINT to this process, as Ctrl-C sends it, when the main thread is inside of a function `name` of weft."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    assert main == threading.get_ident()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            frame = sys._current_frames()[main]
            while frame is not None:
                if frame.f_code.co_name == name and "weft" in frame.f_code.co_filename:
                    time.sleep(_INSIDE_S)
                    os.kill(os.getpid(), signal.SIGINT)
                    return
                frame = frame.f_back  # type: ignore[assignment]
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        is_over.set()
        thread.join()
    assert time.monotonic() - start < LONG_S


def _outside(outer_comm: Any, call: str) -> tuple[Any, ...]:
    """Two members and a newcomer that is interrupted; in ready() while a member is stopped, in boundary()
    before anybody wants it."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    pids = [int(pid) for pid in outer.tell(str(os.getpid()).encode())]
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, device="cpu")
        ep = make_ep(comm)
        if call == "ready":
            os.kill(pids[1], signal.SIGSTOP)
            wait_until_stopped(pids[1])
            with interrupted("ready"):
                comm.ready()
            os.kill(pids[1], signal.SIGCONT)
            comm.ready()
        else:
            comm.ready()
            with interrupted("boundary"):
                comm.boundary()
        assert not comm.is_member
        outer.wait()
        change = comm.boundary(LONG_S)
        assert change is not None
    else:
        ep = make_ep(comm)
        checked_step(ep, 1)
        outer.wait()
        outer.wait()
        checked_step(ep, 2)
        if comm.rank == 0:
            comm.propose(admit=[2])
        change = run_until(comm, ep, [0, 1, 2])
    if comm.rank == 2:
        checked_step(ep, number_of(comm))
    outer.wait()
    return change.added, change.active


@pytest.mark.parametrize("call", ["ready", "boundary"])
def test_a_newcomer_is_interrupted(call: str) -> None:
    """It calls again, and is taken in."""
    assert weft.spawn(_outside, 3, (call,), device="cpu") == [((2,), (0, 1, 2))] * 3


def _joins(outer_comm: Any) -> int:
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    ep = make_ep(comm) if comm is not None else None  # before who makes them is stopped
    pids = [int(pid) for pid in outer.tell(str(os.getpid()).encode())]
    if comm is None:
        os.kill(pids[1], signal.SIGSTOP)
        wait_until_stopped(pids[1])
        with interrupted("join"):
            weft.Communicator.join(address, device="cpu")
        os.kill(pids[1], signal.SIGCONT)
        comm = weft.Communicator.join(address, device="cpu")  # the one slot is free again
        ep = make_ep(comm)
        comm.ready()
        outer.wait()
        assert comm.boundary(LONG_S) is not None
        checked_step(ep, number_of(comm))
    else:
        assert ep is not None
        outer.wait()
        checked_step(ep, 1)
        if comm.rank == 0:
            comm.propose(admit=[2])
        run_until(comm, ep, [0, 1, 2])
    outer.wait()
    return comm.rank


def test_a_join_is_interrupted() -> None:
    """While a member does not answer: the slot is free again, for the same process, too."""
    assert weft.spawn(_joins, 3, device="cpu") == [0, 1, 2]


def _changes(outer_comm: Any) -> tuple[Any, ...]:
    """Both want a rank that does not exist; one is interrupted, and does not want it any more."""
    outer = Outer(outer_comm)
    comm, _ = open_group(outer, 2, 3)
    assert comm is not None
    ep = make_ep(comm)
    if comm.rank == 0:
        with interrupted("change"):
            comm.change(admit=[2])
        assert comm._ticket is not None
        assert comm._ticket.state == "withdrawn"
        outer.wait()
    else:
        ticket = comm.propose(admit=[2])
        outer.wait()
        assert ticket.state == "preparing"  # of this rank it still is
        assert ticket.withdraw() == "withdrawn"
    assert not comm.broken
    for number in range(3):
        assert comm.boundary(LONG_S) is None
        checked_step(ep, number)
    outer.wait()
    change = comm.change(suspend=[1])
    outer.wait()
    return change.removed, change.active


def test_a_change_is_interrupted() -> None:
    """It is taken back, on this rank alone; the next one happens."""
    assert weft.spawn(_changes, 2, device="cpu") == [((1,), (0,))] * 2


def _recovers(outer_comm: Any) -> tuple[int, ...]:
    """Rank 2 is stopped, so both others wait for it; rank 0 is interrupted."""
    outer = Outer(outer_comm)
    comm, _ = open_group(outer, 3, 3)
    assert comm is not None
    ep = make_ep(comm)
    pids = [int(pid) for pid in outer.tell(str(os.getpid()).encode())]
    checked_step(ep, 1)
    outer.wait()
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(weft.Evicted):
            comm.meet(LONG_S)
        outer.wait()
        return ()
    wait_until_stopped(pids[2])
    if comm.rank == 0:
        with interrupted("recover"):
            comm.recover()
        change = comm.recover([2])
    else:
        try:
            change = comm.recover()
        except weft.PeerTimeout:  # the others have gone on to another epoch, or rank 0 was interrupted
            change = comm.recover([2])
    assert change.active == (0, 1)
    for number in range(3):
        checked_step(ep, number)
    if comm.rank == 0:
        os.kill(pids[2], signal.SIGCONT)
    outer.wait()
    return change.active


def test_a_recovery_is_interrupted() -> None:
    """Called again it goes on, without the one that was waited for."""
    assert weft.spawn(_recovers, 3, device="cpu") == [(0, 1), (0, 1), ()]


def _at_any_moment(outer_comm: Any, folder: pathlib.Path, seed: int) -> list[tuple[Any, ...]]:
    """Rank 1 is interrupted again and again, at boundaries at which rank 2 leaves and comes back."""
    outer = Outer(outer_comm)
    comm, _ = open_group(outer, 3, 3)
    assert comm is not None
    ep = make_ep(comm)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chance, is_over = random.Random(seed), threading.Event()
    has_heard, seen = False, []
    told = {}  # a listener that is interrupted is told again
    comm.on_change(lambda change: told.update({change.epoch: change.active}))
    main = threading.main_thread().ident

    def interrupt() -> None:
        while not is_over.is_set():
            time.sleep(chance.random() * 0.003)
            frame = sys._current_frames()[main]
            if frame.f_code.co_name == "boundary" and not is_over.is_set():  # inside the native call, or about to
                signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    if comm.rank == 1:
        thread.start()
    ticket: Any = None
    wanted = comm.active_ranks  # by rank 0; what is committed has not happened yet
    while True:
        try:
            if has_heard:
                (folder / "heard").touch()
            if (folder / "end").exists():
                is_over.set()
                if comm.rank == 1:
                    thread.join()
                    time.sleep(0.01)  # its last signal comes here
                break
            change = comm.boundary(0.02)
            if change is not None:
                seen.append((change.epoch, change.active))
            time.sleep(0.001)  # no step holds the ranks together, and a change comes a few boundaries ahead
            if comm.rank != 0 or (comm.active_ranks != wanted and ticket.state != "withdrawn"):
                continue
            if comm.active_ranks == (0, 1, 2):
                if comm.epoch >= LAST and (folder / "heard").exists():
                    (folder / "end").touch()
                else:
                    ticket, wanted = comm.propose(suspend=[2]), (0, 1)
            elif comm.membership.standby == (2,):
                ticket, wanted = comm.propose(resume=[2]), (0, 1, 2)
        except KeyboardInterrupt:
            has_heard = True
    epoch = int(outer.tell(str(comm.epoch).encode())[0])
    while seen[-1][0] < epoch:
        change = comm.boundary(LONG_S)
        if change is not None:
            seen.append((change.epoch, change.active))
    assert list(told.items()) == seen
    assert comm.active_ranks == (0, 1, 2)
    outer.wait()
    checked_step(ep, 5)
    outer.wait()
    return seen


@pytest.mark.parametrize("seed", range(2))
def test_a_rank_is_interrupted_at_any_moment_of_boundaries(tmp_path: pathlib.Path, seed: int) -> None:
    """What was decided is done and told, whether the call that did it was interrupted or not."""
    seen = weft.spawn(_at_any_moment, 3, (tmp_path, seed), device="cpu")
    assert len(seen[0]) >= LAST - 1
    assert seen[1] == seen[0] == seen[2]
