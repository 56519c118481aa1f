"""Times of calls that follow each other, and what the GPU ran in them."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PROFILED = 10  # calls that the profiler's figures are of
_LEFT_OUT = 3  # recorded calls, or samples, that are not counted
_REPLAYS = 5  # in a sample
_COPY_BYTES = 64 << 20
_MOST_COPIES = 12


@dataclass(frozen=True)
class Times:
    """Calls of one kind on one rank, back to back, in microseconds."""

    gpu_us: list[float]  # from the end of the call before to the end of this one, on the stream; on a CPU: host_us
    host_us: list[float]  # until the call returned


@dataclass(frozen=True)
class GpuWork:
    """What the GPU ran in one call, from the profiler's records."""

    kernel_us: float  # in which a kernel or copy was there; a kernel that has begun early and waits is, too
    span_us: float  # from the first start to the last end of some calls / these calls
    num_kernels: float
    num_blocks: float  # SMs: blocks of all kernels, of each as many as the GPU has SMs at most


def time_calls(
    call: Callable[[], None], *, iters: int, warmup: int, device: torch.device, meet: Callable[[], None]
) -> Times:
    """Meet the other ranks, then make `warmup` + `iters` calls without a pause; the last `iters` are counted.

    The boundaries lie between calls, so that the time in which a GPU waits for its host is in the figures too.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:  # ranks may be threads: the host waits for its own stream alone
        torch.cuda.current_stream(device).synchronize()
    meet()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(iters + 1 if on_gpu else 0)]
    for _ in range(warmup):
        call()
    host_us = []
    if on_gpu:
        events[0].record()
    for idx in range(iters):
        start = time.perf_counter_ns()
        call()
        host_us.append((time.perf_counter_ns() - start) / 1e3)
        if on_gpu:
            events[idx + 1].record()
    if not on_gpu:
        return Times(host_us, host_us)
    torch.cuda.current_stream(device).synchronize()
    return Times([a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)], host_us)


def time_copies(*, iters: int, device: torch.device, meet: Callable[[], None]) -> dict[str, int]:
    """Copy 64 MiB again and again, all ranks at once: when this rank began and ended, and how many bytes it copied."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    target.copy_(source)
    meet()
    begin_ns = time.monotonic_ns()
    num_copies = min(_MOST_COPIES, iters)
    for _ in range(num_copies):
        target.copy_(source)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return {"from_ns": begin_ns, "to_ns": time.monotonic_ns(), "copied_bytes": num_copies * _COPY_BYTES}


def time_replays(replay: Callable[[], None], *, num_calls: int, samples: int, meet: Callable[[], None]) -> Times:
    """Times of a call that a captured graph makes `num_calls` times: the mean over some replays between two events, so
    many times.
    """
    return replays_in_turn([(replay, num_calls)], samples=samples, meet=meet)[0]


def replays_in_turn(
    graphs: Sequence[tuple[Callable[[], None], int]],
    *,
    samples: int,
    meet: Callable[[], None],
    begin: Callable[[], object] | None = None,
) -> list[Times]:
    """Times of the calls of several graphs, (replay, calls in it), replayed in turn, so that what drifts falls on all.

    The first samples, in which ranks wait for a late start, are not counted; `begin` is called behind them. Ranks may
    be threads: the host waits for its own stream alone.
    """
    stream = torch.cuda.current_stream()
    stream.synchronize()
    meet()
    events = [torch.cuda.Event(enable_timing=True) for _ in range((samples + _LEFT_OUT) * len(graphs) + 1)]
    events[0].record()
    stamps = [time.perf_counter_ns()]
    for turn in range(samples + _LEFT_OUT):
        if turn == _LEFT_OUT and begin is not None:
            begin()
        for replay, _ in graphs:
            for _ in range(_REPLAYS):
                replay()
            events[len(stamps)].record()
            stamps.append(time.perf_counter_ns())
    stream.synchronize()
    found = []
    for first, (_, num_calls) in enumerate(graphs, start=_LEFT_OUT * len(graphs)):
        each, places = 1e3 / (_REPLAYS * num_calls), range(first, len(events) - 1, len(graphs))
        gpu_us = [events[at].elapsed_time(events[at + 1]) * each for at in places]
        found.append(Times(gpu_us, [(stamps[at + 1] - stamps[at]) / 1e6 * each for at in places]))
    return found


def profile_calls(
    call: Callable[[], None], *, iters: int, meet: Callable[[], None], num_calls: int = 1
) -> GpuWork | None:
    """Record `call`, which makes `num_calls` calls, with torch's profiler; the last `iters` times are counted, when
    ranks no longer wait for a late start. None where the driver gives no records. Collective.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        torch.cuda.synchronize()
        meet()
        for _ in range(_LEFT_OUT + iters):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    num_sms = torch.cuda.get_device_properties().multi_processor_count
    all_calls = (_LEFT_OUT + iters) * num_calls
    return gpu_work(trace["traceEvents"], all_calls, num_sms, left_out=_LEFT_OUT * num_calls)


def gpu_work(events: list[dict[str, Any]], num_calls: int, num_sms: int, *, left_out: int = 0) -> GpuWork | None:
    """What a profiler's records (the Chrome trace format, times in microseconds) say of `num_calls` equal calls, the
    first `left_out` of them not counted.
    """
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not work:
        return None
    work = sorted(work, key=lambda event: event["ts"])[len(work) * left_out // num_calls :]
    num_calls -= left_out
    kernels = [event for event in work if event["cat"] == "kernel"]
    blocks = sum(min(num_sms, _product(event["args"].get("grid", (num_sms,)))) for event in kernels)
    busy, end = 0.0, work[0]["ts"]
    for event in work:
        busy += max(0.0, event["ts"] + event["dur"] - max(end, event["ts"]))
        end = max(end, event["ts"] + event["dur"])
    return GpuWork(
        kernel_us=busy / num_calls,
        span_us=(end - work[0]["ts"]) / num_calls,
        num_kernels=len(kernels) / num_calls,
        num_blocks=blocks / num_calls,
    )


def _product(sizes: Any) -> int:
    product = 1
    for size in sizes:
        product *= int(size)
    return product
