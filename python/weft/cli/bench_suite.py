"""`weft bench --suite`: runs weft.bench.suite and prints its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from weft.bench.options import SuiteOptions
from weft.cli.output import EXIT_FAILED, Output

_COLUMNS = (
    "case",
    "T",
    "SMs",
    "median us",
    "p99 us",
    "must",
    "stretch",
    "wire GB/s",
    "of link",
    "host us",
    "x all_to_all",
)


def run_suite(output: Output, options: SuiteOptions, plot: Path | None) -> None:
    """Print rows as they come (`--json`) or tables at the end; exit 1 if a result was wrong.

    Raises:
        Unsupported: `plot` without matplotlib.
        What a rank raised, after the rows that were complete.
    """
    from weft.bench.plot import require_matplotlib, write_plot
    from weft.bench.suite import has_problems
    from weft.bench.suite import run_suite as measure
    from weft.machine import where

    if plot is not None:
        require_matplotlib()
    rows: list[dict[str, Any]] = []
    try:
        with output.progress(1, "bench", where.read):
            for row in measure(options):
                rows.append(row)
                output.row(row)
    except Exception as error:
        output.error(error)  # before the tables of what was complete
        raise
    finally:
        if rows:
            _print(output, rows)
        if rows and plot is not None:
            write_plot(rows, plot)
            output.text(f"wrote {plot}")
    if has_problems(rows):
        raise typer.Exit(EXIT_FAILED)


def _print(output: Output, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        for problem in row.get("problems", ()):
            output.text(f"WRONG {row['name']}: {problem}", style="bold red")
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"], []).append(row)
    for machine in by_kind.get("machine", []):
        built = f"weft {machine['weft']} ({machine['commit'] or 'no commit'})"
        versions = f"driver {machine['driver']}, torch {machine['torch']}, NCCL {machine['nccl']}"
        output.text(f"{built}, {machine['machine']}, {versions}")
    links = [
        (row["link_kind"], str(row["row_bytes"]), str(row["num_sms"]), f"{row['link_gb_per_s']:.1f}")
        for row in by_kind.get("link", [])
    ]
    if links:
        output.table("links, all GPUs at once", ("kind", "bytes of a row", "SMs", "GB/s a GPU"), links)
    cases = [_cells(row) for row in by_kind.get("case", [])]
    title = "slowest rank; results were compared with the reference first"
    output.table(title, _COLUMNS, cases, spare=(4, 6, 9, 7))
    crossovers = [
        (row["op"], row["layout"], row["rows"], ("more than " if row["is_bound"] else "") + str(row["most_tokens"]))
        for row in by_kind.get("crossover", [])
    ]
    if crossovers:
        columns = ("operation", "layout", "rows", "small-batch kernels are faster up to T")
        output.table("crossovers, by what was timed", columns, crossovers)
    print_targets(output, by_kind.get("target", []))


def print_targets(output: Output, rows: Sequence[dict[str, Any]]) -> None:
    """A table of rows of kind `target`, if there are any."""
    targets = [
        (
            row["target"],
            row["unit"],
            f"{row['value']:.3g}",
            f"{row['must']:g}",
            "" if row["stretch"] is None else f"{row['stretch']:g}",
            row["met"],
        )
        for row in rows
    ]
    if targets:
        output.table("targets", ("what", "unit", "measured", "must", "stretch", "met"), targets)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    routing = "" if row["routing"] == "uniform" else f", {row['routing']}"
    head = (row["name"] + routing, str(row["tokens"]), str(row["num_sms"] or ""))
    if "time_us" not in row:
        return (*head, "wrong" if row["problems"] else "unsupported", *[""] * (len(_COLUMNS) - 4))
    numbers = (
        (row["time_us"], ".0f"),
        (row["time_p99_us"], ".0f"),
        (row["must_us"], ".0f"),
        (row["stretch_us"], ".0f"),
        (row["wire_gb_per_s"], ".1f"),
        (row["ratio_vs_link"], ".3f"),
        (row["host_us"], ".1f"),
        (row["ratio_vs_all_to_all"], ".2f"),
    )
    return (*head, *("" if value is None else format(value, form) for value, form in numbers))
