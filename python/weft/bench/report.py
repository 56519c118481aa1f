"""Starts the ranks of a benchmark and makes rows of what they measured."""

from __future__ import annotations

import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.bench.options import Options
from weft.machine import where
from weft.machine.topology.parse import format_cpus

if TYPE_CHECKING:
    from weft.bench.worker import RankReport

Row = dict[str, Any]

# (row's op, where the expert outputs lie, key of RankReport.timed for Weft, the same for the baseline)
_OPERATIONS = (
    ("dispatch", None, "dispatch", "dispatch"),
    ("combine", "heap", "combine", "combine"),
    ("combine", "ordinary", "combine_ordinary", "combine"),
    ("both", "heap", "both", "both"),
)
_IMPORT_CODE = """import sys, time
sys.path.insert(0, sys.argv[1])
start = time.perf_counter()
import torch, weft
print(time.perf_counter() - start)"""


@dataclass(frozen=True)
class Report:
    """A benchmark's rows: the machine, the start-up times, then one row per library and operation."""

    machine: Row
    startup: Row
    rows: tuple[Row, ...]

    def all_rows(self) -> tuple[Row, ...]:
        """Every row, as JSON lines hold them."""
        return (self.machine, self.startup, *self.rows)


def run(options: Options) -> Report:
    """Run one benchmark in ranks started for it. Results are checked before they are timed.

    Raises InvalidArgument, Unsupported, or weft.verify.check.Mismatch naming the library whose result is wrong.
    """
    options = options.complete()
    where.say("start-up time")
    load_average = os.getloadavg()[0]
    import_s = _import_seconds()
    from torch._C._distributed_c10d import TCPStore

    import weft
    from weft.bench.worker import run_rank

    barrier = multiprocessing.get_context("fork").Barrier(options.ranks)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if options.baseline else None
    where.say(f"starting {options.ranks} ranks")
    spawned_at_ns = time.monotonic_ns()
    ranks: list[RankReport] = weft.spawn(
        run_rank,
        num_ranks=options.ranks,
        args=(options, barrier, 0 if store is None else store.port),
        device=options.device,
        placement=options.placement,
    )
    copy_rate = _copy_rate(ranks)
    start_s = (max(rank.started_at_ns for rank in ranks) - spawned_at_ns) / 1e9
    first_call_s = max(rank.first_call_s for rank in ranks)
    startup = {
        "kind": "startup",
        "import_s": import_s,
        "start_s": start_s,
        "first_call_s": first_call_s,
        "total_s": import_s + start_s + first_call_s,
    }
    rows = []
    for op, source, weft_key, baseline_key in _OPERATIONS:
        shape = _shape(options)
        baseline = _times([rank.timed["all_to_all", baseline_key] for rank in ranks]) if options.baseline else None
        times = _times([rank.timed["weft", weft_key] for rank in ranks])
        common = {"kind": "bench", "op": op, **shape}
        ratio = None if baseline is None else baseline["time_us"] / times["time_us"]
        row = {**common, "library": "weft", "source": source, **times}
        rows.append({**row, **_rates(options, op, ranks, times, copy_rate), "ratio_vs_all_to_all": ratio})
        if baseline is not None and source != "ordinary":
            row = {**common, "library": "all_to_all_single", "source": None, **baseline}
            rows.append({**row, **_rates(options, op, ranks, baseline, copy_rate), "ratio_vs_all_to_all": 1.0})
    return Report(_machine(ranks, copy_rate, load_average), startup, tuple(rows))


def _shape(options: Options) -> Row:
    names = ("ranks", "tokens", "hidden", "experts", "top_k", "dtype", "layout", "alignment", "quantize", "capacity")
    more = ("routing", "seed", "iters", "warmup", "num_sms", "mode")
    return {name: getattr(options, name) for name in (*names, *more)}


def _times(ranks: Sequence[Any]) -> Row:
    """Of each call the slowest rank; of these the median and p99. mean: the slowest rank's whole loop / calls."""
    per_rank = [rank.gpu_us if rank.gpu_us is not None else rank.call_us for rank in ranks]
    slowest = sorted(max(calls) for calls in zip(*per_rank, strict=True))
    host = sorted(max(calls) for calls in zip(*(rank.call_us for rank in ranks), strict=True))
    return {
        "time_us": statistics.median(slowest),
        "time_p99_us": slowest[min(len(slowest) - 1, int(0.99 * len(slowest)))],
        "time_mean_us": max(rank.total_us for rank in ranks) / len(slowest),
        "host_us": statistics.median(host),
    }


def _rates(options: Options, op: str, ranks: Sequence[RankReport], times: Row, copy_rate: float) -> Row:
    """Bytes, rates and the memory-copy bound of one row. Rates: the busiest rank; bound: all ranks."""
    does_dispatch, does_combine = op in ("dispatch", "both"), op in ("combine", "both")
    wire, result, bound_bytes, logical = [], [], 0.0, []
    for rank in ranks:
        dispatch_bytes = rank.dispatch_row_bytes * does_dispatch
        combine_bytes = rank.combine_row_bytes * does_combine
        wire.append(rank.rows_sent * (dispatch_bytes + combine_bytes))
        logical.append((rank.rows_sent + rank.rows_kept) * (dispatch_bytes + combine_bytes))
        result.append(rank.dispatch_result_bytes * does_dispatch + rank.combine_result_bytes * does_combine)
        bound_bytes += rank.rows_received * dispatch_bytes
        bound_bytes += (rank.rows_received + rank.num_tokens) / 2 * combine_bytes
    is_cpu = ranks[0].device.startswith("cpu")
    bound_us = bound_bytes / copy_rate * 1e6 if is_cpu else None
    seconds = times["time_us"] / 1e6
    return {
        "wire_bytes": max(wire),
        "wire_gb_per_s": max(wire) / seconds / 1e9,
        "logical_bytes": max(logical),
        "logical_gb_per_s": max(logical) / seconds / 1e9,
        "result_bytes": max(result),
        "memory_copy_bound_us": bound_us,
        "ratio_vs_memory_copy": None if bound_us is None else bound_us / times["time_us"],
    }


def _copy_rate(ranks: Sequence[RankReport]) -> float:
    """Bytes a second that all ranks together copied while they copied at once."""
    from_ns, to_ns = min(rank.copy_from_ns for rank in ranks), max(rank.copy_to_ns for rank in ranks)
    return sum(rank.copied_bytes for rank in ranks) / ((to_ns - from_ns) / 1e9)


def _machine(ranks: Sequence[RankReport], copy_rate: float, load_average: float) -> Row:
    import torch

    import weft

    rank = ranks[0]
    return {
        "kind": "machine",
        "weft": weft.__version__,
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": load_average,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": rank.device,
        "device_name": torch.cuda.get_device_name() if rank.device.startswith("cuda") else None,
        "engine": rank.engine,
        "placement": rank.placement.mode,
        "rank_cpus": [format_cpus(each.placement.cpus) for each in ranks],
        "rank_nics": [[str(nic) for nic in each.placement.nics] for each in ranks],
        "memory_copy_gb_per_s": copy_rate / 1e9,
        "window_bytes": _largest(ranks, "control_bytes", "heap_bytes"),
        "heap_peak_bytes": _largest(ranks, "heap_peak"),
    }


def _largest(ranks: Sequence[RankReport], *names: str) -> int | None:
    """The sum of these figures of all windows of a rank, of the rank that has most; None if they are not told."""
    sums = [
        sum(int(window.get(name, 0)) for window in rank.stats.get("windows", ()) for name in names) for rank in ranks
    ]
    return max(sums) or None


def _import_seconds() -> float:
    """Seconds to import torch and weft in a fresh interpreter."""
    command = [sys.executable, "-c", _IMPORT_CODE, str(Path(__file__).parents[2])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return float(done.stdout)


def commit() -> str | None:
    """The commit of the source tree this package lies in, "+" if it has changes; None if it lies in none."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        head = subprocess.run(
            ["git", "-C", root, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
        dirty = subprocess.run(
            ["git", "-C", root, "diff", "--quiet", "HEAD", "--", "python", "src", "include"], check=False
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if dirty.returncode else "")


def cpu_name() -> str | None:
    """Of the processor, as Linux gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
