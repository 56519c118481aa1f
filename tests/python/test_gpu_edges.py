"""Guards against calls of the nvlink engine that are right as long as nothing is unusual, with and without a plan. On
one emulated GPU.
"""

from __future__ import annotations

from functools import _lru_cache_wrapper
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_gpu import IDLE, EmulatedRanks, Graph, Noting, Stream, gpu
from test_quick import EXPERTS, HIDDEN, TOKENS, TOP_K, WAYS, choose_way, inputs, make

import weft
from pool import RankState


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ranks on the emulated GPU."""
    ranks = EmulatedRanks(monkeypatch)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: -1)  # no tool listens
    return ranks


def run(pool: Any, work: Any) -> None:
    pool.run(2, lambda state, _: work(state), [None] * 2)


def test_aligned_groups_of_a_small_batch_without_capacity(pool: Any) -> None:
    """Padding makes more rows than picks."""

    def work(state: RankState) -> None:
        x, ids, weights = inputs(state.rank)
        with make(state) as ep:
            ids = torch.tensor([[0, 0], [0, 0], [0, 1], [1, 1]])
            ids = ids if state.rank == 0 else ids.flip(0)
            r = ep.dispatch(x, ids, weights, layout="expert_major", alignment=32, mode="latency")
            assert r.handle.is_small
            assert r.offsets.tolist() == ([0, 32, 64] if state.rank == 0 else [0, 0, 0])
            assert len(r.x) == r.offsets[-1]

    run(pool, work)


def test_rows_that_fit_without_their_scales(pool: Any) -> None:
    """Data alone fill what the window has for a row; with scales they travel in pieces."""
    hidden = 512

    def data_of(rank: int, num_bytes: int) -> torch.Tensor:
        return torch.arange(4 * num_bytes).remainder(251).to(torch.uint8).view(4, num_bytes) + rank

    def work(state: RankState) -> None:
        ids = torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]])  # tokens 0 and 2 to rank 0, the others to rank 1
        shape = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": hidden, "max_tokens_per_rank": 8}
        with weft.ExpertParallel(state.comm, heap_bytes=0, **shape) as ep:
            for num_bytes in (2 * hidden, 2 * hidden + 256, 3 * hidden):
                mine = weft.Quantized(data_of(state.rank, num_bytes), torch.full((4, 100), 1.0 + state.rank))
                received = ep.dispatch(mine, ids, mode="throughput").x
                assert isinstance(received, weft.Quantized)
                want = [data_of(source, num_bytes)[state.rank :: 2] for source in (0, 1)]
                assert torch.equal(received.data, torch.cat(want))
                assert received.scales is not None
                assert received.scales[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]

    run(pool, work)


def test_heaps_neither_grow_nor_sleep(pool: Any) -> None:
    def work(state: RankState) -> None:
        shape: dict[str, Any] = {"num_experts": 4, "top_k": 2, "hidden": 64, "max_tokens_per_rank": 8}
        with pytest.raises(weft.Unsupported, match="max_heap_bytes"):
            weft.ExpertParallel(state.comm, max_heap_bytes=1 << 30, **shape)
        with weft.ExpertParallel(state.comm, **shape) as ep:
            with pytest.raises(weft.Unsupported, match="resize"):
                ep.resize(heap_bytes=1 << 30)
            with pytest.raises(weft.Unsupported, match="sleep"):
                state.comm.sleep()
            assert not state.comm.is_asleep

    run(pool, work)


def test_logical_experts_are_refused(pool: Any) -> None:
    def work(state: RankState) -> None:
        shape: dict[str, Any] = {"num_experts": 4, "top_k": 2, "hidden": 64, "max_tokens_per_rank": 8}
        with pytest.raises(weft.Unsupported, match="num_logical_experts"):
            weft.ExpertParallel(state.comm, num_logical_experts=3, **shape)
        with weft.ExpertParallel(state.comm, **shape) as ep:
            assert ep.uncovered == ()
            with pytest.raises(weft.Unsupported, match="absent='renormalize'"):
                ep.dispatch(torch.zeros((1, 64), dtype=torch.bfloat16), torch.zeros((1, 2), dtype=torch.int64),
                            absent="renormalize")  # fmt: skip

    run(pool, work)


def test_columns_of_scales_that_lie_on_each_other(pool: Any) -> None:
    """They are copied: a stride of zero means that scales lie row by row."""

    def work(state: RankState) -> None:
        _, ids, weights = inputs(state.rank)
        with make(state) as ep:
            data = torch.arange(TOKENS * HIDDEN).remainder(251).to(torch.uint8).view(TOKENS, HIDDEN)
            same = torch.rand(TOKENS, 1).expand(TOKENS, 3)
            overlapping = torch.rand(TOKENS + 2).as_strided((TOKENS, 3), (1, 1))
            for scales in (same, overlapping):
                r = ep.dispatch(weft.Quantized(data, scales), ids, weights, mode="throughput")
                want = ep.dispatch(weft.Quantized(data, scales.contiguous()), ids, weights, mode="throughput")
                assert isinstance(r.x, weft.Quantized)
                assert isinstance(want.x, weft.Quantized)
                assert r.x.scales is not None
                assert torch.equal(r.x.scales, want.x.scales)
                assert set(r.x.scales[:, 0].tolist()) >= {
                    float(each) for each in scales[(ids // 2 == state.rank).any(1), 0]
                }

    run(pool, work)


def test_rows_without_data_are_cleared_where_gradients_are_tracked(pool: Any) -> None:
    """All of them, ids and weights too, and no other."""

    def work(state: RankState) -> None:
        x, ids, weights = inputs(state.rank)
        with make(state) as ep:
            for mode in ("throughput", "latency"):
                r = ep.dispatch(x.clone().requires_grad_(), ids, weights, capacity=16, mode=mode)
                number = int(r.num_rows)
                assert 0 < number < 16
                assert r.topk_idx is not None
                assert bool((r.topk_idx[number:] == -1).all())
                assert not bool(r.topk_weights[number:].any())
                assert not bool(r.x.detach()[number:].any())
                assert bool(r.x.detach()[:number].any(dim=1).all())

    run(pool, work)


def test_a_bias_may_be_overwritten_before_a_staged_combine_has_received(pool: Any) -> None:
    def work(state: RankState) -> None:
        x, ids, weights = inputs(state.rank)
        with make(state) as ep:
            for shape in ((HIDDEN,), (TOKENS, HIDDEN)):
                r = ep.dispatch(x, ids, weights, capacity=16, mode="latency")
                bias = torch.rand(shape).bfloat16()
                want = ep.combine(r.x, r.handle, bias=bias.clone(), mode="latency")
                staged = ep.combine(r.x, r.handle, bias=bias, staged=True)
                bias.fill_(1000.0)
                assert torch.equal(staged.wait(), want)

    run(pool, work)


def test_deadlines_and_sms_arrive_at_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def note(name: str, args: tuple[Any, ...]) -> None:
        if hasattr(args[0] if args else None, "timeout_ns"):
            seen.append((args[0].timeout_ns, args[0].num_blocks))

    def work(state: RankState) -> None:
        x, ids, weights = inputs(state.rank)
        with make(state, deadline_s=40.0, num_sms=2) as ep:
            window = ep.calls.windows[0]
            window.native = Noting(window.native, note)
            for options in ({}, {"deadline_s": 2.5, "num_sms": 1}):
                for mode in ("throughput", "latency"):
                    for _ in range(3):
                        r = ep.dispatch(x, ids, weights, capacity=16, mode=mode, **options)
                        ep.combine(r.x, r.handle, mode=mode, **options)
                        ep.dispatch(x, handle=r.handle, mode=mode, **options)

    run(EmulatedRanks(monkeypatch, IDLE), work)
    assert sorted(set(seen)) == [(2_500_000_000, 1), (40_000_000_000, 2)]
    assert len(seen) == 2 * 2 * 2 * 3 * 3


def num_kept(made: Any, seen: set[int]) -> list[int]:
    """How many entries each dictionary and cache has that an object of Weft holds."""
    if id(made) in seen:
        return []
    seen.add(id(made))
    if isinstance(made, dict):
        return [len(made)]
    if isinstance(made, _lru_cache_wrapper):
        return [made.cache_info().currsize]
    if not type(made).__module__.startswith("weft") or not hasattr(made, "__dict__"):
        return []
    return [number for each in vars(made).values() for number in num_kept(each, seen)]


def test_what_is_kept_for_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(state: RankState) -> None:
        x, ids, weights = inputs(state.rank)
        with make(state) as ep:
            for number in range(300):
                r = ep.dispatch(x, ids, weights, capacity=16, mode="throughput", deadline_s=10.0 + number)
                ep.combine(r.x, r.handle, deadline_s=10.0 + number)
            kept = num_kept(ep, set())
            assert kept
            assert max(kept) <= 256

    run(EmulatedRanks(monkeypatch, IDLE), work)


# ---- a plan is there, and something else is not as it was


def learn(ep: weft.ExpertParallel, x: Any, ids: Any, weights: Any, **options: Any) -> weft.Dispatched:
    """Calls that know each other."""
    for _ in range(3):
        r = ep.dispatch(x, ids, weights, capacity=16, **options)
        ep.combine(r.x, r.handle, **options)
    return r


@pytest.mark.parametrize("mode", ["throughput", "latency"])
def test_a_window_with_half_a_call_takes_no_other(pool: Any, mode: str) -> None:
    def work(state: RankState) -> None:
        x, ids, weights = inputs(state.rank)
        with make(state) as ep:
            r = learn(ep, x, ids, weights, mode=mode)
            staged = ep.dispatch(x, ids, weights, capacity=16, staged=True)
            for call in (
                lambda: ep.dispatch(x, ids, weights, capacity=16, mode=mode),
                lambda: ep.combine(r.x, r.handle, mode=mode),
            ):
                with pytest.raises(weft.InvalidState, match="a staged call on window 0 has not been received"):
                    call()
            staged.wait()
            learn(ep, x, ids, weights, mode=mode)

    run(pool, work)


def test_an_event_of_a_graph_is_not_that_of_calls_outside(pool: Any) -> None:
    """Calls share one until somebody asks for it."""

    def work(state: RankState) -> None:
        x, ids, weights = inputs(state.rank)
        with make(state) as ep:
            first, graph = learn(ep, x, ids, weights), Graph()
            with graph.record():
                recorded = ep.dispatch(x, ids, weights, capacity=16).event._cuda_event()
            assert first.event._cuda_event() is not recorded
            graph.destroy()

    run(pool, work)


@pytest.mark.parametrize("mode", ["throughput", "latency"])
def test_gradients_of_weights_alone(pool: Any, mode: str) -> None:
    def work(state: RankState) -> None:
        torch.autograd.set_multithreading_enabled(False)
        x, ids, weights = inputs(state.rank)
        with make(state) as ep:
            learn(ep, x, ids, weights, mode=mode)
            tracked = weights.clone().requires_grad_()
            r = ep.dispatch(x, ids, tracked, capacity=16, mode=mode)
            assert r.topk_weights.requires_grad
            (r.topk_weights * 3.0).sum().backward()
            assert tracked.grad is not None
            assert torch.equal(tracked.grad, torch.where(ids >= 0, 3.0, 0.0))

    run(pool, work)


def test_a_recorder_sees_calls_of_all_kinds(pool: Any, tmp_path: Path) -> None:
    def work(state: RankState) -> None:
        x, ids, weights = inputs(state.rank)
        with make(state) as ep:
            learn(ep, x, ids, weights, mode="throughput")
            state.comm.meet(30)
            if state.rank == 0:
                with weft.routing.record(tmp_path / "trace"):
                    state.comm.meet(30)
                    learn(ep, x, ids, weights, mode="throughput")
                    state.comm.meet(30)
            else:
                state.comm.meet(30)
                learn(ep, x, ids, weights, mode="throughput")
                state.comm.meet(30)

    run(pool, work)
    trace = weft.routing.load_trace(tmp_path / "trace")
    assert {rank: len(dispatches) for rank, dispatches in trace.dispatches.items()} == {0: 3, 1: 3}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["throughput", "latency"])
def test_a_call_on_another_stream_runs_there(pool: Any, mode: str, way: str) -> None:
    """And its event is of that one."""

    def work(state: RankState) -> None:
        x, ids, weights = inputs(state.rank)
        with make(state) as ep:
            choose_way(ep, way)
            learn(ep, x, ids, weights, mode=mode)
            first, other = torch.cuda.current_stream(), Stream()
            if state.rank == 0:
                torch.cuda.set_stream(other)  # type: ignore[arg-type]
            before = [gpu().given(each) for each in (first, other)]
            r = learn(ep, x, ids, weights, mode=mode)
            given = [gpu().given(each) - number for each, number in zip((first, other), before, strict=True)]
            mine = given.pop(1 - state.rank)
            assert mine >= 6, "a kernel a call, and what orders them"
            assert given == [state.rank == 0], "an event, for which the other waits"
            assert ep.calls.windows[0].streams.last_handle == torch.cuda.current_stream().cuda_stream
            assert r.event._stream is torch.cuda.current_stream()

    run(pool, work)
