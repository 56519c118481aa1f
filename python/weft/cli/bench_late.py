"""`weft bench --who-is-late`: runs weft.bench.late and prints who waited for whom."""

from __future__ import annotations

import typer

from weft.bench.options import Options
from weft.cli.output import EXIT_FAILED, Output


def run_who_is_late(output: Output, options: Options, late_rank: int | None, late_us: float) -> None:
    """Print rows (`--json`) or the matrix; exit 1 if the rank that was delayed is not the one waited for longest."""
    from weft.bench.apart import apart
    from weft.bench.facts import machine_facts
    from weft.bench.late import who_is_late

    with output.progress(1, "bench"):
        waits = who_is_late(options, late_rank, late_us)
    if output.json_lines:
        output.row({"kind": "machine", **apart(machine_facts, options.device)})
    for row in waits.rows():
        output.row(row)
    ranks = range(len(waits.matrix))
    columns = ("waited", *(f"for rank {rank}" for rank in ranks))
    cells = [
        (f"rank {rank}", *("" if rank == peer else f"{us:.1f}" for peer, us in enumerate(waits.matrix[rank])))
        for rank in ranks
    ]
    means = ("mean", *(f"{us:.1f}" for us in waits.waited_for))
    output.table(f"{waits.engine} engine, us a dispatch and combine", columns, [*cells, means])
    delayed = "nobody was delayed" if waits.late_rank is None else f"rank {waits.late_rank} came {late_us:.0f} us late"
    output.text(f"{delayed}; rank {waits.latest} was waited for longest")
    if waits.late_rank is not None and waits.latest != waits.late_rank:
        raise typer.Exit(EXIT_FAILED)
