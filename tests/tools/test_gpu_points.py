"""Guards against a test on GPUs that would stop a kernel at a text that is gone, which only a machine with GPUs saw."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_processes_fail import POINTS, Point

KERNELS = Path(__file__).parents[2] / "include" / "weft" / "kernels"


@pytest.mark.parametrize("name", POINTS)
def test_a_point_is_there_once(name: str) -> None:
    point: Point = POINTS[name]
    assert (KERNELS / point.file).read_text().count(point.text) == 1
