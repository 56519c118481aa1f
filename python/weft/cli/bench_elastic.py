"""`weft bench --elastic`: runs weft.bench.elastic and prints its times."""

from __future__ import annotations

from weft.cli.output import Output


def run_elastic(output: Output, ranks: int, trials: int) -> None:
    """Print rows (`--json`) or a table."""
    from weft.bench.elastic import ELASTIC, FETCH_BYTES, elastic

    with output.progress(1, "bench"):
        rows = elastic(ranks, trials)
    for row in rows:
        output.row(row)
    cells = [
        (ELASTIC[row["what"]], *(f"{row[name]:.4f}" for name in ("p50_ms", "p99_ms", "max_ms")), str(row["count"]))
        for row in rows
    ]
    output.table(f"ranks that come and go, {ranks} ranks, ms", ("what", "median", "p99", "worst", "times"), cells)
    p99 = {row["what"]: row["p99_ms"] for row in rows}
    change = p99["step_during_cold_join_ms"] / p99["step_ms"] - 1
    output.text(f"p99 of a step while a new process joins: {change:+.0%}")
    median = {row["what"]: row["p50_ms"] for row in rows}
    rate, share = FETCH_BYTES / median["fetch_ms"] / 1e6, median["copy_ms"] / median["fetch_ms"]
    loss = 1 - median["step_before_fetch_ms"] / median["step_during_fetch_ms"]
    output.text(f"a fetch: {rate:.1f} GB/s, {share:.2f} of a copy's rate; steps beside it make {loss:.0%} less")
