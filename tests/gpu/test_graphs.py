"""Guards against captured graphs that replay an old sequence, old routing or memory that is gone."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from test_streams import EXPERTS, HIDDEN, NUM_RANKS, TOKENS, TOP_K, expected, inputs, make, on_device, run

import weft

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
@pytest.mark.parametrize("heap_bytes", [None, 4096])
def test_replays_with_changing_routing(layout: str, heap_bytes: int | None) -> None:
    """Captured once; each replay reads new rows, ids and weights from the same places. With and without a heap."""
    capacity = NUM_RANKS * TOKENS * (1 if layout == "rank_major" else TOP_K)
    options: dict[str, Any] = {"layout": layout, "capacity": TOKENS * NUM_RANKS if layout == "masked" else capacity}

    def work(comm: weft.Communicator) -> None:
        ep = make(comm, heap_bytes=heap_bytes)
        ep.warmup(**options)
        num_tokens = TOKENS - 7 * comm.rank
        x = torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16, device=comm.device)
        ids = torch.zeros(num_tokens, TOP_K, dtype=torch.int64, device=comm.device)
        weights = torch.zeros(num_tokens, TOP_K, device=comm.device)
        torch.cuda.current_stream(comm.device).synchronize()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(comm.device)
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            r = ep.dispatch(x, ids, weights, **options)
            y = ep.combine(r.x, r.handle)
            graph.capture_end()
        with torch.cuda.stream(stream):
            for seed in range(5):
                given, sums = expected(seed, **options)
                for place, values in zip((x, ids, weights), inputs(seed), strict=True):
                    place.copy_(values[comm.rank])
                y.fill_(float("nan"))
                graph.replay()
                stream.synchronize()
                mine = given[comm.rank]
                assert int(r.num_rows) == int(mine.num_rows)
                assert torch.equal(r.num_tokens_per_expert.cpu(), mine.num_tokens_per_expert)
                assert torch.equal(y.cpu(), sums[comm.rank]), f"replay {seed}"
                if seed == 2:  # an ordinary call between replays takes its own turn
                    parts = [part[comm.rank].to(comm.device) for part in inputs(9)]
                    between = ep.dispatch(*parts)
                    assert torch.equal(between.x.cpu(), expected(9)[0][comm.rank].x)
            stream.synchronize()
        ep.check()
        graph.reset()
        ep.close()

    run(work)


def test_a_captured_call_behind_two_streams() -> None:
    """What either stream in front of a call writes late is there when it begins, replayed or not."""
    capacity = NUM_RANKS * TOKENS

    def work(comm: weft.Communicator) -> None:
        ep = make(comm)
        ep.warmup(capacity=capacity)
        late = on_device(comm, inputs(0))
        x, ids, weights = (torch.zeros_like(part) for part in late)
        stream, side, after = (torch.cuda.Stream(comm.device) for _ in range(3))
        copy = torch.empty_like(x)

        def step() -> torch.Tensor:
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                torch.cuda._sleep(200_000)
                x.copy_(late[0])
            torch.cuda._sleep(100_000)
            ids.copy_(late[1])
            weights.copy_(late[2])
            stream.wait_stream(side)
            r = ep.dispatch(x, ids, weights, capacity=capacity)
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                torch.cuda._sleep(100_000)
                r.x.mul_(2)
            weights.add_(0)
            stream.wait_stream(side)
            y = ep.combine(r.x, r.handle)
            after.wait_stream(stream)
            with torch.cuda.stream(after):
                copy.copy_(y)
                y.fill_(float("nan"))
            stream.wait_stream(after)
            return y

        torch.cuda.current_stream(comm.device).synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            kept = [step()]
            stream.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            kept.append(step())
            graph.capture_end()
            for seed in range(6):
                for place, values in zip(late, inputs(seed), strict=True):
                    place.copy_(values[comm.rank])
                for place in (x, ids, weights, copy):
                    place.zero_()
                if seed % 2:
                    graph.replay()
                else:
                    kept.append(step())
                stream.synchronize()
                assert torch.equal(copy.cpu(), 2 * expected(seed)[1][comm.rank]), f"step {seed}"
        ep.check()
        graph.reset()
        ep.close()

    run(work)


@pytest.mark.parametrize("mode", ["latency", "throughput"])
def test_a_peer_that_does_not_replay(mode: str) -> None:
    """The replay of the others ends at the deadline, check() says so, and rebuild makes the window work again."""

    def work(comm: weft.Communicator) -> None:
        ep = make(comm, deadline_s=2.0)
        options: dict[str, Any] = {"capacity": NUM_RANKS * TOKENS, "mode": mode}
        ep.warmup(**options)
        parts = on_device(comm, inputs(1))
        stream, graph = torch.cuda.Stream(comm.device), torch.cuda.CUDAGraph()
        torch.cuda.current_stream(comm.device).synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            r = ep.dispatch(*parts, **options)
            y = ep.combine(r.x, r.handle, mode=mode)
            graph.capture_end()
        graph.replay()  # on another stream than any call before it
        ep.check()
        assert torch.equal(y.cpu(), expected(1)[1][comm.rank])
        if comm.rank == 1:
            while not comm.broken:
                time.sleep(0.01)
        else:
            graph.replay()
            with pytest.raises(weft.PeerTimeout) as caught:
                ep.check()
            assert caught.value.peers == (1,)
        with pytest.raises(weft.PeerTimeout):
            ep.dispatch(*parts, **options)
        assert int(torch.ones(4, device=comm.device).sum()) == 4
        graph.reset()
        del r, y
        comm.rebuild(range(comm.num_ranks))
        assert torch.equal(ep.dispatch(*parts).x.cpu(), expected(1)[0][comm.rank].x)
        ep.close()

    run(work)


def test_capture_needs_a_capacity() -> None:
    def work(comm: weft.Communicator) -> None:
        ep = make(comm)
        ep.warmup()
        x = torch.zeros(8, HIDDEN, dtype=torch.bfloat16, device=comm.device)
        ids = torch.zeros(8, TOP_K, dtype=torch.int64, device=comm.device)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(comm.device)
        with torch.cuda.stream(stream):
            x.add_(0)
            stream.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            x.add_(0)
            with pytest.raises(weft.InvalidArgument, match="capacity is None while a CUDA graph is captured"):
                ep.dispatch(x, ids)
            graph.capture_end()
        assert torch.equal(ep.dispatch(x, ids).x, torch.zeros_like(ep.dispatch(x, ids).x))
        assert EXPERTS % comm.num_ranks == 0

    run(work, 2)
