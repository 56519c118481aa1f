"""Guards against figures in docs/performance.md that no result file has, and a page that hides what is missed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from cli_lines import ROOT
from typer.testing import CliRunner

from weft.cli import app


@pytest.fixture
def performance() -> ModuleType:
    spec = importlib.util.spec_from_file_location("performance", ROOT / "benchmarks" / "performance.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_the_result_files(performance: ModuleType) -> None:
    assert performance.DOC.read_text(encoding="utf-8") == performance.page(), "run python benchmarks/performance.py"


def test_a_page_without_runs_says_so(performance: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performance, "RESULTS", tmp_path)
    assert "No run is in the result files yet" in performance.page()


def test_a_run_becomes_tables_and_missed_targets_come_first(
    performance: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "--device cpu --tokens 16 --hidden 256 --iters 2 --warmup 1 --ranks 2 --suite targets,step,small --json"
    done = CliRunner().invoke(app, ["bench", *flags.split()])
    assert done.exit_code == 0, done.output
    common = {"kind": "target", "unit": "us", "must": 100, "stretch": 90}
    targets = [
        {**common, "target": "kept", "value": 80.0, "met": "stretch"},
        {**common, "target": "late", "value": 125.0, "met": "no"},
    ]
    link = {"kind": "link", "link_kind": "push", "row_bytes": 7168, "num_sms": 16, "link_gb_per_s": 344.4}
    lines = [*done.stdout.splitlines(), *(json.dumps(row) for row in (*targets, link))]
    (tmp_path / "gpu_bench_small.jsonl").write_text("\n".join(lines) + "\n")
    soak = {
        "machine": "2 x GPU",
        "ranks": 2,
        "commit": "abc",
        "calls": 1200,
        "words": 5,
        "replays": 2300,
        "problems": [],
        "traffic": "-",
    }
    (tmp_path / "gpu_soak_1.jsonl").write_text(json.dumps({"kind": "soak", **soak}) + "\n")
    kills = [{"kind": "kill", "ok": True}, {"kind": "kill", "ok": False}]
    kills.append({"kind": "times", "what": "detection", "count": 6, "p50_us": 4000, "p99_us": 5500, "max_us": 5600})
    (tmp_path / "gpu_kill_1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kills))
    cut_off = {"ok": False, "detection_us": [900.0, 500.0], "rebuild_us": [7000.0], "channels": [{"pidfd": 2000.0}]}
    rows = [{"kind": "kill", **cut_off, "problems": ["it hung"]}, {"kind": "error", "text": "interrupted"}]
    (tmp_path / "gpu_kill_2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"kind": "waits", "rank": rank, "wait_us": [0.0, 40.0 * rank]} for rank in range(2)]
    rows.append({"kind": "who_is_late", "late_rank": 1, "late_us": 1000.0})
    cost = {"kind": "cost", "op": "dispatch", "tokens": 8, "kernels": "no poll", "time_us": 14.2, "saved_us": 0.05}
    (tmp_path / "gpu_wait_cost.jsonl").write_text(json.dumps(cost) + "\n")
    (tmp_path / "gpu_late.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    built = [
        {"kind": "built", "name": f"kernel {n}", "arch": "sm_90", "cpu_seconds": n / 10, "num_bytes": 9}
        for n in (1, 5, 2)
    ]
    built.append({"kind": "prebuilt", "cpu": "A CPU", "nvrtc": "13", "commit": "abc"})
    (tmp_path / "gpu_compile_1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in built))
    machine = {"kind": "machine", "machine": "2 x GPU", "commit": "abc"}
    times = {"the kernel in front has ended": 0.5, "flight begun": 0.1, "end": 6.0}
    places = [{"place": name, "mean_us": us, "last_us": us + 0.2, "last_block": 7} for name, us in times.items()]
    dispatch = {"kind": "places", "op": "dispatch", "time_us": 9.0, "blocks": 32}
    rows = [machine, {**dispatch, "tokens": 8, "places": places}, {**dispatch, "tokens": 1, "places": places[2:]}]
    rows.append({"kind": "host", "op": "combine", "mode": "latency", "host_us": 14.04, "native_us": 5.0})
    (tmp_path / "gpu_where_time_goes_1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kernels = {"kind": "kernels", "ranks": 2, "isolation": "thread", "op": "combine", "tokens": 8, "layout": "masked"}
    rows = [machine, {**kernels, "quantize": None, "headers": "new", "time_us": 14.0, "more_us": -0.25}]
    (tmp_path / "gpu_kernels_1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tests = {"kind": "tests", "file": "tests/gpu/test_a.py", "passed": 7, "failed": 0, "skipped": 2, "late_s": "1,5"}
    tests |= {"status": 2, "failures": ["a", "b"]}
    (tmp_path / "gpu_tests_1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (machine, tests)))
    demo = {"placement": "2 ranks", "losses": [6.0, 1.7], "baseline_losses": [6.0, 1.8]}
    demo |= {"early_difference": 0.0, "overall_difference": 0.0066}
    example = {"kind": "example", "ranks": 2, "status": 0}
    rows = [machine, {**example, "name": "a.py", "lines": ["all well"]}, {**example, "name": "weft demo", "demo": demo}]
    (tmp_path / "gpu_examples_1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(performance, "RESULTS", tmp_path)
    page = performance.page()
    assert "No run is" not in page
    assert "| the kernel in front has ended | -0.5 |  |" in page
    assert "| end | 6.0, 6.2 (block 7) | 6.0, 6.2 (block 7) |" in page
    assert "flight begun |" not in page
    assert "| combine, latency | 14.0 | 5.0 |" in page
    assert "`a.py --ranks 2`, status 0:\n```text\nall well\n```" in page
    assert "loss 6.0000 -> 1.7000, on one rank without Weft 6.0000 -> 1.8000" in page
    assert "0.66% between means of steps" in page
    assert "1 of 2 targets are met." in page
    assert page.index("| late | 125 us | 100 us | 90 us | 25.0% |") < page.index("| kept | 80 us |")
    assert "| dispatch FP8, rank_major | 16 |" in page
    assert "| result MB | heap peak MB |" in page
    assert "x faster |" not in page  # than all_to_all_single at T = 16
    assert "| step BF16, expert_major" in page
    assert "| both FP8, BF16 back, masked, weighted | 1 |" in page
    assert page.count("| both | 2 |") == 1
    assert "| both | expert_major | fp8 |" in page
    assert "| push | 7168 | 344 |" in page
    assert "1,200 calls, and 2,300 replays" in page
    assert "| gpu_kill_1 | 2, 1 failed | detection | 6 | 4.00 | 5.50 | 5.60 |" in page
    assert "| gpu_kill_2 | 1, 1 failed | detection | 2 | 0.90 | 0.90 | 0.90 |" in page
    assert "| gpu_kill_2 | 1, 1 failed | channel: pidfd | 1 | 2.00 | 2.00 | 2.00 |" in page
    assert "3 kills in all." in page
    assert "What failed: gpu_kill_2: it hung." in page
    assert "Rank 1 was delayed by 1000 us" in page
    assert "| gpu_wait_cost | 4 | dispatch | 8 | no poll | 14.20 | 0.05 | 0.20, met |" in page
    assert "| rank 1 waited | 0.0 | 40.0 |" in page
    assert "gpu_tests_1: 2 x GPU, commit abc, a rank late by 1,5 s, interrupted." in page
    assert "| tests/gpu/test_a.py | 7 | 0 | 2 | a, b |" in page
    assert "gpu_kernels_1: 2 x GPU, 2 ranks, each a thread." in page
    assert "| combine | 8 | masked | BF16 | new | 14.0 | -0.25 |" in page
    assert "| gpu_compile_1 (A CPU, NVRTC 13, commit abc) | sm_90 | 3 | 0.20 | 0.50 (kernel 5) | 0.8 |" in page
    for line in page.splitlines():
        if line.startswith("|"):
            assert line.endswith("|"), line
