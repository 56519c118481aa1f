"""Guards against a `weft plan` that hides what is a model, doesn't fit a terminal, lies to scripts, or needs torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_lines import ROOT, rows_of, weft_command
from typer.testing import CliRunner

from weft.cli import app
from weft.planner import PRESETS

DOC = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
WITHOUT = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; from weft.cli import main; main()"


def run(*args: str) -> str:
    result = CliRunner().invoke(app, ["plan", *args])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_it_needs_neither_torch_nor_numpy() -> None:
    done = weft_command("plan", "--preset", "dgx-h100", "--ranks", "64", "--compare", "--json", code=WITHOUT)
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    assert {row["kind"] for row in rows} == {"plan", "plan_resources", "plan_compare"}


def test_help_has_two_examples_and_both_run() -> None:
    text = " ".join(CliRunner().invoke(app, ["plan", "--help"]).stdout.split())
    examples = re.findall(r"weft plan --.*?(?= weft plan --|$)", text.split("Examples:")[1])
    assert len(examples) == 2
    for example in examples:
        assert example in text
        run(*example.split()[2:])


@pytest.mark.parametrize(
    "args",
    [
        ["--ranks", "16", "--compare"],
        ["--preset", "gb200-nvl72", "--ranks", "32", "--ranks", "512", "--compare"],
        ["--preset", "hgx-h200", "--ranks", "4"],
        ["--mode", "latency", "--ranks", "16", "--experts", "32", "--compare"],
        ["--preset", "gcp-a3-mega", "--ranks", "512", "--tokens", "99999"],
    ],
)
def test_every_line_fits_80_columns_and_every_figure_says_what_it_is(args: list[str]) -> None:
    lines = run(*args).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    figures = [line for line in lines if re.match(r"│ (dispatch|combine|both) ", line)]
    assert figures
    for line in figures:
        assert re.search(r"\b(model|measured)\b", line), line
    if "2 x 8" in lines[1]:
        assert sum("[model]" in line for line in lines) >= 7  # memory part by part, and connections
        assert not any("measured" in line for line in figures)


@pytest.mark.parametrize("args", [["--ranks", "16", "--compare"], ["--preset", "hgx-h200", "--ranks", "4"]])
def test_json_is_explained_and_says_what_is_a_model(args: list[str]) -> None:
    rows = rows_of(run("--json", *args))
    for row in rows:
        for key in row:
            assert f"`{key}`" in DOC or f"`{key}`" in (ROOT / "docs" / "benchmarking.md").read_text(), key
        if row["kind"] in ("plan", "plan_compare"):
            assert row["basis"] in ("model", "measured")
            assert row["kind"] == "plan_compare" or (row["basis"] == "measured") == bool(row["measured_at"])
    assert sum(row["kind"] == "plan_resources" for row in rows) == 1


def test_several_ranks_give_several_plans() -> None:
    rows = rows_of(run("--json", "--ranks", "8", "--ranks", "64", "--sms", "8", "--sms", "12"))
    found = {(row["num_ranks"], row["num_sms"]) for row in rows if row["kind"] == "plan"}
    assert found == {(8, 8), (8, 12), (64, 8), (64, 12)}


def test_flags_change_the_machine() -> None:
    def first(*args: str) -> dict[str, Any]:
        return rows_of(run("--json", "--ranks", "16", "--sms", "16", *args))[0]

    assert first("--nic", "25")["time_us"] > 1.9 * first()["time_us"]
    assert first("--latency-us", "58.4")["time_us"] == pytest.approx(first()["time_us"] + 100, abs=1)
    assert first("--nvlink", "50")["binds"] == "NVLink"
    assert first("--ranks-per-domain", "16")["num_domains"] == 1
    assert "(changed)" in first("--nic", "25")["machine"]
    two = rows_of(run("--json", "--ranks", "16", "--preset", "hgx-h200", "--nic-ports", "2"))[-1]
    assert two["qps"] == 8


def test_a_histogram_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "loads.json"
    file.write_text(json.dumps([2.0] * 16 + [1] * 240))
    rows = rows_of(run("--json", "--ranks", "16", "--histogram", str(file)))
    assert rows[0]["routing"] == "histogram"
    assert rows[0]["imbalance"] > 1.2
    assert "busiest rank" in " ".join(run("--ranks", "16", "--histogram", str(file)).split())
    for text in ("not json", "{}", "[]", "[true]", '["a"]'):
        file.write_text(text)
        result = CliRunner().invoke(app, ["plan", "--histogram", str(file)])
        assert (result.exit_code, result.stdout) == (2, "")
        assert "--histogram" in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["--preset", "dgx"],
        ["--ranks", "1"],
        ["--ranks", "513"],
        ["--experts", "100"],
        ["--groups", "8"],
        ["--trace", "/nowhere/trace"],
        ["--histogram", "/nowhere/loads.json"],
        ["--plot", "/nowhere/plan.png"],
        ["--plot", "plan.gif"],
    ],
)
def test_wrong_usage_exits_2(args: list[str]) -> None:
    result = CliRunner().invoke(app, ["plan", *args])
    assert result.exit_code == 2, result.output
    assert result.stderr


def test_every_flag_and_preset_is_documented() -> None:
    group: Any = typer.main.get_command(app)
    flags = {flag for parameter in group.commands["plan"].params for flag in parameter.opts} - {"--help"}
    assert len(flags) > 15
    for flag in flags:
        assert f"`{flag}`" in DOC.split("## Flags")[1].split("## ")[0], flag
    for name in PRESETS:
        assert name in DOC


def test_pictures_keep_the_model_and_what_was_published_apart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for args in (
        ["--ranks", "16", "--sms", "8"],
        ["--preset", "gb200-nvl72", "--ranks", "32", "--experts", "256"],
        ["--preset", "h800-deepep", "--ranks", "128", "--mode", "latency"],
        ["--ranks", "2", "--groups", "8", "--topk-groups", "4"],
    ):
        file = tmp_path / "plan.svg"
        run(*args, "--plot", str(file))
        assert file.stat().st_size > 10_000


def test_lines_are_the_model_and_points_are_published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    from weft.planner import plan, plot

    kept: list[Any] = []
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda self, *args, **options: kept.append(self))
    plot.write_plot(plan(num_ranks=16, num_sms=(8,)), {}, tmp_path / "a.png")
    plot.write_plot(plan(num_ranks=2, num_sms=(16,)), {}, tmp_path / "b.png")
    across, within = kept
    (legend,) = across.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert [name for name in names if name.startswith("Weft")] == [
        "Weft combine BF16 [model]",
        "Weft dispatch BF16 [model]",
        "Weft dispatch FP8 [model]",
    ]
    assert all(name.startswith("published: ") for name in names if not name.startswith("Weft"))
    assert any("Hybrid-EP, kernel" in name for name in names)
    for axes in across.axes:
        for line in axes.lines:
            is_model = line.get_label().startswith("Weft")
            assert is_model == (line.get_linestyle() != "None")
            assert is_model or line.get_markerfacecolor() == "white"
    assert "Weft, measured" in [text.get_text() for text in within.legends[0].get_texts()]
    assert "model" in across.get_suptitle()
    assert "published" in across.get_suptitle()
