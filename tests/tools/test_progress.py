"""Guards against an installation that is silent for minutes, or a failure that its progress display swallows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

PROGRESS = Path(__file__).resolve().parents[2] / "tools" / "progress.sh"

PIP = """\
Collecting torch
  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (29 kB)
  Using cached torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (512.3 MB)
  Downloading nvidia_cuda_nvrtc-13.0.88-py3-none-manylinux2010_x86_64.manylinux_2_12_x86_64.whl (90.2 MB)
  Downloading six-1.17.0-py2.py3-none-any.whl (11 kB)
Installing collected packages: six, torch
"""


def progress(log: Path, script: str) -> subprocess.CompletedProcess[str]:
    command = [str(PROGRESS), str(log), "bash", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_large_files_have_a_short_line_each(tmp_path: Path) -> None:
    (tmp_path / "pip").write_text(PIP)
    done = progress(tmp_path / "new" / "log", f"cat {tmp_path / 'pip'}")
    lines = [line.split("s: ")[1] for line in done.stdout.splitlines()]
    assert lines == ["downloading torch 2.13.0, 512.3 MB", "downloading nvidia_cuda_nvrtc 13.0.88, 90.2 MB"]
    assert max(map(len, done.stdout.splitlines())) < 80
    assert (tmp_path / "new" / "log").read_text() == PIP
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_quiet_command_is_told_of(tmp_path: Path) -> None:
    done = progress(tmp_path / "log", "echo '[3/74] Building CXX'; sleep 12; echo '[9/74] Building CXX'")
    assert "s: compiled 3 of 74 files\n" in done.stdout
    assert done.returncode == 0


def test_a_failure_keeps_its_status_and_its_end_is_shown(tmp_path: Path) -> None:
    done = progress(tmp_path / "log", "seq 100; echo 'error: no such package' >&2; exit 7")
    assert done.returncode == 7
    assert "error: no such package\n" in done.stderr
    assert "\n50\n" not in done.stderr
    assert str(tmp_path / "log") in done.stderr
