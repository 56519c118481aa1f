"""Guards against ranks that are threads and go on waiting when nobody wants their results any more."""

from __future__ import annotations

import contextlib
import importlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from test_errors import SHAPE, raised

import weft

LEAVES_WITHIN_S = 30.0  # the deadline of the calls is 100 s


def rank_threads() -> list[str]:
    """Those left, but for the last moment of a thread."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("weft-rank-")]
    for thread in threads:
        thread.join(5)
    return [thread.name for thread in threads if thread.is_alive()]


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_waits() -> None:
    inside = threading.Event()

    def rank(comm: weft.Communicator) -> None:
        with weft.ExpertParallel(comm, **SHAPE) as ep:
            if comm.rank:
                inside.wait(LEAVES_WITHIN_S)
                return
            threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,)).start()
            try:
                ep.warmup()  # rank 1 does not come
            finally:
                inside.set()

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        weft.spawn(rank, 2, isolation="thread")
    assert time.monotonic() - begin < LEAVES_WITHIN_S
    assert inside.is_set()
    assert not rank_threads()


def waits_in_a_rebuild() -> Callable[[weft.Communicator], None]:
    """A rank: 2 fails, and 0 waits in a rebuild in which 1 takes no part."""
    all_constructed = threading.Barrier(3)
    rank_0_left = threading.Event()

    def rank(comm: weft.Communicator) -> None:
        with weft.ExpertParallel(comm, **{**SHAPE, "num_experts": 6}) as ep:
            all_constructed.wait(LEAVES_WITHIN_S)
            if comm.rank == 2:
                raise KeyError("the reason")
            if comm.rank == 1:
                rank_0_left.wait(LEAVES_WITHIN_S)  # takes no part in the rebuild
                return
            try:
                with contextlib.suppress(weft.PeerLost):
                    ep.warmup()
                comm.rebuild([0, 1])
            finally:
                rank_0_left.set()

    return rank


def test_failure_of_one_rank_ends_the_waits_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("weft.spawn"), "THREAD_GRACE_S", 2.0)
    begin = time.monotonic()
    with pytest.raises(KeyError, match="the reason") as caught:
        weft.spawn(waits_in_a_rebuild(), 3, isolation="thread")
    assert time.monotonic() - begin < LEAVES_WITHIN_S
    notes = "\n".join(caught.value.__notes__)
    assert "raised by rank 2 of weft.spawn" in notes
    assert "rank 0 ended with PeerLost: rank 0 was stopped by weft.spawn, because another rank had failed" in notes
    assert not rank_threads()


class _ClosesLate:
    """A communicator's native object; `close` waits until its rank has come to its end."""

    def __init__(self, native: Any, ended: threading.Event) -> None:
        self._native, self._ended = native, ended

    def close(self) -> None:
        self._ended.wait(LEAVES_WITHIN_S)
        self._native.close()


def test_a_rank_that_hears_of_another_before_it_is_stopped_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = importlib.import_module("weft.spawn")
    monkeypatch.setattr(spawn, "THREAD_GRACE_S", 0.0)
    real = spawn._ThreadRanks.stop

    def stop(ranks: Any) -> None:
        *others, first = sorted(ranks.natives, key=lambda native: -native.rank)
        ranks.natives = [*others, _ClosesLate(first, ranks.ended[0])]
        real(ranks)

    monkeypatch.setattr(spawn._ThreadRanks, "stop", stop)
    with pytest.raises(KeyError, match="the reason") as caught:
        weft.spawn(waits_in_a_rebuild(), 3, isolation="thread")
    notes = "\n".join(caught.value.__notes__)
    assert "rank 0 ended with PeerLost: rank 0 was stopped by weft.spawn, because another rank had failed" in notes
    assert "left out by the others" not in notes


def test_what_a_rank_raises_of_itself_behind_the_stop_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """That it lost the rank that failed, and errors of its own."""
    spawn = importlib.import_module("weft.spawn")
    monkeypatch.setattr(spawn, "THREAD_GRACE_S", 0.0)
    all_constructed = threading.Barrier(3)
    heard, stopped = threading.Event(), threading.Event()
    real = spawn._ThreadRanks.stop

    def stop(ranks: Any) -> None:
        heard.wait(LEAVES_WITHIN_S)
        real(ranks)
        stopped.set()

    def rank(comm: weft.Communicator) -> None:
        with weft.ExpertParallel(comm, **{**SHAPE, "num_experts": 6}) as ep:
            all_constructed.wait(LEAVES_WITHIN_S)
            if comm.rank == 2:
                raise KeyError("the reason")
            error = raised(ep.warmup) if comm.rank == 0 else ValueError("another reason")
            if comm.rank == 0:
                heard.set()
            stopped.wait(LEAVES_WITHIN_S)
            raise error

    monkeypatch.setattr(spawn._ThreadRanks, "stop", stop)
    with pytest.raises(KeyError, match="the reason") as caught:
        weft.spawn(rank, 3, isolation="thread")
    _, of_rank_0, of_rank_1 = caught.value.__notes__
    assert of_rank_0.startswith("rank 0 ended with PeerLost: ")
    assert "stopped" not in of_rank_0
    assert of_rank_1 == "rank 1 ended with ValueError: another reason"
