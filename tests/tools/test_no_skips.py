"""Guards against a `--no-skips` under which a skipped test, or file of tests, counts as passed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CASES = {
    "mark": "import pytest\n@pytest.mark.skip(reason='why')\ndef test_it(): pass\n",
    "call": "import pytest\ndef test_it(): pytest.skip('why')\n",
    "file": "import pytest\npytest.skip('why', allow_module_level=True)\n",
    "import": "import pytest\npytest.importorskip('no_such_module')\ndef test_it(): pass\n",
    "expected": "import pytest\n@pytest.mark.xfail\ndef test_it(): assert False\n",
    "passes": "def test_it(): pass\n",
}


def failed(folder: Path, *options: str) -> set[str]:
    """Names of the cases that did not pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    command += ["--import-mode=importlib", "--rootdir", str(folder), str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, cwd=folder)
    return set(re.findall(r"^(?:FAILED|ERROR) test_(\w+)\.py", done.stdout, re.MULTILINE))


def test_a_skip_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((Path(__file__).parents[1] / "conftest.py").read_text())
    for name, text in CASES.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    assert failed(tmp_path) == set()
    assert failed(tmp_path, "--no-skips") == {"mark", "call", "file", "import"}
