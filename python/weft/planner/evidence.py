"""What the model is worth: for each published cell, modelled, not modelled with the reason, or without evidence."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.planner.groups import GROUPS, Group, group_of, reason_against
from weft.planner.published import Cell, cells

__all__ = ["KINDS", "WITHIN", "Verdict", "constants_for", "fits", "num_points", "table", "verdict_of", "verdicts"]

MODELLED, NOT, NO_EVIDENCE = "modelled", "not modelled", "without evidence"
KINDS = (MODELLED, NOT, NO_EVIDENCE)
WITHIN = 0.10
_FILE = Path(__file__).with_name("fitted.json")


@dataclass(frozen=True)
class Verdict:
    """Of one cell: `kind` of KINDS, the `group`'s name, the model's figure `fitted`, and `predicted`, the figure of
    constants that the cell had no part in (None if it was not held out); `reason` if it is not modelled.
    """

    cell: Cell
    kind: str
    group: str
    fitted: float | None
    predicted: float | None
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Model / published - 1; None if no constants are fitted to the cell."""
        return None if self.fitted is None else self.fitted / self.cell.value - 1

    @property
    def held_out_error(self) -> float | None:
        """The same of the prediction."""
        return None if self.predicted is None else self.predicted / self.cell.value - 1


@functools.cache
def fits() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    """By group and fit ("all", "held_out"): the constants."""
    found: Mapping[str, Mapping[str, Mapping[str, float]]] = json.loads(_FILE.read_text(encoding="utf-8"))["groups"]
    return found


def constants_for(
    group: Group,
    call: tuple[str, str],
    own: Mapping[str, float],
    kernels: Mapping[str, Mapping[str, float]],
) -> Mapping[str, float]:
    """The constants of a call (op, dtype): the group's own, and for whole calls those of its kernel.

    Only a dispatch exchanges the routing map.
    """
    if not group.kernel:
        return own
    around = {name: value for name, value in own.items() if call[0] == "dispatch" or name != "call_map"}
    return {**kernels[group.kernel[call]], **around}


def _figure(cell: Cell, group: Group, fit: str) -> float:
    kernels = {name: fits()[name][fit] for name in group.kernel.values()}
    constants = constants_for(group, (cell.op, cell.dtype), fits()[group.name][fit], kernels)
    return cell.in_unit(cell.time_us(constants))


def num_points(group: Group) -> int:
    """Runs of a group that the model can tell apart, of those that its constants are fitted to."""
    mine = [cell for cell in cells() if group.has(cell) and not group.predicted(cell)]
    return len({cell.point for cell in mine if not reason_against(cell)})


def verdict_of(cell: Cell) -> Verdict:
    """Modelled is a cell within 10 % of the fit and, if it was held out, of the prediction. A group with as many
    constants as runs that the model can tell apart says nothing."""
    reason = reason_against(cell)
    if reason:
        return Verdict(cell, NOT, "", None, None, reason)
    group = group_of(cell)
    fitted = _figure(cell, group, "all")
    predicted = _figure(cell, group, "held_out") if group.held_out(cell) else None
    if num_points(group) <= len(group.free):
        return Verdict(cell, NO_EVIDENCE, group.name, fitted, None, f"{len(group.free)} constant for as many runs")
    error = fitted / cell.value - 1
    held_out_error = None if predicted is None else predicted / cell.value - 1
    if abs(error) > WITHIN:
        return Verdict(cell, NOT, group.name, fitted, predicted, f"the model is off by {error:+.1%}")
    if held_out_error is not None and abs(held_out_error) > WITHIN:
        reason = f"held out ({group.held_out_words}), the model is off by {held_out_error:+.1%}"
        return Verdict(cell, NOT, group.name, fitted, predicted, reason)
    return Verdict(cell, MODELLED, group.name, fitted, predicted)


@functools.cache
def verdicts() -> tuple[Verdict, ...]:
    """Of every cell, in the order of the file."""
    return tuple(verdict_of(cell) for cell in cells())


@dataclass(frozen=True)
class GroupRow:
    """Of one group: its constants, cells and how many are modelled; the worst errors, None where there is none."""

    name: str
    num_constants: int
    num_modelled: int
    num_cells: int
    worst: float
    worst_held_out: float | None
    held_out_words: str


def table() -> list[GroupRow]:
    """A row for each group of cells with constants."""
    rows = []
    for group in GROUPS:
        mine = [verdict for verdict in verdicts() if verdict.group == group.name]
        errors = [abs(v.error) for v in mine if v.error is not None]
        held = [abs(v.held_out_error) for v in mine if v.held_out_error is not None]
        num_modelled = sum(v.kind == MODELLED for v in mine)
        worst_held = max(held, default=None)
        rows.append(
            GroupRow(
                group.name,
                len(group.free),
                num_modelled,
                len(mine),
                max(errors),
                worst_held,
                group.held_out_words,
            )
        )
    return rows
