"""Calls that the native module makes at once (weft/deep_ep/known.py): the same results as the long way, errors that say
the same, and windows that grow behind them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import weft
from weft import deep_ep
from weft.deep_ep.known import Known
from weft.errors import InvalidArgument

HIDDEN, EXPERTS, TOP_K, MOST = 128, 8, 2, 16
_LAID_OUT = ("low latency FP8", "low latency rounded")  # Python lays scales out by column on the cpu engine


def inputs(rank: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids and weights."""
    generator = torch.Generator(device="cpu").manual_seed(100 * rank + num_tokens)
    x = torch.randn(num_tokens, HIDDEN, generator=generator, dtype=torch.float32).to(torch.bfloat16)
    ids = torch.rand(num_tokens, EXPERTS, generator=generator, dtype=torch.float32).topk(TOP_K).indices
    return x, ids, torch.rand(num_tokens, TOP_K, generator=generator, dtype=torch.float32)


Calls = dict[str, tuple[Callable[..., Any], Callable[..., Any]]]


def calls_of(comm: weft.Communicator) -> Calls:
    """Of every dialect: a dispatch of (x, ids, weights), and what is to be equal of its result, sums among it."""
    v1, few = deep_ep.Buffer(comm), deep_ep.Buffer(comm, low_latency_mode=True)
    v2 = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=MOST)
    hybrid = deep_ep.HybridEPBuffer(comm, HIDDEN, MOST, EXPERTS // comm.num_ranks)

    def of_v1(x: Any, ids: Any, weights: Any, **options: Any) -> Any:
        per_rank, _, per_expert, in_rank, _ = v1.get_dispatch_layout(ids, EXPERTS)
        layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        return v1.dispatch(x, topk_idx=ids, topk_weights=weights, **(layout | options))

    def of_few(x: Any, ids: Any, weights: Any, **options: Any) -> Any:
        *made, hook = few.low_latency_dispatch(x, ids, MOST, EXPERTS, **({"use_fp8": False} | options))
        assert (hook is not None) == options.get("return_recv_hook", False)
        if hook is not None:
            hook()
        return *made, hook, ids, weights

    def of_v2(x: Any, ids: Any, weights: Any, **options: Any) -> Any:
        return v2.dispatch(x, ids, weights, num_experts=EXPERTS, **options)

    hooked: dict[str, Any] = {"return_recv_hook": True}
    expanded: dict[str, Any] = {"do_expand": True, "expert_alignment": 4, "do_zero_padding": True}

    def of_hybrid(x: Any, ids: Any, weights: Any) -> Any:
        return hybrid.dispatch_with_permute(
            hidden=x, topk_idx=ids, topk_weights=weights, num_of_experts=EXPERTS, pad_multiple=4
        )

    def seen_of_few(r: Any) -> Any:
        rows, count, handle, *_, ids, weights = r
        data = rows if isinstance(rows, torch.Tensor) else rows[0]
        is_row = torch.arange(data.shape[1], device="cpu")[None] < count[:, None]
        y = torch.where(is_row[..., None], data.float(), 0.0).to(torch.bfloat16)
        again = [few.low_latency_combine(y, ids, weights, handle)[0] for _ in range(3)]
        out = torch.empty_like(again[0])
        return y, count, *again, few.low_latency_combine(y, ids, weights, handle, out=out)[0], *handle

    def seen_of_v2(r: Any) -> Any:
        rows, ids, weights, handle, _ = r
        tables = handle.topk_idx, handle.recv_src_metadata, handle.psum_num_recv_tokens_per_expert, handle.ids
        again = [v2.dispatch(rows_of_source(r), handle=handle, do_zero_padding=True)[0] for _ in range(2)]
        counts = handle.num_recv_tokens_per_expert_list, handle.expert_alignment, handle.do_expand, handle.num_experts
        return rows, ids, weights, *tables, *again, *counts, *(v2.combine(rows, handle)[0] for _ in range(3))

    def rows_of_source(r: Any) -> torch.Tensor:
        return torch.ones((len(r[3].topk_idx), HIDDEN), dtype=torch.bfloat16, device="cpu")

    def seen_of_v1(r: Any) -> Any:
        rows, ids, weights, counts, handle, _ = r
        x = torch.ones((len(handle[4]), HIDDEN), dtype=torch.bfloat16, device="cpu")
        again = [v1.dispatch(x, handle)[0] for _ in range(3)]
        return rows, ids, weights, counts, *handle, *again, *(v1.combine(rows, handle)[0] for _ in range(3))

    def seen_of_hybrid(r: Any) -> Any:
        rows, probs, scales, counts, handle = r
        sums = [hybrid.combine_with_unpermute(hidden=rows, handle=handle)[0] for _ in range(3)]
        return rows, probs, scales, counts, *handle[:9], handle[10], *sums

    return {
        "V1": (of_v1, seen_of_v1),
        "low latency": (of_few, seen_of_few),
        "low latency hook": (lambda *given, **options: of_few(*given, **options, **hooked), seen_of_few),
        "low latency FP8": (lambda *given: of_few(*given, use_fp8=True), seen_of_few),
        "low latency FP8 hook": (lambda *given: of_few(*given, use_fp8=True, round_scale=True, **hooked), seen_of_few),
        "low latency rounded": (lambda *given: of_few(*given, use_fp8=True, round_scale=True), seen_of_few),
        "V2": (of_v2, seen_of_v2),
        "V2 expanded": (lambda *given, **options: of_v2(*given, **expanded, **options), seen_of_v2),
        "Hybrid": (of_hybrid, seen_of_hybrid),
    }


def are_equal(one: Any, two: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.shape == two.shape and one.dtype == two.dtype and torch.equal(one, two)
    return type(one) is type(two) and one == two


@contextlib.contextmanager
def counting(made: list[int]) -> Iterator[None]:
    """Calls that were known, into `made`."""

    def counted(ask: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found = ask(*args)
            made[0] += found is not None
            return found

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("dispatch", "half"):
            patch.setattr(Known, name, counted(getattr(Known, name)))
        yield


def different_results(comm: weft.Communicator) -> list[str]:
    """Dialects whose known calls differ from the first, or were not known."""
    wrong = []
    made = [0]
    with counting(made):
        for name, (dispatch, seen) in calls_of(comm).items():
            given = inputs(comm.rank, 6 + comm.rank)
            first = seen(dispatch(*given))
            made[0] = 0
            later = [seen(dispatch(*given)) for _ in range(6)]
            same = all(all(map(are_equal, first, each)) and len(first) == len(each) for each in later)
            if not same or (made[0] < 2 and name not in _LAID_OUT):
                wrong.append(f"{name}: {same}, {made[0]} known")
    return wrong


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_known_calls_give_the_same(num_ranks: int) -> None:
    assert weft.spawn(different_results, num_ranks, device="cpu") == [[]] * num_ranks


def refusals(comm: weft.Communicator) -> list[str]:
    """Calls that are refused before and behind others like them were made, but not in the same words."""
    wrong = []
    x, ids, weights = inputs(comm.rank, 6)
    bad = {
        "x": (x.float(), ids, weights), "ids of floats": (x, ids.float(), weights),
        "ids of others": (x, ids[:5], weights),
        "weights": (x, ids, weights[:, :1]), "x of others": (x[:5], ids, weights), "no x": (None, ids, weights),
        "no ids": (x, None, weights), "flat": (x, ids.view(-1), weights), "strides": (x.T.contiguous().T, ids, weights),
    }  # fmt: skip

    def words(dispatch: Callable[..., Any], given: tuple[Any, ...]) -> str:
        try:
            dispatch(*given)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    fresh, used = calls_of(comm), calls_of(comm)
    for name, (dispatch, _) in used.items():
        if name == "V1":  # its layout looks at the ids before
            bad_here = {each: given for each, given in bad.items() if not each.startswith(("ids", "no ids", "flat"))}
        else:
            bad_here = bad
        for _ in range(4):
            dispatch(x, ids, weights)
        for each, given in bad_here.items():
            is_few = name.startswith("low")  # to which no weights are given; of other rows it has no window
            if (each == "weights" and is_few) or (each == "x" and not is_few):
                continue
            before, behind = words(fresh[name][0], given), words(dispatch, given)
            if before != behind or before == "nothing":
                wrong.append(f"{name}, {each}: {before!r}, {behind!r}")
        dispatch(x, ids, weights)
    return wrong


def test_refusals_say_the_same() -> None:
    assert weft.spawn(refusals, 1, device="cpu") == [[]]


def grown(comm: weft.Communicator) -> list[str]:
    """Dialects whose windows did not grow behind known calls when a rank had more tokens, and whose calls were not
    known in the larger ones."""
    wrong = []
    for name in ("V1", "Hybrid"):
        dispatch, seen = calls_of(comm)[name]
        few, many = inputs(comm.rank, 6), inputs(comm.rank, 600 if comm.rank == 1 else 7)
        for _ in range(4):
            dispatch(*few)
        found = seen(dispatch(*many))
        others = calls_of(comm)[name]
        want = others[1](others[0](*many))
        if not all(map(are_equal, found, want)):
            wrong.append(name)
        if not all(map(are_equal, seen(dispatch(*many)), want)):
            wrong.append(f"{name} again")
    return wrong


def test_windows_grow_behind_known_calls() -> None:
    assert weft.spawn(grown, 2, device="cpu") == [[], []]


def options_apart(comm: weft.Communicator) -> bool:
    """Known calls of one buffer with other options, another E, another buffer."""
    x, ids, weights = inputs(comm.rank, 6)
    v2 = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=MOST)
    for _ in range(3):
        plain = v2.dispatch(x, ids, weights, num_experts=EXPERTS)
        padded = v2.dispatch(x, ids, weights, num_experts=EXPERTS, expert_alignment=4, do_expand=True)
        worst = v2.dispatch(x, ids, weights, num_experts=EXPERTS, do_cpu_sync=False)
        more = v2.dispatch(x, ids, weights, num_experts=2 * EXPERTS)
        with pytest.raises(InvalidArgument):
            v2.dispatch(x, ids, weights, num_experts=EXPERTS, num_max_tokens_per_rank=4)
    return (
        not plain[3].do_expand and padded[3].expert_alignment == 4 and len(worst[0]) == comm.num_ranks * MOST
        and worst[3].num_recv_tokens_per_expert_list == [] and more[3].num_experts == 2 * EXPERTS
        and len(more[3].num_recv_tokens_per_expert_list) == 2 * EXPERTS // comm.num_ranks
    )  # fmt: skip


def test_options_are_kept_apart() -> None:
    assert weft.spawn(options_apart, 1, device="cpu") == [True]


def statistics(comm: weft.Communicator) -> list[str]:
    """Dialects whose known calls do not add what came, or are not known where the caller counts; and what is refused
    in other words than at first, or has been sent."""
    wrong = []
    given, made, num_local = inputs(comm.rank, 6 + comm.rank), [0], EXPERTS // comm.num_ranks
    with counting(made):
        for name in ("low latency", "low latency hook", "V2", "V2 expanded"):
            dispatch, _ = calls_of(comm)[name]
            for dtype in (torch.int32, torch.int64):
                stats, made[0] = torch.arange(num_local, dtype=dtype, device="cpu"), 0
                for _ in range(8):  # low-latency calls take turns
                    r = dispatch(*given, cumulative_local_expert_recv_stats=stats)
                    counts = r[1] if name.startswith("low") else r[3].num_unaligned_recv_tokens_per_expert
                want = torch.arange(num_local, dtype=dtype, device="cpu") + 8 * counts
                if not torch.equal(stats, want) or made[0] < 2:
                    wrong.append(f"{name} {dtype}: {stats.tolist()}, {counts.tolist()}, {made[0]} known")
            more = torch.zeros(num_local + 1, dtype=torch.int32, device="cpu")
            for bad in (more, more[1:].float(), [0] * num_local):
                for call in (dispatch, calls_of(comm)[name][0]):
                    with pytest.raises(InvalidArgument, match="cumulative_local_expert_recv_stats is"):
                        call(*given, cumulative_local_expert_recv_stats=bad)
            dispatch(*given)
    return wrong


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_statistics_of_known_calls(num_ranks: int) -> None:
    assert weft.spawn(statistics, num_ranks, device="cpu") == [[]] * num_ranks
