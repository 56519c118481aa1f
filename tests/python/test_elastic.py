"""Guards against a plan that `weft elastic` plays with a wrong word, leaves something over, or takes for right when it
is not."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
from typing import Any

import pytest
from cli_lines import rows_of, weft_command

import weft
from weft.elastic.plan import Phase, as_json, draw_plan, num_slots, read_plan
from weft.elastic.run import play
from weft.elastic.steps import Load
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


def test_plans_that_are_drawn_have_all_words() -> None:
    """Among 50: ranks are suspended, resumed, killed, replaced, stopped, late, and come again in their slot."""
    found = set()
    for seed in range(50):
        for before, phase in itertools.pairwise(draw_plan(seed)):
            was_active, was_resting = set(before.left), set(before.standing)
            happens = {
                "suspended": was_active & set(phase.standby),
                "resumed": was_resting & set(phase.ranks),
                "removed": was_active - set(phase.present),
                "together": not phase.together,
                "again": set(before.lost) & set(phase.ranks),
                **{name: getattr(phase, name) for name in ("killed", "stopped", "paused", "spares")},
            }
            found |= {name for name, is_so in happens.items() if is_so}
    assert found == {"suspended", "resumed", "removed", "together", "again", "killed", "stopped", "paused", "spares"}


def test_a_plan_is_read_as_it_was_written(tmp_path: pathlib.Path) -> None:
    for seed in range(50):
        (tmp_path / "plan.json").write_text(as_json(draw_plan(seed)))
        assert read_plan(tmp_path / "plan.json") == draw_plan(seed)


WORDS = [
    [0, 1, 2],
    {"ranks": [0, 1], "standby": [2, 3], "together": False},  # 2 is suspended, 3 a spare
    {"ranks": [0, 1, 2], "standby": [3], "kill": [1], "spare": [3]},  # 2 is resumed, and 3 takes the place of 1
    {"ranks": [0, 1, 2, 3], "pause": [2]},  # 1 comes again in its slot, while 2 is late for the change
    {"ranks": [0, 1, 2], "stop": [1], "standby": [3], "spare": [3]},  # 1 is left out, and 3, suspended just now, serves
    {"ranks": [2, 3], "pause": [3]},
]


def test_all_words_of_a_plan(tmp_path: pathlib.Path) -> None:
    """Who is active, on standby and lost in the end, with the reference's bits."""
    (tmp_path / "plan.json").write_text(json.dumps(WORDS))
    done = weft_command("elastic", str(tmp_path / "plan.json"), "--ops", "6", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(done.stdout)
    seen = [(row["active"], row["standby"], row["killed"]) for row in rows]
    assert seen == [
        ([0, 1, 2], [], []),
        ([0, 1], [2, 3], []),
        ([0, 2, 3], [], [1]),
        ([0, 1, 2, 3], [], []),
        ([0, 2, 3], [], [1]),
        ([2, 3], [], []),
    ]
    assert all((row["wrong"], row["leftovers"], row["error"], row["ops"]) == (0, [], "", 6) for row in rows)


def test_a_spare_that_stood_by_while_a_slot_was_taken_again(tmp_path: pathlib.Path) -> None:
    """It has seen the end of the one before, and meets the new one when that is a member already."""
    path = tmp_path / "plan.json"
    stands = {"standby": [3]}
    path.write_text(
        json.dumps([[0, 1], {"ranks": [0, 1], "kill": [1], **stands}, {"ranks": [0, 1], **stands}, [0, 1, 3]])
    )
    done = weft_command("elastic", str(path), "--ops", "4", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows_of(done.stdout)[-1]["active"] == [0, 1, 3]


def test_ranks_that_come_in_one_right_after_the_other(tmp_path: pathlib.Path) -> None:
    """The next change is decided while a member is still inside the boundary of the one before."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps([[0], {"ranks": [0, 1, 2, 3], "together": False}] * 8))
    done = weft_command("elastic", str(path), "--ops", "2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all((row["wrong"], row["error"], row["recover_ms"]) == (0, "", 0.0) for row in rows_of(done.stdout))


def test_a_plan_that_fails_can_be_played_again(tmp_path: pathlib.Path) -> None:
    """Its phases and options stand in the output, for people and as JSON. The reference is wrong here."""
    wrong = """
from weft import reference
right = reference.combine
reference.combine = lambda outputs, wanted: [each + 1 for each in right(outputs, wanted)]
from weft.cli import main
main()
"""
    done = weft_command("elastic", "--drawn", "1", "--seed", "7", "--ops", "4", "--json", code=wrong)
    assert done.returncode == 1
    row = rows_of(done.stdout)[-1]
    assert (row["kind"], row["plan"]) == ("failed", "seed 7")
    (tmp_path / "plan.json").write_text(json.dumps(row["phases"]))
    assert read_plan(tmp_path / "plan.json") == draw_plan(7)
    done = weft_command("elastic", str(tmp_path / "plan.json"), *row["options"].split(), code=wrong)
    assert done.returncode == 1
    assert as_json(draw_plan(7)) in done.stdout.splitlines()


BAD = [[], {}, [[]], [[1, 2]], [[0, 1], [2]], [[0], [0, 0]], [[0], [0, 64]], [[0], [-0.5]], [[0, 1], [-1]], [[0, -1]]]
BAD += [
    [[0, 1], phase]
    for phase in (
        {},
        {"ranks": []},
        {"ranks": [0], "kil": [0]},
        {"ranks": [0, -1]},
        {"ranks": [0, 1], "standby": [1]},
        {"ranks": [0, 1], "kill": [2]},
        {"ranks": [0, 1, 2], "kill": [1], "stop": [1]},
        {"ranks": [0, 1], "kill": [0], "stop": [1]},
        {"ranks": [0, 1], "kill": [1], "spare": [2]},
        {"ranks": [0, 1], "standby": [2], "spare": [2]},
        {"ranks": [0, 1], "together": 1},
        {"ranks": [2], "standby": [0, 1]},
    )
]


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
