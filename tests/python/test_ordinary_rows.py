"""Guards against ordinary tensors for rows and scales of another shape, dtype or order than those of the heap have."""

from __future__ import annotations

from typing import Any

import emulated_gpu
import pytest
import torch
from test_quick import fp8, inputs, make
from torch import Tensor

import weft
from pool import RankState
from weft.call.plan import Memory
from weft.call.scales import empty_by_column


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    return emulated_gpu.EmulatedRanks(monkeypatch, emulated_gpu.IDLE)


def test_bytes_in_another_dtype() -> None:
    scales = Memory(16, torch.uint8)
    assert scales.of(torch.float32) == Memory(4, torch.float32)
    assert scales.of(torch.float8_e4m3fn) == Memory(16, torch.float8_e4m3fn)
    for dtype in (None, torch.int4, torch.bool):
        assert scales.of(dtype) is scales
    by_column = Memory(4, torch.float32, True)
    assert by_column.of(torch.float8_e8m0fnu) is by_column


def make_rows(state: RankState) -> None:
    x, ids, weights = inputs(state.rank)
    with make(state) as ep:
        ep.dispatch(fp8(x), ids, weights, capacity=16, mode="latency")
        plan = next(iter(ep.calls.plans.values()))
        for lead in ((16,), (0,), *((number,) for number in range(40)), (2, 3), (16,)):
            data, scales = ep.calls._ordinary(plan, lead)
            assert isinstance(scales, Tensor)
            assert (data.shape, data.dtype) == ((*lead, x.shape[1]), torch.float8_e4m3fn)
            assert (scales.shape, scales.dtype) == ((*lead, x.shape[1] // 128), torch.float32)
            assert data.is_contiguous()
            assert scales.is_contiguous()
            assert data.stride() == torch.empty(data.shape).stride() or not all(lead)
        assert 0 < len(plan.shapes) <= 16


def test_shapes_of_a_plan_are_kept_and_bounded(pool: Any) -> None:
    pool.run(1, lambda state, _: make_rows(state), [None])


def make_columns(state: RankState) -> None:
    x, ids, _ = inputs(state.rank)
    with make(state) as ep:
        options = {"quantize": "fp8", "scale_layout": "column_major", "mode": "latency"}
        ep.dispatch(x, ids, layout="masked", capacity=16, **options)
        plan = next(iter(ep.calls.plans.values()))
        columns, dtype, is_by_column = plan.rows[1]
        assert is_by_column
        for lead in ((2, 16), (2, 3), (16,), (5,), (0,), (2, 0)):
            _, scales = ep.calls._ordinary(plan, lead)
            assert isinstance(scales, Tensor)
            want = empty_by_column(lead, columns * dtype.itemsize, dtype, x.device)
            assert (scales.shape, scales.stride(), scales.dtype) == (want.shape, want.stride(), want.dtype)
            assert scales.untyped_storage().nbytes() == want.untyped_storage().nbytes(), "with what fills columns up"


def test_scales_by_column_in_one_step_lie_as_else(pool: Any) -> None:
    pool.run(1, lambda state, _: make_columns(state), [None])


def look_at_results(state: RankState) -> None:
    x, ids, weights = inputs(state.rank)
    ue8m0 = weft.Quantized(*weft.reference.quantize_fp8(x, ue8m0=True))
    opaque = weft.Quantized(x.view(torch.uint8), torch.zeros(len(x), 8, dtype=torch.int16))
    cases: list[tuple[Any, dict[str, Any], torch.dtype, torch.dtype]] = [
        (fp8(x), {}, torch.float8_e4m3fn, torch.float32), (ue8m0, {}, torch.float8_e4m3fn, torch.float8_e8m0fnu),
        (x, {"quantize": "fp8"}, torch.float8_e4m3fn, torch.float32),
        (x, {"quantize": "fp8_ue8m0"}, torch.float8_e4m3fn, torch.float8_e8m0fnu),
        (x, {"quantize": "fp8_pow2"}, torch.float8_e4m3fn, torch.float32),
        (opaque, {}, torch.uint8, torch.int16),
    ]  # fmt: skip
    with make(state) as ep:
        for rows, options, dtype, scale_dtype in cases:
            for _ in range(3):
                r = ep.dispatch(rows, ids, weights, layout="masked", capacity=16, mode="latency", **options)
                assert isinstance(r.x, weft.Quantized)
                assert isinstance(r.x.scales, Tensor)
                assert (r.x.data.dtype, r.x.scales.dtype) == (dtype, scale_dtype)
                assert r.x.data.shape[:2] == r.x.scales.shape[:2] == r.handle.rows_shape
                assert r.x.data._base is None, "given as it was made"


def test_results_have_the_dtypes_of_what_was_sent(pool: Any) -> None:
    pool.run(1, lambda state, _: look_at_results(state), [None])
