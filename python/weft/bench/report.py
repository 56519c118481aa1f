"""Measures one shape and makes rows of it (docs/benchmarking.md)."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft import env
from weft.bench.cases import Case
from weft.bench.facts import cpu_name, machine_facts
from weft.bench.options import Options, one_shape
from weft.bench.planned import planned
from weft.bench.ranks import Row, isolation_of, run_cases, slowest, times
from weft.bench.rows import between_nodes, exposed, name_of, row_bytes, target, traffic
from weft.machine import port_counters, where

_IMPORT_CODE = """import sys, time
sys.path.insert(0, sys.argv[1])
start = time.perf_counter()
import torch, weft
print(time.perf_counter() - start)"""

_HALVES = ("send_us", "receive_us")
_NO_RATIOS = dict.fromkeys(("memory_copy_bound_us", "ratio_vs_memory_copy", "ratio_vs_all_to_all"))


@dataclass(frozen=True)
class Report:
    """A benchmark's rows: machine, start-up times, one row per library and operation, then targets and NICs' ports."""

    machine: Row
    startup: Row
    rows: tuple[Row, ...]
    targets: tuple[Row, ...] = ()
    ports: tuple[Row, ...] = ()

    def all_rows(self) -> tuple[Row, ...]:
        """Every row, as JSON lines hold them."""
        return (self.machine, self.startup, *self.rows, *self.targets, *self.ports)


def run(options: Options) -> Report:
    """Run one benchmark in ranks started for it. Results are checked before they are timed.

    Raises InvalidArgument, Unsupported, or weft.verify.check.Mismatch naming the library whose result is wrong.
    """
    options = options.complete()
    planned(options, one_shape(options)[0])  # refuses an unknown machine before ranks start
    where.say("start-up time")
    load_average = os.getloadavg()[0]
    import_s = _import_seconds()
    chosen = one_shape(options)
    if options.trace is not None:
        from weft.verify.cases import loaded_trace

        most = max(len(recorded[0].topk_idx) for recorded in loaded_trace(options.trace).dispatches.values())
        chosen = tuple(dataclasses.replace(case, tokens=most) for case in chosen)
    where.say(f"starting {options.ranks} ranks")
    spawned_at_ns = time.monotonic_ns()
    ports = port_counters.read()
    notes, error = run_cases(chosen, options)
    grown = tuple(port_counters.growth(ports, port_counters.read()))
    if error is not None:
        raise error
    by_kind: dict[str, list[list[Row]]] = {}
    for note in notes:
        by_kind.setdefault(note[0]["kind"], []).append(note)
    (ranks,), (copies,) = by_kind["rank"], by_kind["copies"]
    copy_rate = _copy_rate(copies)
    start_s = (max(rank["started_at_ns"] for rank in ranks) - spawned_at_ns) / 1e9
    first_call_s = max(rank["first_call_s"] for rank in ranks)
    startup = {
        "kind": "startup",
        "import_s": import_s,
        "start_s": start_s,
        "first_call_s": first_call_s,
        "total_s": import_s + start_s + first_call_s,
    }
    baselines = {note[0]["key"]: note for note in by_kind.get("baseline", [])}
    rows: list[Row] = []
    for note in by_kind["case"]:
        rows += _rows_of(options, chosen[note[0]["number"]], note, baselines, copy_rate, ranks[0]["device"])
    machine = _machine(ranks, copies, copy_rate, load_average)
    machine |= {"isolation": isolation_of(options), "network": _network(options, machine["device_name"])}
    targets = target_rows(rows) if machine["device_name"] is not None else ()
    return Report(machine, startup, tuple(rows), targets, grown)


def target_rows(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Of what has a target and was timed."""
    return tuple(
        target(f"{name_of(row)}, T = {row['tokens']}", "us", row["time_us"], row["must_us"], row["stretch_us"])
        for row in rows
        if "time_us" in row and row["must_us"] is not None
    )


def _rows_of(
    options: Options, case: Case, note: list[Row], baselines: dict[str, list[Row]], copy_rate: float, device: str
) -> list[Row]:
    """Of Weft, then of the baseline, which does not know where the expert outputs lie and has no halves."""
    from weft.bench.baselines import baseline_key

    common = {"kind": "bench", "op": case.op, **_shape(options), **_form(case)}
    mine = {**common, "library": "weft", "source": case.source}
    if note[0].get("unsupported") is not None:
        return [{**mine, **_goal(case), "unsupported": note[0]["unsupported"]}]
    copies, other = copy_rate if device.startswith("cpu") else None, baselines.get(baseline_key(case))

    def measured(of_library: list[Row]) -> Row:
        found = _with_mean(of_library)
        # Bytes of halves travel beside the time that counts, which may be 0: they have no rate.
        rated_us = math.inf if case.is_halved else found["time_us"]
        rates = traffic(case, note[0], rated_us) | between_nodes(case, note[0], rated_us)
        return found | rates | _bound(case, note, rated_us, copies)

    mine |= measured(exposed(note)) | _halves(note) | _goal(case) | planned(options, case)
    if case.is_halved:
        return [mine | dict.fromkeys((name for name in mine if name.endswith("_gb_per_s")), None) | _NO_RATIOS]
    theirs = None if other is None else measured(other)
    ratio = None if theirs is None else theirs["time_us"] / mine["time_us"]
    rows = [{**mine, "ratio_vs_all_to_all": ratio}]
    if theirs is not None and case.source != "ordinary":
        library = {"library": "all_to_all_single", "source": None, "planned_on": None, "planned_us": None}
        rows.append({**common, **library, **theirs, **between_nodes(case, {}, 0.0), "ratio_vs_all_to_all": 1.0})
    return rows


def _form(case: Case) -> Row:
    """How it was called, and what only some calls have."""
    names = ("unsupported", "send_us", "receive_us", "work_us", "must_us", "stretch_us")
    return {"is_graphed": case.is_graphed, "is_halved": case.is_halved, **dict.fromkeys(names)}


def _halves(note: list[Row]) -> Row:
    """Medians of each half of the slowest rank, where there were events between them; the work that hid the wire."""
    halves = {name: statistics.median(slowest([rank[name] for rank in note])) for name in _HALVES if name in note[0]}
    return {**halves, **({"work_us": note[0]["work_us"]} if "work_us" in note[0] else {})}


def _goal(case: Case) -> Row:
    return {} if case.goal is None else {"must_us": case.goal.must_us, "stretch_us": case.goal.stretch_us}


def _with_mean(note: list[Row]) -> Row:
    """`times`, with the slowest rank's whole loop / calls."""
    return {**times(note), "time_mean_us": max(sum(rank["gpu_us"]) / len(rank["gpu_us"]) for rank in note)}


def _shape(options: Options) -> Row:
    names = ("ranks", "tokens", "hidden", "experts", "top_k", "dtype", "layout", "alignment", "quantize", "capacity")
    more = ("routing", "seed", "iters", "warmup", "num_sms", "mode", "nodes")
    return {name: getattr(options, name) for name in (*names, *more)}


def _bound(case: Case, ranks: Sequence[Row], time_us: float, copy_rate: float | None) -> Row:
    """The memory-copy bound, of all ranks; None without a rate of copies."""
    dispatch_bytes, combine_bytes = row_bytes(case)
    bound_bytes = 0.0
    for rank in ranks:
        bound_bytes += rank["received_rows"] * dispatch_bytes
        bound_bytes += (rank["received_rows"] + rank["num_tokens"]) / 2 * combine_bytes
    bound_us = None if copy_rate is None else bound_bytes / copy_rate * 1e6
    return {
        "result_bytes": max(rank["result_bytes"] for rank in ranks),
        "memory_copy_bound_us": bound_us,
        "ratio_vs_memory_copy": None if bound_us is None else bound_us / time_us,
    }


def _copy_rate(copies: Sequence[Row]) -> float:
    """Bytes a second that all ranks together copied while they copied at once."""
    from_ns, to_ns = min(rank["from_ns"] for rank in copies), max(rank["to_ns"] for rank in copies)
    return float(sum(rank["copied_bytes"] for rank in copies) / ((to_ns - from_ns) / 1e9))


def _machine(ranks: Sequence[Row], copies: Sequence[Row], copy_rate: float, load_average: float) -> Row:
    rank = ranks[0]
    return {
        "kind": "machine",
        **machine_facts(rank["device"]),
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": load_average,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": rank["device"],
        "engine": rank["engine"],
        "placement": rank["placement"],
        "rank_cpus": [each["cpus"] for each in ranks],
        "rank_nics": [each["nics"] for each in ranks],
        "memory_copy_gb_per_s": copy_rate / 1e9,
        "window_bytes": _largest(copies, "control_bytes", "heap_bytes"),
        "heap_peak_bytes": _largest(copies, "heap_peak"),
    }


def _network(options: Options, device_name: str | None) -> str | None:
    """Which network carried rows between nodes; None without nodes."""
    if options.nodes == 1:
        return None
    return "copies" if device_name is None else env.network()


def _largest(ranks: Sequence[Row], *names: str) -> int | None:
    """The sum of these figures of all windows of a rank, of the rank that has most; None if they are not told."""
    sums = [sum(int(window.get(name, 0)) for window in rank["windows"] for name in names) for rank in ranks]
    return max(sums) or None


def _import_seconds() -> float:
    """Seconds to import torch and weft in a fresh interpreter."""
    command = [sys.executable, "-c", _IMPORT_CODE, str(Path(__file__).parents[2])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return float(done.stdout)
