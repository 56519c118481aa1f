"""Guards against waits that nothing can end from outside, and threads in waits that crash the process when it ends."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import weft

LEAVES_WITHIN_S = 40.0  # the deadline of the calls is 100 s
REASON = "the watchdog found no progress"


def make(comm: weft.Communicator) -> weft.ExpertParallel:
    return weft.ExpertParallel(comm, num_experts=2 * comm.num_ranks, top_k=2, hidden=16, max_tokens_per_rank=8)


def step(ep: weft.ExpertParallel) -> float:
    r = ep.dispatch(torch.ones(2, 16, dtype=torch.bfloat16), torch.tensor([[0, 3]] * 2))
    return float(ep.combine(r.x, r.handle)[0, 0])


def is_here(where: Path, comm: weft.Communicator, ranks: range) -> None:
    """Of each rank behind a call: it has returned from it. It waits for all of `ranks`."""
    (where / str(comm.rank)).touch()
    end = time.monotonic() + 100
    while not all((where / str(rank)).exists() for rank in ranks):
        assert time.monotonic() < end
        time.sleep(0.01)


def until_broken(comm: weft.Communicator) -> weft.Error:
    """What it broke with; this rank calls nothing meanwhile."""
    end = time.monotonic() + LEAVES_WITHIN_S
    while not comm.broken and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(weft.Error) as caught:
        comm.raise_if_broken()
    return caught.value


def ended_by(call: Any) -> tuple[str, str, int, bool]:
    """The error of a call that waits: its class, reason and rank, and whether it came before the deadline."""
    begin = time.monotonic()
    with pytest.raises(weft.Aborted) as caught:
        call()
    error = caught.value
    return type(error).__name__, error.reason, error.rank, time.monotonic() - begin < LEAVES_WITHIN_S


def _abort_beside_a_call(comm: weft.Communicator, where: Path, how: str) -> list[Any]:
    ep = make(comm)
    seen: list[Any] = [step(ep)]
    is_here(where, comm, range(2))
    if comm.rank == 0:
        if how == "thread":
            threading.Timer(0.3, comm.abort, (REASON,)).start()
        else:
            signal.signal(signal.SIGUSR1, lambda *_: comm.abort(REASON))
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        seen.append(ended_by(lambda: step(ep)))  # rank 1 does not come
    else:
        error = until_broken(comm)
        assert isinstance(error, weft.Aborted)
        seen.append((type(error).__name__, error.reason, error.rank, True))
    seen.append(ended_by(lambda: step(ep)))  # broken means broken
    comm.rebuild([0, 1])
    seen.append(step(ep))
    return seen


@pytest.mark.parametrize("how", ["thread", "signal"])
def test_abort_ends_a_wait_here_and_at_the_peers(how: str, tmp_path: Path) -> None:
    aborted = ("Aborted", REASON, 0, True)
    for seen in weft.spawn(_abort_beside_a_call, 2, args=(tmp_path, how), device="cpu"):
        assert seen == [2.0, aborted, aborted, 2.0]


def test_abort_among_ranks_that_are_threads(tmp_path: Path) -> None:
    aborted = ("Aborted", REASON, 0, True)
    for seen in weft.spawn(_abort_beside_a_call, 2, args=(tmp_path, "thread"), device="cpu", isolation="thread"):
        assert seen == [2.0, aborted, aborted, 2.0]


def _abort_a_peers_wait(comm: weft.Communicator, where: Path) -> tuple[str, str, int, bool]:
    ep = make(comm)
    is_here(where, comm, range(3))
    if comm.rank == 1:
        time.sleep(0.3)
        comm.abort(REASON)
        return ended_by(lambda: step(ep))
    return ended_by(lambda: step(ep))


def test_abort_ends_the_wait_of_a_peer(tmp_path: Path) -> None:
    for seen in weft.spawn(_abort_a_peers_wait, 3, args=(tmp_path,), device="cpu"):
        assert seen == ("Aborted", REASON, 1, True)


def _abort_in_constructor(comm: weft.Communicator) -> tuple[Any, float]:
    if comm.rank == 0:
        threading.Timer(0.3, comm.abort, (REASON,)).start()
        seen = ended_by(lambda: make(comm))
    else:
        error = until_broken(comm)
        assert isinstance(error, weft.Aborted)
        seen = (type(error).__name__, error.reason, error.rank, True)
    comm.rebuild([0, 1])
    with make(comm) as ep:
        return seen, step(ep)


def test_abort_ends_a_constructor() -> None:
    for seen in weft.spawn(_abort_in_constructor, 2, device="cpu"):
        assert seen == (("Aborted", REASON, 0, True), 2.0)


def _abort_in_rebuild(comm: weft.Communicator, where: Path, was_broken: bool) -> tuple[Any, int, float]:
    ep = make(comm)
    is_here(where, comm, range(3))
    if was_broken and comm.rank == 0:
        with pytest.raises(weft.PeerTimeout):
            ep.dispatch(torch.ones(2, 16, dtype=torch.bfloat16), torch.tensor([[0, 3]] * 2), deadline_s=0.2)
    elif was_broken:
        assert isinstance(until_broken(comm), weft.PeerTimeout)
    if comm.rank == 0:
        threading.Timer(0.5, comm.abort, (REASON,)).start()
    if comm.rank == 2:  # does not come
        time.sleep(3.0)
        first = ("Aborted", REASON, 0, True)
    else:
        first = ended_by(lambda: comm.rebuild([0, 1, 2]))
    comm.rebuild([0, 1, 2])
    return first, comm.epoch, step(ep)


@pytest.mark.slow
@pytest.mark.parametrize("was_broken", [False, True])
def test_abort_ends_a_rebuild_and_the_next_one_works(was_broken: bool, tmp_path: Path) -> None:
    """Also where the communicator was broken before, by another error."""
    seen = weft.spawn(_abort_in_rebuild, 3, args=(tmp_path, was_broken), device="cpu")
    assert seen == [(("Aborted", REASON, 0, True), 3, 2.0)] * 3, (
        "the epoch of the rebuild that was ended is not tried again"
    )


def _all_abort(comm: weft.Communicator, where: Path) -> float:
    ep = make(comm)
    for turn in range(20):
        (where / str(turn)).mkdir(exist_ok=True)
        is_here(where / str(turn), comm, range(2))  # none is in the step before
        comm.abort(f"turn {turn} of rank {comm.rank}")
        comm.rebuild([0, 1])
        assert step(ep) == 2.0
    return step(ep)


def test_watchdogs_of_all_ranks_abort_and_rebuild_at_once(tmp_path: Path) -> None:
    """What a peer published before it began to rebuild must not end the rebuild."""
    assert weft.spawn(_all_abort, 2, args=(tmp_path,), device="cpu") == [2.0, 2.0]


def _first_reason_stays(comm: weft.Communicator, where: Path) -> str:
    ep = make(comm)
    is_here(where, comm, range(2))
    if comm.rank == 1:
        with pytest.raises(weft.Aborted):
            step(ep)
        return ""
    comm.abort("first")
    comm.abort("second")
    with pytest.raises(weft.Aborted, match="this rank aborted: first; call rebuild") as caught:
        step(ep)
    return caught.value.reason


def test_what_it_broke_with_first_stays(tmp_path: Path) -> None:
    assert weft.spawn(_first_reason_stays, 2, args=(tmp_path,), device="cpu") == ["first", ""]


def _closed_and_wrong(comm: weft.Communicator) -> None:
    with pytest.raises(weft.InvalidArgument, match="reason is 3; allowed is a str"):
        comm.abort(3)  # type: ignore[arg-type]
    pid = os.fork()
    if pid == 0:
        comm.abort("of a forked child")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert not comm.broken
    comm.abort("two\nlines, a \0 and \ud800" + "x" * 500)
    assert comm.broken
    with pytest.raises(weft.Aborted) as caught:
        comm.raise_if_broken()
    assert caught.value.reason == ("two lines, a   and ?" + "x" * 500)[:200]
    comm.close()
    comm.abort("too late")


def test_abort_of_what_is_closed_or_forked_does_nothing() -> None:
    weft.spawn(_closed_and_wrong, 1, device="cpu")


def test_aborted_travels() -> None:
    error = pickle.loads(pickle.dumps(weft.Aborted("why", 2)))
    assert (error.reason, error.rank) == ("why", 2)
    assert str(error) == "rank 2 aborted: why; comm.rebuild(ranks) goes on"


def test_spawn_raises_the_error_of_the_rank_that_aborted() -> None:
    def rank(comm: weft.Communicator) -> None:
        ep = make(comm)
        if comm.rank == 1:
            comm.abort("of one")
            time.sleep(1.0)
        step(ep)

    with pytest.raises(weft.Aborted, match="this rank aborted: of one") as caught:
        weft.spawn(rank, 2, device="cpu")
    assert "raised by rank 1 of weft.spawn" in caught.value.__notes__


TWO_RANKS = """
    import sys, threading, time
    import torch, weft
    from weft import _load
    from weft.communicator import Communicator

    native = _load.native()
    hub = native.LocalHub(2)
    natives = [native.Communicator.local(hub, rank) for rank in range(2)]
    comms, eps = [None, None], [None, None]

    def make(rank):
        comms[rank] = Communicator._local(natives[rank])
        eps[rank] = weft.ExpertParallel(comms[rank], num_experts=4, top_k=2, hidden=16, max_tokens_per_rank=8)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    [each.start() for each in threads]
    [each.join() for each in threads]

    def step(rank):
        r = eps[rank].dispatch(torch.ones(2, 16).bfloat16(), torch.tensor([[0, 3]] * 2))
        eps[rank].combine(r.x, r.handle)
"""
WAITS = {
    "in a call": "threading.Thread(target=step, args=(0,), daemon=True).start()",
    "in one call after the other": """
        def loop(rank):
            try:
                while True:
                    step(rank)
            except weft.Error:
                pass
        [threading.Thread(target=loop, args=(rank,), daemon=True).start() for rank in range(2)]
    """,
    "in a wait that no communicator knows of": """
        threading.Thread(target=natives[0].exchange, args=(5, b"", 60.0), daemon=True).start()
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("wait", WAITS)
def test_a_daemon_thread_in_a_wait_does_not_crash_the_end_of_the_process(wait: str, tmp_path: Path) -> None:
    """Else `terminate called without an active exception`: such a thread is ended by unwinding."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(TWO_RANKS) + textwrap.dedent(WAITS[wait]) + "\ntime.sleep(0.5)\nprint('end')\nsys.exit(3)\n"
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=600, env=environment, check=False
    )
    assert (ended.returncode, ended.stdout) == (3, "end\n"), ended.stderr
    assert "terminate called" not in ended.stderr, ended.stderr
    assert "leaked" not in ended.stderr, "what such a thread holds is nobody's mistake"


def test_peers_learn_that_the_process_ended_in_a_call(tmp_path: Path) -> None:
    """Rank 0 leaves while a thread of it waits; rank 1, which comes then, is told at once."""
    text = weft.spawn(_leave_in_a_call, 2, args=(tmp_path,), device="cpu")[1]
    assert "rank 0 aborted: the process of rank 0 ends while a thread of it is inside a call" in text


def _leave_in_a_call(comm: weft.Communicator, where: Path) -> str:
    ep = make(comm)
    is_here(where, comm, range(2))
    if comm.rank == 0:
        returned: list[int] = []

        def wait() -> None:
            with contextlib.suppress(weft.Error):
                step(ep)
            returned.append(0)

        threading.Thread(target=wait, daemon=True).start()
        while not comm._busy.locked():
            time.sleep(0.01)
        time.sleep(0.5)
        sys.modules["weft.group.turns"]._leave_at_exit()  # as at exit, which ranks of spawn leave out
        with pytest.raises(weft.InvalidState):
            step(ep)
        assert not returned, "the thread came back to Python"
        return ""
    return str(until_broken(comm))
