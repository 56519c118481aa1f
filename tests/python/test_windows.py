"""Guards against windows that go away under a call, and windows that stay when their ExpertParallel is gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from test_errors import IDX, SHAPE, X, raised
from test_lifecycle import sum_of_all

import weft


def test_closing_inside_a_call_is_refused() -> None:
    """From another thread and from a signal handler; it would take the memory away that the call is using."""
    reader, writer = os.pipe()  # rank 1 lets the dispatch of rank 0 wait until this one has tried

    def rank(comm: weft.Communicator) -> list[Any]:
        ep, other = (weft.ExpertParallel(comm, **{**SHAPE, "hidden": hidden}, deadline_s=100) for hidden in (16, 32))
        if comm.rank == 1:
            os.read(reader, 1)
            r = ep.dispatch(X, IDX)
            return [ep.combine(r.x, r.handle)]
        found: list[Any] = []

        def leave_a_block() -> None:
            with pytest.raises(KeyError), other:
                raise KeyError
            assert not other.calls.closed

        def close() -> None:
            while not comm._busy.locked():
                time.sleep(0.01)
            leave_a_block()
            found.extend([raised(ep.close), raised(lambda: other.__exit__(None, None, None))])
            os.kill(os.getpid(), signal.SIGUSR1)

        def on_signal(*_: object) -> None:
            found.append(raised(ep.close))
            os.write(writer, b".")

        signal.signal(signal.SIGUSR1, on_signal)
        thread = threading.Thread(target=close)
        thread.start()
        r = ep.dispatch(X, IDX)
        thread.join()
        y = ep.combine(r.x, r.handle)
        assert not ep.calls.closed
        assert not other.calls.closed
        for each in (ep, ep, other):
            each.close()
        assert ep.calls.windows[0].closed
        assert other.calls.windows[0].closed
        return [y, *found]

    (y, *found), (same,) = weft.spawn(rank, 2)
    assert torch.equal(y, same)
    assert [type(each) for each in found] == [weft.InvalidState] * 3
    assert str(found[0]) == (
        "ExpertParallel.close() while another thread is inside a call of this communicator, or from a signal handler "
        "that came in one: wait for it to return, or end it by comm.abort(); nothing was given back"
    )


def test_closing_after_a_call_that_failed(ep: weft.ExpertParallel) -> None:
    same = weft.ExpertParallel(ep.comm, num_experts=8, top_k=2, hidden=16, max_tokens_per_rank=64, dtype=torch.float32)
    window = ep.calls.windows[0]
    assert type(raised(lambda: ep.dispatch(torch.zeros(2, 16), torch.tensor([[0, 99]] * 2)).x + ep.check())) is (
        weft.InvalidArgument
    )
    with pytest.raises(KeyError), ep:
        raise KeyError
    assert not window.closed, "the other object uses it"
    ep.close()
    same.close()
    assert window.closed


@pytest.mark.parametrize("what", ["second window", "calls"])
def test_a_constructor_that_fails_gives_its_windows_back(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """All but those of other objects. The second window fails on both ranks, the calls on one of them."""

    def rank(comm: weft.Communicator) -> float:
        shape = {**SHAPE, "hidden": 32, "num_windows": 2}
        with weft.ExpertParallel(comm, **{**shape, "num_windows": 1}) as other, monkeypatch.context() as patch:
            if what == "second window":
                patch.setattr(weft.Communicator, "_new_window", refuse)
            elif comm.rank == 1:
                patch.setattr(weft.call.opening, "CpuCalls", refuse)
            if what == "second window" or comm.rank == 1:
                error = raised(lambda: weft.ExpertParallel(comm, **shape))
                assert str(error) == "no room"
                assert [window.num_users for window in comm._windows.values() if not window.closed] == [1]
            else:
                weft.ExpertParallel(comm, **shape).close()
            patch.undo()
            with weft.ExpertParallel(comm, **shape) as ep:
                r = ep.dispatch(torch.ones(2, 32), IDX[:2], window=1)
                assert other.calls.windows[0] is ep.calls.windows[0]
                assert ep.combine(r.x, r.handle, window=1).sum() > 0
        assert all(window.closed for window in comm._windows.values())
        return sum_of_all(comm)

    def refuse(*_: object, **__: object) -> None:
        raise weft.InvalidArgument("no room")

    assert len(set(weft.spawn(rank, 2))) == 1
