"""Guards against a record of tests that misses failures, or counts what did not run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import record_tests

TESTS = """
import pytest

@pytest.fixture
def broken():
    raise RuntimeError

def test_good(): pass
def test_bad(): assert False
def test_set_up(broken): pass
@pytest.mark.skip
def test_left_out(): pass
def test_interrupted(): raise KeyboardInterrupt
def test_never_runs(): pass
"""


@pytest.mark.slow
def test_what_became_of_tests(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    command = [sys.executable, record_tests.__file__, "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(file)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "WEFT_TEST_LATE_S": "1,5"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    machine, row = map(json.loads, done.stdout.splitlines())
    assert done.returncode == row["status"] == 2
    assert machine["kind"] == "machine"
    assert (row["file"], row["passed"], row["failed"], row["skipped"]) == ("test_some.py", 1, 2, 1)
    assert row["failures"] == ["test_some.py::test_bad", "test_some.py::test_set_up"]
    assert row["late_s"] == "1,5"
