"""Draws the suite's rows: wire bandwidth against SMs, with the links' limits, and against T. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weft.bench.cases import TOKENS
from weft.errors import Unsupported

Row = dict[str, Any]

_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b")
_GREY = "#888888"


def require_matplotlib() -> None:
    """Raises `weft.Unsupported` with the command that installs matplotlib, if it is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise Unsupported("--plot", have="no matplotlib", need="pip install 'weft[plot]'")


def write_plot(rows: Sequence[Row], file: Path) -> None:
    """Write the picture; its format is that of the file's name."""
    from matplotlib.figure import Figure  # no pyplot: no window system, no global state

    figure = Figure(figsize=(11.0, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    full = next((row["tokens"] for row in rows if row.get("suite") in ("sms", "targets")), TOKENS)
    for kind, row_bytes in sorted({(row["link_kind"], row["row_bytes"]) for row in rows if row["kind"] == "link"}):
        points = sorted(
            (row["num_sms"], row["link_gb_per_s"])
            for row in rows
            if row["kind"] == "link" and (row["link_kind"], row["row_bytes"]) == (kind, row_bytes)
        )
        style = {"push": "--", "pull": ":"}[kind]
        left.plot(*zip(*points, strict=True), style, color=_GREY, label=f"link: {kind}, rows of {row_bytes} B")
    _curves(left, rows, "num_sms", lambda row: row["tokens"] == full)
    _curves(right, rows, "tokens", lambda row: row["num_sms"] == 16)
    left.set(xlabel="SMs", ylabel="wire bandwidth, GB/s a GPU", title=f"T = {full}", ylim=(0, None))
    right.set(xlabel="tokens a rank", title="16 SMs", xscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)


def _curves(axes: Any, rows: Sequence[Row], key: str, is_wanted: Callable[[Row], bool]) -> None:
    """A curve for each call of the sweeps."""
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["kind"] != "case" or "time_us" not in row or row["routing"] != "uniform" or not is_wanted(row):
            continue
        curves.setdefault(row["name"], {})[row[key]] = row["wire_gb_per_s"]
    swept = {name: points for name, points in curves.items() if len(points) > 2}
    for (name, points), color in zip(sorted(swept.items()), _COLORS, strict=False):
        axes.plot(*zip(*sorted(points.items()), strict=True), "o-", color=color, label=name)
