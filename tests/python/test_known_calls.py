"""Guards against a call that is taken for an earlier one which it does not look like: what is known is not checked."""

from __future__ import annotations

import sys
import threading
from typing import Any

import emulated_gpu
import pytest
import torch
from test_quick import fp8, inputs, make
from torch import Tensor

import weft
from pool import RankState
from weft import _load

EXCHANGE_API = Tensor.__dlpack_c_exchange_api__  # type: ignore[attr-defined]
VALUES = (None, 2.5, "auto", True, 1, 0)
KIND, ORIGIN, PLAN = object(), object(), object()
ALIGNMENT = 16


class Named(Tensor):
    """Of another type than plain tensors."""


def rows(num: int = 4, columns: int = 64, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(num, columns, dtype=dtype)


def known(values: tuple[Any, ...] = VALUES, tensors: tuple[Any, ...] | None = None, lead: Any = None) -> Any:
    """What knows one call: rows, no scales, ids."""
    calls = _load.native().KnownCalls(EXCHANGE_API, ALIGNMENT)
    most = 8 if lead is None else None
    calls.learn(values, KIND, ORIGIN, lead, most, (rows(), None, rows(columns=2, dtype=torch.int64))
                if tensors is None else tensors, PLAN)  # fmt: skip
    return calls


def misaligned() -> Tensor:
    return torch.zeros(4 * 64 + 1, dtype=torch.bfloat16)[1:].view(4, 64)


def freed() -> Tensor:
    made = rows()
    made.untyped_storage().resize_(0)
    return made


def test_a_call_that_looks_the_same_is_found_with_its_addresses() -> None:
    calls, x, ids = known(), rows(8), rows(8, 2, torch.int64)
    found = calls.find(VALUES, KIND, ORIGIN, None, (x, None, ids))
    assert found == (PLAN, 8, (x.data_ptr(), 0, ids.data_ptr()))
    assert found[0] is PLAN
    other = tuple(type(value)(value) if isinstance(value, float) else value for value in VALUES)
    assert calls.find(other, KIND, ORIGIN, None, (x[1:], None, ids[1:]))[1] == 7


OTHER_ROWS = {
    "columns": lambda: rows(columns=32), "dtype": lambda: rows(dtype=torch.float16),
    "dims": lambda: rows().view(4, 8, 8),
    "type": lambda: rows().as_subclass(Named), "parameter": lambda: torch.nn.Parameter(rows(), requires_grad=False),
    "gradients": lambda: rows().requires_grad_(), "gaps": lambda: rows(columns=128)[:, ::2],
    "by column": lambda: rows(64, 4).t(), "signs": lambda: torch._neg_view(rows()), "alignment": misaligned,
    "freed": freed, "sparse": lambda: rows().to_sparse(), "meta": lambda: rows().to("meta"), "none": lambda: None,
    "no tensor": lambda: [[0.0] * 64] * 4, "tokens": lambda: rows(3), "scalar": lambda: rows().sum(),
    "no rows": lambda: rows(0),
}  # fmt: skip


@pytest.mark.parametrize("of_rows", OTHER_ROWS)
def test_rows_that_look_different_are_not_found(of_rows: str) -> None:
    calls, ids = known(), rows(columns=2, dtype=torch.int64)
    assert calls.find(VALUES, KIND, ORIGIN, None, (rows(), None, ids)) is not None
    assert calls.find(VALUES, KIND, ORIGIN, None, (OTHER_ROWS[of_rows](), None, ids)) is None
    assert calls.find(VALUES, KIND, ORIGIN, None, (rows(), None, ids)) is not None, "no error is left behind"


def test_other_tensors_numbers_and_origins_are_not_found() -> None:
    calls, x, ids = known(), rows(), rows(columns=2, dtype=torch.int64)
    for tensors in ((x, x, ids), (x, None, None), (x, None), (x, None, ids.int()), (x, None, ids[:3])):
        assert calls.find(VALUES, KIND, ORIGIN, None, tensors) is None
    many = (rows(9), None, rows(9, 2, torch.int64))
    assert calls.find(VALUES, KIND, ORIGIN, None, many) is None, "more than its plan allows"
    assert calls.find(VALUES, KIND, PLAN, None, (x, None, ids)) is None
    assert calls.find(VALUES, PLAN, ORIGIN, None, (x, None, ids)) is None
    assert calls.find(VALUES, KIND, ORIGIN, (4,), (x, None, ids)) is None


@pytest.mark.parametrize("place", range(len(VALUES)))
def test_options_of_another_value_or_type_are_not_found(place: int) -> None:
    calls, tensors = known(), (rows(), None, rows(columns=2, dtype=torch.int64))
    for value in (None, True, 1, 1.0, 2.5, "auto", "other", 0, False, [], torch.ones(2)):
        changed = (*VALUES[:place], value, *VALUES[place + 1 :])
        is_same = type(value) is type(VALUES[place]) and value == VALUES[place]
        assert (calls.find(changed, KIND, ORIGIN, None, tensors) is not None) == is_same
    assert calls.find(VALUES[:place], KIND, ORIGIN, None, tensors) is None


def test_leading_lengths_are_those_of_the_handle() -> None:
    shape = (2, 3)
    calls = known(tensors=(torch.zeros(2, 3, 64), torch.zeros(2, 3)), lead=shape)
    y, side = torch.zeros(4, 5, 64), torch.zeros(4, 5)
    assert calls.find(VALUES, KIND, ORIGIN, (4, 5), (y, side)) == (PLAN, 4, (y.data_ptr(), side.data_ptr()))
    for lead in ((4, 6), (5, 5), (4,), (4, 5, 64), (), None, [4, 5], ("4", 5)):
        assert calls.find(VALUES, KIND, ORIGIN, lead, (y, side)) is None
    assert calls.find(VALUES, KIND, ORIGIN, (4, 5), (y, torch.zeros(4, 6))) is None


def test_what_can_not_be_known_is_not_learnt() -> None:
    ids = rows(columns=2, dtype=torch.int64)
    for x in (misaligned(), rows().requires_grad_(), freed(), rows(0), rows().to_sparse(), rows().sum(), rows(9)):
        assert known(tensors=(x, None, ids)).find(VALUES, KIND, ORIGIN, None, (x, None, ids)) is None


def test_the_oldest_makes_room() -> None:
    calls, tensors = _load.native().KnownCalls(EXCHANGE_API, ALIGNMENT), (rows(),)
    for number in range(40):
        calls.learn((number,), KIND, ORIGIN, None, 8, tensors, number)
        calls.learn((number,), KIND, ORIGIN, None, 8, tensors, -1)  # known already
    found = [calls.find((number,), KIND, ORIGIN, None, tensors) for number in range(40)]
    assert [each is not None for each in found] == [False] * 24 + [True] * 16
    assert [each[0] for each in found[24:]] == [*range(24, 40)]


@pytest.mark.parametrize("api", [None, object(), 7])
def test_without_the_interface_of_torch_nothing_is_known(api: Any) -> None:
    calls = _load.native().KnownCalls(api, ALIGNMENT)
    calls.learn(VALUES, KIND, ORIGIN, None, 8, (rows(),), PLAN)
    assert calls.find(VALUES, KIND, ORIGIN, None, (rows(),)) is None


# ---- through the Python API


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    ranks = emulated_gpu.EmulatedRanks(monkeypatch)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: -1)  # no tool listens
    return ranks


class Seen:
    """A KnownCalls that notes what it finds."""

    def __init__(self, real: Any) -> None:
        self._real, self.learn = real, real.learn
        self.has_found: list[bool] = []

    def dispatch(self, *args: Any) -> Any:
        return self._noted(self._real.dispatch(*args))

    def combine(self, *args: Any) -> Any:
        return self._noted(self._real.combine(*args))

    def _noted(self, found: Any) -> Any:
        self.has_found.append(found is not None)
        return found


CASES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (None, {}, {}), (None, {"capacity": 16}, {}), (None, {"async_op": True}, {"async_op": True}),
    (None, {"mode": "latency", "layout": "expert_major", "capacity": 16}, {"mode": "latency"}),
    (fp8, {"layout": "expert_major"}, {}), (None, {"quantize": "fp8"}, {"wire": "fp8"}),
    (
        None,
        {"mode": "latency", "layout": "masked", "capacity": 16, "quantize": "fp8", "scale_layout": "column_major"},
        {"mode": "latency"},
    ),
]  # fmt: skip


def call_again_and_again(state: RankState, case: int) -> None:
    make_rows, options, of_combine = CASES[case]
    x, ids, weights = inputs(state.rank)
    given = x if make_rows is None else make_rows(x)
    with make(state) as ep:
        seen, totals = Seen(ep._eager.known), []
        ep._eager.known = seen  # type: ignore[assignment]
        for _ in range(4):
            r = ep.dispatch(given, ids, weights, **options)
            again = ep.dispatch(given, handle=r.handle)
            y = torch.ones(*r.handle.rows_shape, x.shape[1], dtype=torch.bfloat16)
            total = ep.combine(y, r.handle, **of_combine)
            totals.append(total[0] if isinstance(total, tuple) else total)
            assert torch.equal(again.handle.sizes, r.handle.sizes)
        assert seen.has_found == [False] * 6 + [True] * 6, "the first is learnt, the second is known from then on"
        assert all(torch.equal(each, totals[0]) for each in totals)
        if make_rows is None and "quantize" not in options:  # other plans, of the same options
            tracked = ep.dispatch(x.clone().requires_grad_(), ids, weights, **options)
            tracked.wait()
            assert isinstance(tracked.x, Tensor)
            total = ep.combine(y[: len(tracked.x)], tracked.handle, **of_combine)
            total = total[0] if isinstance(total, tuple) else total
            assert tracked.x.requires_grad
            assert total.requires_grad


@pytest.mark.parametrize("case", range(len(CASES)))
def test_later_calls_are_known(pool: Any, case: int) -> None:
    pool.run(2, call_again_and_again, [case] * 2)


def call_into(state: RankState, has_weights: bool) -> None:
    """Sums into memory of the caller; what is none that the engine writes to is refused, or filled behind the call."""
    x, ids, weights = inputs(state.rank)
    options: dict[str, Any] = {"order": "pick", "weights": weights.contiguous()} if has_weights else {}
    with make(state) as ep:
        seen = Seen(ep._eager.known)
        ep._eager.known = seen  # type: ignore[assignment]
        r = ep.dispatch(x, ids, weights, layout="expert_major")
        y = torch.cat([r.x, r.x])[: len(r.x)]
        want, shape = ep.combine(y, r.handle, **options), x.shape
        seen.has_found.clear()
        for idx in range(4):
            out = torch.full_like(want, torch.nan)
            assert ep.combine(y, r.handle, out=out, **options) is out
            assert torch.equal(out, want)
            assert seen.has_found == [idx > 1], "of the first a plan is made, the second is learnt"
            seen.has_found.clear()
        other = torch.zeros(want.numel() + 1, dtype=want.dtype)[1:].view(shape)  # at no multiple of 16 bytes
        assert ep.combine(y, r.handle, out=other, **options) is other
        assert torch.equal(other, want)
        wrong: list[tuple[Any, str]] = [
            (torch.empty_like(want).float(), "dtype"),
            (torch.empty(len(want) + 1, shape[1], dtype=want.dtype), "shape"),
            (torch.empty(len(want), 2 * shape[1], dtype=want.dtype)[:, ::2], "strides"),
            (y.view(-1)[: want.numel()].view(shape), "overlaps expert_output"),
            (torch._neg_view(torch.empty_like(want)), "negative view"),
        ]  # fmt: skip
        if has_weights:
            shared = torch.zeros(want.nbytes, dtype=torch.uint8)
            options["weights"] = shared[: weights.nbytes].view(torch.float32).view(weights.shape).copy_(weights)
            wrong.append((shared.view(want.dtype).view(shape), "overlaps weights"))
        for given, text in wrong:
            with pytest.raises(weft.InvalidArgument, match=text):
                ep.combine(y, r.handle, out=given, **options)
        assert seen.has_found == [False] * (1 + len(wrong))
        assert torch.equal(ep.combine(y, r.handle, **options), want)


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("engine", ["cpu", pytest.param("nvlink", marks=pytest.mark.slow)])
def test_sums_into_the_callers_memory_are_known(pool: Any, engine: str, has_weights: bool) -> None:
    if engine == "nvlink":
        pool.run(1, call_into, [has_weights])
    else:
        weft.spawn(into_on_cpu, 1, (has_weights,), device="cpu", isolation="thread")


def into_on_cpu(comm: weft.Communicator, has_weights: bool) -> None:
    call_into(RankState(comm.rank, {1: comm}, 1), has_weights)


def unusual_calls(state: RankState, has_no_kernels: bool) -> None:
    x, ids, weights = inputs(state.rank)
    ep = make(state)
    for _ in range(3):
        r = ep.dispatch(x, ids, weights, capacity=16)
        y = ep.combine(r.x, r.handle)
    seen = Seen(ep._eager.known)
    ep._eager.known = seen  # type: ignore[assignment]
    calls = (
        lambda: ep.dispatch(x, ids, weights, capacity=16),
        lambda: ep.dispatch(x, handle=r.handle),
        lambda: ep.combine(r.x, r.handle),
    )
    calls[1]()
    calls[1]()
    before = ep.stats()["num_dispatches"], ep.stats()["num_combines"]
    for call in calls:
        with state.comm._busy, pytest.raises(weft.InvalidState, match="another thread is inside a call"):
            call()
        state.comm._has_refused = False  # else Python makes the call
        ep.calls.bad_ids = "ids of an earlier call"
        with pytest.raises(weft.InvalidArgument, match="ids of an earlier call"):
            call()
        assert not state.comm._busy.locked()
    assert (ep.stats()["num_dispatches"], ep.stats()["num_combines"]) == before, "calls that failed do not count"
    with torch.autograd.profiler.profile() as profile:
        for call in calls:
            call()
    names = [event.name for event in profile.function_events if event.name.startswith("weft::")]
    assert names == ["weft::dispatch rank_major"] * 2 + ["weft::combine rank_major"]
    again = calls[2]()
    assert has_no_kernels or torch.equal(again, y)
    assert (ep.stats()["num_dispatches"], ep.stats()["num_combines"]) == (before[0] + 2, before[1] + 2)
    ep.close()
    for call in calls:
        with pytest.raises(weft.InvalidState, match="closed"):
            call()
    assert all(seen.has_found[2:]), "they are known all the same"


def on_cpu(comm: weft.Communicator) -> None:
    unusual_calls(RankState(comm.rank, {1: comm}, 1), False)


@pytest.mark.parametrize("engine", ["cpu", pytest.param("nvlink", marks=pytest.mark.slow)])
def test_what_is_unusual_is_left_to_python(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """A known call is refused as any other, and then gives back what it holds."""
    if engine == "nvlink":
        ranks = emulated_gpu.EmulatedRanks(monkeypatch, emulated_gpu.IDLE)
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: -1)  # no tool listens
        ranks.run(1, unusual_calls, [True])
    else:
        weft.spawn(on_cpu, 1, device="cpu", isolation="thread")


def test_threads_find_their_own_calls() -> None:
    """Others learn meanwhile, so that calls are forgotten."""
    calls, x, newest, is_over = _load.native().KnownCalls(EXCHANGE_API, ALIGNMENT), rows(), [0], threading.Event()
    wrong: list[tuple[int, int]] = []

    def find() -> None:
        while not is_over.is_set():
            for value in range(newest[0] - 15, newest[0] + 1):
                found = calls.find((value,), KIND, ORIGIN, None, (x, x, x, x))
                if found is not None and found[0] != str(value):
                    wrong.append((value, found[0]))

    threads = [threading.Thread(target=find) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for value in range(60_000):
            calls.learn((value,), KIND, ORIGIN, None, 8, (x, x, x, x), str(value))
            newest[0] = value
    finally:
        sys.setswitchinterval(before)
        is_over.set()
        for thread in threads:
            thread.join()
    assert wrong == []
