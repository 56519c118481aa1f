"""Guards against worked placements that are not what the trees under tests/data/machines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_page_of_placements_is_current() -> None:
    command = [sys.executable, str(ROOT / "tools" / "placement_tables.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
