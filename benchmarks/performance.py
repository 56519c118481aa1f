"""Writes docs/performance.md from benchmarks/results: `python benchmarks/performance.py`.

Every figure of its tables is one of these files': the output of `weft bench --suite ... --json`, and of the runs that
timed other libraries beside Weft. A test compares the page with what this writes. The page shows the latest run alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOC = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"

# The files that the page is made of: the latest of each kind. A new run takes the place of an older one here.
BESIDE_PEERS = "peers_2xh100.jsonl"
TWO_RANKS = "gpu_two_ranks_97f4d04.jsonl"
TARGETS = "gpu_bench_04f59c1.jsonl"
PEERS_APART = ROOT / "benchmarks" / "peers.md"
SMALL = ("gpu_bench_small_d3b38d2.jsonl", "gpu_bench_small_04f59c1.jsonl")

Row = dict[str, Any]


class Call(NamedTuple):
    """A row of the table of two GPUs: in the file of peers `call` with `sms` (and T), in ours `row` with `num_sms`."""

    call: str
    row: str
    sms: int | None
    must: float | None = None
    tokens: int | None = None


_GRAPH = "dispatch and combine in a graph, masked, FP8 made in the call"
_STEP = "training step, forward + backward, expert-major, weighted, grouped GEMM 7168 -> 2 x 2048 -> 7168"
_OF_UNREGISTERED = ((8, 430), (16, 240), (24, 215))
_OF_WEIGHTED = ((16, 400), (24, 320), (32, 300))
# Musts are targets set from the run beside peers; without one: only shown.
CALLS = (
    *(Call("dispatch FP8, rank-major", "FP8", *of) for of in ((8, 185), (16, 104), (24, 100))),
    *(Call("dispatch BF16, rank-major", "BF16", *of) for of in ((8, 310), (16, 186), (24, 184))),
    *(Call("combine BF16, heap tensor", "heap combine", *of) for of in ((8, 250), (16, 192), (24, 190))),
    *(Call("combine BF16, unregistered tensor", "unregistered combine", *of) for of in _OF_UNREGISTERED),
    *(Call("dispatch FP8, expert-major, aligned 128", "by expert, FP8", *of) for of in ((16, 215), (24, 200))),
    *(Call("dispatch BF16, expert-major, aligned 128", "by expert, BF16", *of) for of in ((16, None), (24, 340))),
    *(Call("combine BF16, expert-major, weighted", "weighted combine", *of) for of in _OF_WEIGHTED),
    Call('dispatch with quantize="fp8", rank-major', "quantize", 16, 150),
    Call('combine with wire="fp8", heap tensor', "FP8 on the wire", 16, 190),
    *(Call(_GRAPH, f"graph, T = {of[0]}", None, of[1], of[0]) for of in ((128, 27), (32, 18.5), (8, 16.5))),
    *(Call(f"{_STEP}, E = {of[0]}", f"step, E = {of[0]}", None, of[1]) for of in ((256, 22.9), (128, 18.6))),
)
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
- **The training step**: about 2 ms are not its GEMMs. It was not measured beside a peer again.
- **Exact sizes**: the host waits about 30 us for counts and then takes 42 us of its own, 26 with a capacity.
- **Host time** of a call is 11 to 18 us on one H100 at 97f4d04: a launch (5 to 8), allocations, results.
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


def two_gpus() -> Iterator[str]:
    """Weft and the best peer in one run, and Weft since then."""
    peers, *rows = read_rows(RESULTS / BESIDE_PEERS)
    machine, *ours = read_rows(RESULTS / TWO_RANKS)
    then = {(row["call"], row.get("sms"), row.get("tokens")): row for row in rows}
    now = {(row["row"], row["num_sms"]): row for row in ours if row["variant"] == "now"}
    yield (
        f"\n## {peers['machine']}, beside peers\n\n{peers['date']}, commit {peers['commit']}, "
        f"driver {peers['driver']}, CUDA {peers['cuda']}, torch {peers['torch']}; T = {peers['tokens']}, "
        f"H = {peers['hidden']}, K = {peers['top_k']}, E = {peers['experts']}: Weft *then* and the best peer. "
        f"*Now* is commit {machine['commit'][:7]} on such a machine, without a peer. *Must* is the target. "
        "Times in us, of steps in ms.\n\n"
    )
    cells = []
    for each in CALLS:
        is_step = each.call.startswith(_STEP)
        row = then.get((each.call, 24 if is_step else each.sms, each.tokens), {})
        cells.append(
            (
                each.call + (f", T = {each.tokens}" if each.tokens else ""),
                str(each.sms or "auto"),
                number(row.get("floor")),
                f"{row['best_peer']:g} ({row['peer']})" if row else "",
                number(row.get("weft"), "g"),
                number(now[each.row, each.sms]["time_us"] / (1000 if is_step else 1), ".3g"),
                number(each.must, "g"),
            )
        )
    yield table(("call", "SMs", "limit", "best peer", "then", "now", "must"), cells)
    pairs = [now[f"eager, T = {tokens}", None] for tokens in (128, 32, 8)]
    gaps = [now[f"T = {n}, exact", 16]["time_us"] - now[f"T = {n}, capacity", 16]["time_us"] for n in (256, 1024)]
    gemms = [row["time_us"] / 1000 for row in ours if row["variant"] == "GEMMs alone"]
    yield (
        f"\nWithout a graph dispatch and combine take {' / '.join(number(row['time_us']) for row in pairs)} us at "
        f"T = 128 / 32 / 8, of which the host {' / '.join(number(row['host_us']) for row in pairs)} (must: 30). "
        f"Exact sizes cost {' / '.join(map(number, gaps))} us over a capacity at T = 256 / 1024 (must: 15). "
        f"The grouped GEMMs alone are {' / '.join(number(each, '.1f') for each in gemms)} ms of the steps.\n"
    )


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
    return "".join((_INTRO, *two_gpus(), *against_targets(), *small_batches(), _others(), _WHY, _HOW))


if __name__ == "__main__":
    DOC.write_text(page(), encoding="utf-8")
