"""Guards against figures of a benchmark that hide the slowest rank, or bound it by bytes that nobody copies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.bench.options import Options, one_shape
from weft.bench.ranks import Row, times
from weft.bench.report import _bound, _copy_rate, _with_mean
from weft.bench.rows import row_bytes, traffic

ROWS = {"out_rows": [7, 9], "logical_rows": [10, 10], "result_bytes": 5}
RANKS: list[Row] = [
    {**ROWS, "num_tokens": 10, "received_rows": 30},
    {**ROWS, "num_tokens": 20, "received_rows": 6},
]


def test_a_call_takes_as_long_as_its_slowest_rank() -> None:
    notes = [
        {"gpu_us": [1.0, 10.0, 3.0], "host_us": [1.0, 1.0, 1.0]},
        {"gpu_us": [5.0, 2.0, 4.0], "host_us": [3.0, 0.5, 2.0]},
    ]
    found = times(notes)
    assert (found["time_us"], found["time_p99_us"], found["host_us"]) == (5.0, 10.0, 2.0)
    assert _with_mean(notes)["time_mean_us"] == 14.0 / 3


@pytest.mark.parametrize(
    ("op", "copied", "wire", "logical"),
    [
        ("dispatch", (30 + 6) * 128, 9 * 128, 10 * 128),
        (
            "combine",
            ((30 + 10) / 2 + (6 + 20) / 2) * 128,
            9 * 128,
            10 * 128,
        ),  # read where they came, written once a token
        ("both", (30 + 6) * 128 + ((30 + 10) / 2 + (6 + 20) / 2) * 128, 9 * 256, 10 * 256),
    ],
)
def test_bytes_of_an_operation(op: str, copied: float, wire: int, logical: int) -> None:
    case = next(case for case in one_shape(Options(hidden=64)) if case.op == op)
    rates = traffic(case, RANKS[0], 2.0) | _bound(case, RANKS, 2.0, copy_rate=1e6)
    assert rates["memory_copy_bound_us"] == pytest.approx(copied)
    assert rates["ratio_vs_memory_copy"] == pytest.approx(copied / 2.0)
    assert (rates["wire_bytes"], rates["logical_bytes"], rates["result_bytes"]) == (wire, logical, 5)
    assert rates["wire_gb_per_s"] == pytest.approx(wire / 2e-6 / 1e9)


@pytest.mark.parametrize(
    ("quantize", "num_bytes"), [("none", 260), ("fp8", 138), ("fp8_ue8m0", 132), ("fp8_pow2", 138)]
)
def test_scales_travel_with_their_rows(quantize: str, num_bytes: int) -> None:
    """130 values have two scales."""
    case = one_shape(Options(hidden=130, quantize=quantize))[0]
    assert traffic(case, RANKS[0], 2.0)["wire_bytes"] == 9 * num_bytes
    assert row_bytes(replace(case, op="step", quantize="none", rows="fp8", wire="fp8")) == (138, 138)


def test_copies_of_all_ranks_count_from_the_first_to_the_last() -> None:
    copies = [{"from_ns": 0, "to_ns": 10, "copied_bytes": 40}, {"from_ns": 10, "to_ns": 20, "copied_bytes": 60}]
    assert _copy_rate(copies) == pytest.approx(100 / 20e-9)
