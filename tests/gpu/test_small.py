"""Guards against small batches that differ from the specification, and halves of staged calls that overtake each other:
the matrix with mode="latency", staged calls on other streams and windows, graphs of several sizes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import test_property
import torch
from test_matrix import pool  # noqa: F401  a fixture
from test_property import (  # noqa: F401  collected here with `pool`, as calls of small batches
    test_capacity_to_the_row,
    test_column_major_scales,
    test_column_major_scales_given,
    test_fp8_on_the_wire,
    test_gradients_of_each_layout,
    test_heap_without_room,
    test_holes_that_nobody_needs,
    test_ids,
    test_ids_out_of_range_are_told_once_by_the_next_call,
    test_layouts_and_rows,
    test_megabytes,
    test_nvfp4,
    test_old_results_survive_later_calls,
    test_one_rank_alone,
    test_ranks_without_tokens,
    test_rows_fit_the_heap_and_their_plan_does_not,
)
from test_streams import EXPERTS, HIDDEN, NUM_RANKS, TOKENS, TOP_K, busy, expected, inputs, make, on_device, run
from torch import Tensor

import weft
from weft import reference

LAYOUTS = ["rank_major", "expert_major", "masked"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(test_property, "CALL", replace(test_property.CALL, mode="latency"))
    return


def with_capacity(layout: str, tokens: int = TOKENS) -> dict[str, Any]:
    """Options of a call in which nothing is dropped."""
    return {"layout": layout, "capacity": NUM_RANKS * tokens * (TOP_K if layout == "expert_major" else 1)}


@pytest.mark.parametrize("num_ranks", [8, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_ranks(threads: Any, num_ranks: int, layout: str) -> None:
    sizes = tuple((7 * rank) % 41 for rank in range(num_ranks))
    case = test_property.with_call(
        layout=layout, tokens=sizes, biases=("row",) * num_ranks, ids_are_int64=(True,) * num_ranks, rows="fp8"
    )
    test_property.checked(threads, replace(case, num_ranks=num_ranks, num_local=2))


@pytest.mark.parametrize("num_sms", [1, 3, 16])
def test_blocks_and_tokens(threads: Any, num_sms: int) -> None:
    """Fewer tokens than blocks, more, and one."""

    def work(comm: weft.Communicator) -> None:
        ep = make(comm, num_sms=num_sms)
        for tokens in (1, 2, 17, 200):
            xs, ids, weights = ([part[:tokens] for part in parts] for parts in inputs(tokens))
            given = reference.dispatch(xs, ids, weights, num_experts=EXPERTS, layout="expert_major")
            sums = reference.combine([each.x for each in given], given)
            mine = [part[comm.rank].to(comm.device) for part in (xs, ids, weights)]
            r = ep.dispatch(*mine, layout="expert_major", max_tokens=tokens, mode="latency")
            assert torch.equal(r.x.cpu(), given[comm.rank].x)
            assert torch.equal(ep.combine(r.x, r.handle).cpu(), sums[comm.rank])
        ep.check()

    run(work)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_halves_on_other_streams(layout: str) -> None:
    """Sent on one stream, received on another; inputs are overwritten, other work runs between."""
    options = with_capacity(layout)

    def work(comm: weft.Communicator) -> None:
        ep = make(comm)
        ep.warmup(**options, staged=True)
        here, other = torch.cuda.current_stream(comm.device), torch.cuda.Stream(comm.device)
        for seed in range(6):
            given, sums = expected(seed, **options)
            x, ids, weights = on_device(comm, inputs(seed))
            r = ep.dispatch(x, ids, weights, **options, staged=True)
            for each in (x, ids, weights):
                each.fill_(-1)
            busy(comm.device)
            with torch.cuda.stream(other):
                r.wait()
                rows = r.x.clone()
            here.wait_stream(other)
            bias = torch.zeros(HIDDEN, device=comm.device)
            half = ep.combine(rows, r.handle, bias=bias, staged=True)
            for each in (rows, bias):
                each.fill_(7)
            with torch.cuda.stream(other):
                y = half.wait().clone()
            half.wait()  # once more, for the stream here
            half.event.synchronize()
            other.synchronize()
            assert torch.equal(r.num_tokens_per_expert.cpu(), given[comm.rank].num_tokens_per_expert)
            assert torch.equal(y.cpu(), sums[comm.rank]), seed
        ep.check()

    run(work)


@pytest.mark.parametrize("quantize", ["fp8", "fp8_ue8m0", "fp8_pow2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_column_major_scales_on_streams(layout: str, quantize: str) -> None:
    """They are there before the event of an async call, by the half that receives, and in each replay of a graph."""
    options = {**with_capacity(layout), "quantize": quantize, "scale_layout": "column_major"}

    def check(comm: weft.Communicator, seed: int, scales: Tensor) -> None:
        want = reference.dispatch(*inputs(seed), num_experts=EXPERTS, **options)[comm.rank]
        assert scales.stride() == want.x.scales.stride()
        filled = torch.arange(scales.shape[-2]) < (
            want.num_tokens_per_expert[:, None] if layout == "masked" else want.num_rows
        )
        assert torch.equal(scales.cpu()[filled], want.x.scales[filled]), seed

    def work(comm: weft.Communicator) -> None:
        ep = make(comm)
        other, graph = torch.cuda.Stream(comm.device), torch.cuda.CUDAGraph()
        for mode in ("throughput", "latency"):
            ep.warmup(**options, mode=mode)
            parts = on_device(comm, inputs(1))
            late = torch.zeros_like(parts[0])
            busy(comm.device)
            late.copy_(parts[0])
            r = ep.dispatch(late, *parts[1:], **options, mode=mode, async_op=True)
            r.event.wait()
            check(comm, 1, r.x.scales)
        r = ep.dispatch(*on_device(comm, inputs(2)), **options, staged=True)
        busy(comm.device)
        with torch.cuda.stream(other):
            check(comm, 2, r.wait().x.scales)
        places = on_device(comm, inputs(3))
        other.wait_stream(torch.cuda.current_stream(comm.device))
        with torch.cuda.stream(other):
            graph.capture_begin(capture_error_mode="thread_local")
            r = ep.dispatch(*places, **options)
            graph.capture_end()
            for seed in (3, 4):
                for place, values in zip(places, on_device(comm, inputs(seed)), strict=True):
                    place.copy_(values)
                graph.replay()
                check(comm, seed, r.x.scales)
            ep.check()
        graph.reset()
        ep.close()

    run(work)


def test_two_micro_batches_in_two_windows() -> None:
    options = with_capacity("masked")

    def work(comm: weft.Communicator) -> None:
        ep = make(comm, num_windows=2)
        ep.warmup(**options, staged=True)
        for seed in range(0, 8, 2):
            sent = [ep.dispatch(*on_device(comm, inputs(seed + n)), **options, staged=True, window=n) for n in (0, 1)]
            sums = [ep.combine(r.wait().x, r.handle, staged=True, window=n) for n, r in enumerate(sent)]
            for n, y in enumerate(sums):
                assert torch.equal(y.wait().cpu(), expected(seed + n, **options)[1][comm.rank]), (seed, n)
        ep.check()

    run(work)


def test_a_half_that_is_not_received() -> None:
    """The window refuses the next call, locally, and goes on when the half has been received."""
    options = with_capacity("rank_major")

    def work(comm: weft.Communicator) -> None:
        ep = make(comm, num_windows=2)
        parts = on_device(comm, inputs(1))
        r = ep.dispatch(*parts, **options, staged=True)
        with pytest.raises(weft.InvalidState, match=r"call its wait\(\) first, or use another window"):
            ep.dispatch(*parts)
        between = ep.dispatch(*parts, window=1, mode="throughput")
        y = ep.combine(r.wait().x, r.handle)
        assert torch.equal(y.cpu(), expected(1)[1][comm.rank])
        assert torch.equal(between.x.cpu(), expected(1)[0][comm.rank].x)
        ep.check()

    run(work)


def receive_and_check(ep: weft.ExpertParallel, r: weft.Dispatched) -> None:
    """The first may raise already, if another rank was faster."""
    r.wait()
    ep.check()


def test_a_peer_that_does_not_send() -> None:
    """wait() of a staged call ends with PeerTimeout on every rank, and rebuild makes an end of the half."""
    options = with_capacity("rank_major")

    def work(comm: weft.Communicator) -> None:
        ep = make(comm, deadline_s=60.0)  # kernels may be compiled for the first time
        ep.warmup(**options, staged=True)
        parts = on_device(comm, inputs(1))
        if comm.rank == 1:
            while not comm.broken:
                time.sleep(0.01)
            with pytest.raises(weft.PeerTimeout):
                ep.dispatch(*parts, **options, staged=True)
        else:
            r = ep.dispatch(*parts, **options, staged=True, deadline_s=1.0)
            with pytest.raises(weft.PeerTimeout):
                receive_and_check(ep, r)
        with pytest.raises(weft.PeerTimeout):
            ep.dispatch(*parts)
        comm.rebuild(range(comm.num_ranks))
        r = ep.dispatch(*parts, **options, staged=True)
        assert torch.equal(ep.combine(r.wait().x, r.handle).cpu(), expected(1)[1][comm.rank])

    run(work)


@pytest.mark.parametrize("is_graphed", [False, True])
@pytest.mark.parametrize("staged", [False, True])
def test_a_rank_that_comes_seconds_late(is_graphed: bool, staged: bool) -> None:
    """No false alarm before the deadline, and right results."""
    options: dict[str, Any] = {**with_capacity("expert_major"), "mode": "latency", "staged": staged}

    def work(comm: weft.Communicator) -> None:
        ep = make(comm, deadline_s=10.0)
        ep.warmup(**options)
        parts = on_device(comm, inputs(3))
        y = torch.zeros_like(parts[0])

        def step() -> None:
            r = ep.dispatch(*parts, **options).wait()
            half = ep.combine(r.x, r.handle, mode="latency", staged=staged, out=y)
            if staged:
                half.wait()

        call, graph, stream = step, torch.cuda.CUDAGraph(), torch.cuda.Stream(comm.device)
        torch.cuda.current_stream(comm.device).synchronize()
        with torch.cuda.stream(stream):
            if is_graphed:
                graph.capture_begin(capture_error_mode="thread_local")
                step()
                graph.capture_end()
                call = graph.replay
            call()
            stream.synchronize()
            y.zero_()
            if comm.rank == 2:
                time.sleep(3.0)
            call()
            ep.check()
            assert torch.equal(y.cpu(), expected(3, layout="expert_major")[1][comm.rank])
        if is_graphed:
            graph.reset()
        ep.close()

    run(work)


def part_of(seed: int, tokens: int) -> tuple[list[Tensor], ...]:
    return tuple([each[:tokens] for each in parts] for parts in inputs(seed))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("staged", [False, True])
def test_graphs_of_several_sizes(layout: str, staged: bool) -> None:
    """Captured right after warmup(); each replay has other rows, ids and weights; eager calls of all modes between."""
    sizes = (128, 32, 5)

    def work(comm: weft.Communicator) -> None:
        ep = make(comm)
        stream = torch.cuda.Stream(comm.device)
        graphs = []
        for tokens in sizes:
            options = {**with_capacity(layout, tokens), "max_tokens": tokens, "mode": "latency", "staged": staged}
            ep.warmup(**options)
            places = [torch.zeros_like(part[comm.rank], device=comm.device) for part in part_of(0, tokens)]
            torch.cuda.current_stream(comm.device).synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                r = ep.dispatch(*places, **options).wait()
                y = ep.combine(r.x, r.handle, staged=staged)
                y = y.wait() if staged else y
                graph.capture_end()
            graphs.append((tokens, graph, places, r, y))
        with torch.cuda.stream(stream):
            for turn in range(12):
                tokens, graph, places, r, y = graphs[turn % len(graphs)]
                given = reference.dispatch(*part_of(turn, tokens), num_experts=EXPERTS, **with_capacity(layout, tokens))
                sums = reference.combine([each.x for each in given], given)
                for place, values in zip(places, part_of(turn, tokens), strict=True):
                    place.copy_(values[comm.rank])
                y.fill_(float("nan"))
                graph.replay()
                stream.synchronize()
                assert int(r.num_rows) == int(given[comm.rank].num_rows)
                assert torch.equal(y.cpu(), sums[comm.rank]), f"replay {turn}"
                mode = ("throughput", "latency")[turn % 2]
                between = ep.dispatch(*on_device(comm, inputs(9)), mode=mode)
                assert torch.equal(between.x.cpu(), expected(9)[0][comm.rank].x), f"between, {mode}"
            stream.synchronize()
        ep.check()
        for _, graph, *_ in graphs:
            graph.reset()
        ep.close()

    run(work)


def test_refusals() -> None:
    """Local, before anything is sent."""

    def work(comm: weft.Communicator) -> None:
        ep = make(comm, max_tokens_per_rank=600)
        x, ids, weights = on_device(comm, inputs(1))
        with pytest.raises(weft.InvalidArgument, match="mode is 'latency' with max_tokens = 600; allowed"):
            ep.dispatch(x, ids, weights, mode="latency")
        small = ep.dispatch(x, ids, weights, mode="latency", max_tokens=TOKENS)
        with pytest.raises(weft.InvalidArgument, match="'throughput' with the handle of a small-batch dispatch"):
            ep.combine(small.x, small.handle, mode="throughput")
        assert torch.equal(ep.combine(small.x, small.handle).cpu(), expected(1)[1][comm.rank])
        assert x.shape[1] == HIDDEN

    run(work)
