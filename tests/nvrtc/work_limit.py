"""A limit of the CPU time that a block takes, all threads of this process together."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

import pytest


@contextlib.contextmanager
def limited_cpu(most_s: float) -> Iterator[None]:
    """Fail the test inside the block after `most_s` seconds of CPU time. Call it from the main thread."""

    def fail(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"this took more than {most_s:g} s of CPU time")

    before = signal.signal(signal.SIGPROF, fail)
    signal.setitimer(signal.ITIMER_PROF, most_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
