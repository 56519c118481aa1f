"""Guards against lab/host_time.py measuring another tree than it says, or no longer running."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import host_time
import pytest

import weft


@pytest.mark.slow
def test_each_tree_has_its_turn_and_its_rows(tmp_path: Path) -> None:
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "weft").symlink_to(Path(weft.__file__).parent)  # that of this run, with its native module
    trees = [f"--tree={name}={tmp_path}" for name in ("before", "after")]
    command = [sys.executable, host_time.__file__, *trees, "--rounds", "1", "--calls", "2", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    machine, *rows = map(json.loads, done.stdout.splitlines())
    assert machine["kind"] == "machine"
    ops = [(case, op) for case in host_time.CASES for op in ("dispatch", "combine")] + [("gradients", "backward")]
    assert [(row["tree"], row["case"], row["op"]) for row in rows] == [
        (t, *of) for t in ("before", "after") for of in ops
    ]
    assert all(row["host_us"] > 0 for row in rows)


def test_a_package_that_is_not_the_trees_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = json.dumps({"package": "/elsewhere/weft", "found": {}})
    monkeypatch.setattr(host_time.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, told + "\n"))
    options = type("Options", (), {"ranks": 1, "calls": 1, "device": "cpu", "limit": 1.0})
    with pytest.raises(SystemExit, match="/elsewhere/weft was measured in place of"):
        host_time.measured(tmp_path, options)
