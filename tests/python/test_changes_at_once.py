"""Guards against ranks that count boundaries differently behind a collective change, because they wanted different
ones: they would come to the next change in different steps."""

from __future__ import annotations

import time
from typing import Any

import pytest
from joining_cases import LONG_S, checked_step, make_ep, number_of

import weft
from weft.group import collective_changes

R = 5
WISHES: dict[str, list[dict[str, list[int]]]] = {  # of each rank; of those behind the last one the last one
    "two": [{"suspend": [3]}, {"suspend": [4]}],
    "three, of which one is done by the others": [{"suspend": [4]}, {"suspend": [3, 4]}, {"suspend": [3]}],
    "one is refused": [{"suspend": [3]}, {"suspend": [4]}, {"suspend": [0, 1, 2, 3, 4]}, {"suspend": [3]}],
    "one is let go by another": [{"suspend": [3]}, {"suspend": [3]}, {"suspend": [3]}, {"suspend": [4]}],
}


def _at_once(comm: weft.Communicator, wishes: list[dict[str, list[int]]]) -> Any:
    """Then a step and a boundary in turn, until a change comes: behind equally many on all ranks, or a step finds ranks
    of another set."""
    ep = make_ep(comm)
    wanted = wishes[min(comm.rank, len(wishes) - 1)]
    refused = ""
    try:
        comm.change(**wanted, deadline_s=LONG_S)  # type: ignore[arg-type]
    except weft.InvalidArgument as error:
        refused = str(error)
    if not comm.is_member:
        return None
    active = comm.active_ranks
    if comm.rank == 0:
        comm.propose(remove=[2])
    count, change = 0, None
    while change is None:
        checked_step(ep, number_of(comm))
        change = comm.boundary(LONG_S)
        count += 1
    return active, count, change.active, "leaves none" in refused


@pytest.mark.parametrize("name", WISHES)
def test_all_count_alike_behind_different_changes(name: str) -> None:
    """Each is carried out on all ranks before any of them goes on."""
    found = weft.spawn(_at_once, R, (WISHES[name],), device="cpu", max_ranks=R)
    (seen,) = {each[:3] for each in found[:3]}
    assert seen[0] in [(0, 1, 2), (0, 1, 2, 4)][: 1 + (name == "one is let go by another")]
    assert seen[2] == tuple(rank for rank in seen[0] if rank != 2)
    assert [each[3] for each in found[:3]] == [False, False, name == "one is refused"]


class _Clock:
    """Once somebody has looked at the stages, all deadlines are over."""

    def __init__(self, native: Any) -> None:
        self.native, self.is_late = native, False

    def stages(self, *args: Any) -> Any:
        self.is_late = True
        return self.native.stages(*args)

    def monotonic(self) -> float:
        return time.monotonic() + 1e6 * self.is_late

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)


def _does_not_call(comm: weft.Communicator) -> tuple[int, ...]:
    """Rank 1 makes boundaries in place of the call; rank 0 has its change all the same, at its deadline."""
    make_ep(comm)
    comm.meet(LONG_S)
    if comm.rank == 1:
        change = None
        while change is None:
            change = comm.boundary(LONG_S)
            time.sleep(0.001)
        return change.removed
    clock: Any = _Clock(comm._native)
    comm._native = collective_changes.time = clock
    return comm.change(suspend=[2], deadline_s=LONG_S).removed


def test_a_rank_that_does_not_call_is_waited_for_until_the_deadline() -> None:
    assert weft.spawn(_does_not_call, 3, device="cpu", max_ranks=3) == [(2,)] * 3


def _is_interrupted(comm: weft.Communicator) -> int:
    """Rank 0 is interrupted while it waits for the others, which do not wait for it."""
    ep = make_ep(comm)
    native, told = comm._native, []
    comm.on_change(told.append)

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    if comm.rank == 0:
        comm._native = _Stages(native, interrupt)
        with pytest.raises(KeyboardInterrupt):
            comm.change(suspend=[2], deadline_s=LONG_S)
        comm._native = native
    else:
        comm.change(suspend=[2], deadline_s=LONG_S)
    assert [each.removed for each in told] == [(2,)]
    if comm.is_member:
        checked_step(ep, number_of(comm))
        assert comm.boundary(LONG_S) is None
        comm.meet(LONG_S)
    return comm.epoch


class _Stages:
    """The native communicator, with another look at the stages of the others."""

    def __init__(self, native: Any, stages: Any) -> None:
        self.native, self.stages = native, stages

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)


def test_nobody_waits_for_a_rank_that_was_interrupted() -> None:
    assert weft.spawn(_is_interrupted, 3, device="cpu", max_ranks=3) == [2] * 3
