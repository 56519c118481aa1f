"""Guards against a doctor or topo that needs torch, a GPU or a healthy machine, or prints what programs can't read."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from cli_lines import ROOT, rows_of, weft_command

WITHOUT_TORCH = """
import sys
from weft.cli import app
try:
    app()
finally:
    assert not {"torch", "numpy"} & set(sys.modules), "imported"
"""
KEYS = ["kind", "group", "check", "status", "found", "why", "cost", "fix"]


def test_doctor_prints_json_only_and_imports_no_torch() -> None:
    done = weft_command("doctor", "--no-measure", "--json", code=WITHOUT_TORCH)
    assert "imported" not in done.stderr
    *checks, summary = rows_of(done.stdout)
    assert all(list(row) == KEYS and row["kind"] == "check" for row in checks)
    assert {row["status"] for row in checks} <= {"ok", "warn", "fail", "n/a"}
    assert all(row["found"] and row["why"] for row in checks)
    count = {status: sum(row["status"] == status for row in checks) for status in ("fail", "warn", "ok", "n/a")}
    names = ("failed", "warned", "passed", "skipped")
    counts = dict(zip(names, count.values(), strict=True))
    assert summary == {"kind": "summary", "ok": not count["fail"], **counts}
    assert done.returncode == (1 if count["fail"] else 0)
    of_the_process = {row["check"]: row["status"] for row in checks}
    assert of_the_process["native-module"] == of_the_process["memfd"] == of_the_process["unix-socket"] == "ok"


def test_doctor_prints_a_row_for_each_check() -> None:
    shown = weft_command("doctor", "--no-measure", "--all").stdout
    for row in rows_of(weft_command("doctor", "--no-measure", "--json").stdout)[:-1]:
        assert f" {row['check']} " in shown


def test_doctor_says_first_what_is_not_well_and_counts_what_does_not_apply() -> None:
    root = str(ROOT / "tests" / "data" / "machines" / "container-one-socket")
    *checks, summary = rows_of(weft_command("doctor", "--root", root, "--json").stdout)
    lines = weft_command("doctor", "--root", root, COLUMNS="80").stdout.splitlines()
    ends = [line.split(": ")[:2] for line in lines if line.startswith(("fail: ", "warn: "))]
    by_status = {status: [row["check"] for row in checks if row["status"] == status] for status in ("fail", "warn")}
    assert ends == [[status, check] for status in ("fail", "warn") for check in by_status[status]]
    assert lines[0].startswith("fail: locked-memory")
    table = lines.index(next(line for line in lines if line.startswith("┏")))
    assert all(lines.index(line) < table for line in lines if line.startswith(("fail: ", "warn: ")))
    assert not any(f" {row['check']} " in line for row in checks if row["status"] == "n/a" for line in lines[table:])
    assert f"{summary['skipped']} checks not applicable here (--all shows every check)" in lines
    assert max(map(len, lines[table:])) <= 80


def test_measuring_without_a_gpu_says_so() -> None:
    done = weft_command("doctor", "--measure", "--json")
    rows = rows_of(done.stdout)
    if any(row.get("check") == "gpus" and row["found"].startswith("no GPU") for row in rows):
        (measurement,) = [row for row in rows if row["kind"] == "measurement"]
        assert "error" in measurement
        assert {row["status"] for row in rows if row.get("group") == "measured"} == {"n/a"}


def test_doctor_of_a_root_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    assert weft_command("doctor", "--root", str(tmp_path / "nowhere")).returncode == 2


@pytest.mark.parametrize("command", ["doctor", "topo"])
def test_an_empty_root_is_no_error(tmp_path: Path, command: str) -> None:
    done = weft_command(command, "--root", str(tmp_path), "--json", code=WITHOUT_TORCH)
    assert done.returncode == 0, done.stderr
    assert rows_of(done.stdout)
    assert weft_command(command, "--root", str(tmp_path)).returncode == 0


@pytest.mark.parametrize("flag", ["--svg", "--record"])
def test_what_can_not_be_written_is_wrong_usage(tmp_path: Path, flag: str) -> None:
    (tmp_path / "file").write_text("")
    done = weft_command("topo", flag, str(tmp_path / "file" / "inside"))
    assert done.returncode == 2
    assert f"error: {flag} can't be written" in done.stderr


def test_topo_of_this_machine(tmp_path: Path) -> None:
    picture, recording = tmp_path / "picture.svg", tmp_path / "recording"
    done = weft_command("topo", "--json", "--svg", str(picture), "--record", str(recording), code=WITHOUT_TORCH)
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(done.stdout)
    assert row["kind"] == "topology"
    assert len(row["gpu_gpu"]) == len(row["gpu_nic"]) == len(row["gpus"]) == len(row["machine"]["gpus"])
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    again = rows_of(weft_command("topo", "--json", "--root", str(recording)).stdout)[0]
    for part in ("gpus", "nics", "gpu_gpu", "gpu_nic"):
        assert again[part] == row[part]
    assert again["machine"]["cpus"]["online"] == row["machine"]["cpus"]["online"]
    assert json.loads((recording / "tree.json").read_text())
