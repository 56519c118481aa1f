"""Writes docs/performance.md from benchmarks/results/gpu_*.jsonl: `python benchmarks/performance.py`.

Every figure of its tables is one of these files', the output of `weft bench --suite`, `weft bench --who-is-late`, `weft
verify --kill` (all with `--json`), and of tools/soak.py, compare_kernels.py, wait_cost.py, where_time_goes.py and
example_runs.py; a test compares the page with what this writes. Missed targets come first.
"""

# check: allow file-size: a function for each section of the page

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOC = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
PEERS = ROOT / "benchmarks" / "peers.md"

Row = dict[str, Any]

LATEST = "6c3371c"  # in the names of the files of the latest run, which come first

_INTRO = """# Performance between GPUs

Written by [benchmarks/performance.py](../benchmarks/performance.py) from the files under
[benchmarks/results/](../benchmarks/results/), the output of real runs; [benchmarking](benchmarking.md) says how
everything is counted and what each figure means. Times are medians of the slowest rank in us, everything inside the
boundary of the public call; results were compared with the reference before they were timed.
A section is one run, at the commit it names; the latest comes first.
gpu_bench_2f9039c has the other routings, numbers of tokens and SMs, and the step; combine of ordinary tensors took a
tenth longer at that commit, by the form of a loop that waits (decision 0022), and FP8 on the wire had other scales.
Host times differ by a factor of three between machines of this kind, and within a run: the tables have 14 to 44 us.
The words that the soak found different at 3cc9406 are those of its expectation, which was mended since (README, what
works). In the first death of each trial at 6c3371c and 1a9b3bf (and some at 3b27649) survivors raised late, most
likely since the harness loaded cuBLAS just then; it does so before now, and at 4a74939, with two ranks, first deaths
were raised within 1.2 ms.
Runs on two H100 (gpu_bench_08b8880, gpu_bench_small_d3b38d2) have today's kernels; their times have no targets, which
are those of four ranks. Their host is slower: a kernel of torch alone takes it 10 us.
Since a4a1b4c the throughput kernels have a few more votes of a warp; what they cost is measured on one GPU alone,
where links play no part ("Kernels of two commits"). Files gpu_bench of four GPUs are older than that, and than
decision 0028, which takes some 0.5 us off a small call in a graph, 1 us off two, 0029, which adds 0.1 to 0.2 us to a
combine, and 0032: combine from rank_major takes less on one GPU, with FP8 on the wire a tenth to an eighth, of two
ranks an eighth of ordinary tensors and a third from their heaps. "Packed exchange alone" moves bytes that lie ready,
without permutes, places and sums. It is faster than the call here by expert at T = 4096, where all tokens go to one
rank, for dispatches of 256 and 512 tokens and of 1024 with FP8 rows, and than throughput kernels of up to 512 tokens;
in gpu_bench_2f9039c also than dispatches with 8 SMs, calls with 4 and 6, and combine of ordinary tensors. A dispatch
of exact sizes waits for the counts on the host: at small T nearly all of its time is the host's, a quarter to a half
less since decision 0034, which files of four GPUs are older than.
Ratios to the link's limit in gpu_bench_6c3371c and 2f9039c rest on a limit that differs by 3.5 % between the two runs
at 16 SMs (333 to 335 and 345 GB/s). Against the larger one "dispatch BF16 to FP8, 16 SMs" (0.925) and "combine BF16,
ordinary tensor" (0.908), which count as met, would be missed with 0.898 and 0.876. Ratios slightly above 1 come of the
same, those of all_to_one most likely of a limit that is all GPUs' at once. With 6, 12 and 24 SMs the blocks that
measured it kept to one peer each, most likely why it was up to 8 % less there than with fewer SMs. Since then they go
from peer to peer, the best round counts, and a limit is never less than that of fewer SMs.
The other routings, and T = 1024 and 2048, were measured with three rank_major calls: calls by expert, combine of
ordinary tensors and FP8 on the wire are unmeasured there in the runs so far (by expert with small batches alone).
The dispatch of all_to_all_single, with what is around it, is bound by its host: 3235 us by expert at T = 1, 3330 us at
T = 4096. "x faster" says little of a dispatch at any T; it is left out below T = 1024, and where the recorded time of
its kernels shows the same, which later runs have. In gpu_bench_small_6c3371c it was timed behind the profiler, which
slows the host besides. Its combine by expert (699 us at T = 1, 4975 us at T = 4096, the packed exchange alone 536 us)
is slow in something else, most likely its weighted sums.

"""


def read_rows(file: Path) -> list[Row]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; empty without rows."""
    if not rows:
        return ""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines) + "\n"


def filled_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of the columns that hold anything."""
    kept = [idx for idx in range(len(columns)) if any(row[idx] for row in rows)]
    return table([columns[idx] for idx in kept], [[row[idx] for idx in kept] for row in rows])


def number(value: float | None, form: str) -> str:
    """A figure, or nothing where there is none."""
    return "" if value is None else format(value, form)


def targets(rows: Sequence[Row]) -> str:
    """Missed ones first, by how much; then the others."""
    found = [row for row in rows if row["kind"] == "target"]
    if not found:
        return ""
    missed = [row for row in found if row["met"] == "no"]
    text = f"### Targets\n\n{len(found) - len(missed)} of {len(found)} targets are met. "
    text += "Missed:\n\n" if missed else "None is missed.\n\n"
    columns = ("what", "measured", "must", "stretch", "off by")
    cells = [(*_target_cells(row), f"{abs(row['value'] / row['must'] - 1):.1%}") for row in missed]
    text += table(columns, cells)
    kept = [(*_target_cells(row), row["met"]) for row in found if row not in missed]
    return text + (("Met:\n\n" + table(("what", "measured", "must", "stretch", "reaches"), kept)) if kept else "")


def _target_cells(row: Row) -> tuple[str, ...]:
    unit = "" if row["unit"] == "ratio" else f" {row['unit']}"
    return (row["target"], f"{row['value']:.3g}{unit}", f"{row['must']:g}{unit}", f"{row['stretch']:g}{unit}")


_CASE_COLUMNS = (
    "call",
    "SMs",
    "median",
    "p99",
    "wire GB/s",
    "logical GB/s",
    "of the link's limit",
    "kernels, their SMs",
)
_PACKED = "packed exchange alone"
_CASE_COLUMNS += ("host", "all_to_all_single", "its kernels", "x faster", _PACKED, "result MB", "heap peak MB")


def _case_cells(row: Row, name: str) -> tuple[str, ...]:
    if "time_us" not in row:
        why = "wrong result" if row["problems"] else "not supported"
        return (name, str(row["num_sms"]), why, *[""] * (len(_CASE_COLUMNS) - 3))
    kernels = "" if row["num_kernels"] is None else f"{row['num_kernels']:.0f}, {row['sms']:.0f}"
    return (
        name,
        str(row["num_sms"]),
        f"{row['time_us']:.0f}",
        f"{row['time_p99_us']:.0f}",
        f"{row['wire_gb_per_s']:.0f}",
        f"{row['logical_gb_per_s']:.0f}",
        number(row["ratio_vs_link"], ".1%"),
        kernels,
        number(row["host_us"], ".1f"),
        number(row["all_to_all_us"], ".0f"),
        number(row.get("all_to_all_kernel_us"), ".0f"),
        number(row["ratio_vs_all_to_all"] if row["tokens"] >= 1024 else None, ".2f"),  # else it is its host's
        number(row["packed_us"], ".0f"),
        *(number(row[key] / 1e6 if key in row else None, ".0f") for key in ("result_bytes", "heap_peak_bytes")),
    )


def case_table(rows: Sequence[Row], suite: str, title: str, name: Callable[[Row], str]) -> str:
    """The cases of a suite under a heading; empty if it was not run."""
    cells = [_case_cells(row, name(row)) for row in rows if row["kind"] == "case" and row["suite"] == suite]
    return f"### {title}\n\n{filled_table(_CASE_COLUMNS, cells)}" if cells else ""


def steps(rows: Sequence[Row]) -> str:
    """Dispatch, experts, combine against the experts alone."""
    cells = [
        (row["name"], *(number(row.get(key), ".0f") for key in ("time_us", "gemm_us")))
        + tuple(number(row.get(key), ".2f") for key in ("ratio_vs_gemm", "ratio_vs_all_to_all"))
        for row in rows
        if row["kind"] == "case" and row["suite"] == "step" and "time_us" in row
    ]
    columns = ("step", "median", "grouped GEMMs alone", "step / GEMMs", "x faster than the same over all_to_all_single")
    return f"### A step: dispatch, experts, combine\n\n{table(columns, cells)}" if cells else ""


def small_batches(rows: Sequence[Row]) -> str:
    """Calls of decoding steps in CUDA graphs, then both kinds of kernels over T beside all_to_all_single."""
    cells = [
        (
            row["name"],
            str(row["tokens"]),
            *(number(row.get(key), ".1f") for key in ("time_us", "time_p99_us", "must_us", "stretch_us", "kernel_us")),
            *(number(row.get(key), ".0f") for key in ("num_kernels", "sms")),
            number(row.get("packed_us"), ".1f"),
        )
        for row in rows
        if row["kind"] == "case" and row["suite"] == "small" and "time_us" in row
    ]
    columns = ("call", "T", "median", "p99", "must", "stretch", "kernel time", "kernels", "SMs", _PACKED)
    heading = "### Small batches, in CUDA graphs\n\n"
    return (heading + table(columns, cells) + _modes(rows) + _crossovers(rows)) if cells else ""


def _modes(rows: Sequence[Row]) -> str:
    found = [row for row in rows if row["kind"] == "case" and row["suite"] == "small_tokens" and "time_us" in row]
    times = {(row["op"], row["tokens"], row["mode"]): row for row in found}
    cells = []
    for op in dict.fromkeys(row["op"] for row in found):
        for tokens in sorted({row["tokens"] for row in found if row["op"] == op}):
            both = [times.get((op, tokens, mode), {}) for mode in ("latency", "throughput")]
            figures = [number(row.get(key), ".1f") for row in both for key in ("time_us", "time_p99_us")]
            baselines = (number(both[0].get(key), ".0f") for key in ("all_to_all_us", "all_to_all_kernel_us"))
            cells.append((op, str(tokens), *figures, *baselines, number(both[0].get("packed_us"), ".1f")))
    columns = ("operation", "T", "small-batch kernels", "p99", "throughput kernels", "p99", "all_to_all_single, eager")
    return filled_table((*columns, "its kernels", _PACKED), cells)


def _crossovers(rows: Sequence[Row]) -> str:
    cells = [
        (row["op"], row["layout"], row["rows"], f"{'more than ' if row['is_bound'] else ''}{row['most_tokens']}")
        for row in rows
        if row["kind"] == "crossover"
    ]
    return table(("operation", "layout", "rows", "small-batch kernels are faster up to T"), cells)


def links(rows: Sequence[Row]) -> str:
    """GB/s by kind and row, a column per number of SMs."""
    found = [row for row in rows if row["kind"] == "link"]
    sms = sorted({row["num_sms"] for row in found})
    cells = []
    for kind, row_bytes in sorted({(row["link_kind"], row["row_bytes"]) for row in found}):
        rates = {row["num_sms"]: row["link_gb_per_s"] for row in found if _is_link(row, kind, row_bytes)}
        cells.append((kind, str(row_bytes), *(number(rates.get(count), ".0f") for count in sms)))
    heading = "### The links, all GPUs at once, GB/s of each GPU and direction, by SMs\n\n"
    return heading + table(("kind", "bytes of a row", *map(str, sms)), cells) if cells else ""


def _is_link(row: Row, kind: str, row_bytes: int) -> bool:
    return (row["link_kind"], row["row_bytes"]) == (kind, row_bytes)


def benches() -> Iterator[str]:
    """A section per file of `weft bench --suite`, the latest first."""
    for file in sorted(RESULTS.glob("gpu_bench*.jsonl"), key=lambda file: (LATEST not in file.stem, file.stem)):
        rows = read_rows(file)
        machine = rows[0]
        yield (
            f"## {file.stem}\n\n{machine['machine']}, driver {machine['driver']} (CUDA {machine['cuda_driver']}), "
            f"torch {machine['torch']}, NCCL {machine['nccl']}, commit {machine['commit']}.\n\n"
        )
        yield targets(rows)
        yield case_table(rows, "targets", "Calls at T = 4096, uniform routing", lambda row: row["name"])
        yield case_table(rows, "routings", "Other routings", lambda row: f"{row['name']}, {row['routing']}")
        yield case_table(rows, "tokens", "By number of tokens", lambda row: f"{row['name']}, T = {row['tokens']}")
        yield case_table(rows, "sms", "By number of SMs, T = 4096", lambda row: row["name"])
        yield small_batches(rows)
        yield steps(rows)
        yield links(rows)


def soaks() -> str:
    """Calls checked under background traffic, run by run."""
    cells = []
    for file in sorted(RESULTS.glob("gpu_soak*.jsonl")):
        for row in read_rows(file):
            if row["kind"] == "soak":
                words = "not noted" if row["words"] is None else f"{row['words']:,}"  # of a run that was cut off
                figures = (f"{row['calls']:,}", words, f"{row['replays']:,}", str(len(row["problems"])))
                cells.append((f"{row['machine']}, {row['ranks']} ranks", str(row["commit"]), *figures, row["traffic"]))
    if not cells:
        return ""
    calls, replays = (sum(int(cell[column].replace(",", "")) for cell in cells) for column in (2, 4))
    columns = ("where", "commit", "calls", "words compared", "graph replays", "wrong", "traffic besides")
    intro = f"{calls:,} calls, and {replays:,} replays of CUDA graphs with changing routing in all."
    return f"## Random calls under background traffic\n\n{intro}\n\n{table(columns, cells)}"


def kills() -> str:
    """Times from the kill, run by run, and what went wrong."""
    cells, problems, num_all = [], [], 0
    for file in sorted(RESULTS.glob("gpu_kill*.jsonl")):
        rows = read_rows(file)
        found = [row for row in rows if row["kind"] == "kill"]
        num_all += len(found)
        problems += [f"{file.stem}: {problem}" for row in found for problem in row.get("problems", [])]
        count = f"{len(found)}, {sum(not row['ok'] for row in found)} failed"
        if any(row["kind"] == "machine" and row["machine"].startswith("1 x ") for row in rows):
            count += ", ranks share a GPU"
        for row in [row for row in rows if row["kind"] == "times"] or _times(found):
            if row["count"]:
                figures = (f"{row[key] / 1e3:.2f}" for key in ("p50_us", "p99_us", "max_us"))
                cells.append((file.stem, count, row["what"], str(row["count"]), *figures))
    if not cells:
        return ""
    columns = ("file", "kills", "time from the kill", "count", "p50 ms", "p99 ms", "max ms")
    text = f"## Ranks killed under load\n\n{num_all} kills in all.\n\n{table(columns, cells)}"
    return text + (f"What failed: {'; '.join(problems)}.\n\n" if problems else "")


def _times(found: Sequence[Row]) -> Iterator[Row]:
    """As `weft verify --kill` adds them up at its end: a run that was interrupted has none."""
    times = {"detection": "detection_us", "rebuild": "rebuild_us"}
    values = {what: sorted(us for row in found for us in row.get(key, [])) for what, key in times.items()}
    for row in found:
        for seen in row.get("channels", []):
            for channel, us in seen.items():
                values.setdefault(f"channel: {channel}", []).append(us)
    for what, all_us in values.items():
        ordered = sorted(all_us)
        shares = {"p50_us": 0.5, "p99_us": 0.99, "max_us": 1.0}
        at = {key: min(len(ordered) - 1, int(share * len(ordered))) for key, share in shares.items()}
        yield {
            "what": what,
            "count": len(ordered),
            **({key: ordered[idx] for key, idx in at.items()} if ordered else {}),
        }


def kills_by_operation() -> str:
    """How many, by what the victim was doing, where a run has noted it."""
    counts: Counter[tuple[str, str]] = Counter()
    for file in sorted(RESULTS.glob("gpu_kill*.jsonl")):
        counts.update(
            (row["mode"], row["operation"]) for row in read_rows(file) if "operation" in row and "victim" in row
        )
    cells = [(mode, operation, str(count)) for (mode, operation), count in sorted(counts.items())]
    return table(("kernels", "the victim was in", "kills"), cells)


def recorded_tests() -> str:
    """What tools/record_tests.py counted."""
    text = ""
    for file in sorted(RESULTS.glob("gpu_tests*.jsonl")):
        machine, *rows = read_rows(file)
        cells = [
            (row["file"], *(str(row[key]) for key in ("passed", "failed", "skipped")), ", ".join(row["failures"]))
            for row in rows
        ]
        late = f", a rank late by {rows[0]['late_s']} s" if rows and rows[0]["late_s"] else ""
        late += ", interrupted" if rows and rows[0]["status"] == 2 else ""  # pytest's status
        text += f"{file.stem}: {machine['machine']}, commit {machine['commit']}{late}.\n\n"
        text += filled_table(("file", "passed", "failed", "skipped", "which failed"), cells)
    return f"## Tests between GPUs\n\n{text}" if text else ""


def sanitizers() -> str:
    """What compute-sanitizer counted in small random calls (tools/sanitize.sh)."""
    cells = [
        (file.stem, row["tool"], str(row["ranks"]), str(row["calls"]), str(row["errors"]))
        for file in sorted(RESULTS.glob("gpu_sanitize*.jsonl"))
        for row in read_rows(file)
    ]
    return f"## Sanitizers\n\n{table(('file', 'tool', 'ranks', 'calls', 'errors'), cells)}" if cells else ""


def late_ranks() -> str:
    """The matrices of `weft bench --who-is-late`."""
    text = ""
    for file in sorted(RESULTS.glob("gpu_late*.jsonl")):
        rows = read_rows(file)
        waits = [row for row in rows if row["kind"] == "waits"]
        for row in (row for row in rows if row["kind"] == "who_is_late"):
            columns = (file.stem, *(f"for rank {number}" for number in range(len(waits))))
            cells = [(f"rank {row['rank']} waited", *(f"{us:.1f}" for us in row["wait_us"])) for row in waits]
            delay = f"Rank {row['late_rank']} was delayed by {row['late_us']:g} us"
            text += f"{delay} before each dispatch and combine; us of both.\n\n{table(columns, cells)}"
    return f"## Who is late\n\n{text}" if text else ""


def wait_costs() -> str:
    """What tools/wait_cost.py measured: kernels without a part against the kernels as they are."""

    def verdict(row: Row) -> str:
        if row["kernels"] == "as they are" or row.get("isolation") == "thread":  # goals are for a GPU each
            return ""
        goal = 0.2 if "statistics" in row["kernels"] else max(0.2, 0.01 * (row["time_us"] + row["saved_us"]))
        return f"{goal:.2f}, {'met' if row['saved_us'] <= goal else 'missed'}"

    def ranks(row: Row) -> str:
        return f"{row.get('ranks', 4)}{', one GPU' if row.get('isolation') == 'thread' else ''}"

    cells = [
        (
            *(file.stem, ranks(row), row["op"], str(row["tokens"]), row["kernels"]),
            *(f"{row['time_us']:.2f}", f"{row['saved_us']:.2f}", verdict(row)),
        )
        for file in sorted(RESULTS.glob("gpu_wait_cost*.jsonl"))
        for row in read_rows(file)
        if row["kind"] == "cost"
    ]
    columns = ("file", "ranks", "call", "T", "kernels", "median", "less than as they are", "goal")
    return f"## What bounded waits and wait statistics cost\n\n{table(columns, cells)}" if cells else ""


def kernels_compared() -> str:
    """What tools/compare_kernels.py measured: kernels of several commits in turn."""
    text = ""
    for file in sorted(RESULTS.glob("gpu_kernels*.jsonl")):
        rows = read_rows(file)
        cells = [
            (
                *(row["op"], str(row["tokens"]), row["layout"], row["quantize"] or "BF16", row["headers"]),
                *(f"{row['time_us']:.1f}", f"{row['more_us']:+.2f}"),
            )
            for row in rows
            if row["kind"] == "kernels"
        ]
        where = f"{rows[0]['machine']}, {rows[1]['ranks']} ranks, each a {rows[1]['isolation']}"
        columns = ("call", "T", "layout", "rows", "kernels", "us", "more than the first")
        text += f"{file.stem}: {where}.\n\n{table(columns, cells)}"
    return f"## Kernels of two commits\n\n{text}" if text else ""


def where_time_goes() -> str:
    """What tools/where_time_goes.py measured: places of small kernels, parts of host times."""
    text = ""
    for file in sorted(RESULTS.glob("gpu_where_time_goes*.jsonl")):
        rows = read_rows(file)
        text += (
            f"{file.stem}: {rows[0]['machine']}, commit {rows[0]['commit']}. Kernels for small batches, us of each "
            "block from its own flight begun, when it has read its control words: mean of blocks, and the block with "
            "the largest. Noting takes some of it.\n\n"
        )
        places = [row for row in rows if row["kind"] == "places"]
        for op in dict.fromkeys(row["op"] for row in places):
            found = [row for row in places if row["op"] == op]
            columns = (op, *(f"T = {row['tokens']}, {row['blocks']} SMs" for row in found))
            places_of = [{each["place"]: each for each in row["places"]} for row in found]
            names = dict.fromkeys(name for of_row in places_of for name in of_row if not name.startswith("flight"))
            cells = [(name, *(_place(of_row.get(name)) for of_row in places_of)) for name in names]
            cells.append(("from a call to the next, in a graph", *(f"{row['time_us']:.1f}" for row in found)))
            text += table(columns, cells)
        cells = [
            (f"{row['op']}, {row['mode']}", f"{row['host_us']:.1f}", f"{row['native_us']:.1f}")
            for row in rows
            if row["kind"] == "host"
        ]
        text += table(("eager call on the host, us", "whole", "in the native module"), cells)
    return f"## Where the time goes\n\n{text}" if text else ""


def _place(found: Row | None) -> str:
    if found is None:
        return ""
    if found["place"] == "the kernel in front has ended":  # until then
        return f"-{found['mean_us']:.1f}"
    return f"{found['mean_us']:.1f}, {found['last_us']:.1f} (block {found['last_block']})"


def examples() -> str:
    """What the examples printed, and how far the demo's losses are from those without Weft."""
    text = ""
    for file in sorted(RESULTS.glob("gpu_examples*.jsonl")):
        rows = read_rows(file)
        text += f"{file.stem}: {rows[0]['machine']}, commit {rows[0]['commit']}, `--device cuda`.\n\n"
        for row in (row for row in rows if row["kind"] == "example"):
            heading = f"`{row['name']} --ranks {row['ranks']}`, status {row['status']}"
            if "demo" not in row:
                text += f"{heading}:\n```text\n" + "".join(f"{line}\n" for line in row["lines"]) + "```\n\n"
                continue
            demo = row["demo"]
            text += (
                f"{heading}: {demo['placement']}, {len(demo['losses'])} steps; loss {demo['losses'][0]:.4f} -> "
                f"{demo['losses'][-1]:.4f}, on one rank without Weft {demo['baseline_losses'][0]:.4f} -> "
                f"{demo['baseline_losses'][-1]:.4f}; largest difference {demo['early_difference']:.4%} in the first "
                f"steps, {demo['overall_difference']:.2%} between means of steps.\n\n"
            )
    return f"## Examples\n\n{text}" if text else ""


def compile_times() -> str:
    """CPU seconds a kernel, by architecture."""
    cells = []
    for file in sorted(RESULTS.glob("gpu_compile*.jsonl")):
        rows = read_rows(file)
        built = [row for row in rows if row["kind"] == "built"]
        how = next((row for row in rows if row["kind"] == "prebuilt"), {})
        where = f"{file.stem} ({how.get('cpu')}, NVRTC {how.get('nvrtc')}, commit {how.get('commit')})"
        for arch in sorted({row["arch"] for row in built}):
            seconds = sorted(row["cpu_seconds"] for row in built if row["arch"] == arch)
            slowest = max((row for row in built if row["arch"] == arch), key=lambda row: row["cpu_seconds"])
            median = seconds[len(seconds) // 2]
            figures = (
                str(len(seconds)),
                f"{median:.2f}",
                f"{seconds[-1]:.2f} ({slowest['name']})",
                f"{sum(seconds):.1f}",
            )
            cells.append((where, arch, *figures))
    columns = ("file", "architecture", "kernels", "median, CPU s", "slowest, CPU s", "all, CPU s")
    return f"## Compile times\n\n{table(columns, cells)}" if cells else ""


def page() -> str:
    """The whole page."""
    runs = "".join(benches()) or "No run is in the result files yet: nothing here says how fast Weft is.\n\n"
    peers = "## Other libraries\n\n" + PEERS.read_text(encoding="utf-8")
    text = "".join(
        (
            _INTRO,
            runs,
            soaks(),
            kills(),
            kills_by_operation(),
            recorded_tests(),
            sanitizers(),
            late_ranks(),
            wait_costs(),
            kernels_compared(),
            where_time_goes(),
            examples(),
            compile_times(),
            peers,
        )
    )
    return text.rstrip("\n") + "\n"


if __name__ == "__main__":
    DOC.write_text(page(), encoding="utf-8")
