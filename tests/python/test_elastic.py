"""Guards against a plan that `weft elastic` plays with a wrong word, leaves something over, or takes for right when it
is not."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pytest
from cli_lines import rows_of, weft_command

import weft
from weft.elastic.plan import Phase, draw_plan, num_slots, read_plan
from weft.elastic.run import play
from weft.elastic.worker import Load
from weft.machine.placement import local

PLANS = pathlib.Path(__file__).parent.parent / "data/plans"


@pytest.mark.parametrize("name", sorted(path.stem for path in PLANS.glob("*.json")))
def test_the_plans_of_others(name: str) -> None:
    """As they are: every phase ends with its ranks, no wrong word, nothing left over."""
    done = weft_command("elastic", str(PLANS / f"{name}.json"), "--ops", "6", "--json")
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    wanted = json.loads((PLANS / f"{name}.json").read_text())
    assert [sorted(row["active"]) for row in rows] == [sorted(rank for rank in each if rank >= 0) for each in wanted]
    for row in rows:
        assert (row["wrong"], row["leftovers"], row["error"], row["ops"]) == (0, [], "", 6)


def test_drawn_plans() -> None:
    """The same ones for a seed; a table for people."""
    assert draw_plan(3) == draw_plan(3)
    done = weft_command("elastic", "--drawn", "2", "--seed", "1", "--ops", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "plan seed 1" in done.stdout
    assert "plan seed 2" in done.stdout


BAD = [[], {}, [[]], [[1, 2]], [[0, 1], [2]], [[0], [0, 0]], [[0], [0, 64]], [[0], [-0.5]], [[0, 1], [-1]], [[0, -1]]]


@pytest.mark.parametrize("value", BAD)
def test_bad_plans(value: Any, tmp_path: pathlib.Path) -> None:
    """Refused before a process is started."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(value))
    with pytest.raises(weft.InvalidArgument):
        read_plan(path)


def test_what_a_plan_needs(tmp_path: pathlib.Path) -> None:
    """Slots up to the highest rank; a killed rank is none of those left."""
    path = tmp_path / "plan.json"
    path.write_text("[[0, 1], [0, 5, -1]]")
    phases = read_plan(path)
    assert num_slots(phases) == 6
    assert phases[1].left == (0, 5)
    done = weft_command("elastic", str(tmp_path / "none.json"))
    assert done.returncode == 2
    assert "can't be read as a plan" in done.stderr


def test_ranks_inherit_what_costs_time(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is looked at once: not by each process that joins, while the others wait for a core."""
    read = local.read_here

    def noted(**options: Any) -> Any:
        (tmp_path / str(os.getpid())).touch()
        return read(**options)

    monkeypatch.setattr(local, "read_here", noted)
    monkeypatch.setattr(local, "_machines", {})
    played = play([Phase((0,)), Phase((0, 1))], Load(ops=2), lambda _: None)
    assert [each.error for each in played] == ["", ""]
    assert {path.name for path in tmp_path.iterdir()} == {str(os.getpid())}
