"""Writes docs/performance.md from benchmarks/results: `python benchmarks/performance.py`.

Every figure of its tables is one of these files': the output of `weft bench --suite ... --json`, and of the runs that
timed other libraries beside Weft. A test compares the page with what this writes. The page shows the latest run alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOC = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"

# The files that the page is made of: the latest of each kind. A new run takes the place of an older one here.
BESIDE_PEERS = "peers_2xh100.jsonl"
SINCE = "gpu_two_ranks_a26804a.jsonl"
TARGETS = "gpu_bench_04f59c1.jsonl"
PEERS_APART = ROOT / "benchmarks" / "peers.md"
SMALL = ("gpu_bench_small_d3b38d2.jsonl", "gpu_bench_small_04f59c1.jsonl")

Row = dict[str, Any]

_INTRO = """# Performance between GPUs

[benchmarks/performance.py](../benchmarks/performance.py) writes this page from [result files](../benchmarks/results/).
A time is the median of a whole call on the slowest rank: counts, transfer, copies, sums, every kernel and the host.
Results are compared with the reference before they are timed. *Limit* is the time that the links alone need, at the
rate measured in the same run. *SMs* are those given to Weft; peers use copy and reduce kernels on all SMs besides.
How everything is counted: [benchmarking](benchmarking.md).
"""

_WHY = """
## What is missed, and why
- **Expert-major dispatch**: a second launch places rows at memory rate
  ([0036](decisions/0036-rows-by-expert-are-placed-by-a-second-launch.md)), 22 us of it for holes (FP8, 24 SMs). Other
  forms of the second changed nothing ([0038](decisions/0038-calls-by-expert-take-more-sms.md)).
- **Combine of unregistered tensors** copies rows first, then they are pulled. On 24 SMs copy and pull would have to
  overlap ([0039](decisions/0039-ordinary-rows-are-brought-into-the-landing.md)).
- **Expert-major weighted combine** is bound by instructions
  ([0022](decisions/0022-combine-is-short-of-instructions.md)), **FP8 on the wire** by quantising and adding
  ([0032](decisions/0032-fp8-rows-are-stored-by-the-threads-that-make-them.md)).
- **The training step** (2.7 ms are not its GEMMs) was not measured beside a peer again.
- **Host time** is 27 to 43 us of 15 a call: a launch (5 to 8), allocations, results and the call in Python.
"""

_HOW = """
## Reproduce
```bash
weft bench --device cuda --suite targets,routings,tokens,sms,step,small --json > bench.jsonl
benchmarks/run_gpu.sh OUT bench
```
"""


def read_rows(file: Path) -> list[Row]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def number(value: float | None, form: str = ".0f") -> str:
    """A figure, or nothing where there is none."""
    return "" if value is None else format(value, form)


def beside_peers() -> Iterator[str]:
    """Weft and the best peer, in the same run."""
    machine, *rows = read_rows(RESULTS / BESIDE_PEERS)
    yield (
        f"\n## {machine['machine']}, beside peers\n\n{machine['date']}, commit {machine['commit']}, "
        f"driver {machine['driver']}, CUDA {machine['cuda']}, torch {machine['torch']}; T = {machine['tokens']}, "
        f"H = {machine['hidden']}, K = {machine['top_k']}, E = {machine['experts']}. "
        "A ratio below 1 is a call in which Weft is slower.\n\n"
    )
    cells = [
        (
            row["call"] + (f", T = {row['tokens']}" if "tokens" in row else ""),
            str(row.get("sms", "auto")),
            f"{row['weft']:g} {row.get('unit', 'us')}",
            number(row.get("floor")),
            f"{row['best_peer']:g} ({row['peer']})",
            f"{row['best_peer'] / row['weft']:.2f}",
        )
        for row in rows
    ]
    yield table(("call", "SMs", "Weft", "limit", "best peer", "peer / Weft"), cells)


def since() -> Iterator[str]:
    """What has changed since the run beside peers, without a peer."""
    machine, *rows = read_rows(RESULTS / SINCE)
    yield f"\n## Since then, on the same kind of machine\n\n{machine['date']}, commit {machine['commit'][:7]}, "
    yield f"in one run without a peer. Before: {machine['before']}. *Must* is the target.\n\n"
    cells = [
        (row["call"], row["sms"], f"{row['before']:g}", f"{row['now']:g} {row['unit']}", f"{row['must']:g}")
        for row in rows
        if row["kind"] == "now"
    ]
    yield table(("call", "SMs", "before", "now", "must"), cells)


def against_targets() -> Iterator[str]:
    """The cases of the suite of targets, and the targets that are missed."""
    rows = read_rows(RESULTS / TARGETS)
    yield f"\n## {_machine(rows[0])}\n\nUniform routing, T = 4096, H = 7168, K = 8, E = 256. "
    yield "No peer was timed in this run.\n\n"
    cells = [
        (
            row["name"],
            str(row["num_sms"]),
            number(row["time_us"]),
            number(row["link_us"]),
            number(row["ratio_vs_link"], ".2f"),
        )
        for row in rows
        if row["kind"] == "case" and row["suite"] == "targets" and "time_us" in row
    ]
    yield table(("call", "SMs", "us", "limit", "of the limit's rate"), cells)
    found = [row for row in rows if row["kind"] == "target"]
    missed = [row for row in found if row["met"] == "no"]
    of_host = [row for row in missed if row["target"].startswith("host time: ")]
    yield f"\n{len(found) - len(missed)} of {len(found)} targets are met. Missed:\n\n"
    yield table(
        ("target", "measured", "must", "off by"),
        [
            (
                row["target"],
                f"{row['value']:.3g}",
                f"{row['must']:g} {row['unit']}",
                f"{abs(row['value'] / row['must'] - 1):.1%}",
            )
            for row in missed
            if row not in of_host
        ]
        + _host_times(of_host),
    )


def _host_times(missed: Sequence[Row]) -> list[tuple[str, ...]]:
    """In one row: they are of one cause."""
    if not missed:
        return []
    values = sorted(row["value"] for row in missed)
    off = [f"{each / missed[0]['must'] - 1:.0%}" for each in (values[0], values[-1])]
    whose = f"host time of {len(missed)} calls"
    return [
        (whose, f"{values[0]:.3g} to {values[-1]:.3g}", f"{missed[0]['must']:g} {missed[0]['unit']}", " to ".join(off))
    ]


def small_batches() -> Iterator[str]:
    """Decoding in CUDA graphs: dispatch and combine together, on each machine."""
    machines = [read_rows(RESULTS / name) for name in SMALL]
    yield "\n## Small batches, in CUDA graphs\n\nDispatch and combine together, us. H = 7168, K = 8, E = 256.\n\n"
    times: dict[tuple[str, int], list[str]] = {}
    for idx, rows in enumerate(machines):
        for row in rows:
            if row["kind"] == "case" and row["suite"] == "small" and row["op"] == "both" and "time_us" in row:
                times.setdefault((row["name"], row["tokens"]), [""] * len(machines))[idx] = f"{row['time_us']:.1f}"
    names = [_machine(rows[0]) for rows in machines]
    yield table(("call", "T", *names), [(name, str(tokens), *cells) for (name, tokens), cells in times.items()])


def _machine(row: Row) -> str:
    return f"{row['machine']}, commit {row['commit'][:7]}"


def _others() -> str:
    return "\n## Other libraries on 4 x H200, in runs of their own\n\n" + PEERS_APART.read_text(encoding="utf-8")


def page() -> str:
    """The whole page."""
    return "".join((_INTRO, *beside_peers(), *since(), *against_targets(), *small_batches(), _others(), _WHY, _HOW))


if __name__ == "__main__":
    DOC.write_text(page(), encoding="utf-8")
