"""Where forked ranks hang: shortly before a test reaches its limit, each prints the stacks of its threads to stderr."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from pathlib import Path

_ASK_S = 850.0  # pytest's limit is 900 s
_LOOK_S = 5.0
_SIGNAL = signal.SIGUSR2


class Watch:
    """One thread of the session; `begin` and `end` surround a test."""

    def __init__(self) -> None:
        self._since: float | None = None
        # Inherited by a fork, with whatever stands for stderr there.
        faulthandler.register(_SIGNAL, file=2, all_threads=True)
        threading.Thread(target=self._run, name="hung-ranks", daemon=True).start()

    def begin(self) -> None:
        self._since = time.monotonic()

    def end(self) -> None:
        self._since = None

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            since = self._since
            if since is not None and time.monotonic() - since > _ASK_S:
                self._since = None
                ask()


def ask() -> None:
    """All forked children of this process print their stacks. Another program would die of the signal."""
    mine = Path("/proc/self/cmdline").read_bytes()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread or a child that has ended
            for pid in (task / "children").read_text().split():
                if Path(f"/proc/{pid}/cmdline").read_bytes() == mine:
                    os.kill(int(pid), _SIGNAL)
