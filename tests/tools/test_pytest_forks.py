"""Guards against a fork that pytest finds otherwise than a new process: a mutant would be killed by that."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_forks import Forks

TESTS = """import os, subprocess, sys
import package

def test_state():
    assert package.calls == []
    package.calls.append(1)

def test_place():
    assert os.getcwd() == os.environ["PLACE"] == sys.path[0]
    assert sys.modules["__main__"].__spec__.name == "pytest.__main__"

def test_children():
    subprocess.run(["bash", "-c", "exec 9>held; flock 9; touch started; sleep 1000"])
"""


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[Forks]:
    (tmp_path / "package.py").write_text("calls = []\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    made = Forks(tmp_path, {**os.environ, "PLACE": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}, ("pytest",))
    yield made
    made.close()


def test_each_run_is_as_in_a_new_process(forks: Forks, tmp_path: Path) -> None:
    arguments = ["-q", "-p", "no:cacheprovider", "test_it.py", "-k", "state or place"]
    for _ in range(2):
        status, output, has_hung = forks.run(arguments, 60)
        assert (status, has_hung) == (0, False), output
        assert "2 passed" in output
    (tmp_path / "package.py").write_text("calls = [0]\n")
    status, output, _ = forks.run(arguments, 60)
    assert status == 1
    assert "1 failed, 1 passed" in output
    assert forks.run(["-q", "no_such_file.py"], 60)[0] == 4


def test_a_run_that_hangs_is_ended_with_what_it_started(forks: Forks, tmp_path: Path) -> None:
    quiet = ["-q", "-p", "no:cacheprovider", "test_it.py", "-k"]
    for limit_s in (0.5, 5, 50):
        status, _, has_hung = forks.run([*quiet, "children"], limit_s)
        assert (status, has_hung) == (-9, True)
        if (tmp_path / "started").exists():
            break
    with (tmp_path / "held").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # whoever had it is gone
    assert "1 passed" in forks.run([*quiet, "state"], 60)[1]
