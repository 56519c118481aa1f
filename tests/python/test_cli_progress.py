"""Guards against commands that are silent for minutes without a terminal, or that lie about how far they are."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from weft.cli import progress
from weft.machine import where


@pytest.fixture
def free_alarm() -> object:
    """The timer signal, which pytest's own time limit may hold."""
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGALRM, before)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


def test_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch, free_alarm: object) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.02)
    stream = io.StringIO()
    here = [""]
    with progress.show_progress(Console(file=stream), 3, "work", lambda: here[0]) as advance:
        until(lambda: "work, 0 of 3 done" in stream.getvalue())
        advance("first")
        until(lambda: "first, 1 of 3 done" in stream.getvalue())
        here[0] = "inside the second"
        until(lambda: "work: inside the second, 1 of 3 done" in stream.getvalue())
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert "\x1b" not in stream.getvalue()


class _Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_nobody_reads_the_lines() -> None:
    with progress.show_progress(Console(file=io.StringIO()), 3, "work", str) as steps:
        steps._console.file = _Closed()
        steps.tick()
        steps._console.file = io.StringIO()


def test_a_program_that_uses_the_signal_keeps_it(free_alarm: object) -> None:
    def theirs(number: int, frame: object) -> None:
        pass

    signal.signal(signal.SIGALRM, theirs)
    with progress.show_progress(Console(file=io.StringIO()), 1, "work", str):
        assert signal.getsignal(signal.SIGALRM) is theirs
    assert signal.getsignal(signal.SIGALRM) is theirs


def test_ranks_tell_where_they_are() -> None:
    where.say("before the fork")
    child = os.fork()
    if child == 0:
        where.say("é" * 500)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert where.read().startswith("ééé")
    where.say("short")
    assert where.read() == "short"
