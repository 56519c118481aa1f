"""Guards against heaps that can't grow, or lose what lies in them, and against memory that a sleeping group keeps."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from joining_cases import dies_behind
from torch import Tensor

import weft

HIDDEN, NUM_TOKENS, TOP_K = 1024, 1024, 2
ROWS_BYTES = 4 * HIDDEN * NUM_TOKENS


def opened(comm: weft.Communicator, **options: Any) -> weft.ExpertParallel:
    shape: dict[str, Any] = {"num_experts": 2 * comm.num_ranks, "top_k": TOP_K, "hidden": HIDDEN}
    return weft.ExpertParallel(comm, max_tokens_per_rank=NUM_TOKENS, dtype=torch.float32, **(shape | options))


def inputs(comm: weft.Communicator) -> tuple[Tensor, Tensor]:
    """To every rank, rows that differ."""
    x = torch.arange(NUM_TOKENS * HIDDEN, dtype=torch.float32, device="cpu").view(NUM_TOKENS, HIDDEN) + comm.rank
    ids = torch.arange(2, device="cpu").repeat(NUM_TOKENS, 1) * 2
    return x, ids


def called(ep: weft.ExpertParallel) -> Tensor:
    """Dispatch and combine; nothing is held afterwards but the sum, an ordinary tensor."""
    x, ids = inputs(ep.comm)
    r = ep.dispatch(x, ids)
    assert isinstance(r.x, Tensor)
    y: Tensor = ep.combine(r.x, r.handle)
    assert torch.equal(y, 2 * x)
    return y


def shared_bytes() -> int:
    """Of this process's pages those of shared memory."""
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssShmem"))
    return 1024 * int(line.split()[1])


def heap_stats(ep: weft.ExpertParallel, name: str) -> Any:
    return [window[name] for window in ep.stats()["windows"]]


# ---- sleep


def sleeping(comm: weft.Communicator) -> None:
    x, ids = inputs(comm)
    with opened(comm) as ep, opened(comm, heap_bytes=0) as staged:
        called(ep)
        called(staged)
        r = ep.dispatch(x, ids)
        place = r.x.data_ptr()  # type: ignore[union-attr]
        kept = ep.dispatch(x, ids).handle
        before = shared_bytes()
        assert before > 2 * ROWS_BYTES  # the own heap and what was written to the peers' heaps
        with pytest.raises(weft.InvalidState, match=r"\d+ bytes on rank 0, \d+ bytes on rank 1\. Drop the tensors"):
            comm.sleep()
        assert not comm.is_asleep
        assert torch.equal(ep.combine(r.x, r.handle), 2 * x)  # as it was
        del r, kept
        comm.sleep()
        assert comm.is_asleep
        assert "asleep" in repr(comm)
        assert shared_bytes() < before // 10
        calls: list[Callable[[], Any]] = [
            lambda: ep.dispatch(x, ids), lambda: staged.dispatch(x, ids), ep.warmup, ep.check, comm.sleep,
            lambda: opened(comm), lambda: ep.resize(heap_bytes=ep.heap_bytes),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(weft.InvalidState, match=r"the communicator is asleep; call comm.wake\(\)"):
                call()
        assert comm.gather(b"here") == {0: b"here", 1: b"here"}
        assert ep.uncovered == ()
        assert comm.membership.active == (0, 1)
        assert shared_bytes() < before // 10
        comm.wake()
        with pytest.raises(weft.InvalidState, match="not asleep"):
            comm.wake()
        again = ep.dispatch(x, ids)
        assert again.x.data_ptr() == place  # type: ignore[union-attr]
        assert torch.equal(ep.combine(again.x, again.handle), 2 * x)
        del again
        called(staged)
        assert ep.stats()["num_dispatches"] == 4  # the sequence went on
        if comm.rank == 1:
            held = ep.dispatch(x, ids).x
        else:
            ep.dispatch(x, ids)
        with pytest.raises(weft.InvalidState, match=r"in a heap: \d+ bytes on rank 1\. Drop"):
            comm.sleep()
        if comm.rank == 1:
            del held


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_sleep_gives_memory_back(isolation: str) -> None:
    weft.spawn(sleeping if isolation == "process" else sleeping_threads, 2, device="cpu", isolation=isolation)


def sleeping_threads(comm: weft.Communicator) -> None:
    with opened(comm) as ep:
        called(ep)
        comm.sleep()
        with pytest.raises(weft.InvalidState, match="asleep"):
            called(ep)
        comm.wake()
        called(ep)


def losing_a_rank_asleep(comm: weft.Communicator, where: Path) -> None:
    with opened(comm) as ep:
        x, ids = inputs(comm)
        ids = ids.remainder(2)  # rank 0 alone
        r = ep.dispatch(x, ids)
        ep.combine(r.x, r.handle)  # type: ignore[arg-type]
        del r
        comm.sleep()
        low = shared_bytes()
        dies_behind(comm, 2, where)
        with pytest.raises(weft.PeerLost):
            comm.gather(b"")
        with pytest.raises(weft.PeerLost):
            comm.wake()
        assert comm.recover().lost == (2,)
        assert comm.is_asleep
        assert shared_bytes() <= low + ROWS_BYTES // 4
        with pytest.raises(weft.InvalidState, match="asleep"):
            ep.dispatch(x, ids)
        comm.wake()
        r = ep.dispatch(x, ids)
        assert torch.equal(ep.combine(r.x, r.handle), x)  # type: ignore[arg-type]


def test_a_rank_that_dies_asleep(tmp_path: Path) -> None:
    outcomes = weft.spawn(losing_a_rank_asleep, 3, (tmp_path,), device="cpu", on_failure="return")
    assert outcomes[:2] == [None, None]


class Interrupted(Exception):
    """As what a signal handler raises."""


def interrupted(comm: weft.Communicator, call: Callable[[], None], number: int) -> None:
    """On rank 1 `call` ends just after its exchange of that number, with which it ends well on the others."""
    told, left = comm._told, [number]

    def told_and_interrupted(what: str, value: Any, deadline_s: float) -> dict[int, Any]:
        found = told(what, value, deadline_s)
        left[0] -= 1
        if left[0] == 0:
            raise Interrupted
        return found

    if comm.rank != 1:
        call()
        return
    comm._told = told_and_interrupted  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        call()
    del comm._told  # type: ignore[method-assign]


def half_asleep(comm: weft.Communicator) -> None:
    with opened(comm) as ep:
        interrupted(comm, comm.sleep, 2)
        assert comm.is_asleep == (comm.rank == 0)
        comm.wake()
        called(ep)
        comm.sleep()
        interrupted(comm, comm.wake, 1)
        assert comm.is_asleep == (comm.rank == 1)
        comm.wake()
        called(ep)
        with pytest.raises(weft.InvalidState, match="not asleep"):
            comm.wake()
        called(ep)


def test_ranks_of_which_some_are_asleep() -> None:
    weft.spawn(half_asleep, 2, device="cpu")


def killed_in(comm: weft.Communicator, call: str, number: int) -> None:
    """Rank 2 dies just before or after the others have heard of it: whoever sleeps then, all wake up."""
    with opened(comm, num_experts=6) as ep:
        if call == "wake":
            comm.sleep()
        if comm.rank == 2:
            told, left = comm._told, [number]

            def told_and_killed(what: str, value: Any, deadline_s: float) -> dict[int, Any]:
                found = told(what, value, deadline_s)
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return found

            comm._told = told_and_killed  # type: ignore[method-assign]
        with contextlib.suppress(weft.PeerLost):
            getattr(comm, call)()
        with contextlib.suppress(weft.PeerLost):
            comm.gather(b"")
        comm.recover()
        is_any_asleep = b"1" in comm.gather(b"%d" % comm.is_asleep).values()
        if is_any_asleep:
            comm.wake()
        else:
            with pytest.raises(weft.InvalidState, match="not asleep"):
                comm.wake()
        called(ep)


@pytest.mark.parametrize(("call", "number"), [("sleep", 2), ("wake", 1)])
def test_a_rank_that_dies_in_the_last_exchange(call: str, number: int) -> None:
    outcomes = weft.spawn(killed_in, 3, (call, number), device="cpu", on_failure="return")
    assert outcomes[:2] == [None, None]


# ---- growing


def growing(comm: weft.Communicator) -> None:
    x, ids = inputs(comm)
    least, most = 3 * ROWS_BYTES // 2 + 1000, 12 * ROWS_BYTES
    with opened(comm, heap_bytes=least, max_heap_bytes=most, num_windows=2) as ep:
        assert (ep.heap_bytes, ep.max_heap_bytes) == (least, most)
        r = ep.dispatch(x, ids, window=1)  # no room: rows of two ranks
        called(ep)
        assert heap_stats(ep, "num_staged") == [1, 1]
        inside = ep.empty_output(r)  # no room either
        small = ep.dispatch(x[:8], ids[:8])
        values, place = small.x.clone(), small.x.data_ptr()  # type: ignore[union-attr]
        for refused in (1.5, None):
            with pytest.raises(weft.InvalidArgument, match="an int is expected"):
                ep.resize(heap_bytes=refused)  # type: ignore[arg-type]
        for too_much in (least - 1, most + 1):
            with pytest.raises(weft.InvalidArgument, match=rf"allowed are {least}, what there is, to max_heap_bytes"):
                ep.resize(heap_bytes=too_much)
        with pytest.raises(
            weft.InvalidArgument, match=r"heap_bytes differs between ranks: \d+ on rank 0; \d+ on rank 1"
        ):
            ep.resize(heap_bytes=most - comm.rank)
        ep.resize(heap_bytes=least)  # nothing to do
        ep.resize(heap_bytes=least + 100)  # in the last page
        for heap_bytes in (3 * ROWS_BYTES, 8 * ROWS_BYTES + 77, most):
            ep.resize(heap_bytes=heap_bytes)
            assert heap_stats(ep, "heap_bytes") == [heap_bytes] * 2
            assert ep.heap_bytes == heap_bytes
            for window in (0, 1):
                results = [
                    ep.dispatch(x + number, ids, window=window) for number in range(heap_bytes // (3 * ROWS_BYTES))
                ]
                for number, each in enumerate(results):
                    assert ep.calls.windows[window].native.owns(each.x.data_ptr())  # type: ignore[union-attr]
                    y = ep.combine(each.x, each.handle, window=window)  # type: ignore[arg-type]
                    assert torch.equal(y, 2 * (x + number))
                del results, each
        assert heap_stats(ep, "num_staged") == [1, 1]
        assert torch.equal(small.x, values)  # type: ignore[arg-type]
        assert small.x.data_ptr() == place  # type: ignore[union-attr]
        assert torch.equal(ep.combine(small.x, small.handle), 2 * x[:8])  # type: ignore[arg-type]
        assert torch.equal(ep.combine(r.x, r.handle, window=1), 2 * x)  # type: ignore[arg-type]
        del small, r, inside
        before = shared_bytes()
        comm.sleep()  # the pieces, too
        assert shared_bytes() < before // 10
        comm.wake()
        called(ep)
        comm.rebuild([0, 1])  # a heap of the size that it has now
        assert heap_stats(ep, "heap_bytes") == [most] * 2
        called(ep)
        assert heap_stats(ep, "num_staged") == [1, 1]
    for look in (lambda: ep.heap_bytes, lambda: ep.max_heap_bytes):
        with pytest.raises(weft.InvalidState, match="closed"):
            look()
    with opened(comm) as ep:
        assert ep.max_heap_bytes == ep.heap_bytes
        with pytest.raises(weft.InvalidArgument, match="to max_heap_bytes"):
            ep.resize(heap_bytes=ep.heap_bytes + 1)
    for given in ({"heap_bytes": 1 << 20}, {}):
        with pytest.raises(weft.InvalidArgument, match="max_heap_bytes is 4096; allowed are None and heap_bytes = "):
            opened(comm, max_heap_bytes=4096, **given)


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_heaps_grow(isolation: str) -> None:
    weft.spawn(growing if isolation == "process" else growing_threads, 2, device="cpu", isolation=isolation)


def growing_threads(comm: weft.Communicator) -> None:
    with opened(comm, heap_bytes=1 << 20, max_heap_bytes=8 * ROWS_BYTES) as ep:
        called(ep)
        ep.resize(heap_bytes=8 * ROWS_BYTES)
        called(ep)
        assert heap_stats(ep, "num_staged") == [1]


def refusing(comm: weft.Communicator) -> None:
    import resource

    with opened(comm, heap_bytes=1 << 20, max_heap_bytes=16 * ROWS_BYTES) as ep:
        if comm.rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        with pytest.raises(weft.CapacityExceeded, match="rank 1 could not make or map"):
            ep.resize(heap_bytes=16 * ROWS_BYTES)
        assert ep.heap_bytes == 1 << 20
        called(ep)
        if comm.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        ep.resize(heap_bytes=16 * ROWS_BYTES)
        called(ep)
        assert heap_stats(ep, "num_staged") == [1]


def test_a_rank_that_can_not_grow() -> None:
    weft.spawn(refusing, 2, device="cpu")


class Grown:
    """The native window of a rank whose heap has grown alone."""

    def __init__(self, native: Any) -> None:
        self.native = native

    def stats(self) -> dict[str, Any]:
        return self.native.stats() | {"heap_bytes": 2 << 20}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)


def grown_alone(comm: weft.Communicator) -> None:
    with opened(comm, heap_bytes=1 << 20, max_heap_bytes=8 << 20) as ep:
        window = ep.calls.windows[0]
        native = window.native
        if comm.rank == 1:
            window.native = Grown(native)
        with pytest.raises(weft.InvalidArgument, match=rf"allowed are {2 << 20}, what there is, to .* = {8 << 20}"):
            ep.resize(heap_bytes=3 << 19, deadline_s=60.0)  # room enough on rank 0
        window.native = native
        ep.resize(heap_bytes=4 << 20)
        called(ep)


def test_a_size_that_one_rank_has_passed() -> None:
    weft.spawn(grown_alone, 2, device="cpu")


def losing_a_rank_that_grows(comm: weft.Communicator) -> None:
    with opened(comm, num_experts=6, heap_bytes=1 << 20, max_heap_bytes=16 * ROWS_BYTES) as ep:
        if comm.rank == 2:
            comm.meet(60.0)
            os.kill(os.getpid(), signal.SIGKILL)

        def grow() -> None:  # a death right behind a call may end that one, too
            comm.meet(60.0)
            ep.resize(heap_bytes=8 * ROWS_BYTES)

        with pytest.raises(weft.PeerLost):
            grow()
        comm.recover()
        called(ep)
        ep.resize(heap_bytes=16 * ROWS_BYTES)
        called(ep)
        assert heap_stats(ep, "heap_bytes") == [16 * ROWS_BYTES]


def test_a_rank_that_dies_while_heaps_grow() -> None:
    outcomes = weft.spawn(losing_a_rank_that_grows, 3, device="cpu", on_failure="return")
    assert outcomes[:2] == [None, None]
