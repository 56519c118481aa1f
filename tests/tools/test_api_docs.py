"""Guards against a docs/api.md that no longer says what the docstrings say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_api_page_is_current() -> None:
    command = [sys.executable, str(ROOT / "tools" / "generate_api_docs.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
