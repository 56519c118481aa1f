"""Starts the ranks of a benchmark, and what their notes of a call mean. No torch until they start."""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from weft.bench.cases import Case
from weft.bench.options import Options, SuiteOptions

__all__ = ["isolation_of", "run_cases", "slowest", "times"]

Row = dict[str, Any]


def run_cases(
    chosen: tuple[Case, ...], options: Options | SuiteOptions
) -> tuple[list[list[Row]], BaseException | None]:
    """Each step that every rank completed, as the objects that the ranks have noted; and what a rank raised."""
    from torch._C._distributed_c10d import TCPStore

    import weft
    from weft.bench.worker import run_rank

    isolation = isolation_of(options)
    barrier: Any = threading.Barrier(options.ranks)
    if isolation == "process":
        barrier = multiprocessing.get_context("fork").Barrier(options.ranks)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    error: BaseException | None = None
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        try:
            weft.spawn(
                run_rank,
                num_ranks=options.ranks,
                args=(chosen, options, barrier, store.port, Path(folder)),
                device=options.device,
                isolation=isolation,
                placement=options.placement,
            )
        except BaseException as caught:  # noqa: BLE001  the caller raises it
            error = caught
        files = [Path(folder) / f"rank{rank}.jsonl" for rank in range(options.ranks)]
        lines = [file.read_text(encoding="utf-8").splitlines() if file.exists() else [] for file in files]
    return [[json.loads(line) for line in step] for step in zip(*lines, strict=False)], error


class Spawned(Protocol):
    """What options say of how ranks are started."""

    @property
    def ranks(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def node_ranks(self) -> int | None: ...
    @property
    def isolation(self) -> str: ...


def isolation_of(options: Spawned) -> str:
    """Of weft.spawn: nodes whose ranks share a GPU are threads, since as processes they would take turns."""
    if options.isolation != "auto":
        return options.isolation
    if options.device == "cpu" or options.node_ranks is None:
        return "process"
    import torch

    return "thread" if 0 < torch.cuda.device_count() < options.ranks else "process"


def slowest(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Of each call the slowest rank."""
    return [max(calls) for calls in zip(*per_rank, strict=True)]


def times(note: Sequence[Row]) -> Row:
    """Of the ranks' notes of a case or baseline: median and p99 of the slowest rank in each call, and the host's."""
    calls = sorted(slowest([rank["gpu_us"] for rank in note]))
    return {
        "time_us": statistics.median(calls),
        "time_p99_us": calls[min(len(calls) - 1, int(0.99 * len(calls)))],
        "host_us": statistics.median(slowest([rank["host_us"] for rank in note])),
    }
