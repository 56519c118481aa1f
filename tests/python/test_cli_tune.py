"""Guards against `weft tune` choosing what was not measured to be best, or storing it where nobody looks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cli_lines import assert_documented, rows_of
from typer.testing import CliRunner

import weft
from weft.bench.ahead import compile_ahead
from weft.bench.tune import MODES, NODE_SMS, Point, TuneOptions, best_node_sms, best_sms, crossovers, of_points
from weft.cli import app, tune_command
from weft.kernels import prebuild
from weft.kernels import tables as tuning_files
from weft.kernels.tuning import FORMS, choose
from weft.limits import LAYOUTS

QUICK = ["tune", "--device", "cpu", "--ranks", "2", "--hidden", "256", "--samples", "2"]
QUICK += ["--tokens", "1", "--tokens", "6"]


@pytest.fixture
def any_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the cpu engine too, which the command refuses."""
    monkeypatch.setattr(tune_command, "TuneOptions", partial(TuneOptions, any_engine=True))


def run(*args: str, code: int = 0) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, [*QUICK, "--json", *args])
    assert result.exit_code == code, result.output
    return rows_of(result.stdout)


def test_the_cpu_engine_is_refused_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its "SMs" would be stored and taken by every ExpertParallel."""
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    rows = run(code=3)
    assert [row["kind"] for row in rows] == ["machine", "error"]
    assert "weft tune is not supported: have the cpu engine" in rows[-1]["text"]
    run("--output", str(tmp_path / "mine.json"), code=3)
    assert not any(tmp_path.rglob("*.json"))


@pytest.mark.usefixtures("any_engine")
def test_what_is_measured_is_stored_where_objects_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    monkeypatch.setenv("WEFT_CACHE_DIR", str(folder))
    rows = run()
    assert_documented(rows)
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in {row["kind"] for row in rows}}
    calls = {(row["op"], row["layout"], row["form"], row["tokens"], row["mode"]) for row in by_kind["tuned"]}
    forms = [(op, layout, form) for op, forms in FORMS.items() for layout in LAYOUTS for form in forms]
    assert {(*key, tokens, mode) for key in forms for tokens in (1, 6) for mode in MODES} <= calls
    assert all(row["time_p99_us"] >= row["time_us"] > 0 for row in by_kind["tuned"])
    (stored,) = by_kind["table"]
    assert stored["file"] == str(folder / "tuning-cpu-2.json")
    found = tuning_files.find("cpu", 2)
    assert found.source == stored["source"]
    assert found.source.startswith("weft tune on ")
    assert found.shape["hidden"] == 256
    wanted = {(row["op"], row["layout"], row["form"]): row["most_tokens"] for row in by_kind["tuned_crossover"]}
    assert dict(found.table.most_tokens) == wanted
    assert found.table.num_sms == tuple((row["most_tokens"], row["num_sms"]) for row in by_kind["tuned_sms"])

    def table_of(comm: weft.Communicator) -> object:
        with weft.ExpertParallel(comm, num_experts=4, top_k=2, hidden=64, max_tokens_per_rank=8) as ep:
            return ep._shape.table

    assert weft.spawn(table_of, 2, device="cpu") == [found.table] * 2


def test_kernels_are_compiled_before_the_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the points, once each; what no rank can call is left out."""
    wanted: list[str] = []
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(prebuild, "compile_all", lambda every, folder: wanted.extend(source for _, _, source in every))
    options = TuneOptions(ranks=2, hidden=256, experts=8, top_k=2, tokens=(6,))
    plain = Point(op="dispatch", layout="masked", form="plain", tokens=6, mode="latency", num_sms=4)
    points = [
        plain,
        replace(plain, op="both"),
        replace(plain, op="combine", form="quantized"),
        replace(plain, form="quantized"),
        replace(plain, form="wide"),
        replace(plain, mode="throughput", num_sms=0),
    ]
    shape = prebuild.KernelShape(
        ranks=2, experts=8, top_k=2, hidden=256, tokens=6, small_num_sms=(4,), layouts=("masked",)
    )
    names = {
        source: f"{dtype} {name}"
        for dtype in ("bf16", "fp32")
        for name, source in prebuild.kernels(replace(shape, dtype=dtype), prebuild.ARCHITECTURES["sm_90"])
    }
    assert compile_ahead(of_points(options, points), "sm_90") == len(wanted) == 6
    assert {names[source] for source in wanted} == {
        "bf16 small dispatch masked, plain, int64 ids",
        "fp32 small dispatch masked, plain, int64 ids",
        "bf16 small dispatch masked, fp8, int64 ids",
        "bf16 small combine by expert, plain",
        "bf16 small combine by expert, fp8",
        "bf16 dispatch masked, plain, int64 ids",
    }
    assert compile_ahead(of_points(options, [plain]), "sm_70") == 0
    refused = TuneOptions(ranks=1, hidden=256, experts=1 << 14, top_k=2, tokens=(6,))
    assert compile_ahead(of_points(refused, [plain]), "sm_90") == 0


@pytest.mark.usefixtures("any_engine")
def test_a_file_of_its_own_and_a_table_for_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", "")
    file = tmp_path / "mine.json"
    result = CliRunner().invoke(app, [*QUICK, "--output", str(file)])
    assert result.exit_code == 0, result.output
    assert f"wrote {file}" in result.output
    assert tuning_files.read(file, is_shipped=True).device_name == "cpu"
    (refused,) = run(code=2)
    assert "WEFT_CACHE_DIR is empty" in refused["text"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--tokens", "3"], "that ascend"),
        (["--tokens", "513"], "up to 512"),
        (["--experts", "3"], "multiple of ranks"),
        (["--nodes", "3"], "divisors of ranks=2"),
    ],
)
def test_refused_flags(flags: list[str], named: str, tmp_path: Path) -> None:
    (row,) = run("--output", str(tmp_path / "x.json"), *flags, code=2)
    assert named in row["text"]


def test_the_fewest_sms_that_are_nearly_the_best() -> None:
    def point(tokens: int, num_sms: int) -> Point:
        common = {"op": "both", "layout": "expert_major", "form": "plain", "mode": "latency"}
        return Point(tokens=tokens, num_sms=num_sms, **common)

    times = {point(1, 4): 10.1, point(1, 8): 10.0, point(1, 32): 10.5}
    times |= {point(8, 4): 10.3, point(8, 8): 10.0, point(8, 32): 9.9}
    times |= {point(64, 4): 30.0, point(64, 8): 20.0, point(64, 32): 19.7}
    assert best_sms(times) == ((1, 4), (64, 8))
    assert best_sms({}) == ()


def test_a_crossover_loses_least_and_one_odd_time_does_not_decide() -> None:
    def times(op: str, latency: list[float], throughput: list[float]) -> dict[Point, float]:
        found = {}
        for mode, us in (("latency", latency), ("throughput", throughput)):
            for tokens, time_us in zip((1, 2, 4, 8), us, strict=True):
                found[Point(op=op, layout="masked", form="plain", tokens=tokens, mode=mode)] = time_us
        return found

    slow = [30.0, 30.0, 30.0, 30.0]
    assert crossovers(times("dispatch", [10, 40, 20, 50], slow)) == ((("dispatch", "masked", "plain"), 4),)
    both = crossovers(times("dispatch", [40.0] * 4, slow) | times("combine", [10.0] * 4, slow))
    assert dict(both) == {("dispatch", "masked", "plain"): 0, ("combine", "masked", "plain"): 8}
    table = tuning_files.Table(most_tokens=both)
    assert choose(table, "dispatch", "masked", "plain", 1) == "throughput"
    assert choose(table, "combine", "masked", "plain", 8) == "latency"
    only_one = {point: us for point, us in times("dispatch", [1.0] * 4, slow).items() if point.mode == "latency"}
    assert crossovers(only_one) == ()


@pytest.mark.usefixtures("any_engine")
def test_ranks_in_nodes_get_their_sms_beside_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other nodes, and without nodes."""
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    other = ((3, "dispatch", "masked"), 5)
    known = tuning_files.Table(most_tokens_else=7, node_num_sms=(other, ((1, "combine", "masked"), 5)))
    tuning_files.write(
        tuning_files.path_in(tmp_path / "cache", "cpu", 2), tuning_files.Tuning("cpu", 2, known, "before")
    )
    rows = run("--nodes", "2")
    assert_documented(rows)
    tuned = [row for row in rows if row["kind"] == "tuned"]
    assert {(row["op"], row["layout"], row["form"], row["mode"], row["tokens"], row["num_sms"]) for row in tuned} == {
        (op, layout, "plain", "throughput", tokens, num_sms)
        for op in FORMS
        for layout in LAYOUTS
        for tokens in (1, 6)
        for num_sms in NODE_SMS
    }
    found = {(row["node_ranks"], row["op"], row["layout"]): row["num_sms"] for row in rows if "node_ranks" in row}
    assert set(found) == {(1, op, layout) for op in FORMS for layout in LAYOUTS}
    stored = tuning_files.find("cpu", 2)
    assert (stored.table.most_tokens_else, dict(stored.table.node_num_sms)) == (7, dict((other,)) | found)
    assert stored.source.startswith("2 nodes: weft tune on ")
    assert stored.source.endswith("; else: before")
    run("--tokens", "8")  # without nodes: what nodes want is kept
    assert dict(tuning_files.find("cpu", 2).table.node_num_sms) == dict((other,)) | found


def test_between_nodes_one_number_of_sms_serves_every_t() -> None:
    def times(us: dict[tuple[int, int], float]) -> dict[Point, float]:
        common = {"op": "dispatch", "layout": "masked", "form": "plain", "mode": "throughput"}
        return {Point(tokens=tokens, num_sms=num_sms, **common): time for (tokens, num_sms), time in us.items()}

    us = {(512, 8): 100.0, (512, 16): 90.0, (512, 24): 89.0, (4096, 8): 900.0, (4096, 16): 700.0, (4096, 24): 705.0}
    assert best_node_sms(times(us)) == ((("dispatch", "masked"), 16),)
    assert best_node_sms(times(us | {(512, 4): 10.0})) == ((("dispatch", "masked"), 16),)  # not measured at 4096
    assert best_node_sms({}) == ()
