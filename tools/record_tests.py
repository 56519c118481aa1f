"""Runs tests and prints what became of them: python tools/record_tests.py tests/gpu -n 4 > gpu_tests.jsonl

Arguments are pytest's. JSON lines for benchmarks/results/: machine, commit and versions, then an object a file of
tests, also if the run was interrupted. A failure is printed to stderr at once, so that a run that hangs later shows
it. Exit status: that of pytest.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

import pytest

from weft.bench.apart import apart
from weft.bench.suite import machine_facts


class Recorder:
    """Counts of each file."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

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


def main() -> int:
    """Run, print. What pytest says goes to stderr."""
    facts = apart(machine_facts, "cuda" if os.path.exists("/dev/nvidiactl") else "cpu")
    recorder = Recorder()
    with contextlib.redirect_stdout(sys.stderr):
        status = int(pytest.main(sys.argv[1:], plugins=[recorder]))
    print(json.dumps({"kind": "machine", **facts}))
    for _, row in sorted(recorder.rows.items()):
        print(json.dumps({**row, "status": status, "late_s": os.environ.get("WEFT_TEST_LATE_S")}))
    return status


if __name__ == "__main__":
    sys.exit(main())
