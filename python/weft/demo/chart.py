"""Small charts made of characters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def bar(value: float, largest: float, width: int) -> str:
    """A horizontal bar of up to `width` characters."""
    return "█" * round(width * value / largest) if largest > 0 else ""


def area(values: Sequence[float], *, width: int, height: int) -> list[str]:
    """Lines of a chart filled up to the values, with the largest and smallest value at the left.

    More values than `width` are averaged; the lowest line starts a little below the smallest value.
    """
    columns = resample(values, width)
    low, high = min(columns), max(columns)
    low -= 0.1 * (high - low) + 1e-9
    filled = [8 * height * (value - low) / (high - low) for value in columns]
    lines = []
    for row in range(height - 1, -1, -1):
        cells = "".join(_EIGHTHS[min(8, max(0, round(level - 8 * row)))] for level in filled)
        label = f"{max(columns):.2f}" if row == height - 1 else f"{min(columns):.2f}" if row == 0 else ""
        lines.append(f"{label:>6} │{cells}")
    return lines


def resample(values: Sequence[float], width: int) -> list[float]:
    """Means of `width` equal stretches; the values themselves if they are fewer."""
    if len(values) <= width:
        return list(values)
    edges = [i * len(values) // width for i in range(width + 1)]
    return [fmean(values[a:b]) for a, b in itertools.pairwise(edges)]
