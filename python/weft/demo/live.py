"""What the demo says while it runs: a progress bar on terminals, and the story of a rank's death as it happens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from weft.demo.config import DemoConfig
from weft.demo.events import Event

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

LINE_S = 10.0  # between lines of progress, where there is no bar


class LiveView:
    """Shows events on a console (None: nowhere) and keeps the time of the kill, which only an event tells."""

    def __init__(self, console: Console | None, config: DemoConfig, *, verbose: bool = False) -> None:
        self._console, self._config, self._verbose = console, config, verbose
        self._next_line = time.monotonic() + LINE_S
        self._name = ""
        self._bar: tuple[Progress, TaskID] | None = None
        self.killed_ns: int | None = None

    def begin(self, text_source: str, why_here: str) -> None:
        """The first lines: what is about to happen."""
        config = self._config
        self._say(
            f"[bold]Training a byte-level language model[/]: {config.layers} layers, {config.experts} experts each, "
            f"{config.top_k} for every token."
        )
        self._say(
            f"{why_here}. Each holds {config.experts_per_rank} experts of every layer; "
            "Weft takes each token to its experts and back."
        )
        self._say(f"The text is {text_source}.")
        if config.baseline:
            self._say(
                "Then the same model learns the same on one rank in plain torch without Weft, to compare the losses."
            )

    @contextmanager
    def progress(self, name: str, total: int) -> Iterator[None]:
        """A bar for `total` steps while the block runs; a few lines instead where the console is no terminal."""
        self._name = name
        if self._console is None or not self._console.is_terminal:
            yield
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description:8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps, loss {task.fields[loss]}"),
            TimeElapsedColumn(),
        )
        # Without a thread of its own: ranks are forked while the bar is there.
        bar = Progress(*columns, console=self._console, transient=True, auto_refresh=False, redirect_stdout=False)
        with bar:
            self._bar = bar, bar.add_task(name, total=total, loss="-")
            try:
                yield
            finally:
                self._bar = None

    def listen(self, event: Event) -> None:
        """Takes an event from a rank."""
        kind = event["kind"]
        if kind == "step":
            self.step(event["step"], event["loss"])
        elif kind == "kill":
            self.killed_ns = event["at_ns"]
            self._say(f"[bold red]Step {event['step']}: rank {event['rank']} dies[/] (SIGKILL, inside a combine).")
        elif kind == "lost":
            after = "" if self.killed_ns is None else f" {(event['at_ns'] - self.killed_ns) / 1e6:.1f} ms later"
            self._say(f"  rank {event['rank']} sees it{after}: [yellow]{_plain(event['error'])}[/]")
        elif kind == "log" and self._verbose:
            self._say(f"  [dim]log: {_plain(event['text'])}[/]")
        elif kind == "rebuilt":
            ranks = ", ".join(str(rank) for rank in event["left"])
            self._say(f"  rank {event['rank']} goes on with ranks {ranks}: rebuild took {event['ms']:.1f} ms")

    def step(self, step: int, loss: float) -> None:
        """A step is done."""
        done, total = step + 1, self._config.steps
        if self._bar is not None:
            progress, task = self._bar
            progress.update(task, completed=done, loss=f"{loss:.3f}", refresh=True)
        elif time.monotonic() >= self._next_line or done == total:
            self._next_line = time.monotonic() + LINE_S
            self._say(f"  {self._name}: step {done} of {total}, loss {loss:.3f}")

    def _say(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text, highlight=False)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
