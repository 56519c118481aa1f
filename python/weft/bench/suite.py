"""Runs the suite in ranks started for it and makes rows of what they measured (docs/benchmarking.md)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from weft.bench.ahead import compile_ahead, of_cases
from weft.bench.apart import COMPILE_S, apart
from weft.bench.cases import TOKENS, Case, cases
from weft.bench.facts import machine_facts
from weft.bench.link import LinkPoint, measure, rising
from weft.bench.options import SuiteOptions
from weft.bench.ranks import Row, run_cases, slowest, times
from weft.bench.rows import row_bytes, target, traffic
from weft.kernels import tables as tuning_files

_SWEEP = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32)  # SMs of the link's curve
_MUST_RATIO, _STRETCH_RATIO = 0.90, 0.96  # of the link's limit, 16 SMs
_MUST_CALL, _STRETCH_CALL = 1.03, 1.01  # call time / kernel time
_MUST_HOST_US, _STRETCH_HOST_US = 15.0, 8.0
_MUST_GB, _STRETCH_GB = 0.35, 0.1  # registered memory beside the heap
_MUST_QUARTER, _STRETCH_QUARTER = 0.9, 1.0  # rate at a quarter of the tokens / that of the targets


def run_suite(options: SuiteOptions) -> Iterator[Row]:
    """Yield the machine's row, then the links', the cases', the memory's and the targets' rows.

    A device that is not there is refused before any row. If a rank fails, the rows of the cases that were complete
    come first, then its error is raised. A wrong result is a row with `problems` and no times.
    """
    from weft.group.joining import device_of

    apart(device_of, options.device)
    shape = {"tokens": options.tokens, "ranks": options.ranks, "hidden": options.hidden}
    chosen = cases(options.suites, trace=options.trace, **shape)
    machine = {**apart(machine_facts, options.device), "ranks": options.ranks, "seed": options.seed}
    machine["placement"] = options.placement
    yield {"kind": "machine", **machine}
    stamp = {name: machine[name] for name in ("commit", "machine", "driver", "torch")}
    on_gpu = machine["device_name"] is not None
    rates = _link_rates(chosen, options) if on_gpu else {}
    limits = rising(rates)
    yield from _link_rows(rates, limits, stamp)
    if machine["arch"] is not None:
        table = tuning_files.find(machine["device_name"], options.ranks).table
        apart(compile_ahead, [*of_cases(chosen, options, table)], machine["arch"], timeout_s=COMPILE_S)

    notes, error = run_cases(chosen, options)
    _add_work(notes)
    baselines = _baselines(notes)
    rows = [
        {**_case_row(chosen[note[0]["number"]], note, options, limits, baselines), **stamp}
        for note in notes
        if note[0]["kind"] == "case"
    ]
    yield from rows
    memory = [{**_memory_row(note), **stamp} for note in notes if note[0]["kind"] == "memory"]
    yield from memory
    yield from ({**row, **stamp} for row in _crossover_rows(rows))
    yield from ({**row, **stamp} for row in _target_rows(rows, memory) if on_gpu)
    if error is not None:
        raise error


def has_problems(rows: Sequence[Row]) -> bool:
    """Whether a result was wrong."""
    return any(row.get("problems") for row in rows)


# ---- what the ranks wrote


def _add_work(notes: list[list[Row]]) -> None:
    """To the cases what the profiler has recorded of them later, None without."""
    works = {note[0]["number"]: [rank["work"] for rank in note] for note in notes if note[0]["kind"] == "work"}
    for note in notes:
        if note[0]["kind"] == "case":
            for rank, work in zip(note, works.get(note[0]["number"], [None] * len(note)), strict=True):
                rank["work"] = work


def _baselines(notes: list[list[Row]]) -> dict[str, Row]:
    """Medians by key, of the slowest rank in each call; with `kernel_us` where the profiler gave it."""
    found: dict[str, Row] = {}
    for note in notes:
        if note[0]["kind"] == "baseline":
            found[note[0]["key"]] = {
                name: statistics.median(slowest([rank[name] for rank in note]))
                for name in ("gpu_us", "packed_us", "gemm_us")
                if name in note[0]
            }
        if note[0]["kind"] == "baseline_work" and all(rank["kernel_us"] is not None for rank in note):
            found[note[0]["key"]]["kernel_us"] = max(rank["kernel_us"] for rank in note)
    return found


def ratio_vs_all_to_all(row: Row) -> float | None:
    """None without a baseline, and where most of its time is not its kernels' but its host's, which would flatter
    every call.
    """
    baseline_us, kernel_us = row["all_to_all_us"], row["all_to_all_kernel_us"]
    if not baseline_us or (kernel_us is not None and kernel_us < 0.9 * baseline_us):
        return None
    return float(baseline_us / row["time_us"])


def _case_row(case: Case, note: list[Row], options: SuiteOptions, limits: Any, baselines: dict[str, Row]) -> Row:
    from weft.bench.baselines import baseline_key

    row: Row = {
        "kind": "case",
        "suite": case.suite,
        "name": case.name,
        "op": case.op,
        "rows": case.rows,
        "layout": case.layout,
        "alignment": case.alignment,
        "quantize": case.quantize,
        "scale_layout": case.scale_layout,
        "sizes": case.sizes,
        "is_cached": case.is_cached,
        "source": case.source,
        "wire": case.wire,
        "num_sms": case.num_sms or None,
        "mode": case.mode,
        "is_graphed": case.is_graphed,
        "tokens": case.tokens,
        "routing": case.routing,
        "routing_options": {name: str(value) for name, value in case.routing_options.items()},
        "hidden": case.hidden,
        "experts": case.experts,
        "top_k": case.top_k,
        "ranks": options.ranks,
        "problems": note[0].get("problems", []),
        "unsupported": note[0].get("unsupported"),
    }
    if "gpu_us" not in note[0]:
        return row
    row["iters"] = len(note[0]["gpu_us"])
    row |= times(note)
    row |= {key: max(rank[key] for rank in note) for key in ("result_bytes", "heap_peak_bytes") if key in note[0]}
    row |= _work(note)
    row |= traffic(case, note[0], row["time_us"]) | _link(case, note[0], limits, row["time_us"])
    baseline = baselines.get(baseline_key(case), {})
    row["all_to_all_us"], row["packed_us"] = baseline.get("gpu_us"), baseline.get("packed_us")
    row["all_to_all_kernel_us"] = baseline.get("kernel_us")
    row["ratio_vs_all_to_all"] = ratio_vs_all_to_all(row)
    if case.op == "step":
        row["gemm_us"] = baseline.get("gemm_us")
        row["ratio_vs_gemm"] = row["time_us"] / row["gemm_us"] if row["gemm_us"] else None
    row["must_us"], row["stretch_us"] = (case.goal.must_us, case.goal.stretch_us) if case.goal else (None, None)
    return row


def _work(note: list[Row]) -> Row:
    works = [rank["work"] for rank in note]
    if any(work is None for work in works):
        return {"kernel_us": None, "call_over_kernel": None, "sms": None, "num_kernels": None}
    return {
        "kernel_us": max(work["kernel_us"] for work in works),
        "call_over_kernel": max(work["span_us"] / work["kernel_us"] for work in works),
        "sms": max(work["num_blocks"] for work in works),
        "num_kernels": max(work["num_kernels"] for work in works),
    }


def _link(case: Case, note: Row, limits: Any, time_us: float) -> Row:
    """Bytes of the busiest direction of any rank's link, and its limit."""
    num_bytes = sum(row_bytes(case))
    busiest = max(*note["out_rows"], *note["in_rows"]) * num_bytes
    limit = limits.get(_point(case)) if _has_limit(case) else None
    return {
        "row_bytes": num_bytes,
        "link_bytes": busiest,
        "link_kind": case.link_kind,
        "link_gb_per_s": None if limit is None else limit / 1e9,
        "link_us": None if limit is None else busiest / limit * 1e6,
        "ratio_vs_link": None if limit is None else busiest / limit * 1e6 / time_us,
    }


def _memory_row(note: list[Row]) -> Row:
    largest = max(note, key=lambda rank: rank.get("registered_bytes", 0))
    return {**largest, "start_s": max(rank["start_s"] for rank in note)}


# ---- links, machine, targets


def _point(case: Case) -> LinkPoint:
    """The limit that a case is set against; rows with scales count as rows, since scales travel beside them."""
    is_wide = sum(row_bytes(case)) == 2 * case.hidden
    return LinkPoint(case.link_kind, case.hidden * (2 if is_wide else 1), case.num_sms)


def _has_limit(case: Case) -> bool:
    return case.op != "step" and not case.is_graphed


def _link_rates(chosen: Sequence[Case], options: SuiteOptions) -> dict[LinkPoint, float]:
    points = {_point(case) for case in chosen if _has_limit(case)}
    for kind, num_bytes in (("push", 2 * options.hidden), ("push", options.hidden), ("pull", 2 * options.hidden)):
        points |= {LinkPoint(kind, num_bytes, num_sms) for num_sms in _SWEEP}
    return measure(points, options.ranks)


def _link_rows(rates: dict[LinkPoint, float], limits: dict[LinkPoint, float], stamp: Row) -> Iterator[Row]:
    for point, rate in sorted(rates.items()):
        yield {
            "kind": "link",
            "link_kind": point.kind,
            "row_bytes": point.row_bytes,
            "num_sms": point.num_sms,
            "link_gb_per_s": limits[point] / 1e9,
            "measured_gb_per_s": rate / 1e9,
            **stamp,
        }


def _target_rows(rows: Sequence[Row], memory: Sequence[Row]) -> Iterator[Row]:
    """Each target beside what was measured: `met` is "stretch", "must" or "no"."""
    timed = [row for row in rows if row["suite"] == "targets" and "time_us" in row]
    for row in timed:
        if row["must_us"] is not None:
            what = f"{row['name']}, {row['num_sms']} SMs"
            yield target(what, "us", row["time_us"], row["must_us"], row["stretch_us"])
    for row in rows:
        if row["suite"] == "small" and "time_us" in row and row["must_us"] is not None:
            what = f"{row['name']}, T = {row['tokens']}, in a graph"
            yield target(what, "us", row["time_us"], row["must_us"], row["stretch_us"])
    for row in timed:
        if row["ratio_vs_link"] is not None and row["num_sms"] == 16 and row["must_us"] is not None:
            what = f"rate / link limit: {row['name']}, {row['num_sms']} SMs"
            yield target(what, "ratio", row["ratio_vs_link"], _MUST_RATIO, _STRETCH_RATIO, more_is_better=True)
    for row in timed:
        if row["call_over_kernel"] is not None and row["must_us"] is not None:
            what = f"call time / kernel time: {row['name']}, {row['num_sms']} SMs"
            yield target(what, "ratio", row["call_over_kernel"], _MUST_CALL, _STRETCH_CALL)
    for row in timed:
        if row["op"] == "combine" or row["sizes"] == "capacity":
            what = f"host time: {row['name']}, {row['num_sms']} SMs"
            yield target(what, "us", row["host_us"], _MUST_HOST_US, _STRETCH_HOST_US)
    yield from _quarter_rows(rows)
    for row in memory:
        if "registered_bytes" in row:
            what = f"registered memory beside the heap, T = {row['tokens']}"
            yield target(what, "GB", row["registered_bytes"] / 1e9, _MUST_GB, _STRETCH_GB)


def _quarter_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """The rate at T = 1024 against that at 4096. Fixed costs are taken off: what a call without bytes would take, by
    the line through its times at 2048 and 4096.
    """
    calls: dict[tuple[str, int], dict[int, Row]] = {}
    for row in rows:
        if row["suite"] in ("targets", "tokens") and "time_us" in row:
            calls.setdefault((row["name"], row["num_sms"]), {})[row["tokens"]] = row
    for (name, num_sms), of_tokens in calls.items():
        if not {TOKENS // 4, TOKENS // 2, TOKENS} <= of_tokens.keys():
            continue
        quarter, half, whole = (of_tokens[tokens] for tokens in (TOKENS // 4, TOKENS // 2, TOKENS))
        us_a_byte = (whole["time_us"] - half["time_us"]) / (whole["link_bytes"] - half["link_bytes"])
        fixed_us = whole["time_us"] - us_a_byte * whole["link_bytes"]
        what = f"rate at T = 1024 / at 4096, fixed {fixed_us:.0f} us taken off: {name}, {num_sms} SMs"
        value = us_a_byte * quarter["link_bytes"] / max(quarter["time_us"] - fixed_us, 1e-3)
        yield target(what, "ratio", value, _MUST_QUARTER, _STRETCH_QUARTER, more_is_better=True)


def _crossover_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """Up to which of the T that were timed the kernels for small batches are as fast as the others, or faster."""
    times: dict[tuple[str, str, str], dict[int, dict[str, float]]] = {}
    for row in rows:
        if row["suite"] == "small_tokens" and "time_us" in row:
            of_tokens = times.setdefault((row["op"], row["layout"], row["rows"]), {})
            of_tokens.setdefault(row["tokens"], {})[row["mode"]] = row["time_us"]
    for (op, layout, kind), of_tokens in times.items():
        compared = {tokens: us for tokens, us in of_tokens.items() if len(us) == 2}
        slower = [tokens for tokens, us in compared.items() if us["latency"] > us["throughput"]]
        most = max((tokens for tokens in compared if not slower or tokens < min(slower)), default=0)
        found: Row = {"op": op, "layout": layout, "rows": kind, "most_tokens": most, "is_bound": not slower}
        yield {"kind": "crossover", **found}
