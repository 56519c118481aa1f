"""Timing of DeepEP's tests."""
# check: allow-in-file function-size: parameters as in DeepEP

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["bench", "bench_kineto", "empty_suppress", "flush_l2_cache", "suppress_stdout_stderr"]

_CACHE_BYTES = 256 << 20
_NO_COUNTERPART = "epilogue"


def flush_l2_cache(enabled: bool = True) -> None:
    """Write as much as a GPU's cache holds; nothing without CUDA."""
    if enabled and torch.cuda.is_available():
        torch.empty(_CACHE_BYTES, dtype=torch.uint8, device="cuda").zero_()


def bench(
    fn: Callable[[], object],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], object] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """(mean, least, most) seconds of a call, without the first; on the CPU by the clock."""
    has_cuda = torch.cuda.is_available()
    for _ in range(num_warmups):
        fn()
    flush_l2_cache(flush_l2)
    times = []
    events = []
    for _ in range(num_tests):
        start = time.perf_counter()
        if has_cuda:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
        fn()
        if has_cuda:
            last.record()
            events.append((first, last))
        else:
            times.append(time.perf_counter() - start)
        if post_fn is not None:
            post_fn()
    if has_cuda:
        torch.cuda.synchronize()
        times = [first.elapsed_time(last) / 1e3 for first, last in events]
    counted = times[1:] or times
    return sum(counted) / len(counted), min(counted), max(counted)


class empty_suppress(contextlib.nullcontext):  # type: ignore[type-arg]  # its name in DeepEP
    """Suppresses nothing."""


@contextlib.contextmanager
def suppress_stdout_stderr() -> Iterator[None]:
    """What this process, C code too, prints inside goes nowhere."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(os.devnull, "w") as nowhere:
        kept = [os.dup(each) for each in (1, 2)]
        try:
            for each in (1, 2):
                os.dup2(nowhere.fileno(), each)
            yield
        finally:
            for number, each in zip((1, 2), kept, strict=True):
                os.dup2(each, number)
                os.close(each)


def bench_kineto(
    fn: Callable[[], object],
    kernel_names: str | Sequence[str],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], object] | None = None,
) -> Any:
    """Seconds of a kernel of `fn` by torch's profiler: a float for a name, a tuple for several. On the cpu engine,
    which has no kernels, of Weft's calls, or their halves, in the name's place.

    num_kernels_per_period > 1: a list, of the first, second ... kernel of that name in a call. Those of `barrier`,
    which is a dispatch, are not counted. A name with no counterpart here, or kernels that can't be told from the
    barrier's, is nan.
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else tuple(kernel_names)
    before = barrier if barrier_comm_profiling else None
    with (suppress_stdout_stderr if suppress_kineto_output else empty_suppress)():
        of_barrier = [] if before is None else _profiled(before, 1, None, False, None)
        durations = _profiled(fn, num_tests, trace_path, flush_l2, before)
    found: list[Any] = []
    for name in names:
        kernel = "" if _NO_COUNTERPART in name else name.removesuffix("_impl").removesuffix("_kernel")
        kernel = "dispatch" if kernel == "barrier" else kernel
        mine = seconds_of(durations, kernel, num_tests, len(seconds_of(of_barrier, kernel))) if kernel else []
        if num_kernels_per_period == 1:
            found.append(sum(mine) / len(mine) if mine else math.nan)
            continue
        periods = [mine[first::num_kernels_per_period] for first in range(num_kernels_per_period)]
        found.append([sum(each) / len(each) if each else math.nan for each in periods])
    return found[0] if isinstance(kernel_names, str) else tuple(found)


def seconds_of(
    durations: Sequence[tuple[str, float]], kernel: str, num_calls: int = 1, num_before: int = 0
) -> list[float]:
    """Of the kernels whose name has `kernel` in it, without the first `num_before` of each call. Empty where
    those can't be told from the others."""
    mine = [seconds for name, seconds in durations if kernel in name]
    if len(mine) % num_calls:  # calls differ, or the profiler has lost one
        return [] if num_before else mine
    period = len(mine) // num_calls
    return [seconds for number, seconds in enumerate(mine) if number % max(1, period) >= num_before]


def _profiled(
    fn: Callable[[], object], num_tests: int, trace_path: str | None, flush_l2: bool, barrier: Any
) -> list[tuple[str, float]]:
    """(name, seconds) of every kernel, or call on the cpu engine, in the order in which they ran."""
    has_cuda, of = torch.cuda.is_available(), torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[of.CUDA if has_cuda else of.CPU]) as profile:
        for _ in range(num_tests):
            flush_l2_cache(flush_l2)
            if barrier is not None:
                barrier()
            fn()
        if has_cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(trace_path or Path(folder) / "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    category, names = ("kernel", "") if has_cuda else ("user_annotation", "weft::")
    kernels = [each for each in events if each.get("cat") == category and each["name"].startswith(names)]
    kernels.sort(key=lambda each: each["ts"])
    return [(each["name"], each["dur"] / 1e6) for each in kernels]
