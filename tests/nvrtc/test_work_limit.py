"""Guards against tests of compilers that fail because the machine is busy, and against ones that never end."""

from __future__ import annotations

import time

import pytest
from work_limit import limited_cpu


def work_for_ever() -> None:
    while True:
        pass


def test_waiting_costs_nothing_and_work_ends() -> None:
    with limited_cpu(0.5):
        time.sleep(1.0)
    with pytest.raises(pytest.fail.Exception, match=r"more than 0.5 s of CPU time"), limited_cpu(0.5):
        work_for_ever()


def test_no_wall_clock_limit_is_left(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("timeout")
    assert marker is not None
    assert marker.args == (0,)
