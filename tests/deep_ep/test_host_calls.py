"""Guards against buffers that take the host's time again: functions of Python that a call runs over Weft's own, which
do not depend on how fast a machine is, and copies that nobody reads."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import weft
from weft import deep_ep
from weft.bench import deep_ep as bench
from weft.bench.options import Options

# Of each pair of `weft bench --deep-ep`, of Python 3.11; later ones have fewer. More only where a call does more.
MOST = {
    "Buffer.dispatch": 10,
    "Buffer.dispatch(handle=)": 5,
    "Buffer.combine": 5,
    "Buffer.low_latency_dispatch": 10,
    "Buffer.low_latency_dispatch(hook)": 17,  # and the hook
    "Buffer.low_latency_combine": 5,
    "ElasticBuffer.dispatch": 10,
    "ElasticBuffer.combine": 6,
    "ElasticBuffer.dispatch(do_expand=True)": 11,
    "HybridEPBuffer.dispatch_with_permute": 10,
    "HybridEPBuffer.combine_with_unpermute": 7,
}

# What these calls ask torch for from Python, looks at a tensor among it: a mode of torch, which test_host_ops.py has,
# would see calls that go the long way.
MOST_OF_TORCH: dict[str, dict[str, int]] = {
    "Buffer.dispatch": {"numel": 1},
    "Buffer.dispatch(handle=)": {},
    "Buffer.combine": {},
    "Buffer.low_latency_dispatch": {},
    "Buffer.low_latency_dispatch(hook)": {"dim": 1},
    "Buffer.low_latency_combine": {},
    "ElasticBuffer.dispatch": {"clone": 2},
    "ElasticBuffer.combine": {},
    "ElasticBuffer.dispatch(do_expand=True)": {"clone": 1},
    "HybridEPBuffer.dispatch_with_permute": {"clone": 1},
    "HybridEPBuffer.combine_with_unpermute": {"dim": 1},
}
_OF_TORCH = {
    "Tensor": "",
    "TensorBase": "",
    "_VariableFunctionsClass": "",
    "pybind11_detail_function_record": "operator",
}


def functions_of(call: Callable[[], object]) -> tuple[int, Counter[str]]:
    """Functions of Python that it runs, once all that it keeps is there, and those of torch, by name."""
    for _ in range(4):  # low-latency dispatches take turns
        call()
    count, of_torch = [0], Counter[str]()

    def look(frame: FrameType, event: str, arg: object) -> None:
        count[0] += event == "call"
        owner, _, name = getattr(arg, "__qualname__", "").rpartition(".")
        kind = next((each for each in _OF_TORCH if owner.startswith(each)), None)
        if event == "c_call" and kind is not None:
            of_torch[_OF_TORCH[kind] or name] += 1

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count[0], of_torch


def functions_over_own(comm: weft.Communicator) -> dict[str, tuple[int, dict[str, int]]]:
    """Of every pair of the bench."""
    options, found = Options(ranks=1, device="cpu", tokens=8, hidden=128, experts=8, top_k=2).complete(), {}
    for pair in bench._pairs(comm, options):
        (theirs, theirs_of_torch), (own, own_of_torch) = functions_of(pair.theirs), functions_of(pair.own)
        found[pair.name] = theirs - own, dict(theirs_of_torch - own_of_torch)
    return found


def test_functions_of_a_call() -> None:
    (found,) = weft.spawn(functions_over_own, 1, device="cpu")
    assert found.keys() == MOST.keys() == MOST_OF_TORCH.keys()
    assert not {name: number for name, (number, _) in found.items() if number > MOST[name]}
    more = {name: Counter(of_torch) - Counter(MOST_OF_TORCH[name]) for name, (_, of_torch) in found.items()}
    assert not {name: each for name, each in more.items() if each}


def absent_picks(comm: weft.Communicator) -> bool:
    """Whatever the weight of a pick is whose id has turned -1."""
    buffer = deep_ep.Buffer(comm, low_latency_mode=True)
    x = torch.randn(6, 128, dtype=torch.float32).to(torch.bfloat16)
    ids = torch.randint(0, 8, (6, 2), dtype=torch.int64)
    weights = torch.rand(6, 2, dtype=torch.float32)
    rows, _, handle, *_ = buffer.low_latency_dispatch(x, ids, 8, 8, use_fp8=False)
    want, *_ = buffer.low_latency_combine(rows, ids, torch.where(torch.arange(2) == 0, 0.0, weights), handle)
    for given in (torch.nan, torch.inf, -1.0):
        for dtype in (torch.int64, torch.int32):
            gone, other = ids.to(dtype), weights.clone()
            gone[:, 0], other[:, 0] = -1, given
            found, *_ = buffer.low_latency_combine(rows, gone, other, handle)
            if not torch.equal(found, want):
                return False
    return True


def written_results(comm: weft.Communicator) -> list[str]:
    """Calls whose sums change when the caller has written to what a dispatch gave beside the rows."""
    x = torch.randn(6, 128, dtype=torch.float32).to(torch.bfloat16)
    ids = (torch.arange(12, dtype=torch.int64) % 8).view(6, 2)
    weights = torch.rand(6, 2, dtype=torch.float32)
    wrong = []

    def check(name: str, given: Any, combine: Callable[[], Any]) -> None:
        before = combine()
        for each in given:
            each.fill_(5)
        after = combine()
        if not all(torch.equal(one, two) for one, two in zip(before, after, strict=True)):
            wrong.append(name)

    v1 = deep_ep.Buffer(comm)
    per_rank, _, per_expert, in_rank, _ = v1.get_dispatch_layout(ids, 8)
    options: dict[str, Any] = {
        "num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert,
        "topk_idx": ids, "topk_weights": weights,
    }  # fmt: skip
    rows, got_ids, got_weights, _, handle, _ = v1.dispatch(x, **options)
    lanes = got_weights.clone()
    check("V1 combine", (got_ids, got_weights), lambda: v1.combine(rows, handle, lanes)[:2])
    check("V1 dispatch", (got_ids, got_weights), lambda: v1.dispatch(x, handle)[:1])
    few = deep_ep.Buffer(comm, low_latency_mode=True)
    rows, count, of_few, *_ = few.low_latency_dispatch(x, ids, 8, 8, use_fp8=False)
    check("low latency", (count,), lambda: few.low_latency_combine(rows, ids, weights, of_few)[:1])
    check("low latency handle", (count,), lambda: (of_few[0], of_few[1]))
    v2 = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=8)
    for expands in (False, True):
        rows, got_ids, got_weights, known, _ = v2.dispatch(x, ids, weights, num_experts=8, do_expand=expands)
        given = [each for each in (got_ids, got_weights) if each is not None]
        side = got_weights.clone()
        check(f"V2 combine {expands}", given, lambda: v2.combine(rows, known, side)[:2])  # noqa: B023
        again = lambda: v2.dispatch(x, topk_weights=weights, handle=known)  # noqa: B023, E731
        check(f"V2 dispatch {expands}", given, lambda: [again()[0], again()[2]])  # noqa: B023
    hybrid = deep_ep.HybridEPBuffer(comm, 128, 8, 8 // comm.num_ranks)
    rows, probs, _, _, of_hybrid = hybrid.dispatch_with_permute(
        hidden=x, topk_idx=ids, topk_weights=weights, num_of_experts=8
    )
    lanes_of_rows = probs.clone()
    check("Hybrid", (probs,), lambda: hybrid.combine_with_unpermute(hidden=rows, probs=lanes_of_rows, handle=of_hybrid))
    return wrong


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_callers_write_to_results(num_ranks: int) -> None:
    """What a caller gets without a copy no later call reads."""
    assert weft.spawn(absent_picks, num_ranks, device="cpu") == [True] * num_ranks
    assert weft.spawn(written_results, num_ranks, device="cpu") == [[]] * num_ranks
