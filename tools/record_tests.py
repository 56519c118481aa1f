"""Runs tests and prints what became of them: python tools/record_tests.py tests/gpu -n 4 > gpu_tests.jsonl

Arguments are pytest's. JSON lines for benchmarks/results/: machine, commit and versions, then an object a file of
tests. Who interrupts the run gets them at once, before workers end, which may take long. A failure is printed to
stderr at once, so that a run that hangs later shows it. Exit status: that of pytest.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from types import FrameType
from typing import Any

import pytest

from weft.bench.apart import apart
from weft.bench.suite import machine_facts


class Recorder:
    """Counts of each file."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.is_shown = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of setting up, of the test, of cleaning up behind it."""
        file = report.nodeid.partition("::")[0]
        empty = {"kind": "tests", "file": file, "passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0, "failures": []}
        row = self.rows.setdefault(file, empty)
        row["seconds"] = round(row["seconds"] + report.duration, 3)
        if report.outcome != "passed" or report.when == "call":
            row[report.outcome] += 1
        if report.failed:
            row["failures"].append(report.nodeid)
            print(f"\n{report.nodeid} failed\n{report.longreprtext[-4000:]}", file=sys.stderr, flush=True)

    def show(self, facts: dict[str, Any], status: int) -> None:
        """To stdout, whatever print() is told meanwhile."""
        late_s = os.environ.get("WEFT_TEST_LATE_S")
        rows = [{**row, "status": status, "late_s": late_s} for _, row in sorted(self.rows.items())]
        for row in [{"kind": "machine", **facts}, *rows]:
            print(json.dumps(row), file=sys.__stdout__, flush=True)


def main() -> int:
    """Run, print. What pytest says goes to stderr."""
    facts = apart(machine_facts, "cuda" if os.path.exists("/dev/nvidiactl") else "cpu")
    recorder = Recorder()

    def interrupted(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.default_int_handler)
        recorder.show(facts, int(pytest.ExitCode.INTERRUPTED))
        recorder.is_shown = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupted)
    with contextlib.redirect_stdout(sys.stderr):
        status = int(pytest.main(sys.argv[1:], plugins=[recorder]))
    if not recorder.is_shown:
        recorder.show(facts, status)
    return status


if __name__ == "__main__":
    sys.exit(main())
