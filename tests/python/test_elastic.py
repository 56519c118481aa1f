"""Guards against a plan that `weft elastic` plays with a wrong word, leaves something over, or takes for right when it
is not."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pathlib
import signal
from typing import Any

import pytest
from cli_lines import rows_of, weft_command

import weft
from weft.elastic import playing, worker
from weft.elastic.plan import MOMENTS, Phase, as_json, draw_plan, num_slots, read_plan
from weft.elastic.run import play
from weft.elastic.steps import Load, Steps, Way
from weft.machine.placement import local

PLANS = pathlib.Path(__file__).parent.parent / "data/plans"


@pytest.mark.parametrize("name", sorted(path.stem for path in PLANS.glob("*.json")))
def test_plans_that_are_there(name: str) -> None:
    """As they are: every phase ends with its ranks, no wrong word, nothing left over."""
    done = weft_command("elastic", str(PLANS / f"{name}.json"), "--ops", "6", "--json")
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    wanted = read_plan(PLANS / f"{name}.json")
    assert [tuple(row["active"]) for row in rows] == [phase.left for phase in wanted]
    assert [tuple(row["standby"]) for row in rows] == [phase.standing for phase in wanted]
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
                **{name: (phase.killed or phase.stopped) and phase.at == name for name in MOMENTS},
            }
            found |= {name for name, is_so in happens.items() if is_so}
    words = {"suspended", "resumed", "removed", "together", "again", "killed", "stopped", "paused", "spares"}
    assert found == words | set(MOMENTS)


def test_a_plan_is_read_as_it_was_written(tmp_path: pathlib.Path) -> None:
    own_ops = [Phase((0, 1)), Phase((0, 1), killed=(1,), at="mid-payload", ops=3)]
    for plan in (*map(draw_plan, range(50)), own_ops):
        (tmp_path / "plan.json").write_text(as_json(plan))
        assert read_plan(tmp_path / "plan.json") == plan


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


def test_every_moment_of_a_phase_of_its_own_length(tmp_path: pathlib.Path) -> None:
    """Ranks that die or are stopped in the last step of a phase may have done their part of it: the others go on until
    they have noticed."""
    path = tmp_path / "plan.json"
    plan: list[Any] = [[0, 1, 2]]
    for number, at in enumerate(MOMENTS):
        plan.append({"ranks": [0, 1, 2], "kill" if number % 2 else "stop": [2], "at": at, "ops": 2 + number})
        plan.append([0, 1, 2])
    path.write_text(json.dumps(plan))
    done = weft_command("elastic", str(path), "--ops", "3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(done.stdout)
    assert [row["ops"] for row in rows] == [3, 2, 3, 3, 3, 4, 3, 5, 3]
    assert all((row["wrong"], row["leftovers"], row["error"]) == (0, [], "") for row in rows)


@pytest.mark.parametrize("at", MOMENTS)
def test_a_moment_is_where_it_says(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its call; or inside it, and then the step does not go on before."""
    found = []
    monkeypatch.setattr(playing.os, "kill", lambda pid, number: found.append((pid, number)))
    note = playing._Signalled(signal.SIGSTOP, at, {"dispatch": 0.001, "combine": 0.001})
    calls = ("dispatch", "combine", "other")
    seen = []
    for call in calls:
        note(call)
        thread = note.thread
        if thread is not None:
            thread.join()
        seen.append((len(found), thread is not None))
    call, is_inside = MOMENTS[at]
    begins = calls.index(call)
    assert seen == [(int(number >= begins), is_inside and number == begins) for number in range(3)]
    assert found == [(os.getpid(), signal.SIGSTOP)]


class _Pipe:
    """It has something from a given look on."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def poll(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def _goes_on(outer_comm: weft.Communicator) -> tuple[int, int]:
    rank, tell = outer_comm.rank, outer_comm._native.exchange
    comm = weft.Communicator.from_allgather(rank, 2, lambda mine: list(tell(1 << 20, mine, 60.0)), max_ranks=3)
    me = Steps(comm, Load(ops=2))
    step = me.step
    me.step = lambda: step() and rank == 0  # type: ignore[method-assign]
    pipe: Any = _Pipe(3 * rank)
    found = worker._go_on(pipe, me)
    assert comm.boundary() is None
    assert me.step() == (rank == 0)
    comm.meet(60.0)
    comm.close()
    return found


def test_ranks_go_on_between_phases() -> None:
    """Until each has been told what comes next, all equally long; steps with a wrong word are told."""
    assert weft.spawn(_goes_on, 2, device="cpu") == [(3, 0), (3, 3)]


def test_traffic_and_new_interpreters() -> None:
    """A plan with all words ends as without; who has joined is none of the forked processes."""
    path = PLANS / "replace.json"
    started = []

    def look(_: Any) -> None:
        for child in multiprocessing.active_children():
            lines = pathlib.Path(f"/proc/{child.pid}/cmdline").read_bytes()
            started.append((child.pid, b"spawn_main" in lines))

    played = play(read_plan(path), Load(ops=2), look, Way(fresh=True, traffic=True))
    assert [(each.wrong, each.error, each.leftovers) for each in played] == [(0, "", ())] * len(played)
    assert [each.active for each in played] == [phase.left for phase in read_plan(path)]
    assert sum(is_new for _, is_new in set(started)) == 2  # 3, and 1 again
    assert sum(not is_new for _, is_new in set(started)) == 3  # the founders


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
        {"ranks": [0, 1], "kill": [1], "at": "payload"},
        {"ranks": [0, 1], "kill": [1], "at": ["combine"]},
        {"ranks": [0, 1], "at": "mid-payload"},
        {"ranks": [0, 1], "ops": 1},
        {"ranks": [0, 1], "ops": True},
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
