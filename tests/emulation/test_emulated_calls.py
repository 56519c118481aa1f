"""Guards against wrong words between Python, the host code and the kernels: calls of the Python API run the real host
code and the real kernels on one emulated GPU, and are compared bit for bit with weft.reference.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated_gpu import EmulatedRanks, Graph
from kernels import Mutant
from order_cases import checked_orders
from property_cases import IDS
from test_emulated_dispatch import OWN_TYPE
from test_property import checked, checked_gradients, with_call

import weft
from pool import RankFailed, RankState
from weft import reference

LAYOUTS = ("rank_major", "expert_major", "masked")
PAIR: dict[str, Any] = {"tokens": (5, 17), "biases": ("row", "none"), "ids_are_int64": (True, False)}


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """They share one GPU."""
    return EmulatedRanks(monkeypatch)


def of_two(**changed: Any) -> Any:
    """A case of two ranks."""
    return replace(with_call(**(PAIR | changed)), num_ranks=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(ranks: Any, layout: str) -> None:
    """Dispatch, its repetition and combine, of heap tensors too."""
    checked(ranks, of_two(layout=layout, alignment=4))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_tokens_and_capacities(ranks: Any, layout: str) -> None:
    """Every kind of ids, ranks without tokens, capacities to the row, ids out of range that are told later."""
    cases: list[dict[str, Any]] = [{"ids": ids} for ids in IDS]
    cases += [{"tokens": (0, 0)}, {"tokens": (0, 1), "ids": "one_expert"}, {"check_late": True}]
    cases += [{"capacity": capacity} for capacity in ("met", "exceeded", "ample", "zero")]
    for changed in cases:
        checked(ranks, of_two(layout=layout, alignment=4, **changed))


def counts_of_exact_calls(state: RankState, seed: int) -> None:
    """As the kernel tells the host."""
    x, ids, weights = inputs(state.rank, seed)
    with weft.ExpertParallel(state.comm, num_experts=6, top_k=4, hidden=48, max_tokens_per_rank=17) as ep:
        for layout, mode in itertools.product(LAYOUTS[:2], ("throughput", "latency")):
            r = ep.dispatch(x, ids, weights, layout=layout, mode=mode, host_counts=True)
            want = r.num_tokens_per_expert.tolist()
            assert r.handle.__dict__["counts"] == tuple(want) != (0, 0, 0)
            assert r.num_tokens_per_expert_list == want
            repeated = ep.dispatch(x, handle=r.handle)
            assert repeated.num_tokens_per_expert_list == want
        assert "counts" not in ep.dispatch(x, ids, weights).handle.__dict__


@pytest.mark.long
def test_counts_that_the_host_learns_with_the_number_of_rows(ranks: Any) -> None:
    """As the kernels of each layout and mode that has exact sizes tell them."""
    ranks.run(2, counts_of_exact_calls, [3, 3])


@pytest.mark.parametrize("mode", ["throughput", "latency"])
@pytest.mark.long
def test_counts_where_the_heap_has_no_room(ranks: Any, mode: str) -> None:
    """They come with the landing's rows, too."""
    call: dict[str, Any] = {"layout": "expert_major", "alignment": 4, "mode": mode, "repeat": None, "side": None}
    checked(ranks, replace(of_two(host_counts=True, heap_output=False, **call), heap="none"))


def test_old_results_survive_later_calls(ranks: Any) -> None:
    """They are looked at again when all calls have been made."""
    call = of_two(alignment=4).calls[0]
    several = tuple(
        replace(call, seed=n, layout=LAYOUTS[n % 3], capacity="met" if n % 3 == 2 else None, tokens=(n, 17))
        for n in range(9)
    )
    checked(ranks, replace(of_two(), calls=several))


def call_asynchronously(state: RankState, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and sums of a call on the window's own stream, and of the same call on the caller's."""
    x, ids, weights = inputs(state.rank, seed)
    with weft.ExpertParallel(state.comm, num_experts=6, top_k=4, hidden=48, max_tokens_per_rank=17) as ep:
        r = ep.dispatch(x, ids, weights, capacity=40, async_op=True)
        r.event.wait()
        y, event = ep.combine(r.x, r.handle, async_op=True)
        event.synchronize()
        want = ep.dispatch(x, ids, weights, capacity=40)
        return y, ep.combine(want.x, want.handle)


def test_asynchronous_calls(ranks: Any) -> None:
    """On a stream of the window."""
    for y, want in ranks.run(2, call_asynchronously, [3, 3]):
        assert torch.equal(y, want)


def test_results_without_room_in_the_heap(ranks: Any) -> None:
    """They are staged, and unloaded."""
    checked(ranks, replace(of_two(), heap="none"))
    checked(ranks, replace(of_two(layout="expert_major", alignment=4), heap="full_on_one"))


@pytest.mark.long
def test_rows_in_fp8(ranks: Any) -> None:
    """Quantised by the kernel, there and back; given as FP8, and opaque ones."""
    checked(ranks, of_two(rows="fp8", wire="fp8", side=None))
    for layout, rows in zip(LAYOUTS, ("quantized_ue8m0", "bytes_with_side", "quantized_fp8"), strict=True):
        wire = "fp8" if layout != "rank_major" else None
        checked(ranks, of_two(layout=layout, rows=rows, wire=wire, repeat="quantized", heap_output=False))


@pytest.mark.long
def test_column_major_scales(ranks: Any) -> None:
    """Made so by the kernel, by the host, and given so. 656 values have six scales: one int32 of UE8M0 is not full."""
    for changed in (
        {"layout": "masked", "rows": "fp8_ue8m0", "mode": "latency", "scale_layout": "column_major"},
        {"layout": "expert_major", "rows": "quantized_fp8", "scale_layout": "column_major"},
        {"layout": "rank_major", "rows": "quantized_fp8", "mode": "staged", "capacity": "ample", "columns_given": True},
    ):
        checked(ranks, replace(of_two(side=None, repeat=None, heap_output=False, **changed), hidden=656))


def test_holes_that_nobody_needs(ranks: Any) -> None:
    """They keep what lay there."""
    checked(ranks, of_two(layout="expert_major", alignment=16, zero_holes=False))


@pytest.mark.long
def test_wide_rows_travel_in_pieces(ranks: Any) -> None:
    """fp32 rows of a bf16 object and opaque rows with side data are wider than a row of the landing."""
    case = of_two(repeat="float32", output_dtype="float32", side=None, heap_output=False)
    checked(ranks, replace(case, hidden=2064))
    checked(ranks, replace(of_two(rows="bytes_with_side", side=None), hidden=8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_batches(ranks: Any, layout: str) -> None:
    """In one go and in halves."""
    for mode in ("latency", "staged", "mixed"):
        checked(ranks, of_two(layout=layout, mode=mode, capacity="ample", side=None))


@pytest.mark.long
def test_sums_of_domains(ranks: Any) -> None:
    """Of two ranks and of one: rows as they are, sums of picks in FP8, small batches, the gradient of x."""
    three: dict[str, Any] = {"tokens": (5, 0, 17), "biases": ("row", "none", "full"), "ids_are_int64": (True,) * 3}
    for changed in (
        {}, {"layout": "expert_major", "wire": "fp8", "side": None},
        {"mode": "latency", "wire": "fp8", "capacity": "ample", "side": None},
    ):  # fmt: skip
        checked(ranks, replace(with_call(**(three | changed)), num_ranks=3, sum_domain=2))
    checked_gradients(ranks, replace(with_call(**three), num_ranks=3, sum_domain=2))


def test_one_rank_alone(ranks: Any) -> None:
    """Nobody to wait for."""
    checked(ranks, replace(with_call(layout="expert_major", tokens=(40,), biases=("full",)), num_ranks=1))


def test_gradients(ranks: Any) -> None:
    """With the kernel that makes those of a weighted combine; rows beyond the last are zero."""
    checked_gradients(ranks, of_two(layout="expert_major"))
    for capacity in ("ample", "exceeded"):
        checked_gradients(ranks, of_two(layout="masked", capacity=capacity))
    checked_gradients(ranks, of_two(layout="rank_major", weighted=False, capacity="ample"))


def replay(state: RankState, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A graph of a dispatch and a combine: what each replay gives, of inputs that change."""
    ep = weft.ExpertParallel(state.comm, num_experts=6, top_k=4, hidden=48, max_tokens_per_rank=17)
    x, ids, weights = inputs(state.rank, seed)
    graph, seen = Graph(), []
    r = ep.dispatch(x, ids, weights, capacity=40)  # kernels are compiled
    ep.combine(r.x, r.handle)
    with graph.record():
        r = ep.dispatch(x, ids, weights, capacity=40)
        y = ep.combine(r.x, r.handle)
    for turn in range(3):
        for mine, new in zip((x, ids, weights), inputs(state.rank, seed + turn), strict=True):
            mine.copy_(new)
        graph.replay()
        assert isinstance(r.x, torch.Tensor)
        seen.append((r.x[: int(r.num_rows)].clone(), y.clone()))
    state.comm.meet(10)
    graph.destroy()
    ep.check()
    ep.close()
    return seen


def inputs(rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a rank: x, ids, weights."""
    generator = torch.Generator().manual_seed(2 * seed + rank)
    x = torch.randn(9, 48, generator=generator).bfloat16()
    return x, torch.randint(-1, 6, (9, 4), generator=generator), torch.rand(9, 4, generator=generator)


def test_graphs_are_replayed(ranks: Any) -> None:
    """With other inputs and another routing each time."""
    seen = ranks.run(2, replay, [7, 7])
    for turn in range(3):
        xs, ids, weights = (list(each) for each in zip(*(inputs(rank, 7 + turn) for rank in range(2)), strict=True))
        wanted = reference.dispatch(xs, ids, weights, num_experts=6, capacity=40)
        sums = reference.combine([each.x for each in wanted], wanted)
        for rank in range(2):
            x, y = seen[rank][turn]
            want = wanted[rank].x
            assert isinstance(want, torch.Tensor)
            assert torch.equal(x, want[: len(x)])
            assert len(x) == int(wanted[rank].num_rows)
            assert torch.equal(y, sums[rank])


def in_another_order(state: RankState, _: object) -> list[str]:
    """Two layers of equal shape: each rank calls another one, eagerly and in a graph; then both call the same."""
    shape: dict[str, Any] = {"num_experts": 6, "top_k": 4, "hidden": 48, "max_tokens_per_rank": 17}
    layers = [weft.ExpertParallel(state.comm, **shape) for _ in range(2)]
    x, ids, weights = inputs(state.rank, 7)
    r = layers[0].dispatch(x, ids, weights, capacity=40)  # kernels are compiled
    wanted = layers[0].combine(r.x, r.handle)
    mine, graph, texts, kept = layers[state.rank], Graph(), [], []

    def refused() -> None:
        with pytest.raises(weft.InvalidArgument, match="ranks called different things") as caught:
            mine.check()
        texts.append(str(caught.value))
        again = layers[0].combine(r.x, r.handle)
        layers[0].check()
        assert torch.equal(again, wanted)

    mine.dispatch(x, ids, weights, capacity=40)
    refused()
    with graph.record():
        kept.append(mine.dispatch(x, ids, weights, capacity=40))  # what each replay writes to, a refused one too
    for _ in range(2):
        graph.replay()
        refused()
    state.comm.meet(60)
    graph.destroy()
    for ep in layers:
        ep.close()
    return texts


def test_layers_in_another_order(ranks: Any) -> None:
    """Every rank is told both objects; the calls behind it are right."""
    for rank, texts in enumerate(ranks.run(2, in_another_order, [None, None])):
        assert len(texts) == 3
        for text in texts:
            assert f"of ExpertParallel {rank}, rank {1 - rank} " in text
            assert f"of ExpertParallel {1 - rank}" in text


WRONG_PLACE = Mutant(
    "the last 16 bytes of a row are not sent",
    "weft/ptx/bulk.cuh",
    "self().store(static_cast<u8*>(global), static_cast<const u8*>(shared), num_bytes);",
    "self().store(static_cast<u8*>(global), static_cast<const u8*>(shared), num_bytes - 16);",
)


@pytest.mark.parametrize("mutant", [OWN_TYPE, WRONG_PLACE], ids=lambda mutant: mutant.name)
@pytest.mark.long
def test_mistakes_of_kernels_are_found(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    """Behind Python and the host code too."""
    ranks: Any = EmulatedRanks(monkeypatch, mutant)
    with pytest.raises((AssertionError, RankFailed)):
        checked(ranks, of_two(repeat=None, side=None, heap_output=False))


def test_what_a_block_finds_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank, at once."""
    waits_for_nothing = Mutant(
        "nobody waits for the last copies",
        "weft/kernels/dispatch/stages.cuh",
        "ptx::bulk_wait_all();\n    ptx::fence_proxy_async_global();\n    __syncwarp();",
        "__syncwarp();",
    )
    ranks: Any = EmulatedRanks(monkeypatch, waits_for_nothing)
    with pytest.raises(RankFailed, match=r"ended without waiting for .* bulk stores"):
        checked(ranks, of_two(repeat=None, side=None, heap_output=False))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_orders_of_sums(ranks: Any, dtype: torch.dtype) -> None:
    """By last pick, and by pick with weights of the owner."""
    ranks.run(2, checked_orders, [dtype] * 2)


def weighted_by_owner(state: RankState, staged: bool) -> None:
    """The sums by pick, bit for bit. The caller overwrites its weights as soon as the call has returned."""
    x, ids, _ = inputs(state.rank, 3)
    x, ids = (x[:0], ids[:0]) if state.rank else (x[:8], ids[:8])
    with weft.ExpertParallel(state.comm, num_experts=6, top_k=4, hidden=48, max_tokens_per_rank=17) as ep:
        for turn in range(2):
            r = ep.dispatch(x, ids, layout="expert_major", mode="latency" if staged else "throughput", max_tokens=8)
            weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(turn))
            given = weights.clone()
            sent = ep.combine(r.x, r.handle, order="pick", weights=given, staged=staged)
            given.fill_(torch.nan)
            y, want = sent.wait() if staged else sent, torch.zeros(len(x), 48)
            for k in range(4):
                want = torch.where((ids[:, k] >= 0)[:, None], want + weights[:, k, None] * x.float(), want)
            assert torch.equal(y, want.bfloat16())
        ep.check()


@pytest.mark.parametrize("staged", [False, True])
def test_weights_of_the_owner(ranks: Any, staged: bool) -> None:
    """A rank without tokens has none; those of a staged call may be overwritten before it is waited for."""
    ranks.run(2, weighted_by_owner, [staged] * 2)
