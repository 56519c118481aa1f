"""What every command prints through: tables for people, JSON lines for programs, and the exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft import env
from weft.cli.progress import Steps, show_progress

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNSUPPORTED = 3
EXIT_INTERRUPTED = 130

_PIPE_WIDTH = 160  # a file or a pipe has no width, unless COLUMNS says one: wide enough that no table is cut


class Output:
    """One command's output.

    With `json_lines` stdout holds JSON objects only, one a line: whatever else writes to file descriptor 1 in the
    meantime (a library, a forked rank) is sent to stderr. Without it, tables go to stdout, in colour only on a
    terminal and only when NO_COLOR is not set. Progress bars go to stderr and only to a terminal.
    """

    def __init__(self, *, json_lines: bool) -> None:
        self.json_lines = json_lines
        self.console = _console(sys.stdout)
        self._stderr = _console(sys.stderr)
        self._json_stream: TextIO = sys.stdout
        self._saved_fd: int | None = None
        self._shown: BaseException | None = None
        if json_lines:
            self._claim_stdout()

    def _claim_stdout(self) -> None:
        try:
            is_stdout = sys.stdout.fileno() == 1
        except (OSError, io.UnsupportedOperation):
            return  # a test's stand-in for stdout: nothing to protect
        if not is_stdout:
            return
        sys.stdout.flush()
        self._saved_fd = os.dup(1)
        os.dup2(2, 1)
        self._json_stream = os.fdopen(os.dup(self._saved_fd), "w", encoding="utf-8")

    def close(self) -> None:
        """Give stdout back. Safe to call twice."""
        if self._saved_fd is None:
            return
        sys.stdout.flush()
        self._json_stream.close()
        os.dup2(self._saved_fd, 1)
        os.close(self._saved_fd)
        self._saved_fd = None

    def row(self, row: Mapping[str, Any]) -> None:
        """Write one JSON object (only with `json_lines`; else nothing)."""
        if self.json_lines:
            self._json_stream.write(json.dumps(_finite(row), allow_nan=False) + "\n")
            self._json_stream.flush()  # before any fork, or the rank would write it again

    def text(self, text: str, style: str | None = None) -> None:
        """Write a line for people (nothing with `json_lines`)."""
        if not self.json_lines:
            self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        left: Collection[int] = (0,),
        spare: Sequence[int] = (),
    ) -> None:
        """Write a table for people (nothing with `json_lines`); columns not in `left` are right-aligned.

        Where the width would cut words, the columns `spare` are left out in that order, and a line says which.
        """
        if self.json_lines:
            return
        table = Table(title=title, title_justify="left")
        kept, widths = _fit(columns, rows, spare, self.console.width)
        for i, width in zip(kept, widths, strict=True):
            table.add_column(columns[i], justify="left" if i in left else "right", overflow="fold", width=width)
        for row in rows:
            table.add_row(*(row[i] for i in kept))
        self.console.print(table)
        if len(kept) < len(columns):
            gone = ", ".join(column for i, column in enumerate(columns) if i not in kept)
            self.text(f"too narrow for {gone}: COLUMNS=120 shows all")

    def note(self, text: str) -> None:
        """Write a line on stderr."""
        self._stderr.print(text, markup=False, highlight=False, soft_wrap=True)

    def error(self, error: BaseException, *, text: str | None = None) -> None:
        """Report a failure once: a line on stderr, and with `json_lines` an object of kind "error" on stdout."""
        if error is self._shown:
            return
        self._shown = error
        text = text if text is not None else str(error) or type(error).__name__
        self.row({"kind": "error", "type": type(error).__name__, "text": text})
        self._stderr.print(f"error: {text}", style="bold red", markup=False, highlight=False, soft_wrap=True)

    def progress(self, total: int, what: str, where: Callable[[], str] = str) -> AbstractContextManager[Steps]:
        """Show `total` steps while the block runs; calling what is yielded counts one. `where` tells what happens now.

        A bar on a terminal; else a line every ten seconds. Both on stderr.
        """
        return show_progress(self._stderr, total, what, where)


def _fit(
    columns: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[int], total: int
) -> tuple[list[int], list[int | None]]:
    """The columns to show in `total` characters and their widths; None where rich finds them well by itself.

    rich would shrink the widest column into its words. Here headers wrap first, then cells, all by the same share.
    """
    texts = [[Text.from_markup(cell).plain for cell in column] for column in zip(columns, *rows, strict=True)]
    least = [max((len(word) for text in column for word in text.split()), default=0) for column in texts]
    cells = [max((len(line) for text in column[1:] for line in text.splitlines()), default=0) for column in texts]
    full = [max(pair) for pair in zip(least, cells, strict=True)]
    kept = list(range(len(columns)))

    def room() -> int:
        return total - 1 - 3 * len(kept) - sum(least[i] for i in kept)

    for i in spare:
        if room() < 0:
            kept.remove(i)
    headers = [max(map(len, text.splitlines()), default=0) for text, *_ in texts]
    if room() < 0 or sum(max(full[i], headers[i]) + 3 for i in kept) < total:
        return kept, [None] * len(kept)
    wanted = sum(full[i] - least[i] for i in kept)
    return kept, [least[i] + (full[i] - least[i]) * min(room(), wanted) // max(wanted, 1) for i in kept]


def _finite(value: Any) -> Any:
    """The same with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return value


def _console(stream: TextIO) -> Console:
    is_terminal = bool(getattr(stream, "isatty", lambda: False)())
    has_width = is_terminal or env.columns() is not None  # rich reads COLUMNS by itself
    return Console(file=stream, width=None if has_width else _PIPE_WIDTH)


@contextlib.contextmanager
def command_output(*, json_lines: bool) -> Iterator[Output]:
    """The frame of every command: yields the Output, turns errors into the exit codes, gives stdout back.

    A refused argument ends with 2, `weft.Unsupported` with 3, any other `weft.Error` with 1, Ctrl-C with 130.
    """
    output = Output(json_lines=json_lines)
    try:
        yield output
    except KeyboardInterrupt as error:
        output.error(error, text="interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from error
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        output.error(error)
        raise typer.Exit(code) from error
    finally:
        output.close()


def _exit_code(error: Exception) -> int | None:
    """The exit code for an error that needs no traceback; None for one that does (typer's own are passed on too)."""
    from weft import errors

    if isinstance(error, errors.Unsupported):
        return EXIT_UNSUPPORTED
    if isinstance(error, (errors.InvalidArgument, FileNotFoundError)):
        return EXIT_USAGE
    if isinstance(error, errors.Error):
        return EXIT_FAILED
    return None
