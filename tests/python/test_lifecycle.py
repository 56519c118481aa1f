"""Guards against hangs, leaks and leftovers around a communicator's life: start, end, threads, forks, kills."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from joining_cases import dies_behind
from test_errors import IDX, SHAPE, WEIGHTS, X, raised

import weft

ROOT = Path(__file__).parents[2]


def sum_of_all(comm: weft.Communicator) -> float:
    """A round trip that only works if all ranks take part."""
    with weft.ExpertParallel(comm, **SHAPE) as ep:
        r = ep.dispatch(X, IDX, WEIGHTS, layout="expert_major")
        y = ep.combine(r.x, r.handle)
        torch.testing.assert_close(y, X * WEIGHTS.sum(1, keepdim=True))
        return float(y.sum())


def leftovers() -> tuple[set[str], set[str], int]:
    """Names in /dev/shm of ours, mappings and open descriptors of this process."""
    gc.collect()
    ours = [entry for entry in os.listdir("/dev/shm") if "weft" in entry.lower()]
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line}
    return set(ours), mapped, len(os.listdir("/proc/self/fd"))


def run_script(text: str, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=600, **options
    )


# ---- spawn


@pytest.mark.parametrize("isolation", ["process", "thread"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_spawn_returns_results_in_rank_order(isolation: str, num_ranks: int) -> None:
    def rank(comm: weft.Communicator, offset: int) -> tuple[int, int, float]:
        return comm.rank + offset, os.getpid(), sum_of_all(comm)

    results = weft.spawn(rank, num_ranks, (10,), isolation=isolation)
    assert [result[0] for result in results] == [10 + rank for rank in range(num_ranks)]
    assert len({result[1] for result in results}) == (num_ranks if isolation == "process" else 1)
    assert len({result[2] for result in results}) == 1


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_spawn_raises_the_root_cause(isolation: str) -> None:
    def rank(comm: weft.Communicator) -> float:
        if comm.rank == 2:
            raise KeyError("the reason")
        return sum_of_all(comm)

    with pytest.raises(KeyError, match="the reason") as caught:
        weft.spawn(rank, 4, isolation=isolation)
    notes = "\n".join(caught.value.__notes__)
    assert "raised by rank 2 of weft.spawn" in notes
    assert "rank 0 ended with PeerLost" in notes
    assert isolation == "thread" or "traceback of rank 2" in notes


def test_spawn_keeps_custom_errors_and_results_that_do_not_pickle_apart() -> None:
    class Odd(Exception):
        pass

    def rank(comm: weft.Communicator) -> Callable[[], None]:
        if comm.rank:
            raise Odd("why")
        return lambda: None

    first, second = weft.spawn(rank, 2, on_failure="return")
    assert isinstance(first, weft.Error)
    assert "the result of rank 0, a function, can't be sent to the parent" in str(first)
    assert isinstance(second, weft.Error)
    assert str(second) == "Odd: why"


def test_spawn_of_a_rank_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("weft.spawn"), "GRACE_S", 3.0)

    def rank(comm: weft.Communicator) -> None:
        time.sleep(1)  # a rank that is still connecting would raise PeerLost itself
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if comm.rank == 2:
            os._exit(3)
        time.sleep(60)

    before = children()
    with pytest.raises(weft.PeerLost) as caught:
        weft.spawn(rank, 4)
    assert set(caught.value.ranks) <= {1, 2}, "both, unless one was very late"
    notes = "\n".join(caught.value.__notes__)
    assert "was killed by SIGKILL" in notes or "was killed by SIGKILL" in str(caught.value)
    assert "went on for 3 s after another rank failed" in notes
    assert children() <= before


def children() -> set[int]:
    """Processes of this one, ended ones that nobody has waited for included; other tests may have left some."""
    return {int(pid) for each in Path("/proc/self/task").glob("*/children") for pid in each.read_text().split()}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"fn": 3}, r"fn is 3; a callable fn\(comm, \*args\) is expected"),
        ({"num_ranks": 0}, "num_ranks is 0; allowed are 1 to 1024"),
        ({"num_ranks": 1025}, "num_ranks is 1025; allowed are 1 to 1024"),
        ({"num_ranks": True}, "num_ranks is True; allowed are 1 to 1024"),
        ({"args": 5}, "args is 5; a tuple or another sequence is expected, of what fn takes after comm"),
        ({"device": "tpu"}, "device is 'tpu'; allowed are 'auto', 'cpu', 'cuda'"),
        ({"isolation": "fibre"}, "isolation is 'fibre'; allowed are 'process', 'thread'"),
        ({"on_failure": "cry"}, "on_failure is 'cry'; allowed are 'raise', 'return'"),
    ],
)
def test_spawn_refuses(change: dict[str, Any], text: str) -> None:
    with pytest.raises(weft.InvalidArgument, match=text):
        weft.spawn(**{"fn": sum_of_all, "num_ranks": 2, **change})


def test_spawn_inside_of_a_program_that_has_used_many_threads() -> None:
    text = """
        import torch, weft
        torch.set_num_threads(4)
        torch.randn(400, 400) @ torch.randn(400, 400)
        print(weft.spawn(lambda comm: float((torch.ones(400, 400) @ torch.ones(400, 400)).sum()), 2))
    """
    done = run_script(text)
    assert done.stdout.strip() == "[64000000.0, 64000000.0]", done.stderr


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_leaves_waits_and_no_process() -> None:
    text = """
        import os, signal, threading, time, torch, weft
        def rank(comm):
            ep = weft.ExpertParallel(comm, num_experts=4, top_k=1, hidden=16, max_tokens_per_rank=4)
            ep.warmup()
            os.write(1, f"ready {os.getpid()}\\n".encode())
            if comm.rank:
                time.sleep(60)
            ep.warmup()
        try:
            weft.spawn(rank, 2)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    os.kill(process.pid, signal.SIGINT)  # the parent alone: it must end its ranks
    output, _ = process.communicate(timeout=600)
    assert output.strip() == "interrupted"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_leaves_a_wait_in_a_rank() -> None:
    reader, writer = os.pipe()  # rank 1 stays away until rank 0 has left

    def rank(comm: weft.Communicator) -> str:
        ep = weft.ExpertParallel(comm, **SHAPE)
        if comm.rank == 1:
            os.read(reader, 1)
            return ""
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            ep.dispatch(X, IDX)
        except KeyboardInterrupt:
            os.write(writer, b".")
            return "interrupted"
        return "not interrupted"

    assert weft.spawn(rank, 2, on_failure="return")[0] == "interrupted"
    os.close(reader)
    os.close(writer)


def test_ranks_die_with_their_parent() -> None:
    text = """
        import os, time, weft
        def rank(comm):
            os.write(1, f"ready {os.getpid()}\\n".encode())
            time.sleep(60)
        weft.spawn(rank, 2)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(text)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    process.kill()
    process.wait()
    for pid in pids:
        for _ in range(200):
            if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1][:3]:
                break
            time.sleep(0.05)
        else:
            raise AssertionError(f"rank {pid} is still there")


# ---- closing


def test_nothing_is_left_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # one of our own: other programs may use Weft, too
    monkeypatch.setattr(tempfile, "tempdir", None)
    weft.spawn(sum_of_all, 2)  # what is loaded once is loaded now
    before, processes = leftovers(), children()
    weft.spawn(sum_of_all, 4)
    weft.spawn(sum_of_all, 2, isolation="thread")
    with weft.Communicator.from_env() as comm:
        sum_of_all(comm)
    del comm
    assert leftovers() == before
    assert children() <= processes
    assert not list(tmp_path.iterdir())


def test_close_with_dead_peers_and_results_that_live_on(tmp_path: Path) -> None:
    def rank(comm: weft.Communicator) -> float:
        ep = weft.ExpertParallel(comm, **SHAPE)
        r = ep.dispatch(X, IDX)
        dies_behind(comm, 0, tmp_path)
        error = raised(lambda: [ep.dispatch(X, IDX) for _ in range(100)])
        assert isinstance(error, weft.PeerLost)
        comm.close()
        comm.close()
        ep.close()
        assert type(raised(lambda: ep.dispatch(X, IDX))) is weft.InvalidState
        assert type(raised(comm.raise_if_broken)) is weft.InvalidState
        return float(r.x.sum())

    results = weft.spawn(rank, 4, on_failure="return")
    assert isinstance(results[0], weft.PeerLost)
    assert all(isinstance(result, float) for result in results[1:])


def test_a_rank_that_closes_is_lost_to_the_others() -> None:
    def rank(comm: weft.Communicator) -> str:
        ep = weft.ExpertParallel(comm, **SHAPE)
        if comm.rank == 1:
            comm.close()
            return ""
        error = raised(lambda: ep.dispatch(X, IDX))
        assert isinstance(error, weft.PeerLost)
        assert error.ranks == (1,)
        return str(error)

    assert "rank 1" in weft.spawn(rank, 2)[0]


def test_two_communicators_at_once_do_not_touch_each_other() -> None:
    def rank(comm: weft.Communicator) -> bool:
        alone = weft.Communicator.from_env()
        with weft.ExpertParallel(comm, **SHAPE) as ep, weft.ExpertParallel(alone, **SHAPE) as single:
            r, s = ep.dispatch(X, IDX), single.dispatch(X, IDX)
            assert torch.equal(single.combine(s.x, s.handle), X)
            alone.close()
            assert ep.combine(r.x, r.handle).shape == X.shape
        return not comm.broken

    assert weft.spawn(rank, 2) == [True, True]


def test_garbage_collection_closes() -> None:
    with weft.Communicator.from_env() as comm:
        ep = weft.ExpertParallel(comm, **SHAPE)
        window = ep.calls.windows[0]
        del ep
        gc.collect()
        assert window.closed


def test_an_object_dropped_inside_a_call_is_closed_before_the_next() -> None:
    with weft.Communicator.from_env() as comm:
        ep, other = weft.ExpertParallel(comm, **SHAPE), weft.ExpertParallel(comm, **{**SHAPE, "hidden": 32})
        window = ep.calls.windows[0]
        with comm.alone("a call"):
            del ep
            gc.collect()
            assert not window.closed
        other.warmup()
        assert window.closed


# ---- signals, threads and forks


def test_an_exception_of_a_signal_handler_leaves_the_communicator_free() -> None:
    """It may come between any two lines; a call that it has cut short must not count as one that goes on."""

    class Alarm(Exception):
        pass

    def on_alarm(*_: object) -> None:
        raise Alarm

    rng, before = random.Random(1), signal.signal(signal.SIGVTALRM, on_alarm)
    try:
        with weft.Communicator.from_env() as comm, weft.ExpertParallel(comm, **SHAPE) as ep:
            for _ in range(300):
                with contextlib.suppress(Alarm):
                    signal.setitimer(signal.ITIMER_VIRTUAL, rng.uniform(1e-5, 1e-3))
                    while True:
                        r = ep.dispatch(X, IDX)
                        ep.combine(r.x, r.handle)
                assert not comm._busy.locked()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_another_thread_inside_a_call() -> None:
    reader, writer = os.pipe()  # rank 1 lets the thread of rank 0 wait until this one has tried

    def rank(comm: weft.Communicator) -> list[str]:
        ep = weft.ExpertParallel(comm, **SHAPE)
        if comm.rank == 1:
            os.read(reader, 1)
            ep.warmup()
            return []
        thread = threading.Thread(target=ep.warmup)
        thread.start()
        while not comm._busy.locked():
            time.sleep(0.01)
        texts = [str(raised(lambda: ep.dispatch(X, IDX))), str(raised(comm.close))]
        os.write(writer, b".")
        thread.join()
        return texts

    busy, closing = weft.spawn(rank, 2)[0]
    assert busy == "dispatch: another thread is inside a call of this communicator; one thread at a time may use it"
    assert "another thread is inside a call" in closing


def test_calls_may_come_from_different_threads_in_turn(ep: weft.ExpertParallel) -> None:
    results: list[torch.Tensor] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: results.append(ep.dispatch(X, IDX).x))
        thread.start()
        thread.join()
    assert all(torch.equal(x, X) for x in results)


def test_forked_child_is_refused(ep: weft.ExpertParallel) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, str(raised(lambda: ep.dispatch(X, IDX))).encode())
            ep.comm.close()  # does nothing to the parent's
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    assert f"this is a forked child (pid {pid}) of the process that made the communicator (pid {os.getpid()})" in text
    assert torch.equal(ep.dispatch(X, IDX).x, X)


# ---- other ways to start


@pytest.mark.slow
def test_from_env_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, torch, weft
            with weft.Communicator.from_env() as comm, weft.Communicator.from_env() as other:
                assert comm.rank == int(os.environ["RANK"]) and other.num_ranks == 3
                ep = weft.ExpertParallel(comm, num_experts=6, top_k=2, hidden=16, max_tokens_per_rank=4)
                x = torch.full((4, 16), 1.0 + comm.rank).bfloat16()
                r = ep.dispatch(x, torch.tensor([[0, 5]] * 4), layout="expert_major")
                y = ep.combine(r.x, r.handle)
                assert torch.equal(y, 2 * x), y
                print(f"rank {comm.rank} of {comm.num_ranks} fine\\n{comm}\\n", end="", flush=True)
            """
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        assert f"rank {rank} of 3 fine" in done.stdout
    assert "from torchrun" in done.stdout


def test_from_process_group_with_gloo(tmp_path: Path) -> None:
    def rank(comm: weft.Communicator) -> tuple[int, float]:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=comm.rank, world_size=4)
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        with weft.Communicator.from_process_group() as whole:
            assert (whole.rank, whole.num_ranks) == (comm.rank, 4)
            assert "torch.distributed group" in repr(whole)
            total = sum_of_all(whole)
        assert type(raised(lambda: weft.Communicator.from_process_group(pairs[1 - comm.rank // 2]))) in (
            weft.InvalidState,
            weft.InvalidArgument,
        )
        with weft.Communicator.from_process_group(pairs[comm.rank // 2]) as pair:
            dist.destroy_process_group()  # not used again
            assert sum_of_all(pair) == total
            return pair.rank, total

    results = weft.spawn(rank, 4)
    assert [result[0] for result in results] == [0, 1, 0, 1]


def test_from_process_group_without_one() -> None:
    with pytest.raises(weft.InvalidState, match=r"torch.distributed is not initialised: call .*from_env.*weft.spawn"):
        weft.Communicator.from_process_group()


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "0"}, "RANK is '0' and WORLD_SIZE is None in the environment; set both"),
        ({"RANK": "two", "WORLD_SIZE": "4"}, "RANK is 'two' in the environment; a number from 0 is expected"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4 in the environment; allowed are 0 to WORLD_SIZE - 1 = 3"),
    ],
)
def test_from_env_refuses(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], text: str) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(weft.InvalidArgument, match=text):
        weft.Communicator.from_env()


def test_log_level_of_the_environment() -> None:
    code = "from weft import _load; _load.native(); import logging; print(logging.getLogger('weft').level)"
    done = run_script(code, env={**os.environ, "WEFT_LOG_LEVEL": "debug"})
    assert done.stdout.strip() == "10", done.stderr
    done = run_script(code, env={**os.environ, "WEFT_LOG_LEVEL": "loud"})
    assert "WEFT_LOG_LEVEL is 'loud'" in done.stderr


def test_exit_without_close() -> None:
    """At interpreter exit nothing waits for a peer."""
    text = """
        import torch, weft
        comm = weft.Communicator.from_env()
        ep = weft.ExpertParallel(comm, num_experts=4, top_k=1, hidden=16, max_tokens_per_rank=4)
        r = ep.dispatch(torch.zeros(2, 16).bfloat16(), torch.zeros(2, 1, dtype=torch.int64))
        print("done")
    """
    done = run_script(text)
    assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (0, "done", "")
