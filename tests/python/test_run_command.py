"""Guards against `weft run` binding to cores of others, losing exit codes or flags; and WEFT_PLACEMENT unheard."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
from cli_lines import weft_command

import weft
from weft.machine.placement import local

SHOW = "import json, os; print(json.dumps([sorted(os.sched_getaffinity(0)), os.environ.get('WEFT_PLACEMENT')]))"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_program_runs_on_the_cores_of_its_rank(rank: int) -> None:
    done = weft_command("run", "--bind", "--", sys.executable, "-c", SHOW, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    assert done.returncode == 0, done.stderr
    cpus, mode = json.loads(done.stdout)
    assert tuple(cpus) == local.resolve_before_torch("process", local_rank=rank, num_local_ranks=2).cpus
    assert mode == "off"
    assert f"rank {rank} of 2: " in done.stderr


def test_ranks_of_flags_have_cores_of_their_own() -> None:
    seen = []
    for rank in ("0", "1"):
        command = ["run", "--local-rank", rank, "--local-ranks", "2", "--", sys.executable, "-c", SHOW]
        seen.append(set(json.loads(weft_command(*command).stdout)[0]))
    if len(os.sched_getaffinity(0)) > 1:
        assert not seen[0] & seen[1]


def test_without_binding_nothing_changes_and_flags_and_exit_codes_are_the_programs() -> None:
    code = f"{SHOW}; import sys; print(sys.argv[1:]); sys.exit(7)"
    done = weft_command("run", "--no-bind", "--", sys.executable, "-c", code, "--help", "--bind")
    assert done.returncode == 7
    first, second = done.stdout.splitlines()
    assert json.loads(first) == [sorted(os.sched_getaffinity(0)), os.environ.get("WEFT_PLACEMENT")]
    assert second == "['--help', '--bind']"


def test_a_program_does_not_inherit_the_signals_that_python_ignores() -> None:
    status = weft_command("run", "--no-bind", "--", "cat", "/proc/self/status").stdout
    (ignored,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn:"))
    assert not ignored & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)


def test_what_the_user_set_stays() -> None:
    done = weft_command("run", "--", sys.executable, "-c", SHOW, WEFT_PLACEMENT="process")
    assert json.loads(done.stdout)[1] == "process"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--", "/no/such/program"], "/no/such/program can't be started: No such file"),
        (["--local-rank", "2", "--local-ranks", "2", "--", "true"], "--local-rank is 2; allowed are 0 to"),
        ([], "Missing argument"),
    ],
)
def test_wrong_usage(args: list[str], words: str) -> None:
    done = weft_command("run", *args)
    assert done.returncode == 2
    assert words in done.stderr


def test_the_variable_takes_the_place_of_the_default_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_PLACEMENT", "off")
    assert weft.spawn(lambda comm: comm.placement.mode, num_ranks=1, device="cpu") == ["off"]
    assert local.check_placement("process") == "process"
    monkeypatch.setenv("WEFT_PLACEMENT", "Process")
    assert local.check_placement("auto") == "process"
    monkeypatch.delenv("WEFT_PLACEMENT")
    assert local.check_placement("auto") == "auto"
    monkeypatch.setenv("WEFT_PLACEMENT", "near")
    with pytest.raises(weft.InvalidArgument, match="WEFT_PLACEMENT is 'near' in the environment; allowed are auto"):
        local.check_placement("auto")
