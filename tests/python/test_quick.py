"""Guards against calls along a plan that give other bits than the first of their kind, or let pass what it refuses. On
one emulated GPU.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import emulated_gpu
import pytest
import torch
from torch import Tensor

import weft
from pool import RankState
from weft.call.eager import Eager

TOKENS, HIDDEN, EXPERTS, TOP_K = 4, 128, 4, 2
WAYS = ("native", "python")  # of a call along a plan: made by the native module (call_maker.cc), or by Runner.run


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    ranks = emulated_gpu.EmulatedRanks(monkeypatch)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: -1)  # no tool listens
    return ranks


@pytest.fixture
def learnt(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls that found no plan, of all ranks."""
    seen: list[str] = []
    for name in ("dispatch", "combine"):
        real = getattr(Eager, f"_learn_{name}")

        def spy(*args: Any, real: Any = real, name: str = name) -> Any:
            seen.append(name)
            return real(*args)

        monkeypatch.setattr(Eager, f"_learn_{name}", spy)
    return seen


def make(state: RankState, **options: Any) -> weft.ExpertParallel:
    return weft.ExpertParallel(
        state.comm, num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=8, num_windows=2, **options
    )


class _KnowsNothing:
    """In place of KnownCalls."""

    def dispatch(self, *_: Any) -> None: ...

    combine = learn = dispatch


def choose_way(ep: weft.ExpertParallel, way: str) -> None:
    """Of calls along a plan, one of WAYS."""
    if way == "python":
        ep._eager.known = _KnowsNothing()  # type: ignore[assignment]


def inputs(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    ids = torch.randint(-1, EXPERTS, (TOKENS, TOP_K), generator=generator)
    return x, ids, torch.rand(TOKENS, TOP_K, generator=generator)


def fp8(x: Tensor) -> weft.Quantized:
    return weft.Quantized(*weft.reference.quantize_fp8(x))


ROWS = {
    "bf16": (lambda x: x, {}),
    "fp8": (fp8, {}),
    "ue8m0": (lambda x: weft.Quantized(*weft.reference.quantize_fp8(x, ue8m0=True)), {}),
    "bytes": (lambda x: weft.Quantized(x.view(torch.uint8)), {}),
    "no scales": (lambda x: weft.Quantized(x.view(torch.uint8), torch.empty(len(x), 0)), {}),
    "quantize": (lambda x: x, {"quantize": "fp8"}),
    "powers of two": (lambda x: x, {"quantize": "fp8_pow2"}),
}


def parts_of(r: weft.Dispatched, y: Tensor) -> list[Tensor]:
    num_rows = int(r.num_rows) if r.handle.layout != "masked" else None
    rows = [r.x] if isinstance(r.x, Tensor) else [part for part in (r.x.data, r.x.scales) if part is not None]
    if num_rows is not None:
        ids = [] if r.topk_idx is None else [r.topk_idx]
        rows = [part[:num_rows] for part in (*rows, r.topk_weights, *ids)]
    else:
        filled = torch.arange(r.topk_weights.shape[1]) < r.num_tokens_per_expert.unsqueeze(-1)
        rows = [part[filled] for part in (*rows, r.topk_weights)]
    return [*rows, r.handle.sizes.clone(), y]


def call_again_and_again(
    state: RankState, rows: str, layout: str, mode: str, heap_bytes: int | None, capacity: int | None
) -> None:
    make_rows, options = ROWS[rows]
    x, ids, weights = inputs(state.rank)
    with make(state, heap_bytes=heap_bytes) as ep:
        results = []
        for _ in range(4):
            r = ep.dispatch(make_rows(x), ids, weights, layout=layout, capacity=capacity, mode=mode, **options)
            y = ep.combine(torch.ones(*r.handle.rows_shape, HIDDEN, dtype=torch.bfloat16), r.handle, mode=mode)
            results.append((r, [part.clone() for part in parts_of(r, y)]))
        first, want = results[0]
        for r, got in results[1:]:
            for mine, theirs in zip(got, want, strict=True):
                assert mine.dtype == theirs.dtype
                assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
            assert (r.handle.num_tokens, r.handle.call) == (first.handle.num_tokens, first.handle.call)
            assert (r.topk_idx is None) == (r.handle.topk_idx is None) == (layout != "rank_major")
            assert r.handle.rows_shape == r.topk_weights.shape[: len(r.handle.rows_shape)]
        assert ep.stats()["num_dispatches"] == ep.stats()["num_combines"] == len(results)


MOST = 2 * TOKENS * TOP_K  # rows
SIZES = [("rank_major", MOST), ("rank_major", None), ("expert_major", MOST), ("expert_major", None), ("masked", MOST)]
# (layout, capacity), mode, heap_bytes: all of them for plain rows, for other rows each layout in some mode. Kernels are
# compiled for each kind of rows, layout and mode.
PLAIN = [*itertools.product(SIZES, ("throughput", "latency"), (None, 0))]
OTHERS = [(SIZES[1], "latency", None), (SIZES[3], "throughput", None), (SIZES[4], "latency", 0)]

LONG = ("ue8m0", "bytes", "no scales")


@pytest.mark.parametrize("rows", [pytest.param(rows, marks=[pytest.mark.long] * (rows in LONG)) for rows in ROWS])
def test_a_plan_gives_the_same_bits(pool: Any, learnt: list[str], rows: str) -> None:
    for (layout, capacity), mode, heap_bytes in PLAIN if rows == "bf16" else OTHERS:
        learnt.clear()
        of_case = (rows, layout, mode, heap_bytes, capacity)
        pool.run(2, lambda state, given: call_again_and_again(state, *given), [of_case] * 2)
        assert sorted(learnt) == ["combine"] * 2 + ["dispatch"] * 2, (of_case, "once a rank")


def ask_for_few(state: RankState, asked: dict[int, int]) -> None:
    x, ids, weights = inputs(state.rank)
    for mode, (layout, capacity) in itertools.product(("throughput", "latency"), SIZES):
        with make(state) as ep:
            for _ in range(3):
                asked[threading.get_ident()] = 0
                r = ep.dispatch(x, ids, weights, layout=layout, capacity=capacity, mode=mode)
                ep.combine(torch.ones(*r.handle.rows_shape, HIDDEN, dtype=torch.bfloat16), r.handle, mode=mode)
            before = asked[threading.get_ident()]
            assert before == (mode == "throughput"), (mode, layout, capacity, "rows of the heap alone")
            assert r.topk_weights.shape[: len(r.handle.rows_shape)] == r.handle.rows_shape
            assert asked[threading.get_ident()] > before
            for made in (r, r.handle):
                with pytest.raises(AttributeError, match="no attribute 'topk_ids'"):
                    _ = made.topk_ids  # type: ignore[union-attr]


def test_what_nobody_asks_for_is_no_tensor(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[int, int] = {}  # tensors made of memory of the GPU, by thread
    real = emulated_gpu._REAL_FROM_DLPACK

    def spy(capsule: Any) -> Tensor:
        asked[threading.get_ident()] = asked.get(threading.get_ident(), 0) + 1
        return real(capsule)

    monkeypatch.setattr(emulated_gpu, "_REAL_FROM_DLPACK", spy)
    pool.run(2, lambda state, _: ask_for_few(state, asked), [None] * 2)


def refuse(state: RankState) -> None:
    """What a plan knows is right; then each argument in turn is not."""
    x, ids, weights = inputs(state.rank)
    options: dict[str, Any] = {"capacity": 16, "mode": "throughput"}
    with make(state) as ep, make(state) as other:
        for _ in range(3):
            r = ep.dispatch(x, ids, weights, **options)
            y = torch.ones(*r.handle.rows_shape, HIDDEN, dtype=torch.bfloat16)
            ep.combine(y, r.handle)
        wrong: list[tuple[Any, ...]] = [
            (x[:, :64], ids, weights), (x.float(), ids, weights), (x, ids[:2], weights), (x, ids.short(), weights),
            (x, ids, weights.double()), (x, ids, weights[:, :1]), (x, None, weights), (None, ids, weights),
            (x.repeat(3, 1), ids.repeat(3, 1), weights.repeat(3, 1)), (x, ids, weights[:2]), (x[:2], ids, weights),
            (x.to_sparse(), ids, weights), (x.to("meta"), ids, weights), (x, ids.to("meta"), weights),
        ]  # fmt: skip
        for args in wrong:
            with pytest.raises(weft.InvalidArgument):
                ep.dispatch(*args, **options)
        for name, value in {
            "capacity": 16.0, "alignment": True, "layout": "other", "num_sms": 0, "deadline_s": -1.0, "window": 2,
            "quantize": [], "max_tokens": 9, "mode": "slow", "scale_layout": "column_major", "async_op": 1,
            "zero_holes": 1, "host_counts": 1,
        }.items():  # fmt: skip
            with pytest.raises(weft.InvalidArgument):
                ep.dispatch(x, ids, weights, **{**options, name: value})
        gone = [each.clone() for each in (x, ids, weights, weights.bfloat16(), y, torch.ones(16))]
        ep.dispatch(x, ids, weights.bfloat16(), **options)  # there is a plan
        ep.combine(y, r.handle, side=gone[5])
        for each in gone:
            each.untyped_storage().resize_(0)
        for args in ((gone[0], ids, weights), (x, gone[1], weights), (x, ids, gone[2]), (x, ids, gone[3])):
            with pytest.raises(weft.InvalidArgument, match="has no memory: its storage was freed"):
                ep.dispatch(*args, **options)
        for bad, named in ((gone[4], {}), (y, {"side": gone[5]})):
            with pytest.raises(weft.InvalidArgument, match="has no memory: its storage was freed"):
                ep.combine(bad, r.handle, **named)
        for bad in (y[:-1], y.int(), y.to_sparse(), y.to("meta"), None):
            with pytest.raises(weft.InvalidArgument):
                ep.combine(bad, r.handle)
        with pytest.raises(weft.InvalidState, match="another ExpertParallel"):
            other.combine(y, r.handle)
        with pytest.raises(weft.InvalidArgument):
            ep.combine(y, r.handle, window=1)
        ep.close()
        for call in (lambda: ep.dispatch(x, ids, weights, **options), lambda: ep.combine(y, r.handle)):
            with pytest.raises(weft.InvalidState, match="closed"):
                call()


def test_a_plan_lets_nothing_pass(pool: Any) -> None:
    pool.run(2, lambda state, _: refuse(state), [None] * 2)


def refuse_natively(state: RankState) -> None:
    refused = [""]

    def refuse(name: str, args: tuple[Any, ...]) -> None:
        if name in refused:
            raise weft.InvalidArgument("of the native module")

    x, ids, weights = inputs(state.rank)
    options: dict[str, Any] = {"capacity": 16, "mode": "throughput"}
    with make(state) as ep:
        window = ep.calls.windows[0]
        window.native = emulated_gpu.Noting(window.native, refuse)
        for _ in range(4):
            r = ep.dispatch(x, ids, weights, **options)
            y = torch.ones(*r.handle.rows_shape, HIDDEN, dtype=torch.bfloat16)
            ep.combine(y, r.handle)
        refused += ["dispatch_first", "combine_rows"]
        for call in (lambda: ep.dispatch(x, ids, weights, **options), lambda: ep.combine(y, r.handle)):
            state.comm._has_refused = False
            with pytest.raises(weft.InvalidArgument, match="of the native module") as caught:
                call()
            assert not any(entry.name.startswith("_learn") for entry in caught.traceback)
            assert state.comm._has_refused


def test_the_peers_are_told_of_a_refusal_along_a_plan(pool: Any) -> None:
    pool.run(2, lambda state, _: refuse_natively(state), [None] * 2)


def change_what_is_not_in_the_plan(state: RankState) -> None:
    """Strides, alignment and gradients differ between calls of a plan."""
    x, ids, weights = inputs(state.rank)
    with make(state) as ep:

        def call(x: Tensor, ids: Tensor = ids) -> Tensor:
            r = ep.dispatch(x, ids, weights, capacity=16, mode="throughput")
            rows = r.x
            assert isinstance(rows, Tensor)
            return ep.combine(rows, r.handle, mode="throughput")  # type: ignore[no-any-return]

        want = call(x)
        for _ in range(2):
            assert torch.equal(call(x), want)
        by_column = x.t().contiguous().t()
        shifted = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
        for other in (by_column, shifted, torch._neg_view(-x)):
            assert torch.equal(call(other), want)
        assert torch.equal(call(x, ids.int()), want)
        with torch.enable_grad():
            tracked = call(x.clone().requires_grad_())
        assert tracked.requires_grad
        assert torch.equal(tracked, want)


def test_what_differs_between_calls_of_a_plan(pool: Any) -> None:
    pool.run(2, lambda state, _: change_what_is_not_in_the_plan(state), [None] * 2)


def send_other_numbers(state: RankState, mode: str) -> None:
    """Exact sizes, of which one plan sees many; outputs that do not fit are refused in between."""
    x, _, weights = inputs(state.rank)
    with make(state) as ep:
        for number in range(1, 3 * TOKENS):
            here = 1 + (number + state.rank) % TOKENS  # tokens, another number each time
            ids = torch.full((here, TOP_K), -1)
            ids[: number % (here + 1), 0] = torch.arange(number % (here + 1)) % EXPERTS
            r = ep.dispatch(x[:here], ids, weights[:here], mode=mode)
            assert isinstance(r.x, Tensor)
            assert len(r.x) == int(r.num_rows) == len(r.topk_weights) == r.handle.rows_shape[0]
            for bad in (r.x.new_ones(len(r.x) + 1, HIDDEN), r.x.new_ones(1, len(r.x), HIDDEN)):
                with pytest.raises(weft.InvalidArgument):
                    ep.combine(bad, r.handle)
            y = ep.combine(r.x, r.handle)
            assert torch.equal(y, torch.where(ids[:, :1] >= 0, x[:here], 0))


@pytest.mark.parametrize("mode", ["throughput", "latency"])
def test_exact_sizes_differ_between_calls_of_a_plan(pool: Any, learnt: list[str], mode: str) -> None:
    pool.run(2, lambda state, _: send_other_numbers(state, mode), [None] * 2)
    assert sorted(learnt) == ["combine"] * 2 + ["dispatch"] * 2


def send_few_rows_of(state: RankState, dtype: torch.dtype) -> None:
    """So few that they are copied from where there was room for all."""
    ids = torch.full((TOKENS, TOP_K), -1)
    ids[0, 0] = 0
    data = torch.arange(TOKENS * HIDDEN).remainder(251).to(torch.uint8).view(TOKENS, HIDDEN)
    with make(state) as ep:
        for _ in range(4):
            r = ep.dispatch(weft.Quantized(data.view(dtype)), ids, mode="latency")
            assert isinstance(r.x, weft.Quantized)
            assert r.x.data.dtype == dtype
            want = data[:1].expand(state.comm.num_ranks if state.rank == 0 else 0, HIDDEN)
            assert torch.equal(r.x.data.view(torch.uint8), want)


def test_few_rows_of_exact_sizes(pool: Any) -> None:
    for dtype in (torch.uint8, torch.float8_e4m3fn, torch.int4):  # torch can't copy the last
        pool.run(2, lambda state, given: send_few_rows_of(state, given), [dtype] * 2)


def meet_what_only_exact_sizes_meet(state: RankState, way: str) -> None:
    x, ids, weights = inputs(state.rank)
    with make(state) as ep:
        choose_way(ep, way)
        for _ in range(4):
            ep.dispatch(x, ids, weights, mode="throughput")
        bad = ids.clone()
        bad[2, 1] = EXPERTS + 7
        ep.dispatch(x, bad, weights, mode="throughput")
        with pytest.raises(weft.InvalidArgument, match=f"the first {EXPERTS + 7} at token 2, pick 1"):
            ep.dispatch(x, ids, weights, mode="throughput")
        ep.dispatch(x, ids, weights, mode="throughput")
        graph = emulated_gpu.Graph()
        with graph.record(), pytest.raises(weft.InvalidArgument, match="while a CUDA graph is captured"):
            ep.dispatch(x, ids, weights, mode="throughput")
        graph.destroy()


@pytest.mark.parametrize("way", WAYS)
def test_what_only_exact_sizes_meet(pool: Any, way: str) -> None:
    pool.run(2, meet_what_only_exact_sizes_meet, [way] * 2)
