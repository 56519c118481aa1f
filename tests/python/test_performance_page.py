"""Guards against figures in docs/performance.md that no result file has, and a page that hides what is missed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from cli_lines import ROOT


@pytest.fixture
def performance() -> ModuleType:
    return loaded("performance")


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_the_result_files(performance: ModuleType) -> None:
    assert performance.DOC.read_text(encoding="utf-8") == performance.page(), "run python benchmarks/performance.py"


def test_the_page_is_short(performance: ModuleType) -> None:
    assert len(performance.page().splitlines()) <= 150


def test_tables_follow_the_files(performance: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {
        "kind": "machine",
        "machine": "2 x GPU",
        "commit": "abcdef0123",
        "date": "today",
        "driver": "1",
        "cuda": "2",
    }
    machine |= {"torch": "3", "tokens": 4096, "hidden": 7168, "top_k": 8, "experts": 256}
    peer = {"kind": "peer", "call": "dispatch", "sms": 16, "weft": 200, "best_peer": 100, "peer": "other", "floor": 90}
    write(tmp_path / performance.BESIDE_PEERS, [machine, peer])
    ours = {"kind": "two_ranks", "variant": "now", "num_sms": 16, "time_us": 150.4, "host_us": 30.0}
    pairs = [{**ours, "row": f"eager, T = {tokens}", "num_sms": None} for tokens in (128, 32, 8)]
    sized = [
        {**ours, "row": f"T = {tokens}, {how}", "time_us": time_us}
        for tokens in (256, 1024)
        for how, time_us in (("exact", 90.0), ("capacity", 50.0))
    ]
    step = {**ours, "row": "step", "num_sms": None, "time_us": 24_400.0}
    alone = {**step, "variant": "GEMMs alone", "time_us": 22_300.0}
    other = {**ours, "row": "of another variant", "variant": "left out", "time_us": 77.0}
    rows = [{**ours, "row": "rows"}, {**ours, "row": "quantize"}, *pairs, *sized, step, alone, other]
    write(tmp_path / performance.TWO_RANKS, [{**machine, "commit": "1234567"}, *rows])
    calls = (
        performance.Call("dispatch", "rows", 16, 140),
        performance.Call("dispatch, quantised", "quantize", 16),
        performance.Call(performance._STEP, "step", None, 22.9),
    )
    monkeypatch.setattr(performance, "CALLS", calls)
    case = {"kind": "case", "suite": "targets", "name": "combine", "num_sms": 8, "time_us": 50.4, "link_us": 40.0}
    refused = {"kind": "case", "suite": "targets", "name": "left out"}
    target = {"kind": "target", "unit": "us", "must": 100.0}
    targets = [
        {**target, "target": "kept", "value": 80.0, "met": "must"},
        {**target, "target": "late", "value": 125.0, "met": "no"},
    ]
    write(tmp_path / performance.TARGETS, [machine, {**case, "ratio_vs_link": 0.79}, refused, *targets])
    both = {"kind": "case", "suite": "small", "op": "both", "name": "both", "tokens": 8}
    for idx, name in enumerate(performance.SMALL):
        write(tmp_path / name, [machine, {**both, "time_us": 10.0 + idx}])
    monkeypatch.setattr(performance, "RESULTS", tmp_path)
    page = performance.page()
    assert "| dispatch | 16 | 90 | 100 (other) | 200 | 150 | 140 |" in page
    assert "| dispatch, quantised | 16 |  |  |  | 150 |  |" in page
    assert "| auto |  |  |  | 24.4 | 22.9 |" in page
    assert "*Now* is commit 1234567" in page
    assert "the host 30 / 30 / 30 (must: 30). Exact sizes cost 40 / 40 us" in page
    assert "alone are 22.3 ms" in page
    assert "| combine | 8 | 50 | 40 | 0.79 |" in page
    assert "left out" not in page
    assert "1 of 2 targets are met. Missed:" in page
    assert "| late | 125 | 100 us | 25.0% |" in page
    assert "| kept |" not in page
    assert "| both | 8 | 10.0 | 11.0 |" in page


def write(file: Path, rows: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_figures_of_the_readme_are_those_of_the_file() -> None:
    """The four rows of the README, and every bar of its chart, are measured ones."""
    pictures = loaded("pictures")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    chart = (pictures.PICTURES / "two-h100.svg").read_text(encoding="utf-8")
    found = {f"{row['weft']} us | {row['best_peer']} us ({row['peer']})" for row in pictures.rows()}
    shown = [line for line in readme.splitlines() if line.startswith("| ") and " us | " in line]
    assert len(shown) == 4
    for line in shown:
        assert any(figures in line for figures in found), line
    for row in pictures.rows():
        assert f"{row['weft']} us" in chart
        assert f"{row['best_peer']} us ({row['peer']})" in chart


def test_the_diagram_is_the_one_that_is_drawn() -> None:
    pictures = loaded("pictures")
    assert (pictures.PICTURES / "dispatch-combine.svg").read_text(encoding="utf-8") == pictures.flow()
