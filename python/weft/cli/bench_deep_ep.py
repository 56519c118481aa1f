"""`weft bench --deep-ep`: runs weft.bench.deep_ep and prints what the package adds to each call."""

from __future__ import annotations

from weft.bench.options import Options
from weft.cli.output import Output


def run_deep_ep(output: Output, options: Options) -> None:
    """Print rows (`--json`) or the table."""
    from weft.bench.apart import apart
    from weft.bench.deep_ep import deep_ep
    from weft.bench.facts import machine_facts

    with output.progress(1, "bench"):
        found = deep_ep(options)
    if output.json_lines:
        output.row({"kind": "machine", **apart(machine_facts, options.device)})
    for row in found.rows():
        output.row(row)
    cells = [
        (
            each.name, f"{each.own_us:.1f}", f"{each.theirs_us:.1f}", f"{each.theirs_us - each.own_us:.1f}",
            *(str(len(names)) for names in (each.own_kernels, each.their_kernels) if names is not None),
        )
        for each in found.calls
    ]  # fmt: skip
    columns = ("call of weft.deep_ep", "Weft's own us", "its us", "more us", "Weft's kernels", "its kernels")
    title = f"{found.engine} engine, host time a call, median of {options.iters} pairs"
    output.table(title, columns[: len(cells[0])], cells, spare=range(4, len(cells[0])))  # the cpu engine has no kernels
