"""`weft bench --control`: runs weft.bench.control and prints its times."""

from __future__ import annotations

from weft.cli.output import Output


def run_control(output: Output, ranks: int, trials: int, device: str, num_hosts: int | None = None) -> None:
    """Print rows (`--json`) or a table. With `num_hosts` between these, a rank each."""
    from weft.bench.control import MEASURED, control
    from weft.bench.control_hosts import MEASURED_BETWEEN_HOSTS, control_between_hosts

    with output.progress(1, "bench"):
        rows = control(ranks, trials, device) if num_hosts is None else control_between_hosts(num_hosts, trials)
    for row in rows:
        output.row(row)
    texts = MEASURED | MEASURED_BETWEEN_HOSTS
    cells = [(texts[row["what"]], f"{row['p50_ms']:.2f}", f"{row['max_ms']:.2f}", str(row["count"])) for row in rows]
    who = f"{ranks} ranks" if num_hosts is None else f"{num_hosts} hosts"
    output.table(f"control plane, {who}, ms", ("what", "median", "worst", "times"), cells)
