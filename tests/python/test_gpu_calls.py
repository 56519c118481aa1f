"""Guards against wrong streams, lifetimes and kinds of calls between the API and the windows of GPUs, on one emulated
GPU. Every word of such calls: tests/emulation/test_emulated_calls.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_gpu import IDLE, EmulatedRanks, Noting, Stream

import weft
from pool import RankState
from weft import _load
from weft.call.gpu_calls import GpuCalls
from weft.call.streams import WindowStreams


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ranks on the emulated GPU."""
    return EmulatedRanks(monkeypatch)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same, with kernels that do nothing."""
    return EmulatedRanks(monkeypatch, IDLE)


def make(state: RankState) -> weft.ExpertParallel:
    return weft.ExpertParallel(state.comm, num_experts=4, top_k=2, hidden=128, max_tokens_per_rank=8, num_windows=2)


def call_asynchronously(state: RankState, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    ep = make(state)
    x = torch.arange(4 * 128).view(4, 128).bfloat16() + state.rank
    r = ep.dispatch(x, torch.tensor([[0, 1], [1, 2], [3, -1], [0, 0]]), async_op=True, window=1)
    r.event.wait()
    y, event = ep.combine(r.x, r.handle, async_op=True, window=1)
    event.synchronize()
    assert event.query()
    r.record_stream(torch.cuda.current_stream())  # type: ignore[no-untyped-call]
    assert "windows" in ep.stats()
    assert ep.stats()["num_dispatches"] == 1
    ep.close()
    return x, y


def warm_up_for_rows_of_all_kinds(state: RankState, seed: int) -> tuple[list[Any], list[Any]]:
    """-> type and number of rows of each dispatch; of each combine whether there is side, and `empty_output`."""
    ep = make(state)
    dispatches, combines, outputs = [], [], []
    dispatch, combine, empty_output = ep.dispatch, ep.combine, ep.empty_output

    def noted_dispatch(x: Any, *args: Any, **options: Any) -> Any:
        dispatches.append((type(x).__name__, len(getattr(x, "data", x))))
        return dispatch(x, *args, **options)

    def noted_combine(y: Any, *args: Any, **options: Any) -> Any:
        combines.append((options["side"] is not None, y is outputs[-1]))
        return combine(y, *args, **options)

    def noted_output(dispatched: weft.Dispatched) -> torch.Tensor:
        outputs.append(empty_output(dispatched))
        return outputs[-1]

    ep.dispatch, ep.combine, ep.empty_output = noted_dispatch, noted_combine, noted_output  # type: ignore[method-assign]
    rows = weft.Quantized(torch.ones(3, 64, dtype=torch.uint8), torch.ones(3, 4))
    by_column = weft.Quantized(rows.data, torch.ones(4, 4).T[:3])
    for x in (rows, by_column, weft.Quantized(rows.data), torch.ones(3, 128).bfloat16()):
        ep.warmup(x=x, side=True, layout="expert_major", capacity=4)
    with pytest.raises(weft.InvalidArgument, match="x is a list"):
        ep.warmup(x=[1.0])  # type: ignore[arg-type]
    with pytest.raises(weft.InvalidArgument, match="multiples of 16"):
        ep.warmup(x=weft.Quantized(torch.ones(3, 8, dtype=torch.uint8)))
    ep.close()
    return dispatches, combines


def test_warmup_for_rows_of_all_kinds(idle: Any) -> None:
    """Dispatch, its repetition and both combines in each window, with the kind of rows that it is shown, but none."""
    for dispatches, combines in idle.run(2, warm_up_for_rows_of_all_kinds, [0, 0]):
        refused = [("list", 1), ("Quantized", 0)]
        assert dispatches == [("Quantized", 0)] * 12 + [("Tensor", 0)] * 4 + refused
        assert combines == [(True, True), (True, False)] * 8


def warm_up_for_other_outputs(state: RankState, seed: int) -> tuple[list[torch.dtype], list[torch.dtype]]:
    """-> dtypes of the rows of each dispatch and each combine."""
    ep = make(state)
    dispatches, combines = [], []
    dispatch, combine = ep.dispatch, ep.combine

    def noted_dispatch(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        dispatches.append(x.dtype)
        return dispatch(x, *args, **options)

    def noted_combine(y: torch.Tensor, *args: Any, **options: Any) -> Any:
        combines.append(y.dtype)
        return combine(y, *args, **options)

    ep.dispatch, ep.combine = noted_dispatch, noted_combine  # type: ignore[method-assign]
    ep.warmup(output_dtype=torch.float32, layout="expert_major", capacity=4)
    ep.close()
    return dispatches, combines


def test_warmup_for_outputs_of_another_dtype(idle: Any) -> None:
    """In each window, and their gradients repeat the dispatch. The heap's outputs have the object's dtype: they lie in
    ordinary tensors.
    """
    for dispatches, combines in idle.run(2, warm_up_for_other_outputs, [0, 0]):
        assert dispatches == [torch.bfloat16, torch.bfloat16, torch.float32] * 2
        assert combines == [torch.float32] * 2


def warm_up_staged(state: RankState, seed: int) -> None:
    ep = make(state)
    ep.warmup(output_dtype=torch.float32, wire="fp8", staged=True, layout="masked", capacity=4)
    ep.close()


def test_warmup_of_staged_calls_repeats_no_wide_rows(idle: Any) -> None:
    """Staged calls have no gradients to send, and refuse rows that travel in pieces."""
    idle.run(2, warm_up_staged, [0, 0])


def test_asynchronous_calls(pool: Any) -> None:
    for x, y in pool.run(2, call_asynchronously, [0, 0]):
        ranks = torch.tensor([1, 2, 1, 1]).view(4, 1)  # that each token reaches
        assert torch.equal(y, (x.float() * ranks).bfloat16())


def combine_and_repeat_asynchronously(state: RankState, seed: int) -> weft.Handle:
    ep = make(state)
    r = ep.dispatch(torch.zeros(4, 128).bfloat16(), torch.tensor([[0, 1], [1, 2], [3, -1], [0, 0]]))
    ep.combine(r.x, r.handle, async_op=True)
    ep.dispatch(torch.zeros(4, 128).bfloat16(), handle=r.handle, async_op=True).event.wait()
    return r.handle


def test_asynchronous_calls_keep_the_plans_they_read(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or whoever lets go of the handle gives their place to the next tensor of the caller's stream."""
    kept: list[int] = []

    def record(calls: GpuCalls, things: Any, stream: Any, also: Any = (), other: Any = None) -> None:
        for thing in (*things, *also):
            if isinstance(thing, weft.Handle):
                kept.extend(thing._places())
            elif thing is not None:
                kept.append(thing.data_ptr())

    monkeypatch.setattr(GpuCalls, "record_stream", record)
    for handle in pool.run(2, combine_and_repeat_asynchronously, [0, 0]):
        for plan in (handle.send_plan, handle.recv_plan):
            assert kept.count(plan.data_ptr()) >= 2, "by combine and by dispatch"
        assert handle.sizes.data_ptr() in kept


def test_whose_heap_a_tensor_lies_in_is_told_of_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is told of what lies in no heap of Weft."""
    heaps: list[Any] = []
    torchs: list[Any] = []

    def record(address: int, stream: int) -> bool:
        heaps.append((address, stream))
        return address < 3000

    monkeypatch.setattr(_load.native(), "gpu_record_stream", record)
    tensors = [
        SimpleNamespace(is_cuda=True, numel=lambda: 1, data_ptr=lambda at=at: at, record_stream=torchs.append)
        for at in (1003, 3000)
    ]
    one, other = (SimpleNamespace(cuda_stream=number) for number in (7, 8))
    GpuCalls.record_stream(SimpleNamespace(), tensors, one, tensors, other)  # type: ignore[arg-type]
    assert (heaps, torchs) == ([(1003, 7), (3000, 7), (1003, 8), (3000, 8)], [one, other])


def read_unaligned_and_strided(state: RankState, seed: int) -> torch.Tensor:
    """Contiguous but not at a multiple of 16 bytes; columns of a wider tensor; column-major scales."""
    ep = make(state)
    ids = torch.tensor([[0, 1], [1, 2], [3, -1], [0, 0]])
    base = torch.randn(4 * 128 + 3, generator=torch.Generator().manual_seed(seed)).bfloat16()
    odd = base[3:].view(4, 128)
    wide = torch.cat([odd, odd], dim=1)[:, 128:]
    first = ep.dispatch(odd, ids)
    assert torch.equal(first.x, ep.dispatch(wide, handle=first.handle).x)
    scales = torch.randn(1, 4).t()
    quantised = weft.Quantized(odd.view(torch.uint8)[:, :128].contiguous(), scales)
    received = ep.dispatch(quantised, handle=first.handle).x
    assert isinstance(received, weft.Quantized)
    assert received.scales is not None
    assert received.scales.shape == (len(first.x), 1)
    out = torch.empty(4 * 128 + 1, dtype=torch.bfloat16)[1:].view(4, 128)
    written: list[int] = []
    window = ep.calls.windows[0]
    window.native = Noting(
        window.native, lambda name, args: written.append(args[9] % 16) if "combine" in name else None
    )
    assert ep.combine(first.x, first.handle, out=out) is out
    assert written == [0]  # the kernel wrote to other memory
    return out - ep.combine(first.x, first.handle)


def test_tensors_that_bulk_copies_can_not_read(pool: Any) -> None:
    for difference in pool.run(2, read_unaligned_and_strided, [1, 2]):
        assert not difference.any()


def take_turns(state: RankState, seed: int) -> list[weft.Quantized]:
    """Equal calls but for the strides of scales."""
    ep = make(state)
    ids = torch.tensor([[0, 1], [1, 2], [3, -1], [0, 0]])
    data = torch.arange(4 * 128).view(4, 128).to(torch.uint8) + seed
    scales = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    column_major = scales.t().contiguous().t()
    given = (column_major, scales, scales, column_major, scales)
    modes = ("throughput", "latency")
    found = [ep.dispatch(weft.Quantized(data, each), ids, capacity=9, mode=mode) for mode in modes for each in given]
    return [each.x for each in found if isinstance(each.x, weft.Quantized)]


def test_scales_by_row_and_by_column_in_turn(pool: Any) -> None:
    for first, *others in pool.run(2, take_turns, [1, 2]):
        assert len(others) == 9
        assert all(torch.equal(each.scales[:4], first.scales[:4]) for each in others)


def test_waiting_covers_the_current_stream(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs may have been launched there, of which a window knows nothing."""
    busy = [True, True, True]
    stream = Stream()
    monkeypatch.setattr(stream, "query", lambda: not busy or not busy.pop(), raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    WindowStreams(torch.device("cuda", 0)).wait()
    assert busy == []


def spoil_results_and_repeat(state: RankState, layout: str) -> list[torch.Tensor]:
    """What later calls with a handle give, and what `overflow` counts, after the caller wrote to its results."""
    ep = weft.ExpertParallel(state.comm, num_experts=4, top_k=2, hidden=128, max_tokens_per_rank=8)
    x = torch.arange(4 * 128).view(4, 128).bfloat16() + state.rank
    ids = torch.tensor([[0, 1], [1, 2], [3, -1], [0, 0]])
    weights = torch.rand(4, 2, generator=torch.Generator().manual_seed(1))
    kept: list[torch.Tensor] = []
    for options in ({}, {"mode": "latency"}, {"async_op": True}, {"mode": "latency", "staged": True}):
        seen = []
        for spoils in (False, True):
            before = int(ep._overflow)
            r = ep.dispatch(x, ids, weights, layout=layout, capacity=3, **options)
            if options.get("async_op"):
                r.event.wait()
            y = r.wait().x.clone()
            dropped = int(r.overflow) - before
            if spoils:
                for part in (r.topk_idx, r.topk_weights, r.num_tokens_per_expert, r.offsets, r.num_rows):
                    if part is not None:
                        part.fill_(1)
            again = ep.dispatch(x, handle=r.handle)
            assert int(again.overflow) - before == 2 * dropped, "a repeated dispatch drops as many"
            z, side = ep.combine(y, r.handle, side=torch.ones(r.handle.rows_shape))
            seen.append((z, side))
        for want, got in zip(*seen, strict=True):
            assert torch.equal(want, got), "the handle has read what the caller wrote to the results"
        kept.append(z)
    x = x.float().requires_grad_().bfloat16()
    before = int(ep._overflow)
    r = ep.dispatch(x, ids, weights, layout=layout, capacity=3)
    dropped = int(r.overflow) - before
    ep.combine(r.x, r.handle).sum().backward()
    assert int(r.overflow) - before == dropped, "a backward counts nothing"
    ep.close()
    return kept


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_results_are_the_callers_own(pool: Any, layout: str) -> None:
    pool.run(2, spoil_results_and_repeat, [layout] * 2)


def test_copies_for_the_caller_follow_a_call_in_halves(pool: Any) -> None:
    pool.run(2, copies_of_a_staged_dispatch, [0, 1])


def copies_of_a_staged_dispatch(state: RankState, seed: int) -> None:
    ep = weft.ExpertParallel(state.comm, num_experts=4, top_k=2, hidden=128, max_tokens_per_rank=8)
    x, ids = torch.ones(4, 128).bfloat16(), torch.tensor([[0, 1], [1, 2], [3, -1], [0, 0]])
    r = ep.dispatch(x, ids, torch.ones(4, 2), layout="masked", capacity=8, staged=True)
    counts, weights = r.num_tokens_per_expert, r.topk_weights  # before they are there
    r.wait()
    want = ep.dispatch(x, ids, torch.ones(4, 2), layout="masked", capacity=8)
    assert torch.equal(counts, want.num_tokens_per_expert)
    for local, count in enumerate(counts.tolist()):
        assert torch.equal(weights[local, :count], torch.ones(count))
    ep.close()
