"""How far a command is: a bar on a terminal, elsewhere a line on stderr every ten seconds.

A timer signal moves both, not a thread: ranks are forked meanwhile.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["Steps", "show_progress"]

LINE_S = 10.0
_REFRESH_S = 1.0


class Steps:
    """Counts the steps of one command and shows them. `where` tells what happens within a step."""

    def __init__(self, console: Console, bar: Progress, total: int, what: str, where: Callable[[], str]) -> None:
        self._console, self._bar, self._where = console, bar, where
        self._total, self._done, self._what, self._text = total, 0, what, what
        self._task = bar.add_task(what, total=total)
        self._started = time.monotonic()
        self._busy = False

    def __call__(self, text: str, /) -> None:
        """One step is done; `text` says which."""
        self._done, self._text = self._done + 1, text
        self._busy = True  # the timer must not print into the middle of this
        self._bar.update(self._task, advance=1, description=text, refresh=True)
        self._busy = False

    def tick(self) -> None:
        """The timer came: move the bar, or print a line."""
        if self._busy:
            return
        inside = self._where()
        words = [f"{self._what}: {inside}" if inside else self._text]
        if self._console.is_terminal:
            self._bar.update(self._task, description=words[0], refresh=True)
            return
        if self._total > 1:
            words.append(f"{self._done} of {self._total} done")
        words.append(f"{time.monotonic() - self._started:.0f} s")
        # The signal came while stderr was being written, or stderr is closed: a line is not worth a failure.
        with contextlib.suppress(RuntimeError, OSError, ValueError):
            self._console.file.write(", ".join(words) + "\n")
            self._console.file.flush()


@contextlib.contextmanager
def show_progress(console: Console, total: int, what: str, where: Callable[[], str]) -> Iterator[Steps]:
    """Show `total` steps while the block runs."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        auto_refresh=False,
        disable=not console.is_terminal,
    ) as bar:
        steps = Steps(console, bar, total, what, where)
        with _every(_REFRESH_S if console.is_terminal else LINE_S, steps.tick):
            yield steps


@contextlib.contextmanager
def _every(seconds: float, tick: Callable[[], None]) -> Iterator[None]:
    """Call `tick` on the main thread; not where the program has its own use for the signal, nor in forked ranks."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGALRM, lambda number, frame: tick())
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)  # a fork does not inherit it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
