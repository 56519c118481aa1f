"""`weft bench --control`: runs weft.bench.control and prints its times."""

from __future__ import annotations

from weft.cli.output import Output


def run_control(output: Output, ranks: int, trials: int, device: str) -> None:
    """Print rows (`--json`) or a table."""
    from weft.bench.control import MEASURED, control

    with output.progress(1, "bench"):
        rows = control(ranks, trials, device)
    for row in rows:
        output.row(row)
    cells = [(MEASURED[row["what"]], f"{row['p50_ms']:.2f}", f"{row['max_ms']:.2f}", str(row["count"])) for row in rows]
    output.table(f"control plane, {ranks} ranks, ms", ("what", "median", "worst", "times"), cells)
