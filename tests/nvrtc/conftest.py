"""A test here compiles and waits for nothing: its limit is CPU time, which a machine that is busy elsewhere keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from work_limit import limited_cpu

MOST_CPU_S = 1500.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(0))  # no limit of wall-clock time


@pytest.fixture(autouse=True)
def limited_work() -> Iterator[None]:
    """The test fails once this process has worked for too long on it."""
    with limited_cpu(MOST_CPU_S):
        yield
