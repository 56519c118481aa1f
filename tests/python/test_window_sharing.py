"""Guards against windows that ranks share though not all have them, and communicators that leave something behind."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from test_errors import SHAPE, raised
from test_lifecycle import sum_of_all

import weft
from weft import _load
from weft.group import joining


def num_mappings() -> int:
    """Of windows, in this process."""
    return sum("memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("closes", [0, 1])
def test_a_window_that_one_rank_closed_is_shared_by_none(closes: int) -> None:
    """Else one rank makes a new one, and waits for the other."""

    def rank(comm: weft.Communicator) -> tuple[bool, float]:
        kept = weft.ExpertParallel(comm, **SHAPE)
        before = kept.calls.windows[0]
        if comm.rank == closes:
            kept.close()
        with weft.ExpertParallel(comm, **SHAPE, deadline_s=100) as ep:
            is_new = ep.calls.windows[0] is not before
            return is_new, sum_of_all(comm)

    (new_0, total_0), (new_1, total_1) = weft.spawn(rank, 2)
    assert new_0
    assert new_1
    assert total_0 == total_1


def test_a_window_that_all_ranks_have_is_shared() -> None:
    def rank(comm: weft.Communicator) -> bool:
        with weft.ExpertParallel(comm, **SHAPE) as one, weft.ExpertParallel(comm, **SHAPE) as other:
            return one.calls.windows[0] is other.calls.windows[0]

    assert weft.spawn(rank, 2) == [True, True]


def test_closing_a_communicator_frees_the_windows_of_objects_that_live() -> None:
    comm = weft.Communicator.from_env()
    before = num_mappings()
    ep = weft.ExpertParallel(comm, **SHAPE, num_windows=2)
    assert num_mappings() > before
    comm.close()
    assert num_mappings() <= before
    assert all(window.closed for window in ep.calls.windows)
    assert isinstance(raised(lambda: ep.dispatch(torch.zeros(1, 16), torch.zeros(1, 2, dtype=torch.int64))), weft.Error)


def test_a_rank_whose_engine_can_not_be_chosen_is_lost_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its caller keeps the error, and with it all that the constructor had made."""
    hub, is_over = _load.native().LocalHub(2), threading.Event()
    choose = joining.choose_engine

    def refuse_on_rank_1(facts: Any, far: Any) -> Any:
        if threading.current_thread().name == "weft-rank-1":
            raise weft.Unsupported("this engine", "nothing", "another one")
        return choose(facts, far)

    def rank(comm: weft.Communicator) -> None:
        native = _load.native().Communicator.local(hub, comm.rank)
        if comm.rank == 1:
            with pytest.raises(weft.Unsupported, match="this engine") as caught:
                weft.Communicator._local(native)
            del native
            is_over.wait(100)
            assert caught.value.__traceback__ is not None
            return
        try:
            with weft.Communicator._local(native) as other, pytest.raises(weft.PeerLost):
                other.meet(60)
        finally:
            is_over.set()

    def patch(comm: weft.Communicator) -> None:
        comm.meet(60)
        if comm.rank == 0:
            monkeypatch.setattr(joining, "choose_engine", refuse_on_rank_1)
        comm.meet(60)
        rank(comm)

    weft.spawn(patch, 2, isolation="thread")


def test_meetings_are_counted_anew_after_a_rebuild() -> None:
    """One rank has met nobody, and has counted it."""

    def rank(comm: weft.Communicator) -> float:
        if comm.rank == 0:
            with pytest.raises(weft.PeerTimeout):
                comm.meet(0.2)
        comm.rebuild([0, 1], deadline_s=60)
        comm.meet(60)
        return sum_of_all(comm)

    first, second = weft.spawn(rank, 2)
    assert first == second


def test_constructors_are_counted_anew_after_a_rebuild() -> None:
    def rank(comm: weft.Communicator) -> float:
        if comm.rank == 0:
            with pytest.raises(weft.PeerTimeout):
                weft.ExpertParallel(comm, **SHAPE, deadline_s=0.2)
        comm.rebuild([0, 1], deadline_s=60)
        with weft.ExpertParallel(comm, **SHAPE, deadline_s=100):
            return sum_of_all(comm)

    first, second = weft.spawn(rank, 2)
    assert first == second


def test_seconds_of_a_rebuild(solo: weft.Communicator) -> None:
    for wrong in (0, -1, float("inf"), float("nan"), "1", None):
        with pytest.raises(weft.InvalidArgument, match=r"deadline_s is .*; allowed are seconds above 0"):
            solo.rebuild([0], deadline_s=wrong)  # type: ignore[arg-type]
    solo.rebuild([0], deadline_s=30)
    assert solo.epoch > 1
