"""Runs pytest again and again in forks of one interpreter, which imports torch once: three seconds less for each run.

A fork is as good as `python -m pytest` in a new process: nothing but MODULES is imported before it, and no thread is
started. `Forks` is the side that asks; this file as a program is the other.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

MODULES = ("numpy", "pytest", "torch")


class Forks:
    """An interpreter that runs pytest in `folder` with the environment `env`, and has imported `modules`."""

    def __init__(self, folder: Path, env: dict[str, str], modules: tuple[str, ...] = MODULES) -> None:
        self._asking, answering = Pipe()
        command = [sys.executable, str(Path(__file__).resolve()), str(answering.fileno()), *modules]
        self._server = subprocess.Popen(command, cwd=folder, env=env, pass_fds=[answering.fileno()])
        answering.close()

    def run(self, arguments: list[str], limit_s: float) -> tuple[int, str, bool]:
        """Exit status of pytest, what it wrote, and whether it was ended at the limit with all it had started."""
        with tempfile.NamedTemporaryFile("r") as output:
            self._asking.send((output.name, arguments))
            pid = self._asking.recv()
            try:
                has_hung = not self._asking.poll(limit_s)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            return self._asking.recv(), output.read(), has_hung

    def close(self) -> None:
        """End the interpreter."""
        self._asking.close()
        self._server.wait()


def _become_pytest(output: str, arguments: list[str]) -> None:
    """In a fork. Ends as pytest ends: by SystemExit, through all that the interpreter does at its end."""
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.path[0] = os.getcwd()  # as `python -m` has it
    sys.argv = ["pytest", *arguments]
    runpy.run_module("pytest", run_name="__main__", alter_sys=True)


def serve(asked: Connection) -> None:
    """Fork for each request, until the other side is closed. Sends the fork's process id, then its exit status."""
    while True:
        try:
            output, arguments = asked.recv()
        except EOFError:
            return
        pid = os.fork()
        if pid == 0:
            os.setsid()
            asked.close()
            _become_pytest(output, arguments)
        asked.send(pid)
        asked.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    serve(Connection(int(sys.argv[1])))
