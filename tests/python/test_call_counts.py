"""Guards against a call that costs the host more and more: how many Python functions a later call of a kind runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import torch
from test_quick import EXPERTS, HIDDEN, fp8, inputs

import weft
from pool import RankState

GPU = emulated_gpu.__file__
WEFT = str(Path(weft.__file__).parent)
MOST_KNOWN = 2
MOST = 20  # of a dispatch, and of its combine; of the backward of both, two calls, twice as many


def num_calls(work: Callable[[], Any]) -> int:
    """Python functions of Weft that `work` runs, and of torch below them, but for what the emulated GPU does."""
    seen = in_weft = in_gpu = 0

    def count(frame: Any, event: str, arg: object) -> None:
        nonlocal seen, in_weft, in_gpu
        if event not in ("call", "return"):
            return
        file, step = frame.f_code.co_filename, 1 if event == "call" else -1
        if file == GPU:
            in_gpu += step
        elif not in_gpu:
            in_weft += step * file.startswith(WEFT)
            seen += event == "call" and (in_weft > 0)

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "capacity": ({"capacity": 16}, {}),
    "expert_major": ({"layout": "expert_major", "alignment": 4, "zero_holes": False}, {}),
    "masked": ({"layout": "masked", "capacity": 16}, {}),
    "latency": ({"mode": "latency"}, {"mode": "latency"}),
    "latency, capacity": ({"mode": "latency", "capacity": 16}, {"mode": "latency"}),
    "fp8 rows": ({"rows": "fp8"}, {}),
    "quantize, wire": ({"quantize": "fp8"}, {"wire": "fp8"}),
    "column_major": ({"quantize": "fp8", "scale_layout": "column_major", "mode": "latency"}, {}),
    "latency, column_major": (
        {"quantize": "fp8", "scale_layout": "column_major", "mode": "latency", "layout": "masked", "capacity": 16},
        {"mode": "latency"},
    ),
    "capacity, out": ({"capacity": 16}, {"out": True}),
    "handle": ({"handle": True}, {}),
    "handle, latency": ({"handle": True, "mode": "latency"}, {}),
    "async_op": ({"async_op": True}, {"async_op": True}),
    "handle, async_op": ({"async_op": True, "handle": True}, {"async_op": True}),
    "side, bias, out": ({}, {"side": True, "bias": True, "out": True}),
    "not weighted": ({"layout": "expert_major"}, {"weighted": False}),
    "staged": ({"staged": True, "capacity": 16}, {"staged": True}),
    "gradients": ({"layout": "expert_major", "tracked": True}, {}),
    "gradients, rank_major": ({"tracked": True}, {"bias": True}),
    "gradients, capacity": ({"layout": "masked", "capacity": 16, "tracked": True}, {}),
    "gradients, handle": ({"tracked": True, "handle": True}, {}),
    "gradients, async_op": ({"tracked": True, "async_op": True}, {"async_op": True}),
    "gradients, async_op, throughput": ({"tracked": True, "async_op": True, "mode": "throughput"}, {"async_op": True}),
}


def counts_of(state: RankState, kind: str) -> tuple[int, ...]:
    """Of the third call."""
    dispatch_options, combine_options = (dict(each) for each in KINDS[kind])
    x, ids, weights = inputs(state.rank)
    tracked = dispatch_options.pop("tracked", False)
    rows: Any = fp8(x) if dispatch_options.pop("rows", "") else x
    torch.autograd.set_multithreading_enabled(False)  # backwards run in this thread
    made: dict[str, Any] = {}
    counts: tuple[int, ...] = ()
    with weft.ExpertParallel(
        state.comm, num_experts=EXPERTS, top_k=2, hidden=HIDDEN, max_tokens_per_rank=8, num_windows=1
    ) as ep:
        is_repeated, mode = dispatch_options.pop("handle", False), dispatch_options.get("mode", "auto")
        first: Any = ep.dispatch(x, ids, weights, mode=mode) if is_repeated else None
        for _ in range(3):
            given = rows.clone().requires_grad_() if tracked else rows
            routing = (given,) if is_repeated else (given, ids, weights)
            options = {**dispatch_options, **({"handle": first.handle} if is_repeated else {})}

            def dispatch(routing: Any = routing, options: Any = options) -> None:
                made["r"] = ep.dispatch(*routing, **options)

            in_dispatch = num_calls(dispatch)
            r = made["r"].wait()
            y = r.x if isinstance(r.x, torch.Tensor) else torch.ones(*r.handle.rows_shape, HIDDEN).bfloat16()
            options = dict(combine_options)
            if options.get("side"):
                options["side"] = r.topk_weights
            if options.get("bias"):
                options["bias"] = torch.ones(HIDDEN)
            if options.get("out"):
                options["out"] = torch.empty_like(x)

            def combine(y: Any = y, r: Any = r, options: Any = options) -> None:
                made["y"] = ep.combine(y, r.handle, **options)

            in_combine = num_calls(combine)
            result = made["y"]
            result = result.wait() if options.get("staged") else result
            result = result[0] if isinstance(result, tuple) else result
            if not tracked:
                counts = (in_dispatch, in_combine)
                continue
            grad = torch.ones_like(result)
            in_backward = num_calls(lambda result=result, grad=grad: result.backward(grad))
            assert given.grad is not None
            counts = (in_dispatch, in_combine, in_backward)
    return counts


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[emulated_gpu.EmulatedRanks]:
    ranks = emulated_gpu.EmulatedRanks(monkeypatch)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: -1)  # no tool listens
    return ranks  # type: ignore[return-value]


@pytest.mark.slow  # kernels are compiled
@pytest.mark.parametrize("kind", ["capacity", "masked", "latency, capacity", "latency, column_major", "capacity, out"])
def test_a_known_call_runs_hardly_any(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """All but the method of ExpertParallel is the native module's."""
    ranks = emulated_gpu.EmulatedRanks(monkeypatch, emulated_gpu.IDLE)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: -1)  # no tool listens
    for counts in ranks.run(1, counts_of, [kind]):
        assert all(number <= MOST_KNOWN for number in counts), counts


def on_cpu(comm: weft.Communicator, kind: str) -> tuple[int, ...]:
    assert comm.engine == "cpu", comm
    return counts_of(RankState(comm.rank, {2: comm}, 2), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["cpu", pytest.param("nvlink", marks=pytest.mark.slow)])
def test_a_later_call_runs_few_python_functions(request: pytest.FixtureRequest, engine: str, kind: str) -> None:
    if engine == "nvlink":
        counted = request.getfixturevalue("emulated").run(2, counts_of, [kind] * 2)
    else:
        counted = weft.spawn(on_cpu, 2, (kind,), device="cpu", isolation="thread")
    allowed = (MOST, MOST, 2 * MOST)
    for counts in counted:
        assert all(number <= most for number, most in zip(counts, allowed, strict=False)), (counts, allowed)
