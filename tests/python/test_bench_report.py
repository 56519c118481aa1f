"""Guards against figures of a benchmark that hide the slowest rank, or bound it by bytes that nobody copies."""

from __future__ import annotations

import pytest

import weft
from weft.bench.options import Options
from weft.bench.report import _copy_rate, _rates, _times
from weft.bench.worker import RankReport, Timed


def report(**values: int) -> RankReport:
    made = RankReport(0, "cpu", "cpu", weft.Placement(mode="off"))
    for name, value in values.items():
        setattr(made, name, value)
    return made


RANKS = [
    report(num_tokens=10, rows_received=30, rows_sent=7, rows_kept=3, dispatch_row_bytes=100, combine_row_bytes=50),
    report(num_tokens=20, rows_received=6, rows_sent=9, rows_kept=1, dispatch_row_bytes=100, combine_row_bytes=50),
]


def test_a_call_takes_as_long_as_its_slowest_rank() -> None:
    one = Timed(call_us=[1.0, 10.0, 3.0], total_us=30.0)
    other = Timed(call_us=[5.0, 2.0, 4.0], total_us=33.0)
    times = _times([one, other])
    assert (times["time_us"], times["time_p99_us"], times["host_us"]) == (5.0, 10.0, 5.0)
    assert times["time_mean_us"] == 33.0 / 3


def test_times_of_a_gpu_come_before_those_of_the_host() -> None:
    both = [Timed(call_us=[1.0], total_us=1.0, gpu_us=[7.0]), Timed(call_us=[2.0], total_us=2.0, gpu_us=[6.0])]
    assert _times(both)["time_us"] == 7.0
    assert _times(both)["host_us"] == 2.0


@pytest.mark.parametrize(
    ("op", "copied", "wire", "logical"),
    [
        ("dispatch", (30 + 6) * 100, 9 * 100, 10 * 100),
        ("combine", ((30 + 10) / 2 + (6 + 20) / 2) * 50, 9 * 50, 10 * 50),  # read where they came, written once a token
        ("both", (30 + 6) * 100 + ((30 + 10) / 2 + (6 + 20) / 2) * 50, 9 * 150, 10 * 150),
    ],
)
def test_bytes_of_an_operation(op: str, copied: float, wire: int, logical: int) -> None:
    rates = _rates(Options(), op, RANKS, {"time_us": 2.0}, copy_rate=1e6)
    assert rates["memory_copy_bound_us"] == pytest.approx(copied)
    assert rates["ratio_vs_memory_copy"] == pytest.approx(copied / 2.0)
    assert (rates["wire_bytes"], rates["logical_bytes"]) == (wire, logical)
    assert rates["wire_gb_per_s"] == pytest.approx(wire / 2e-6 / 1e9)


def test_copies_of_all_ranks_count_from_the_first_to_the_last() -> None:
    ranks = [
        report(copy_from_ns=0, copy_to_ns=10, copied_bytes=40),
        report(copy_from_ns=10, copy_to_ns=20, copied_bytes=60),
    ]
    assert _copy_rate(ranks) == pytest.approx(100 / 20e-9)
