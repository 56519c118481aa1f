"""Plans of `weft elastic`: which ranks are active in which phase. This module imports no torch."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import InvalidArgument
from weft.limits import MAX_RANKS

__all__ = ["Phase", "draw_plan", "num_slots", "read_plan"]


@dataclass(frozen=True)
class Phase:
    """`ranks` that are active when it begins; those in `killed` are killed in it."""

    ranks: tuple[int, ...]
    killed: tuple[int, ...] = ()

    @property
    def left(self) -> tuple[int, ...]:
        """Active when it ends."""
        return tuple(rank for rank in self.ranks if rank not in self.killed)


def read_plan(path: str | Path) -> list[Phase]:
    """From a JSON file: a list of phases, each a list of ranks; -2: rank 2 is killed in that phase.

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
    if founders != tuple(range(len(founders))) or phases[0].killed:
        raise InvalidArgument("phase 0: the ranks that found the group are 0 to N - 1, and live")
    for number, (before, phase) in enumerate(itertools.pairwise(phases), 1):
        if not set(before.left) & set(phase.ranks):
            raise InvalidArgument(f"phase {number}: none of the ranks {list(before.left)} of the phase before goes on")
        if not phase.left:
            raise InvalidArgument(f"phase {number}: nobody is left")
    return phases


def _phase(number: int, value: Any) -> Phase:
    is_plain = isinstance(value, list) and value and all(type(rank) is int for rank in value)
    ranks = [abs(rank) for rank in value] if is_plain else []
    if not is_plain or max(ranks) >= MAX_RANKS or len(set(ranks)) < len(ranks):
        raise InvalidArgument(
            f"phase {number} is {value!r}; allowed is a list of distinct ranks, 0 to {MAX_RANKS - 1}, -N for one that "
            "is killed"
        )
    return Phase(tuple(sorted(ranks)), tuple(sorted(-rank for rank in value if rank < 0)))


def num_slots(phases: list[Phase]) -> int:
    """Slots that the group needs."""
    return max(rank for phase in phases for rank in phase.ranks) + 1


def draw_plan(seed: int, most_ranks: int = 4, num_phases: int = 4) -> list[Phase]:
    """A plan by chance: ranks come, go and are killed, one at least stays each time."""
    draw = random.Random(seed)
    phases = [Phase(tuple(range(draw.randint(1, most_ranks))))]
    while len(phases) < num_phases:
        before = phases[-1].left
        kept = set(draw.sample(before, draw.randint(1, len(before))))
        free = [rank for rank in range(most_ranks) if rank not in before]
        coming = draw.sample(free, draw.randint(0, len(free)))
        ranks = tuple(sorted({*kept, *coming}))
        mortal = [rank for rank in ranks if rank != 0]
        killed = (draw.choice(mortal),) if len(ranks) > 1 and mortal and draw.random() < 0.4 else ()
        phases.append(Phase(ranks, killed))
    return phases
