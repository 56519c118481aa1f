"""Guards against a suite that times wrong results, counts bytes or kernels wrongly, or loses rows when a rank fails."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_lines import assert_documented, rows_of
from typer.testing import CliRunner

import weft
from weft.bench import suite
from weft.bench.cases import SUITES, Case, Goal, cases
from weft.bench.link import LinkPoint, rising
from weft.bench.options import SuiteOptions
from weft.bench.timing import gpu_work
from weft.cli import app

SMALL = ["--device", "cpu", "--tokens", "16", "--hidden", "256", "--iters", "2", "--warmup", "1", "--json"]


def run(*args: str, code: int = 0) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["bench", *SMALL, *args])
    assert result.exit_code == code, result.output
    return rows_of(result.stdout)


def of_kind(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == kind]


@pytest.mark.slow
def test_every_suite_runs_checks_and_is_documented(tmp_path: Path) -> None:
    picture = tmp_path / "bandwidth.png"
    rows = run("--suite", "all", "--ranks", "2", "--plot", str(picture))
    assert_documented(rows)
    found = of_kind(rows, "case")
    assert len(found) == len(cases(SUITES))
    assert [row for row in found if row["problems"]] == []
    assert [row for row in found if row["unsupported"]] == []
    for row in found:
        assert row["time_p99_us"] >= row["time_us"] > 0
        y_bytes = 2 * row["tokens"] * row["hidden"] * (row["op"] != "dispatch")
        assert (row["result_bytes"] == y_bytes) == (row["op"] in ("combine", "step"))
        assert row["result_bytes"] >= y_bytes
        assert row["heap_peak_bytes"] > 0
        if row["suite"] not in ("sms", "tokens", "small") or (row["suite"] == "tokens" and row["tokens"] == 4):
            assert row["ratio_vs_all_to_all"] > 0
    (step,) = (row for row in found if row["op"] == "step")
    assert step["ratio_vs_gemm"] == pytest.approx(step["time_us"] / step["gemm_us"])
    assert picture.stat().st_size > 10_000


def test_a_wrong_result_is_a_row_without_times(monkeypatch: pytest.MonkeyPatch) -> None:
    combine = weft.ExpertParallel.combine

    def wrong(self: Any, *args: Any, **options: Any) -> Any:
        y = combine(self, *args, **options)
        if self.comm.rank == 1:
            y.view(torch.int16)[-1, 0] ^= 1
        return y

    monkeypatch.setattr(weft.ExpertParallel, "combine", wrong)
    rows = run("--suite", "sms", "--ranks", "2", "--no-baseline", code=1)
    for row in of_kind(rows, "case"):
        assert ("time_us" in row) == (row["op"] == "dispatch")
        assert len(row["problems"]) == (row["op"] == "combine")
        assert not row["problems"] or row["problems"][0].startswith("rank 1: Mismatch: y of combine")


def test_rows_that_were_complete_come_before_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    combine = weft.ExpertParallel.combine

    def fails(self: Any, *args: Any, **options: Any) -> Any:
        if options["num_sms"] == 12 and self.comm.rank == 1:
            raise weft.InternalError("told to")
        return combine(self, *args, **options)

    monkeypatch.setattr(weft.ExpertParallel, "combine", fails)
    rows = run("--suite", "sms", "--ranks", "2", "--no-baseline", code=1)
    assert [(row["op"], row["num_sms"]) for row in of_kind(rows, "case")] == [
        ("dispatch", 4),
        ("dispatch", 4),
        ("combine", 4),
        ("dispatch", 6),
        ("dispatch", 6),
        ("combine", 6),
        ("dispatch", 12),
        ("dispatch", 12),
    ]
    assert rows[-1]["type"] == "InternalError"


@pytest.mark.parametrize(
    ("flags", "named"), [(["--suite", "targets,nothing"], "nothing"), (["--plot", "x.png"], "--plot")]
)
def test_refused_flags(flags: list[str], named: str) -> None:
    (row,) = run(*flags, code=2)
    assert row["type"] == "InvalidArgument"
    assert named in row["text"]


def test_every_target_for_4096_tokens_is_a_case() -> None:
    goals = [(case.goal.must_us, case.goal.stretch_us) for case in cases(("targets",)) if case.goal is not None]
    assert set(goals) == {
        (264, 252), (292, 282), (497, 475), (552, 536), (278, 260), (315, 285),
        (510, 495), (610, 550), (535, 495), (570, 515), (300, 270),
    }  # fmt: skip
    assert all(case.goal is None for case in cases(SUITES, tokens=64))
    assert all(case.goal is None for case in cases(SUITES, ranks=2))


def test_every_target_for_small_batches_is_a_case_of_both_layouts() -> None:
    goals = {
        (case.op, case.tokens, case.layout): (case.goal.must_us, case.goal.stretch_us)
        for case in cases(("small",))
        if case.goal is not None
    }
    wanted = {("dispatch", 128): (18, 15), ("combine", 128): (25, 20)}
    wanted |= {("both", 128): (44, 35), ("both", 32): (28, 20), ("both", 8): (20, 13)}
    assert goals == {(*key, layout): goal for key, goal in wanted.items() for layout in ("masked", "expert_major")}


def test_results_of_small_batches_are_right_in_every_layout() -> None:
    rows = run("--suite", "small", "--ranks", "2", "--tokens", "512", "--no-baseline")
    found = of_kind(rows, "case")
    assert {(row["op"], row["layout"]) for row in found if row["tokens"] == 16 and not row["problems"]} == {
        (op, layout) for op in ("dispatch", "combine", "both") for layout in ("masked", "expert_major")
    }
    assert {(row["op"], row["layout"]) for row in of_kind(rows, "crossover")} == {
        (op, "expert_major") for op in ("dispatch", "combine", "both")
    }


def test_a_crossover_is_where_the_kernels_for_small_batches_first_lose() -> None:
    def row(tokens: int, mode: str, time_us: float) -> dict[str, Any]:
        common = {"suite": "small_tokens", "op": "both", "layout": "expert_major", "rows": "fp8"}
        return {**common, "tokens": tokens, "mode": mode, "time_us": time_us}

    rows = [row(tokens, "latency", 10.0 * tokens) for tokens in (1, 2, 4, 8)]
    rows += [row(tokens, "throughput", 25.0) for tokens in (1, 2, 4)]
    (found,) = suite._crossover_rows(rows)
    assert (found["most_tokens"], found["is_bound"]) == (2, False)
    (found,) = suite._crossover_rows([each for each in rows if each["tokens"] < 4])
    assert (found["most_tokens"], found["is_bound"]) == (2, True)


def test_the_busiest_direction_of_a_link_counts() -> None:
    """All tokens of two ranks to rank 0: rank 1 sends 10 rows, rank 0 receives them, and nothing else crosses."""
    case = Case(suite="routings", op="dispatch", rows="fp8", routing="all_to_one", num_sms=16)
    limits = {LinkPoint("push", 7168, 16): 300e9}
    note = {"out_rows": [0, 10], "in_rows": [30, 0], "logical_rows": [10, 10]}
    row = suite._link(case, note, limits, 2.0)
    row_bytes = 7168 + 7168 // 128 * 4
    assert (row["row_bytes"], row["link_bytes"]) == (row_bytes, 30 * row_bytes)
    assert row["ratio_vs_link"] == pytest.approx(30 * row_bytes / 300e9 / 2e-6)


def test_kernels_are_counted_from_the_profilers_records() -> None:
    def event(cat: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        return {"cat": cat, "ts": ts, "dur": dur, "args": args}

    events = [
        event("cpu_op", 0, 1000),
        event("kernel", 10, 4, grid=[16, 1, 1]),
        event("gpu_memset", 14, 1),
        event("kernel", 20, 5, grid=[64, 64, 1]),
    ]
    work = gpu_work(events, num_calls=2, num_sms=132)
    assert work is not None
    assert (work.kernel_us, work.span_us, work.num_kernels, work.num_blocks) == (5, 7.5, 1, 74)
    assert gpu_work(events[:1], num_calls=2, num_sms=132) is None
    last = gpu_work(
        events * 2 + [event("kernel", ts, 7, grid=[1]) for ts in (30, 35, 50)], num_calls=3, num_sms=132, left_out=2
    )
    assert last is not None
    assert (last.kernel_us, last.span_us, last.num_kernels) == (19, 27, 3)  # two at once are not counted twice


def test_a_limit_is_never_less_than_that_of_fewer_sms() -> None:
    """Else a call with more SMs would look better against the link for a kernel that measured badly."""
    rates = {LinkPoint("push", 7168, 8): 334.0, LinkPoint("push", 7168, 12): 308.0, LinkPoint("push", 7168, 16): 345.0}
    rates |= {LinkPoint("push", 14336, 12): 300.0, LinkPoint("pull", 7168, 12): 290.0}
    limits = rising(rates)
    assert limits == {**rates, LinkPoint("push", 7168, 12): 334.0}
    rows = {(row["link_kind"], row["row_bytes"], row["num_sms"]): row for row in suite._link_rows(rates, limits, {})}
    row = rows["push", 7168, 12]
    assert (row["link_gb_per_s"], row["measured_gb_per_s"]) == (334e-9, 308e-9)
    assert_documented(row)


def test_other_routings_and_tokens_have_every_kind_of_call() -> None:
    """A cliff under a skewed routing, or at few tokens, could be in any of them."""
    kinds = {(case.name, case.num_sms) for case in cases(("targets",))}
    for routing in ("zipf", "all_to_one", "group_limited", "trace"):
        found = [case for case in cases(("routings",), trace="x.npz") if case.routing == routing]
        names = {(case.name, case.num_sms) for case in found}
        assert len(names) == len(found) == 7
        assert names <= kinds
    for tokens in (1024, 2048):
        seen = {(case.name, case.num_sms) for case in cases(("tokens",)) if case.tokens == tokens}
        assert seen - names == {
            (f"{name}, capacity", num_sms) for name, num_sms in names if name.startswith("dispatch")
        }
        assert names <= seen <= kinds


def test_kernel_times_of_baselines_join_their_medians() -> None:
    notes: list[list[dict[str, Any]]] = [
        [{"kind": "baseline", "key": "a", "gpu_us": [9.0, 5.0, 6.0]}, {"kind": "baseline", "gpu_us": [1.0, 7.0, 4.0]}],
        [{"kind": "baseline", "key": "b", "gpu_us": [2.0]}, {"kind": "baseline", "gpu_us": [3.0]}],
        [{"kind": "baseline_work", "key": "a", "kernel_us": 4.0}, {"kind": "baseline_work", "kernel_us": 5.0}],
        [{"kind": "baseline_work", "key": "b", "kernel_us": None}, {"kind": "baseline_work", "kernel_us": 5.0}],
    ]
    assert suite._baselines(notes) == {"a": {"gpu_us": 7.0, "kernel_us": 5.0}, "b": {"gpu_us": 3.0}}


@pytest.mark.parametrize(("time_us", "met"), [(470.0, "stretch"), (490.0, "must"), (500.0, "no")])
def test_targets_say_whether_they_are_met(time_us: float, met: str) -> None:
    case = Case(suite="targets", op="dispatch", goal=Goal(must_us=497, stretch_us=475))
    note = {"gpu_us": [time_us], "host_us": [20.0], "work": None, "out_rows": [1, 1], "in_rows": [1, 1]}
    note["logical_rows"] = [2, 2]
    row = suite._case_row(case, [note, note], SuiteOptions(ranks=2), {}, {})
    (target,) = suite._target_rows([row], [])
    assert (target["value"], target["must"], target["stretch"], target["met"]) == (time_us, 497, 475, met)
    common = {"suite": "tokens", "num_sms": 16, "name": "a call", "must_us": None, "ratio_vs_link": None, "op": "step"}
    common |= {"sizes": "exact", "call_over_kernel": None}
    calls = [{**common, "tokens": n * 1024, "link_bytes": n * 10, "time_us": 20.0 + n * 100} for n in (1, 2, 4)]
    (quarter,) = suite._target_rows([{**calls[0], "time_us": 145.0}, *calls[1:]], [])
    assert "fixed 20 us taken off: a call" in quarter["target"]
    assert (quarter["value"], quarter["met"]) == (pytest.approx(100 / 125), "no")
    assert not [*suite._target_rows(calls[:2], [])]
    (memory,) = suite._target_rows([], [{"registered_bytes": 2e8, "tokens": 4096}])
    assert re.search("memory", memory["target"])
    assert memory["met"] == "must"


def test_what_the_profiler_recorded_comes_after_the_times() -> None:
    """It joins the case that it belongs to."""
    notes: list[list[dict[str, Any]]] = [
        [{"kind": "case", "number": 0, "host_us": [1.0]}],
        [{"kind": "case", "number": 1}],
        [{"kind": "baseline", "key": "k"}],
        [{"kind": "work", "number": 0, "work": "later"}],
    ]
    suite._add_work(notes)
    assert [note[0]["work"] for note in notes[:2]] == ["later", None]


def test_nothing_is_called_faster_than_a_host() -> None:
    """A baseline that takes what its host takes would flatter every call."""
    row = {"time_us": 500.0, "all_to_all_us": 2000.0}
    assert suite.ratio_vs_all_to_all({**row, "all_to_all_kernel_us": None}) == 4.0
    assert suite.ratio_vs_all_to_all({**row, "all_to_all_kernel_us": 1900.0}) == 4.0
    assert suite.ratio_vs_all_to_all({**row, "all_to_all_kernel_us": 700.0}) is None
    assert suite.ratio_vs_all_to_all({**row, "all_to_all_us": None, "all_to_all_kernel_us": None}) is None
