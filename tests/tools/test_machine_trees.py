"""Guards against trees under tests/data/machines that are not what tools/make_machine_trees.py writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_trees_are_current() -> None:
    command = [sys.executable, str(ROOT / "tools" / "make_machine_trees.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_page_of_placements_is_current() -> None:
    command = [sys.executable, str(ROOT / "tools" / "placement_tables.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
