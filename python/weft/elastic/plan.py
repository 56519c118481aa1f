"""Plans of `weft elastic`: which ranks are active in which phase, and what happens then. Imports no torch."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import InvalidArgument
from weft.limits import MAX_RANKS

__all__ = ["LEAST_OPS", "MOMENTS", "Phase", "as_json", "draw_plan", "num_slots", "read_plan"]

LEAST_OPS = 2  # one before what happens, and one behind it
MOMENTS = {  # of the step in the middle of the phase: the call, and whether the moment is inside it
    "dispatch": ("dispatch", False),
    "mid-payload": ("dispatch", True),
    "combine": ("combine", False),
    "mid-combine": ("combine", True),
}
_LISTS = {"ranks": "ranks", "kill": "killed", "stop": "stopped", "pause": "paused", "standby": "standby"} | {
    "spare": "spares"
}
_NAMES = (*_LISTS, "together", "at", "ops")


@dataclass(frozen=True)
class Phase:
    """`ranks` are active once its change is done, and work; `standby` ones are ready, or suspended if they were active.

    In the midst of the work `killed` ones are killed, and `stopped` ones are stopped until the others have gone on
    without them; `spares`, of those on standby, take their places. `paused` ones are stopped for a moment, at the
    change if there is one. `at`: when that is, of MOMENTS. `together`: who comes, comes in one change. `ops`: steps;
    None: as many as in each phase.
    """

    ranks: tuple[int, ...]
    killed: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()
    paused: tuple[int, ...] = ()
    standby: tuple[int, ...] = ()
    spares: tuple[int, ...] = ()
    together: bool = True
    at: str = "combine"
    ops: int | None = None

    @property
    def lost(self) -> tuple[int, ...]:
        """Whom the others go on without."""
        return self.killed + self.stopped

    @property
    def left(self) -> tuple[int, ...]:
        """Active when it ends."""
        return tuple(sorted({*self.ranks, *self.spares} - {*self.lost}))

    @property
    def standing(self) -> tuple[int, ...]:
        """On standby when it ends."""
        return tuple(rank for rank in self.standby if rank not in self.spares)

    @property
    def present(self) -> tuple[int, ...]:
        """Processes that it needs."""
        return self.ranks + self.standby


def read_plan(path: str | Path) -> list[Phase]:
    """From a JSON file: a list of phases, each a list of ranks; -2: rank 2 is killed in that phase. Or an object with
    `ranks`, and what else there is of `kill`, `stop`, `pause`, `standby`, `spare` (lists of ranks), `together`, `at`
    and `ops`: the fields of `Phase`.

    Raises:
        InvalidArgument: the file can't be read, or is no plan; names the phase.
    """
    try:
        values = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path} can't be read as a plan: {error}") from error
    if not isinstance(values, list) or not values:
        raise InvalidArgument(f"{path} is no plan: a list of phases is expected, each a list of ranks")
    phases = [_phase(number, value) for number, value in enumerate(values)]
    founders = phases[0].ranks
    if founders != tuple(range(len(founders))) or phases[0].lost or phases[0].paused:
        raise InvalidArgument("phase 0: the ranks that found the group are 0 to N - 1, and live")
    for number, (before, phase) in enumerate(itertools.pairwise(phases), 1):
        if not set(before.left) & set(phase.ranks):
            raise InvalidArgument(f"phase {number}: none of the ranks {list(before.left)} of the phase before goes on")
    return phases


def as_json(phases: Sequence[Phase]) -> str:
    """What `read_plan` reads."""
    return json.dumps([_value(phase) for phase in phases])


def _value(phase: Phase) -> Any:
    value: dict[str, Any] = {name: getattr(phase, field) for name, field in _LISTS.items() if getattr(phase, field)}
    plain = Phase(())
    value |= {
        name: getattr(phase, name) for name in ("together", "at", "ops") if getattr(phase, name) != getattr(plain, name)
    }
    is_plain = set(value) <= {"ranks", "kill"} and 0 not in phase.killed  # there is no -0
    return [-rank if rank in phase.killed else rank for rank in phase.ranks] if is_plain else value


def _phase(number: int, value: Any) -> Phase:
    if not isinstance(value, dict):
        ranks = _rank_list(number, value, least=1 - MAX_RANKS)
        found = {"ranks": [abs(rank) for rank in ranks], "kill": [-rank for rank in ranks if rank < 0]}
    else:
        found = {**value}
    plain = Phase(())
    others = {name: found.pop(name, getattr(plain, name)) for name in ("together", "at", "ops")}
    if unknown := set(found) - set(_LISTS):
        raise InvalidArgument(f"phase {number}: {sorted(unknown)[0]!r} is unknown; allowed are {', '.join(_NAMES)}")
    if not isinstance(others["together"], bool):
        raise InvalidArgument(f"phase {number}: together is {others['together']!r}; allowed are true and false")
    if not isinstance(others["at"], str) or others["at"] not in MOMENTS:
        raise InvalidArgument(f"phase {number}: at is {others['at']!r}; allowed are {', '.join(MOMENTS)}")
    if others["ops"] is not None and (type(others["ops"]) is not int or others["ops"] < LEAST_OPS):
        raise InvalidArgument(f"phase {number}: ops is {others['ops']!r}; allowed is an int from {LEAST_OPS}")
    lists: dict[str, Any] = {_LISTS[name]: tuple(sorted(_rank_list(number, ranks))) for name, ranks in found.items()}
    phase = Phase(**{"ranks": (), **lists}, **others)
    _check(number, phase)
    return phase


def _rank_list(number: int, value: Any, least: int = 0) -> list[int]:
    is_plain = isinstance(value, list) and all(type(rank) is int and least <= rank < MAX_RANKS for rank in value)
    if not is_plain or len({abs(rank) for rank in value}) < len(value):
        raise InvalidArgument(
            f"phase {number}: {value!r}; allowed is a list of distinct ranks, 0 to {MAX_RANKS - 1}, -N for one that is "
            "killed"
        )
    return list(value)


def _check(number: int, phase: Phase) -> None:
    ranks, lost = set(phase.ranks), set(phase.lost)
    wrongs = {
        "no rank is active": not ranks,
        "at says when somebody is killed, stopped or paused, and nobody is": (
            phase.at != "combine" and not phase.lost + phase.paused
        ),
        "ranks and standby have a rank in common": bool(ranks & set(phase.standby)),
        "who is killed, stopped or paused has to be active, and only one of these": (
            not lost | set(phase.paused) <= ranks or len(lost | set(phase.paused)) < len(phase.lost + phase.paused)
        ),
        "nobody is left": bool(ranks) and ranks <= lost,
        "a spare has to be on standby, and only as many are needed as are killed or stopped": (
            not set(phase.spares) <= set(phase.standby) or len(phase.spares) > len(lost)
        ),
    }
    for text, is_wrong in wrongs.items():
        if is_wrong:
            raise InvalidArgument(f"phase {number}: {text}")


def num_slots(phases: Sequence[Phase]) -> int:
    """Slots that the group needs."""
    return max(rank for phase in phases for rank in phase.present) + 1


def draw_plan(seed: int, slots: int = 5, num_phases: int = 5) -> list[Phase]:
    """A plan by chance: ranks come, together or as they are ready, go, are suspended and resumed, killed, stopped for a
    moment or for long, in or between two calls, and replaced by spares; one at least stays each time."""
    draw = random.Random(seed)
    phases = [Phase(tuple(range(draw.randint(1, slots - 1))))]
    while len(phases) < num_phases:
        phases.append(_draw_phase(draw, phases[-1], slots))
    return phases


def _draw_phase(draw: random.Random, before: Phase, slots: int) -> Phase:
    kept = draw.sample(before.left, draw.randint(1, len(before.left)))
    ranks: set[int] = set(kept)
    standby: set[int] = set()
    for rank in range(slots):
        if rank in kept:
            continue
        is_here = rank in before.left or rank in before.standing
        where = draw.choices((ranks, standby, None), (3, 3, 4) if is_here else (4, 2, 4))[0]
        if where is not None:
            where.add(rank)
    mortal = sorted(ranks - {min(kept)})
    what = draw.choices(("killed", "stopped", "paused", ""), (4, 1, 1, 4) if mortal else (0, 0, 0, 1))[0]
    happens: dict[str, Any] = {what: (draw.choice(mortal),)} if what else {}
    # Who comes in just now may not be prepared for the spare yet, and would keep it out.
    is_replaced = what in ("killed", "stopped") and standby and ranks <= set(before.left) and draw.random() < 0.8
    spares = (draw.choice(sorted(standby)),) if is_replaced else ()
    together = draw.random() < 0.7
    at = draw.choice(tuple(MOMENTS)) if happens else "combine"
    return Phase(
        tuple(sorted(ranks)), **happens, standby=tuple(sorted(standby)), spares=spares, together=together, at=at
    )
