"""Guards against lab/compare_kernels.py telling the difference with the wrong sign, or of one rank alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import compare_kernels


def test_differences_are_of_the_slowest_rank() -> None:
    """Two folders, three samples: the median of what the second takes more, not the difference of medians."""
    of_ranks = [[[1.0, 2.0, 9.0], [3.0, 2.0, 1.0]], [[2.0, 1.0, 1.0], [1.0, 5.0, 10.0]]]
    case = {"tokens": 8, "layout": "masked", "quantize": None}
    first, second = compare_kernels.rows_of(case, "combine", ["old", "new"], of_ranks)
    assert (first["headers"], first["ranks"], first["time_us"], first["more_us"]) == ("old", 2, 2.0, 0.0)
    assert (second["headers"], second["op"], second["time_us"], second["more_us"]) == ("new", "combine", 5.0, 1.0)


def test_a_folder_without_kernels(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, compare_kernels.__file__, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"{tmp_path} has no weft/kernels" in done.stderr
