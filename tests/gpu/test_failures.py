"""Guards against hangs, wrong errors and memory that leaks when calls on GPUs go wrong."""

from __future__ import annotations

import gc
import os
import time

import pytest
import torch
from test_streams import EXPERTS, HIDDEN, TOP_K, expected, inputs, make, on_device, run

import weft

pytestmark = pytest.mark.usefixtures("kernels")
LATE_S = [float(text) for text in os.environ.get("WEFT_TEST_LATE_S", "1").split(",")]  # for longer ones: 1,5,30


def rows(comm: weft.Communicator, num_tokens: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.ones(num_tokens, HIDDEN, dtype=torch.bfloat16, device=comm.device)
    return x, torch.arange(num_tokens * TOP_K, device=comm.device).view(-1, TOP_K) % EXPERTS


def test_ranks_that_call_different_things() -> None:
    """Every rank raises, naming both calls, and goes on."""

    def work(comm: weft.Communicator) -> str:
        ep = make(comm)
        for layout in ("rank_major", "expert_major"):
            ep.warmup(layout=layout)
        with pytest.raises(weft.InvalidArgument, match="different things") as caught:
            ep.dispatch(*rows(comm), layout="expert_major" if comm.rank else "rank_major")
        parts = on_device(comm, inputs(1))
        assert torch.equal(ep.dispatch(*parts).x.cpu(), expected(1)[0][comm.rank].x)
        ep.check()
        return str(caught.value)

    for text in run(work):
        assert "layout='expert_major'" in text
        assert "layout='rank_major'" in text


@pytest.mark.parametrize("mode", ["throughput", "latency"])
@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_ranks_that_use_different_handles(layout: str, mode: str) -> None:
    """Every rank raises, and goes on."""

    def work(comm: weft.Communicator) -> None:
        ep = make(comm)
        x, ids = rows(comm)
        made = [ep.dispatch(x, ids, layout=layout, capacity=64, mode=mode) for _ in range(2)]
        wanted = ep.combine(made[0].x, made[0].handle, mode=mode)
        mine = made[comm.rank % 2]
        for call in (
            lambda: ep.dispatch(x, handle=mine.handle, mode=mode),
            lambda: ep.combine(mine.x, mine.handle, mode=mode),
        ):
            call()
            with pytest.raises(weft.InvalidArgument, match="handle of sequence"):
                ep.check()
            y = ep.combine(made[0].x, made[0].handle, mode=mode)
            ep.check()
            assert torch.equal(y, wanted)

    run(work)


def test_a_late_peer() -> None:
    """All raise PeerTimeout that names it, the GPU goes on working, and rebuild makes the window work again."""

    def work(comm: weft.Communicator) -> float:
        ep = make(comm)
        ep.warmup()  # compiling may take longer than the deadline of the call
        begin = time.monotonic()
        if comm.rank == 1:
            while not comm.broken:
                time.sleep(0.01)
        with pytest.raises(weft.PeerTimeout) as caught:
            ep.dispatch(*rows(comm), deadline_s=1.0)
        took = time.monotonic() - begin
        assert caught.value.peers == (1,)
        assert int(torch.ones(4, device=comm.device).sum()) == 4
        with pytest.raises(weft.PeerTimeout):
            ep.dispatch(*rows(comm))
        comm.rebuild(range(comm.num_ranks))
        parts = on_device(comm, inputs(1))
        assert torch.equal(ep.dispatch(*parts).x.cpu(), expected(1)[0][comm.rank].x)
        return took

    assert all(0.9 < took < 50 for took in run(work))  # without it: 100


@pytest.mark.parametrize("late_s", LATE_S)
def test_a_rank_that_comes_late_in_time(late_s: float) -> None:
    """No false alarm before the deadline, in a dispatch and in a combine, and right results."""

    def work(comm: weft.Communicator) -> None:
        ep = make(comm, deadline_s=60.0)
        ep.warmup()
        parts = on_device(comm, inputs(1))
        given, sums = expected(1)
        time.sleep(late_s if comm.rank == 1 else 0)
        r = ep.dispatch(*parts)
        assert torch.equal(r.x.cpu(), given[comm.rank].x)
        time.sleep(late_s if comm.rank == 2 else 0)
        assert torch.equal(ep.combine(r.x, r.handle).cpu(), sums[comm.rank])
        ep.check()

    run(work)


def test_bad_ids_are_told_once() -> None:
    def work(comm: weft.Communicator) -> None:
        ep = make(comm)
        x, ids = rows(comm)
        ids[3, 1] = EXPERTS + 5 if comm.rank == 0 else ids[3, 1]
        ep.dispatch(x, ids)
        if comm.rank == 0:
            text = rf"1 ids out of range, the first {EXPERTS + 5} at token 3, pick 1"
            with pytest.raises(weft.InvalidArgument, match=text):
                ep.check()
        ep.check()
        r = ep.dispatch(x, ids, capacity=64)
        torch.cuda.current_stream(comm.device).synchronize()
        ep.combine(r.x, r.handle)
        if comm.rank == 0:
            with pytest.raises(weft.InvalidArgument, match="sent nothing and may be repeated"):
                ep.dispatch(x, ids)
        ep.dispatch(x, ids)

    run(work)


def test_capacity_zero_and_exceeded() -> None:
    def work(comm: weft.Communicator) -> None:
        ep = make(comm)
        for layout in ("rank_major", "expert_major", "masked"):
            r = ep.dispatch(*rows(comm), layout=layout, capacity=0)
            assert r.x.numel() == 0
            y = ep.combine(r.x, r.handle, bias=torch.ones(HIDDEN, device=comm.device))
            assert torch.equal(y, torch.ones_like(y))
            with pytest.raises(weft.CapacityExceeded) as caught:
                ep.check()
            assert caught.value.num_dropped > 0
        ep.check()

    run(work)


def test_refused_calls() -> None:
    """Local, and the peers may wait meanwhile."""

    def work(comm: weft.Communicator) -> None:
        ep = make(comm)
        x, ids = rows(comm)
        with pytest.raises(weft.InvalidArgument, match=r"x is on cpu; allowed is the device of the communicator, cuda"):
            ep.dispatch(x.cpu(), ids)
        most = comm.max_num_sms  # of any call, or of this rank's share of a GPU: the texts differ
        too_many = most + 1
        allowed = rf"( with num_windows = 1; allowed are|; allowed: None, or) 1 to {most}\b"
        with pytest.raises(weft.InvalidArgument, match=f"num_sms is {too_many}{allowed}"):
            ep.dispatch(x, ids, num_sms=too_many)
        r = ep.dispatch(x, ids)
        other = make(comm)
        with pytest.raises(weft.InvalidState, match="of another ExpertParallel"):
            other.combine(r.x, r.handle)
        other.close()
        with pytest.raises(weft.InvalidState, match="closed"):
            other.dispatch(x, ids)
        comm.rebuild(range(comm.num_ranks))
        with pytest.raises(weft.InvalidState, match="epoch"):
            ep.combine(r.x, r.handle)

    run(work)


def test_memory_is_given_back() -> None:
    """Windows of closed and of collected objects; results outlive them."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("what the GPU has left also changes with other workers: run it alone")

    def work(comm: weft.Communicator) -> None:
        kept = []
        free: list[int] = []
        for turn in range(4):
            ep = make(comm, heap_bytes=256 << 20)
            r = ep.dispatch(*on_device(comm, inputs(turn)))
            if turn == 0:
                kept.append((r.x, expected(turn)[0][comm.rank].x))
            if turn % 2:
                ep.close()
            del ep, r
            gc.collect()
            torch.cuda.synchronize(comm.device)
            comm.meet(20.0)
            free.append(torch.cuda.mem_get_info(comm.device)[0])
            comm.meet(20.0)
        assert free[-1] > free[1] - (64 << 20), free
        for got, want in kept:
            assert torch.equal(got.cpu(), want)

    run(work)


def test_engine_that_can_not_be() -> None:
    def work(comm: weft.Communicator) -> tuple[str, str]:
        return comm.engine, repr(comm)

    for engine, text in weft.spawn(work, 2, device="cuda", isolation="thread", engine="cpu"):
        assert engine == "cpu"
        assert "the cpu engine was asked for" in text
    with pytest.raises(weft.Unsupported, match="in host memory"):
        weft.spawn(work, 2, device="cpu", isolation="thread", engine="nvlink")
    with pytest.raises(weft.Unsupported, match="17 ranks, more than 16"):
        weft.spawn(work, 17, device="cuda", isolation="thread", engine="nvlink")
