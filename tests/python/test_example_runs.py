"""Guards against a program that fails or hangs and takes the results of the others with it."""

from __future__ import annotations

import json

import example_runs
import pytest

DEMO = {**dict.fromkeys(example_runs.DEMO_KEYS, 2.0), "expert_load": [1]}
STUBS = {
    "good.py": ["-c", "import sys; print('a'); print(sys.argv[1:])"],
    "bad.py": ["-c", "print('so far'); raise SystemExit(3)"],
    "late.py": ["-c", "import time; time.sleep(60)"],
    "weft demo": ["-c", f"print({json.dumps(DEMO)!r})", "--json"],
}


def test_every_program_has_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(example_runs, "PROGRAMS", STUBS)
    monkeypatch.setattr(example_runs, "TIMEOUT_S", 2.0)
    monkeypatch.setattr("sys.argv", ["example_runs.py", "--device", "cpu", "--ranks", "3"])
    assert example_runs.main() == 1
    machine, good, bad, late, demo = map(json.loads, capsys.readouterr().out.splitlines())
    assert machine["kind"] == "machine"
    assert (good["status"], good["lines"]) == (0, ["a", "['--device', 'cpu', '--ranks', '3']"])
    assert (bad["status"], bad["lines"]) == (3, ["so far"])
    assert (late["status"], late["lines"]) == (example_runs.TIMED_OUT, [])
    assert demo["demo"] == dict.fromkeys(example_runs.DEMO_KEYS, 2.0)
    assert [row["name"] for row in (good, bad, late, demo)] == list(STUBS)


def test_the_programs_are_there() -> None:
    for words in example_runs.PROGRAMS.values():
        assert words[0] == "-m" or example_runs.Path(words[0]).is_file(), words
