"""Writes the tables of docs/benchmarking.md from the files of benchmarks/results: `python benchmarks/tables.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOC = ROOT / "docs" / "benchmarking.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- tables of benchmarks/results: written by benchmarks/tables.py -->\n"
END = "<!-- end of tables -->\n"

_HEAD = (
    "| file | library | operation | median us | p99 us | wire GB/s | x all_to_all | x memory copy |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
)
_KILL_HEAD = "| time from the kill | count | p50 us | p99 us | max us |\n| --- | --- | --- | --- | --- |\n"


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def bench_lines() -> Iterator[str]:
    """One table row per measured operation of every bench file."""
    for file in sorted(RESULTS.glob("bench_*.jsonl")):
        for row in read_rows(file):
            if row["kind"] != "bench":
                continue
            source = f", {row['source']} tensor" if row["op"] == "combine" and row["source"] else ""
            figures = (f"{row['time_us']:.0f}", f"{row['time_p99_us']:.0f}", f"{row['wire_gb_per_s']:.2f}")
            ratios = (f"{row['ratio_vs_all_to_all']:.2f}", f"{row['ratio_vs_memory_copy']:.2f}")
            yield f"| {' | '.join((file.stem, row['library'], row['op'] + source, *figures, *ratios))} |\n"


def machine_lines() -> Iterator[str]:
    """A line per bench file: where and what."""
    for file in sorted(RESULTS.glob("bench_*.jsonl")):
        machine, startup, row = read_rows(file)[:3]
        yield (
            f"- {file.stem}: {row['ranks']} ranks, T = {row['tokens']}, H = {row['hidden']}, K = {row['top_k']}, "
            f"E = {row['experts']}, {row['dtype']}, {row['layout']}, quantize {row['quantize']}; "
            f"{machine['cpus']} CPUs ({machine['cpu']}), torch {machine['torch']}, commit {machine['commit']}, "
            f"load average {machine['load_average']:.1f}, memory copies {machine['memory_copy_gb_per_s']:.1f} GB/s; "
            f"import {startup['import_s']:.2f} s, ranks {startup['start_s']:.2f} s, "
            f"first call {startup['first_call_s']:.2f} s\n"
        )


def kill_lines() -> Iterator[str]:
    """One table row per kind of time of the kill file."""
    for row in read_rows(RESULTS / "verify_kill.jsonl"):
        if row["kind"] == "times":
            figures = (f"{row[key]:.0f}" for key in ("p50_us", "p99_us", "max_us"))
            yield f"| {' | '.join((row['what'], str(row['count']), *figures))} |\n"


def tables() -> str:
    """Everything between the two marks."""
    return "".join((*machine_lines(), "\n", _HEAD, *bench_lines(), "\n", _KILL_HEAD, *kill_lines()))


def updated(text: str) -> str:
    """The page with its tables made anew."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n" + tables() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    DOC.write_text(updated(DOC.read_text(encoding="utf-8")), encoding="utf-8")
