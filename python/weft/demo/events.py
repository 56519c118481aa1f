"""What ranks have to tell while they train, on its way to the process that shows it.

Lines of JSON through a pipe that the ranks inherit. Only the display lives on them (results come back through
`weft.spawn`), so a sender never waits: an event that finds the pipe full is dropped.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]
"""`kind` says what happened ("step", "kill", "lost", "rebuilt", ...), the other keys depend on it."""

Listener: TypeAlias = Callable[[Event], None]

_MAX_BYTES = 4096  # PIPE_BUF: writes up to this are atomic, so lines of different ranks never mix
_END = "end of events"


class Sender:
    """A rank's end of the pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, kind: str, **values: Any) -> None:
        """Tells the listener; never waits, never fails."""
        line = json.dumps({"kind": kind, **values}).encode() + b"\n"
        if len(line) <= _MAX_BYTES:
            with suppress(OSError):
                os.write(self._fd, line)


class LogToEvents(logging.Handler):
    """Sends what Weft logs the way of the other events, so that it does not write across the progress bar."""

    def __init__(self, sender: Sender) -> None:
        super().__init__()
        self._sender = sender

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self._sender.send("log", text=record.getMessage())


@contextmanager
def weft_log_to(sender: Sender) -> Iterator[None]:
    """Inside the block, in ranks forked there too, Weft's log becomes events; not where the program has handlers."""
    logger = logging.getLogger("weft")
    if logger.hasHandlers():
        yield
        return
    handler = LogToEvents(sender)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class EventPipe:
    """A pipe and the thread that reads it: `listener` is called on that thread, one event at a time.

    To be entered before the ranks are forked, and left after they ended: then all events have been delivered.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._thread = threading.Thread(target=self._run, name="weft-demo-events", daemon=True)

    def __enter__(self) -> Sender:
        self._thread.start()
        return Sender(self._write_fd)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        os.set_blocking(self._write_fd, True)
        os.write(self._write_fd, json.dumps({"kind": _END}).encode() + b"\n")
        self._thread.join()
        os.close(self._write_fd)
        os.close(self._read_fd)

    def _run(self) -> None:
        with os.fdopen(os.dup(self._read_fd), encoding="utf-8") as lines:
            for line in lines:
                event = json.loads(line)
                if event["kind"] == _END:
                    return
                self._listener(event)
