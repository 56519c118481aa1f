"""Guards against calls that overtake each other, and memory that is given away while another stream uses it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import reference
from weft.engine import driver_gpu
from weft.kernels import tuning

pytestmark = pytest.mark.usefixtures("kernels")
TABLE = tuning.DEFAULT
NUM_RANKS, EXPERTS, TOP_K, HIDDEN, TOKENS = 4, 8, 3, 256, 200


def make(comm: weft.Communicator, **changes: Any) -> weft.ExpertParallel:
    shape = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens_per_rank": TOKENS}
    ep = weft.ExpertParallel(comm, **(shape | {"num_sms": 4, "deadline_s": 20.0} | changes))  # type: ignore[arg-type]
    ep._shape.table = TABLE
    return ep


def inputs(seed: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Rows, ids and weights of every rank."""
    gen = torch.Generator().manual_seed(seed)
    xs = [torch.randn(TOKENS - 7 * r, HIDDEN, generator=gen).bfloat16() for r in range(NUM_RANKS)]
    ids = [torch.randint(-1, EXPERTS, (len(x), TOP_K), generator=gen) for x in xs]
    return xs, ids, [torch.rand(i.shape, generator=gen) for i in ids]


def on_device(comm: weft.Communicator, parts: tuple[list[Tensor], ...]) -> tuple[Tensor, ...]:
    return tuple(part[comm.rank].to(comm.device) for part in parts)


def expected(seed: int, **options: Any) -> tuple[list[Any], list[Tensor]]:
    """What a dispatch gives, and a weighted combine of the same rows."""
    xs, ids, weights = inputs(seed)
    given = reference.dispatch(xs, ids, weights, num_experts=EXPERTS, **options)
    return given, reference.combine([each.x for each in given], given)


def busy(device: torch.device) -> None:
    """Keep the current stream at work for some milliseconds."""
    torch.cuda._sleep(20_000_000)


def run(work: Any, num_ranks: int = NUM_RANKS) -> list[Any]:
    return weft.spawn(work, num_ranks, device="cuda", isolation="thread")


def test_async_calls_run_on_their_own_stream() -> None:
    """Inputs come from a busy stream, results are used on it after event.wait(), and everything may be dropped."""

    def work(comm: weft.Communicator) -> None:
        ep = make(comm)
        for seed in range(4):
            given, sums = expected(seed, layout="expert_major")
            x, ids, weights = on_device(comm, inputs(seed))
            late = torch.empty_like(x)
            busy(comm.device)
            late.copy_(x)
            r = ep.dispatch(late, ids, weights, layout="expert_major", async_op=True)
            del late, x, ids, weights
            r.event.wait()
            y, event = ep.combine(r.x.clone(), r.handle, async_op=True)
            assert isinstance(event, weft.Event)
            event.wait()
            got_x, got_y = r.x.clone(), y.clone()
            event.synchronize()
            assert event.query()
            assert torch.equal(got_x.cpu(), given[comm.rank].x)
            assert torch.equal(got_y.cpu(), sums[comm.rank])
        ep.check()

    run(work)


def test_one_window_from_several_streams() -> None:
    """The library orders the calls; the user only orders the tensors."""

    def work(comm: weft.Communicator) -> None:
        ep = make(comm)
        streams = [torch.cuda.Stream(comm.device) for _ in range(2)]
        begin = torch.cuda.current_stream(comm.device)
        results = []
        for seed in range(6):
            parts = on_device(comm, inputs(seed))
            stream = streams[seed % 2]
            stream.wait_stream(begin)
            with torch.cuda.stream(stream):
                if seed % 2:
                    busy(comm.device)
                r = ep.dispatch(*parts, capacity=NUM_RANKS * TOKENS)
                results.append((ep.combine(r.x, r.handle), r, parts))
        for seed, (y, r, _) in enumerate(results):
            begin.wait_stream(streams[seed % 2])
            given, sums = expected(seed)
            rows = int(r.num_rows)
            assert torch.equal(r.x[:rows].cpu(), given[comm.rank].x), seed
            assert torch.equal(y.cpu(), sums[comm.rank]), seed
        ep.check()

    run(work)


def test_two_windows_have_two_calls_in_flight() -> None:
    def work(comm: weft.Communicator) -> None:
        ep = make(comm, num_windows=2)
        first, second = (ep.dispatch(*on_device(comm, inputs(n)), window=n, async_op=True) for n in (0, 1))
        for seed, r in enumerate((first, second)):
            r.event.wait()
            y, event = ep.combine(r.x, r.handle, window=seed, async_op=True)
            event.wait()
            assert torch.equal(y.cpu(), expected(seed)[1][comm.rank])
        ep.check()

    run(work)


def read_late(r: weft.Dispatched, side: torch.cuda.Stream) -> Tensor:
    """A copy of the rows that a busy stream makes when the caller may have dropped them."""
    side.wait_stream(torch.cuda.current_stream(side.device))
    with torch.cuda.stream(side):
        busy(side.device)
        copy = r.x.clone()
    r.record_stream(side)
    return copy


def test_recorded_streams_keep_memory() -> None:
    """A result is dropped while another stream still reads it; the next results must not lie in its place."""

    def work(comm: weft.Communicator) -> None:
        ep = make(comm, heap_bytes=4 << 20)
        side = torch.cuda.Stream(comm.device)
        given, _ = expected(0)
        mine = on_device(comm, inputs(0))
        for seed in range(1, 9):
            r = ep.dispatch(*mine)
            copy = read_late(r, side)
            del r
            ep.dispatch(*on_device(comm, inputs(seed)))
            side.synchronize()
            assert torch.equal(copy.cpu(), given[comm.rank].x)
        ep.check()

    run(work)


def test_recorded_streams_keep_memory_of_closed_windows() -> None:
    """A result that outlives its window is dropped while another stream still reads it."""

    def work(comm: weft.Communicator) -> None:
        ep = make(comm, heap_bytes=4 << 20)
        side = torch.cuda.Stream(comm.device)
        r = ep.dispatch(*on_device(comm, inputs(0)))
        ep.close()
        copy = read_late(r, side)
        del r
        side.synchronize()
        assert torch.equal(copy.cpu(), expected(0)[0][comm.rank].x)

    run(work)


def test_windows_hold_no_python_object() -> None:
    """What is left of one is cleaned up by a thread of its own, perhaps while the interpreter is being taken down."""

    def work(comm: weft.Communicator) -> None:
        gpu = driver_gpu(comm.device.index)
        num_references = sys.getrefcount(gpu)
        ep = make(comm)
        r = ep.dispatch(*on_device(comm, inputs(0)))
        assert sys.getrefcount(gpu) == num_references
        ep.combine(r.x, r.handle)
        ep.check()

    run(work, 1)


def test_ranges_have_names() -> None:
    def work(comm: weft.Communicator) -> set[str]:
        ep = make(comm)
        with torch.profiler.profile() as profile:
            r = ep.dispatch(*on_device(comm, inputs(0)))
            ep.combine(r.x, r.handle)
        return {event.key for event in profile.key_averages()}

    (names,) = run(work, 1)
    assert {"weft::dispatch rank_major", "weft::combine rank_major"} <= names
