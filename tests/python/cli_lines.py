"""What tests of the `weft` command share: running it, and its JSON lines against docs/benchmarking.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import weft

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "benchmarking.md").read_text(encoding="utf-8")
LAB = (ROOT / "lab" / "README.md").read_text(encoding="utf-8")


def weft_command(
    *args: str, code: str = "from weft.cli import main; main()", **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(weft.__file__).parents[1]), "COLUMNS": "", **env},  # xdist sets it
    )


def rows_of(stdout: str) -> list[dict[str, Any]]:
    """Every line must be a JSON object."""
    rows = [json.loads(line) for line in stdout.splitlines()]
    assert rows
    assert all(isinstance(row, dict) for row in rows)
    return rows


def assert_documented(value: Any) -> None:
    if isinstance(value, Mapping):
        for key, part in value.items():
            assert re.search(rf"`[^`\n]*\b{re.escape(key)}\b[^`\n]*`", DOC + LAB), (
                f"neither docs/benchmarking.md nor lab/README.md explains {key}"
            )
            assert_documented(part)
    elif isinstance(value, list):
        for part in value:
            assert_documented(part)
