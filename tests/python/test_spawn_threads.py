"""Guards against ranks that are threads and go on waiting when nobody wants their results any more."""

from __future__ import annotations

import contextlib
import importlib
import signal
import threading
import time

import pytest
from test_errors import SHAPE

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


def test_failure_of_one_rank_ends_the_waits_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("weft.spawn"), "THREAD_GRACE_S", 2.0)
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

    begin = time.monotonic()
    with pytest.raises(KeyError, match="the reason") as caught:
        weft.spawn(rank, 3, isolation="thread")
    assert time.monotonic() - begin < LEAVES_WITHIN_S
    notes = "\n".join(caught.value.__notes__)
    assert "raised by rank 2 of weft.spawn" in notes
    assert "rank 0 ended with PeerLost: rank 0 was stopped by weft.spawn, because another rank had failed" in notes
    assert not rank_threads()
