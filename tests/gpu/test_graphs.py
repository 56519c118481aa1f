"""Guards against captured graphs that replay an old sequence, old routing or memory that is gone."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_streams import EXPERTS, HIDDEN, NUM_RANKS, TOKENS, TOP_K, expected, inputs, make, on_device, run

import weft
import weft.engine
from weft import reference
from weft.call import check_options

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


def rows_of(kind: str, x: torch.Tensor, seed: int) -> tuple[torch.Tensor, ...]:
    """What is dispatched in place of x: itself, or data and scales."""
    if kind == "fp8":
        return reference.quantize_fp8(x)
    if kind == "bytes":
        gen = torch.Generator().manual_seed(seed)
        sizes = ((len(x), HIDDEN // 2), (len(x), HIDDEN // 16))  # of NVFP4
        return tuple(torch.randint(0, 256, size, generator=gen, dtype=torch.uint8) for size in sizes)
    return (x,)


def one(rows: Sequence[torch.Tensor]) -> torch.Tensor | weft.Quantized:
    """The argument of dispatch."""
    return rows[0] if len(rows) == 1 else weft.Quantized(*rows)


def parts_of(x: torch.Tensor | weft.Quantized) -> list[torch.Tensor]:
    """The other way round."""
    return [x] if isinstance(x, torch.Tensor) else [part for part in (x.data, x.scales) if part is not None]


def outputs_of(weights: torch.Tensor, layout: str) -> torch.Tensor:
    """Expert outputs that depend on the received weights alone."""
    of_rows = weights[..., 0] if layout == "rank_major" else weights
    return (of_rows[..., None] * torch.arange(1, HIDDEN + 1, device=weights.device)).bfloat16()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
@pytest.mark.parametrize("kind", ["plain", "fp8", "bytes", "quantized", "by column", "staged"])
def test_all_that_travels_in_a_graph(kind: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of every kind, a repeated routing, side values, a bias, outputs in the heap, FP8 on the way back, captured
    right after warmup(): each replay gives what the reference does.
    """
    capacity = NUM_RANKS * TOKENS * (TOP_K if layout == "expert_major" else 1)
    made: dict[str, Any] = {"quantize": "fp8"} if kind in ("quantized", "by column") else {}
    made |= {"scale_layout": "column_major"} if kind == "by column" else {}
    options: dict[str, Any] = {"layout": layout, "capacity": capacity, **made}
    later: dict[str, Any] = {"staged": True} if kind == "staged" else {}
    id_dtype = torch.int32 if kind in ("bytes", "quantized") else torch.int64

    def given(seed: int) -> list[list[torch.Tensor]]:
        """Of each rank: rows in one or two parts, ids, weights, bias."""
        xs, ids, weights = inputs(seed)
        ids = [each.to(id_dtype) for each in ids]
        return [[*rows_of(kind, x, seed + 10 * r), ids[r], weights[r], -x.float()] for r, x in enumerate(xs)]

    def wanted(seed: int) -> list[tuple[Any, ...]]:
        """Of each rank: the dispatch, its repetition's rows, sums with a bias, summed side values, sums without, and
        such that travelled as FP8.
        """
        all_given = given(seed)
        there = reference.dispatch(
            [one(parts[:-3]) for parts in all_given],
            [parts[-3] for parts in all_given],
            [parts[-2] for parts in all_given],
            num_experts=EXPERTS,
            **(options | {"capacity": capacity if layout == "masked" else None}),
        )
        again = reference.repeat_dispatch([one(parts[:-3]) for parts in all_given], there[0].routing)
        ys = [outputs_of(each.topk_weights, layout) for each in there]
        sides, biases = [each.topk_weights for each in there], [parts[-1] for parts in all_given]
        sums = reference.combine(ys, there, sides=sides, biases=biases)
        plain, small = reference.combine(ys, there), reference.combine(ys, there, wire="fp8")
        return [
            (first, rows, *of_rank, alone, of_fp8)
            for first, rows, of_rank, alone, of_fp8 in zip(there, again, sums, plain, small, strict=True)
        ]

    monkeypatch.setattr(weft.engine, "_gpus", {})  # kernels that other tests have loaded
    expected_of = {seed: wanted(seed) for seed in range(1, 4)}

    def work(comm: weft.Communicator) -> None:
        ep = make(comm)
        places = [part.to(comm.device) for part in given(0)[comm.rank]]
        x = one(places[:-3])
        for other in ({"side": True}, {}, {"wire": "fp8"}):
            ep.warmup(x=x, topk_dtype=id_dtype, **other, **options, **later)

        def combined(y: torch.Tensor, r: weft.Dispatched, **more: Any) -> Any:
            made = ep.combine(y, r.handle, **more, **later)
            return made.wait() if isinstance(made, weft.Staged) else made

        def step() -> tuple[Any, ...]:
            ids, weights, bias = places[-3:]
            r = ep.dispatch(x, ids, weights, **options, **later).wait()
            again = ep.dispatch(x, handle=r.handle, **later).wait()
            y = outputs_of(r.topk_weights, layout)
            total, side = combined(y, r, side=r.topk_weights, bias=bias)
            return r, again, total, side, combined(ep.empty_output(r).copy_(y), r), combined(y, r, wire="fp8")

        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(comm.device)
        torch.cuda.current_stream(comm.device).synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            r, again, *results = step()
            graph.capture_end()
            for seed, there_and_sums in expected_of.items():
                for place, values in zip(places, given(seed)[comm.rank], strict=True):
                    as_bytes(place).copy_(as_bytes(values))
                for each in (*parts_of(r.x), *parts_of(again.x), *results):
                    each.view(torch.uint8).fill_(0x5A) if each.is_contiguous() else each.fill_(0)
                graph.replay()
                stream.synchronize()
                there, rows_again, *sums = there_and_sums[comm.rank]
                counts = there.num_tokens_per_expert
                assert torch.equal(r.num_tokens_per_expert.cpu(), counts), f"counts, replay {seed}"
                is_row = torch.arange(capacity) < counts[:, None]
                got_parts, want_parts = (
                    (*parts_of(r.x), *parts_of(again.x)),
                    (*parts_of(there.x), *parts_of(rows_again)),
                )
                for got, want in zip(got_parts, want_parts, strict=True):
                    assert got.dtype == want.dtype
                    rows = is_row if layout == "masked" else slice(len(want))
                    assert torch.equal(as_bytes(got.cpu())[rows], as_bytes(want)[rows]), f"rows, replay {seed}"
                for name, got, want in zip(("sums", "side", "plain", "FP8"), results, sums, strict=True):
                    assert torch.equal(got.cpu(), want), f"{name}, replay {seed}"
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
        ep = make(comm, deadline_s=60.0)  # kernels may be compiled for the first time
        options: dict[str, Any] = {"capacity": NUM_RANKS * TOKENS, "mode": mode}
        ep.warmup(**options)
        options["deadline_s"] = 2.0
        parts = on_device(comm, inputs(1))
        stream, graph = torch.cuda.Stream(comm.device), torch.cuda.CUDAGraph()
        torch.cuda.current_stream(comm.device).synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            r = ep.dispatch(*parts, **options)
            y = ep.combine(r.x, r.handle, mode=mode, deadline_s=2.0)
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


def test_graphs_outlive_their_object() -> None:
    """A closed object's graph replays, with the same results, and holds its memory until it is destroyed."""
    heap_bytes = 512 << 20
    on_a_gpu = max(1, NUM_RANKS // torch.cuda.device_count()) * heap_bytes
    counts_memory = "PYTEST_XDIST_WORKER" not in os.environ  # what is free also changes with other workers

    def work(comm: weft.Communicator) -> None:
        ep = make(comm, heap_bytes=heap_bytes)
        options: dict[str, Any] = {"layout": "rank_major", "capacity": NUM_RANKS * TOKENS}
        ep.warmup(**options)
        x, ids, weights = on_device(comm, inputs(3))
        want = expected(3, **options)[1][comm.rank]
        stream = torch.cuda.Stream(comm.device)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.current_stream(comm.device).synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            r = ep.dispatch(x, ids, weights, **options)
            y = ep.combine(r.x, r.handle)
            graph.capture_end()
            for is_closed in (False, True):
                if is_closed:
                    ep.close()
                    comm.meet(20.0)
                y.fill_(float("nan"))
                graph.replay()
                stream.synchronize()
                assert torch.equal(y.cpu(), want), f"is_closed={is_closed}"
        del r
        gc.collect()
        comm.meet(20.0)
        held = torch.cuda.mem_get_info(comm.device)[0]
        comm.meet(20.0)
        graph.reset()
        deadline = time.monotonic() + 60
        while counts_memory and torch.cuda.mem_get_info(comm.device)[0] < held + on_a_gpu:
            assert time.monotonic() < deadline, (held, torch.cuda.mem_get_info(comm.device)[0])
            time.sleep(0.01)
        comm.meet(60.0)

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


def test_a_captured_dispatch_that_is_refused_gives_its_places_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph keeps its places in the heap for good, but no graph has these."""
    monkeypatch.setattr(check_options, "check_num_sms", lambda *_: None)  # so that the native module refuses

    def work(comm: weft.Communicator) -> None:
        comm._choice = replace(comm._choice, max_num_sms=8)
        ep = make(comm)
        options: dict[str, Any] = {"capacity": NUM_RANKS * TOKENS, "mode": "throughput"}
        parts = on_device(comm, inputs(0))
        ep.warmup(**options)
        comm.meet(20.0)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(comm.device)
        torch.cuda.current_stream(comm.device).synchronize()
        native = ep.calls.windows[0].native
        with torch.cuda.stream(stream):
            ep.check()
            used = native.heap_used
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(3):
                with pytest.raises(weft.InvalidArgument, match=r"num_sms is 16; allowed: 1\.\.8 "):
                    ep.dispatch(*parts, num_sms=16, **options)
            assert native.heap_used == used
            r = ep.dispatch(*parts, **options)
            assert native.heap_used > used
            graph.capture_end()
            graph.replay()
            stream.synchronize()
        mine = expected(0)[0][comm.rank]
        assert torch.equal(r.x[: int(r.num_rows)].cpu(), mine.x)
        ep.check()
        graph.reset()
        ep.close()

    run(work)


@pytest.mark.parametrize("is_ahead", [True, False])
def test_async_calls_in_a_graph(is_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window's stream is made by warmup, or under capture."""
    capacity = NUM_RANKS * TOKENS
    monkeypatch.setattr(weft.engine, "_spare_streams", {})  # of closed windows

    def work(comm: weft.Communicator) -> None:
        ep = make(comm)
        ep.warmup(capacity=capacity, async_op=is_ahead)
        places = on_device(comm, inputs(0))
        torch.cuda.current_stream(comm.device).synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(comm.device)
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            r = ep.dispatch(*places, capacity=capacity, async_op=True)
            r.event.wait()
            y, event = ep.combine(r.x, r.handle, async_op=True)
            assert isinstance(event, weft.Event)
            event.wait()
            graph.capture_end()
            for seed in range(1, 4):
                for place, values in zip(places, inputs(seed), strict=True):
                    place.copy_(values[comm.rank])
                y.fill_(float("nan"))
                graph.replay()
                stream.synchronize()
                assert torch.equal(y.cpu(), expected(seed)[1][comm.rank]), f"replay {seed}"
        ep.check()
        graph.reset()
        ep.close()

    run(work)


def test_torch_captures_as_it_does_by_default() -> None:
    """No other thread of Weft does under capture what CUDA then forbids to all. Ranks that are threads would."""
    xs, ids, weights = inputs(0)
    [given] = reference.dispatch(xs[:1], ids[:1], weights[:1], num_experts=EXPERTS)
    [sums] = reference.combine([given.x], [given])

    def work(comm: weft.Communicator) -> None:
        ep = make(comm)
        ep.warmup(capacity=TOKENS)
        x, topk_idx, topk_weights = (part[0].to(comm.device) for part in (xs, ids, weights))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            r = ep.dispatch(x, topk_idx, topk_weights, capacity=TOKENS)
            y = ep.combine(r.x, r.handle)
        for _ in range(3):
            y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(y.cpu(), sums)
        ep.check()
        graph.reset()
        ep.close()

    run(work, 1)
