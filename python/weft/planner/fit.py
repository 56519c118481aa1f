"""Fits the constants of the published systems: `python -m weft.planner.fit` writes fitted.json anew. Needs numpy.

Least squares of log(model / published) over the measurements of a group (a run published in several units counts
once), by Levenberg and Marquardt's method within the bounds of weft.planner.groups, from several starts; the same
numbers every time. Each group is fitted twice: to all its cells, and to those that are not held out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.planner.evidence import constants_for
from weft.planner.groups import BOUNDS, GROUPS, Group, reason_against
from weft.planner.published import Cell, cells

__all__ = ["FILE", "fit_all", "fitted_cells", "measurements"]

Array = npt.NDArray[np.float64]
Constants = dict[str, float]

FILE = Path(__file__).with_name("fitted.json")
_STARTS = 8
_PASSES = 150
_NUDGE = 1e-5


def measurements(found: Sequence[Cell]) -> list[Cell]:
    """One cell for each measurement: of a run that was published in several units, the first."""
    first: dict[tuple[object, ...], Cell] = {}
    for cell in found:
        first.setdefault(cell.measurement, cell)
    return list(first.values())


def fitted_cells(group: Group) -> list[Cell]:
    """The measurements that a group's constants are fitted to when nothing is held out."""
    mine = [cell for cell in cells() if group.has(cell) and not group.predicted(cell)]
    return measurements([cell for cell in mine if not reason_against(cell)])


def fit_all() -> dict[str, dict[str, Constants]]:
    """By group: "all", the constants fitted to all its cells, and "held_out", those without the cells held out."""
    fits: dict[str, dict[str, Constants]] = {}
    for group in GROUPS:  # kernels come before the calls around them
        mine = fitted_cells(group)
        fits[group.name] = {
            "all": _fit(group, mine, {name: fits[name]["all"] for name in group.kernel.values()}),
            "held_out": _fit(
                group,
                [cell for cell in mine if not group.held_out(cell)],
                {name: fits[name]["held_out"] for name in group.kernel.values()},
            ),
        }
    return fits


def _fit(group: Group, mine: Sequence[Cell], kernels: Mapping[str, Mapping[str, float]]) -> Constants:
    bounds = np.log([BOUNDS[name] for name in group.free])

    def residuals(x: Array) -> Array:
        constants = dict(zip(group.free, np.exp(x).tolist(), strict=True))
        of_call = {key: constants_for(group, key, constants, kernels) for key in {(c.op, c.dtype) for c in mine}}
        off = [cell.in_unit(cell.time_us(of_call[cell.op, cell.dtype])) / cell.value for cell in mine]
        return np.array([math.log(one) for one in off])

    x = _least_squares(residuals, bounds[:, 0], bounds[:, 1])
    return {name: float(f"{value:.6g}") for name, value in zip(group.free, np.exp(x).tolist(), strict=True)}


def _least_squares(residuals: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """The x within bounds with the least sum of squares that any start leads to; the first start is their middle."""
    rng = np.random.default_rng(0)
    starts = [(low + high) / 2, *(low + (high - low) * rng.random(len(low)) for _ in range(_STARTS - 1))]
    ends = [_descend(residuals, start, low, high) for start in starts]
    return min(ends, key=lambda end: round(end[0], 9))[1]


def _descend(residuals: Callable[[Array], Array], x: Array, low: Array, high: Array) -> tuple[float, Array]:
    """(sum of squares, x) where Levenberg's and Marquardt's steps from x end."""
    damping = 1e-2
    left = residuals(x)
    cost = float(left @ left)
    for _ in range(_PASSES):
        nudges = _NUDGE * np.eye(len(x))
        jacobian = np.stack([(residuals(x + nudge) - left) / _NUDGE for nudge in nudges], axis=1)
        slope = jacobian.T @ left
        is_free = ~(((x <= low + 1e-9) & (slope > 0)) | ((x >= high - 1e-9) & (slope < 0)))
        if not is_free.any():
            break
        normal = (jacobian.T @ jacobian)[np.ix_(is_free, is_free)]
        normal += damping * np.diag(np.diag(normal)) + 1e-9 * np.eye(int(is_free.sum()))
        step = np.zeros(len(x))
        step[is_free] = np.clip(np.linalg.solve(normal, -slope[is_free]), -1, 1)
        tried = np.clip(x + step, low, high)
        left_there = residuals(tried)
        cost_there = float(left_there @ left_there)
        if cost_there < cost - 1e-14:
            is_done = cost - cost_there < 1e-11
            x, left, cost = tried, left_there, cost_there
            damping = max(damping / 5, 1e-9)
            if is_done:
                break
        else:
            damping *= 4
            if damping > 1e6:
                break
    return cost, x


def main() -> None:
    """Write fitted.json."""
    text: dict[str, Any] = {"about": "Made by python -m weft.planner.fit from published.json.", "groups": fit_all()}
    FILE.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
