"""Guards against kernels and copies that buffers launch beside Weft's own call: what torch is asked for in a call, over
what it is asked for in Weft's own. Views and memory that is not filled launch nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft import deep_ep

HIDDEN, EXPERTS, TOP_K, TOKENS = 512, 8, 2, 6
# They launch nothing.
_SILENT = {
    "detach", "slice", "view", "select", "transpose", "as_strided", "alias", "unsqueeze", "split", "lift_fresh",
    "empty", "new_empty", "new_empty_strided", "empty_strided", "empty_like", "_unsafe_view", "permute",
}  # fmt: skip
# Why each is there: docs/deep_ep.md, "What a call costs over Weft's own".
WANTED = {
    "V1 dispatch": {},
    "V1 dispatch of worst": {},
    "V1 dispatch again": {},
    "V1 combine": {},
    "V1 combine with weights": {},
    "low latency dispatch": {},
    "low latency dispatch FP8": {},
    "low latency dispatch rounded": {},
    "low latency dispatch UE8M0": {},
    "low latency dispatch statistics": {"add_": 1},
    "low latency combine": {},
    "low latency combine into": {},
    "low latency combine hook": {},
    "V2 dispatch": {"clone": 2},
    "V2 dispatch without a copy": {"clone": 1},
    "V2 dispatch expanded": {"clone": 1},
    "V2 dispatch again": {"clone": 1},
    "V2 combine": {},
    "V2 combine with weights": {},
    "Hybrid dispatch": {"clone": 1},
    "Hybrid combine": {},
}


class _Asked(TorchDispatchMode):
    """What torch is asked for, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        self.counts[name] += name not in _SILENT
        return function(*args, **(kwargs or {}))


def launches(call: Callable[[], object]) -> Counter[str]:
    """Of a call, once all that it keeps is there."""
    for _ in range(2):
        call()
    with _Asked() as asked:
        call()
    return +asked.counts


Pair = tuple[str, Callable[[], object], Callable[[], object]]


def inputs(comm: weft.Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids and weights."""
    generator = torch.Generator(device="cpu").manual_seed(comm.rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float32).to(torch.bfloat16)
    ids = torch.rand(TOKENS, EXPERTS, generator=generator, dtype=torch.float32).topk(TOP_K).indices
    return x, ids, torch.rand(TOKENS, TOP_K, generator=generator, dtype=torch.float32)


def of_v1(comm: weft.Communicator, ep: weft.ExpertParallel) -> Iterator[Pair]:
    """Of dispatch and combine."""
    x, ids, weights = inputs(comm)
    buffer = deep_ep.Buffer(comm)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    given: dict[str, Any] = {
        "num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert,
        "topk_idx": ids, "topk_weights": weights,
    }  # fmt: skip
    own, theirs = ep.dispatch(x, ids, weights, host_counts=True), buffer.dispatch(x, **given)
    y, worst = theirs[0].clone(), comm.num_ranks * TOKENS
    yield "V1 dispatch", lambda: ep.dispatch(x, ids, weights, host_counts=True), lambda: buffer.dispatch(x, **given)
    yield (
        "V1 dispatch of worst", lambda: ep.dispatch(x, ids, weights, capacity=worst),
        lambda: buffer.dispatch(x, num_worst_tokens=worst, **given),
    )  # fmt: skip
    yield "V1 dispatch again", lambda: ep.dispatch(x, handle=own.handle), lambda: buffer.dispatch(x, theirs[4])
    yield "V1 combine", lambda: ep.combine(y, own.handle), lambda: buffer.combine(y, theirs[4])
    side = theirs[2].clone()
    yield (
        "V1 combine with weights", lambda: ep.combine(y, own.handle, side=side, side_lanes="all"),
        lambda: buffer.combine(y, theirs[4], side),
    )  # fmt: skip


def of_low_latency(comm: weft.Communicator, ep: weft.ExpertParallel) -> Iterator[Pair]:
    """Of the calls of few tokens; the hook is called, too."""
    x, ids, weights = inputs(comm)
    buffer, room = deep_ep.Buffer(comm, low_latency_mode=True), {"max_tokens": TOKENS, "layout": "masked"}
    room["capacity"] = TOKENS * comm.num_ranks
    stats = torch.zeros(EXPERTS // comm.num_ranks, dtype=torch.int32, device="cpu")
    for name, quantize, options in (
        ("", None, {"use_fp8": False}),
        (" FP8", "fp8", {}),
        (" rounded", "fp8_pow2", {"round_scale": True}),
        (" UE8M0", "fp8_ue8m0", {"round_scale": True, "use_ue8m0": True}),
        (" statistics", None, {"use_fp8": False, "cumulative_local_expert_recv_stats": stats}),
    ):
        scale_layout = "row_major" if quantize is None else "column_major"
        yield (
            f"low latency dispatch{name}",
            lambda q=quantize, s=scale_layout: ep.dispatch(x, ids, quantize=q, scale_layout=s, **room),
            lambda o=options: buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS, **o),
        )
    own, theirs = ep.dispatch(x, ids, **room), buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS, use_fp8=False)
    y, out = theirs[0].clone(), torch.empty_like(x)

    def combine(**options: Any) -> None:
        hook = buffer.low_latency_combine(y, ids, weights, theirs[2], **options)[2]
        if hook is not None:
            hook()

    def of_own(**options: Any) -> object:
        return ep.combine(y, own.handle, order="pick", weights=weights, **options)

    yield "low latency combine", of_own, combine
    yield "low latency combine into", lambda: of_own(out=out), lambda: combine(out=out)
    yield "low latency combine hook", of_own, lambda: combine(return_recv_hook=True)


def of_v2(comm: weft.Communicator, ep: weft.ExpertParallel) -> Iterator[Pair]:
    """Of dispatch and combine."""
    x, ids, weights = inputs(comm)
    buffer = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=TOKENS)

    def own_call(**options: Any) -> Any:
        return ep.dispatch(x, ids, weights, host_counts=True, **options)

    def call(**options: Any) -> Any:
        return buffer.dispatch(x, ids, weights, num_experts=EXPERTS, **options)

    own, theirs = own_call(), call()
    y, side = theirs[0].clone(), theirs[2].clone()
    yield "V2 dispatch", own_call, call
    yield "V2 dispatch without a copy", own_call, lambda: call(do_handle_copy=False)
    yield "V2 dispatch expanded", lambda: own_call(layout="expert_major"), lambda: call(do_expand=True)
    yield "V2 dispatch again", lambda: ep.dispatch(x, handle=own.handle), lambda: buffer.dispatch(x, handle=theirs[3])
    yield "V2 combine", lambda: ep.combine(y, own.handle), lambda: buffer.combine(y, theirs[3])
    yield (
        "V2 combine with weights", lambda: ep.combine(y, own.handle, side=side),
        lambda: buffer.combine(y, theirs[3], side),
    )  # fmt: skip


def of_hybrid(comm: weft.Communicator, ep: weft.ExpertParallel) -> Iterator[Pair]:
    """With ids."""
    x, ids, weights = inputs(comm)
    buffer = deep_ep.HybridEPBuffer(comm, HIDDEN, TOKENS, EXPERTS // comm.num_ranks)

    def own_call() -> Any:
        return ep.dispatch(x, ids, weights, layout="expert_major", alignment=16, host_counts=True)

    def call() -> Any:
        return buffer.dispatch_with_permute(
            hidden=x, topk_idx=ids, topk_weights=weights, num_of_experts=EXPERTS, pad_multiple=16
        )

    own, theirs = own_call(), call()
    y = theirs[0].clone()
    yield "Hybrid dispatch", own_call, call
    yield (
        "Hybrid combine", lambda: ep.combine(y, own.handle, weighted=False),
        lambda: buffer.combine_with_unpermute(hidden=y, handle=theirs[4]),
    )  # fmt: skip


def launches_over_own(comm: weft.Communicator) -> dict[str, dict[str, int]]:
    """Of every pair."""
    found = {}
    with weft.ExpertParallel(
        comm, num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=TOKENS, heap_bytes=1 << 24
    ) as ep:
        for of in (of_v1, of_low_latency, of_v2, of_hybrid):
            for name, own, theirs in of(comm, ep):
                found[name] = dict(launches(theirs) - launches(own))
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_launches_of_a_call(num_ranks: int) -> None:
    assert weft.spawn(launches_over_own, num_ranks, device="cpu") == [WANTED] * num_ranks


def ids_of_a_map(comm: weft.Communicator) -> bool:
    """Whether what a map's handle keeps is what was made of the map, not a second copy."""
    x, ids, weights = inputs(comm)
    buffer = deep_ep.HybridEPBuffer(comm, HIDDEN, TOKENS, EXPERTS // comm.num_ranks)
    routing_map, probs = deep_ep.hybrid_ep_buffer.indices_to_map(ids, weights, TOKENS, EXPERTS)
    made, picks_of_map = [], deep_ep.hybrid_ep_buffer.picks_of_map

    def noted(*args: Any, **named: Any) -> Any:
        made.append(picks_of_map(*args, **named))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deep_ep.hybrid_ep_buffer, "picks_of_map", noted)
        kept = [
            getattr(buffer, name)(hidden=x, routing_map=routing_map, probs=probs)[-1].ids
            for name in ("dispatch", "dispatch_with_permute")
        ]
    return [each.data_ptr() for each in kept] == [each.data_ptr() for each, _ in made]


def test_ids_of_a_map_are_not_copied() -> None:
    assert weft.spawn(ids_of_a_map, 2, device="cpu") == [True, True]


def sums_into(comm: weft.Communicator) -> list[bool]:
    """Of a result of the caller: contiguous, with gaps, of its rows' memory, and behind a hook."""
    x, ids, weights = inputs(comm)
    buffer = deep_ep.Buffer(comm, low_latency_mode=True)
    rows, _, handle, *_ = buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS, use_fp8=False)
    want, *_ = buffer.low_latency_combine(rows, ids, weights, handle)
    shared = rows.clone()
    outs = [
        torch.empty_like(x),
        torch.empty((HIDDEN, TOKENS), dtype=torch.bfloat16, device="cpu").T,
        shared.view(-1, HIDDEN)[:TOKENS],
    ]
    found = []
    for has_hook in (False, True):
        for out in outs:
            shared.copy_(rows)
            y, _, hook = buffer.low_latency_combine(shared, ids, weights, handle, out=out, return_recv_hook=has_hook)
            if hook is not None:
                hook()
            found.append(y is out and torch.equal(out, want))
    return found


def test_sums_into_a_callers_tensor() -> None:
    assert weft.spawn(sums_into, 2, device="cpu") == [[True] * 6] * 2


def rounded_scales(comm: weft.Communicator) -> list[bool]:
    """Scales that are floats, beside the exponents of the same rows; of whole words, and of a word that is not full."""
    found = []
    for hidden in (512, 1024, 384, 128):
        buffer = deep_ep.Buffer(comm, low_latency_mode=True)
        _, ids, _ = inputs(comm)
        generator = torch.Generator(device="cpu").manual_seed(comm.rank)
        x = torch.randn(TOKENS, hidden, generator=generator, dtype=torch.float32).to(torch.bfloat16)
        calls = (x, ids, 7, EXPERTS)
        (_, words), counts, *_ = buffer.low_latency_dispatch(*calls, round_scale=True, use_ue8m0=True)
        (_, scales), *_ = buffer.low_latency_dispatch(*calls, round_scale=True)
        exponents = words.contiguous().view(torch.uint8)[..., : hidden // 128]
        want = torch.exp2(exponents.to(torch.float32) - 127)
        is_row = torch.arange(words.shape[1], device="cpu", dtype=torch.int64) < counts[:, None]
        found.append(torch.equal(scales[is_row], want[is_row]) and scales.stride(1) == 1)
    return found


def test_rounded_scales_are_powers_of_two() -> None:
    assert weft.spawn(rounded_scales, 2, device="cpu") == [[True] * 4] * 2
