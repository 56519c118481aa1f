"""Guards against a Ctrl-C behind the new epoch of a recovery that loses its `Change`, or lets the call made again wait
for ranks that have gone on."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from joining_cases import LONG_S, checked_step, make_ep, number_of, rank_2_dies

import weft


def _interrupt_once(comm: Any, place: str) -> None:
    """At the end of the native call, before the maps are followed, or in a listener."""

    def interrupt(*_: Any) -> None:
        if place != "listener":
            delattr(comm, place)
        elif has_come:
            return
        has_come.append(True)
        raise KeyboardInterrupt

    has_come: list[bool] = []
    if place == "listener":
        comm.on_change(interrupt)
    else:
        setattr(comm, place, interrupt)


def _recovers(comm: Any, place: str, again: str) -> tuple[Any, ...]:
    """Rank 2 dies, and rank 0 is interrupted when both others have come to the new epoch."""
    ep = make_ep(comm)
    checked_step(ep, 1)
    told: list[weft.Change] = []
    if comm.rank == 0:
        _interrupt_once(comm, place)
    comm.on_change(told.append)
    with pytest.raises(weft.PeerLost):
        rank_2_dies(comm, lambda: comm.meet(LONG_S))
    found: Any = None
    if comm.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            comm.recover()
        assert not comm.broken
        assert comm.active_ranks == (0, 1)
        calls: dict[str, Callable[[], Any]] = {
            "recover": lambda: comm.recover(deadline_s=LONG_S), "rebuild": lambda: comm.rebuild([0, 1]),
            "boundary": lambda: comm.boundary(LONG_S),
        }  # fmt: skip
        if again in calls:
            found = calls[again]()
            assert found in [told[0], None][again == "rebuild" :]
    else:
        found = comm.recover()
    if again == "change":
        assert comm.change(suspend=[1]).epoch == 3
        return tuple(each.lost for each in told), told[0].epoch, comm.rank
    for _ in range(3):
        checked_step(ep, number_of(comm))
        assert comm.boundary(LONG_S) is None
    comm.meet(LONG_S)
    assert comm.epoch == 2
    comm.change(suspend=[1])
    assert told[1].removed == (1,)
    return tuple(each.lost for each in told), told[0].epoch, comm.rank


@pytest.mark.parametrize("again", ["recover", "rebuild", "boundary", "change"])
@pytest.mark.parametrize("place", ["_begin_epoch", "_follow_maps", "listener"])
def test_the_next_call_tells_what_a_recovery_has_done(place: str, again: str) -> None:
    seen = weft.spawn(_recovers, 3, (place, again), device="cpu", max_ranks=3, on_failure="return")
    assert seen[:2] == [(((2,), ()), 2, 0), (((2,), ()), 2, 1)]


def _loses_another(comm: Any, folder: pathlib.Path) -> tuple[Any, ...]:
    if comm.rank == 0:
        _interrupt_once(comm, "_begin_epoch")
    with pytest.raises(weft.PeerLost):
        rank_2_dies(comm, lambda: comm.meet(LONG_S))
    if comm.rank == 1:
        comm.recover()
        while not (folder / "interrupted").exists():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(KeyboardInterrupt):
        comm.recover()
    (folder / "interrupted").touch()
    with pytest.raises(weft.PeerLost):
        comm.meet(LONG_S)
    change = comm.recover()
    assert comm.recover().lost == ()  # once more, without need
    return change.epoch, change.lost, comm.epoch


def test_a_rank_is_lost_before_the_next_call(tmp_path: pathlib.Path) -> None:
    """The call made again recovers, and tells of both."""
    seen = weft.spawn(_loses_another, 3, (tmp_path,), device="cpu", max_ranks=3, on_failure="return")
    assert seen[0] == (3, (1, 2), 4)
