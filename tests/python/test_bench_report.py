"""Guards against figures of a benchmark that hide the slowest rank, or bound it by bytes that nobody copies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.bench.baselines import with_baseline
from weft.bench.options import Options, one_shape
from weft.bench.ranks import Row, times
from weft.bench.report import _bound, _copy_rate, _rows_of, _with_mean, target_rows
from weft.bench.rows import exposed, row_bytes, target, traffic

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


def test_what_a_graph_has_beside_its_calls_is_not_exposed() -> None:
    """The slowest rank with the calls less the slowest without: clocks of GPUs differ, and calls make ranks wait."""
    notes: list[Row] = [
        {"gpu_us": [420.0, 431.0], "work_gpu_us": [400.0, 410.0], "host_us": [1.0, 1.0]},
        {"gpu_us": [421.0, 430.0], "work_gpu_us": [398.0, 411.0], "host_us": [1.0, 1.0]},
    ]
    found = exposed(notes)
    assert [rank["gpu_us"] for rank in found] == [[21.0, 20.0]] * 2
    assert times(found)["time_us"] == 20.5
    eager: list[Row] = [{"gpu_us": [3.0], "host_us": [1.0]}]
    assert exposed(eager) == eager


NODES = Options(ranks=2, nodes=2, tokens=128, hidden=7168, experts=256, quantize="fp8", halves=True, baseline=False)


def goals(options: Options) -> list[tuple[float, float | None] | None]:
    return [case.goal and (case.goal.must_us, case.goal.stretch_us) for case in one_shape(options)]


def test_targets_between_nodes_are_of_their_own_shape() -> None:
    halves = [(25, None)] * 4
    assert goals(NODES) == [(60, 50), (80, 70), (80, 70), None, *halves]
    assert goals(replace(NODES, quantize="none")) == [None, (80, 70), (80, 70), None, *([None, (25, None)] * 2)]
    large = replace(NODES, tokens=4096, num_sms=8)
    assert goals(large) == [(680, 664), (1300, 1287), (1300, 1287), None, *[None] * 4]
    assert goals(replace(large, quantize="none"))[0] == (1280, 1280)
    for other in (
        replace(NODES, nodes=1),
        replace(NODES, ranks=4),
        replace(NODES, tokens=64),
        replace(NODES, hidden=4096),
        replace(NODES, layout="masked"),
        replace(NODES, routing="zipf"),
        replace(large, num_sms=None),
    ):
        assert set(goals(other)) == {None}


def test_rows_of_halves_have_their_targets() -> None:
    """And no rate: the bytes travel while something else is counted."""
    dispatch = one_shape(NODES)[4]
    note: Row = {**ROWS, "num_tokens": 10, "received_rows": 30, "network_rows": [4, 5], "host_us": [9.0, 9.0]}
    note |= {"gpu_us": [20.0, 24.0], "send_us": [12.0, 15.0], "receive_us": [8.0, 9.0], "work_us": 200.0}
    late = {**note, "gpu_us": [21.0, 23.0], "send_us": [12.0, 12.0], "receive_us": [9.0, 11.0]}
    (row,) = _rows_of(NODES, dispatch, [note, late], {}, 1.0, "cuda:0")
    assert (row["time_us"], row["send_us"], row["receive_us"], row["work_us"]) == (22.5, 13.5, 10.0, 200.0)
    assert (row["is_halved"], row["is_graphed"], row["must_us"], row["stretch_us"]) == (True, False, 25, None)
    assert row["network_bytes"] == 5 * (7168 + 56 * 4)
    assert row["network_gb_per_s"] is row["wire_gb_per_s"] is row["ratio_vs_all_to_all"] is None
    (refused,) = _rows_of(NODES, dispatch, [{"unsupported": "a reason"}] * 2, {}, 1.0, "cuda:0")
    assert refused["unsupported"] == "a reason"
    (found,) = target_rows([row, refused])
    assert (found["target"], found["value"], found["met"]) == ("weft dispatch, halves, T = 128", 22.5, "must")
    assert (target("", "us", 26.0, 25, None)["met"], target("", "us", 49.0, 60, 50)["met"]) == ("no", "stretch")


def test_no_baseline_has_halves() -> None:
    chosen = one_shape(replace(NODES, nodes=1, baseline=True))
    assert {case.is_halved for case in with_baseline(chosen).values()} == {False}
