"""The measurements of `weft doctor`, in a process of their own: imports torch and starts CUDA.

`main` prints one JSON object. Everything is bounded: sizes and repetitions are fixed, kernels give up after a number
of cycles, and the parent ends the process after a minute.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["main"]

_COPY_BYTES = 256 << 20
_COPIES = 4
_SMALL_COPIES = 50
_PINNED_BYTES = 64 << 20
_ROUNDS = 2000
_LAUNCHES = 100

# Two of them play ping-pong with a flag in each other's memory. A partner that never answers costs about a second.
_PING_PONG = """
extern "C" __global__ void weft_ping_pong(volatile int* mine, volatile int* theirs, int rounds, int first) {
  const long long limit = clock64() + 2000000000LL;
  for (int round = 1; round <= rounds; ++round) {
    if (first) { *theirs = round; __threadfence_system(); }
    while (*mine < round) { if (clock64() > limit) { mine[1] = 1; return; } }
    if (!first) { *theirs = round; __threadfence_system(); }
  }
}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print. The argument is a JSON object: NUMA node to the CPUs to measure from."""
    nodes = json.loads((arguments or sys.argv[1:])[0])
    try:
        import torch
    except Exception as error:  # noqa: BLE001  a torch that is missing or broken in any way
        result: dict[str, Any] = {"error": f"torch can't be imported: {type(error).__name__}: {error}"}
    else:
        result = _measure(torch, nodes)
    sys.stdout.write(json.dumps(result) + "\n")


def _measure(torch: Any, nodes: dict[str, list[int]]) -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"error": "torch sees no GPU (a build without CUDA, or CUDA does not start)"}
    count = torch.cuda.device_count()
    for device in range(count):
        torch.zeros(1, device=device, dtype=torch.float32)  # starts CUDA on it, which is not what is measured
    start = time.monotonic()
    result: dict[str, Any] = {"devices": [_address(torch, idx) for idx in range(count)]}
    players: list[tuple[Any, Any]] = []
    parts: dict[str, Callable[[], Any]] = {
        "copy_gb_per_s": lambda: _pairs(torch, count, _copy_rate),
        "copy_us": lambda: _pairs(torch, count, _small_copy),
        "flag_us": lambda: _flags(torch, count, players),
        "from_nodes": lambda: _from_nodes(torch, count, nodes, players),
    }
    for name, measure in parts.items():
        try:
            result[name] = measure()
        except Exception as error:  # noqa: BLE001  whatever CUDA says: the other parts may still work
            result[name] = None
            result.setdefault("problems", {})[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    result["seconds"] = time.monotonic() - start
    return result


def _address(torch: Any, idx: int) -> str:
    facts = torch.cuda.get_device_properties(idx)
    return f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"


def _pairs(torch: Any, count: int, measure: Callable[[Any, int, int], float]) -> list[list[float | None]]:
    """[from][to]; None of a GPU and itself, and where it was not measured."""
    return [[None if one == other else measure(torch, one, other) for other in range(count)] for one in range(count)]


def _timed(torch: Any, device: int, work: Callable[[], Any]) -> float:
    """Microseconds of GPU time that the work takes on the current stream of a device."""
    with torch.cuda.device(device):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1000


def _copy_rate(torch: Any, one: int, other: int) -> float:
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=one)
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=other)

    def work() -> None:
        for _ in range(_COPIES):
            target.copy_(source, non_blocking=True)

    _timed(torch, one, work)
    return _COPIES * _COPY_BYTES / min(_timed(torch, one, work) for _ in range(2)) / 1000


def _small_copy(torch: Any, one: int, other: int) -> float:
    source = torch.zeros(4, dtype=torch.int32, device=one)
    target = torch.zeros(4, dtype=torch.int32, device=other)

    def work() -> None:
        for _ in range(_SMALL_COPIES):
            target.copy_(source, non_blocking=True)

    _timed(torch, one, work)
    return min(_timed(torch, one, work) for _ in range(2)) / _SMALL_COPIES


def _flags(torch: Any, count: int, players: list[tuple[Any, Any]]) -> list[list[float | None]]:
    """Microseconds of a round trip, once a pair, by kernels compiled here. Peer access is on since the copies.

    `players` is filled once all see each other. torch's own runtime compiler is not public yet: where it is not there,
    nothing is measured.
    """
    compiled = []
    for device in range(count):
        with torch.cuda.device(device):
            flag = torch.zeros(2, dtype=torch.int32, device=device)
            kernel = torch.cuda._compile_kernel(_PING_PONG, "weft_ping_pong")
            kernel((1, 1, 1), (1, 1, 1), [flag, flag, 0, 1])  # loads it: that may wait, which it must not do later
            torch.cuda.synchronize()
            compiled.append((flag, kernel))
    found = [
        [_round_trip(torch, compiled, one, other) if one < other else None for other in range(count)]
        for one in range(count)
    ]
    players += compiled
    return found


def _round_trip(torch: Any, players: list[tuple[Any, Any]], one: int, other: int) -> float:
    (flag, kernel), (other_flag, other_kernel) = players[one], players[other]

    def play(rounds: int) -> float:
        for device in (one, other):
            players[device][0].zero_()
            torch.cuda.synchronize(device)
        with torch.cuda.device(other):
            other_kernel((1, 1, 1), (1, 1, 1), [other_flag, flag, rounds, 0])
        took = _timed(torch, one, lambda: kernel((1, 1, 1), (1, 1, 1), [flag, other_flag, rounds, 1]))
        torch.cuda.synchronize(other)
        return took

    play(1)
    few, many = play(_ROUNDS // 10), play(_ROUNDS)
    if int(flag[1]) or int(other_flag[1]):
        raise RuntimeError(f"GPU {one} and GPU {other} don't see each other's flags")
    return (many - few) / (_ROUNDS - _ROUNDS // 10)


def _from_nodes(
    torch: Any, count: int, nodes: dict[str, list[int]], players: list[tuple[Any, Any]]
) -> dict[str, dict[str, list[float]]]:
    """By node; where there are two, also what is between each GPU and the next one, by number."""
    found = {}
    for node, cpus in nodes.items():
        found[node] = _from_node(torch, count, cpus)
        if len(nodes) > 1 and count > 1:
            found[node] |= _to_next(torch, count, players)
    return found


def _to_next(torch: Any, count: int, players: list[tuple[Any, Any]]) -> dict[str, list[float]]:
    pairs = [(one, (one + 1) % count) for one in range(count)]
    found = {
        "copy_gb_per_s": [_copy_rate(torch, *pair) for pair in pairs],
        "copy_us": [_small_copy(torch, *pair) for pair in pairs],
    }
    return found | ({"flag_us": [_round_trip(torch, players, *pair) for pair in pairs]} if players else {})


def _from_node(torch: Any, count: int, cpus: list[int]) -> dict[str, list[float]]:
    """What a process on these CPUs sees of each GPU: a launch and its end, and the rate from pinned memory near it."""
    os.sched_setaffinity(0, cpus)
    pinned = torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu").fill_(1)
    _KEPT.append(pinned)  # or the allocator would hand the same pages out for the next node
    launches, rates = [], []
    for device in range(count):
        x = torch.zeros(1, device=device, dtype=torch.float32)
        target = torch.empty(_PINNED_BYTES, dtype=torch.uint8, device=device)
        times = []
        for _ in range(_LAUNCHES):
            begin = time.perf_counter_ns()
            x.add_(1)
            torch.cuda.synchronize(device)
            times.append((time.perf_counter_ns() - begin) / 1000)
        launches.append(statistics.median(times))
        copy = functools.partial(target.copy_, pinned, non_blocking=True)
        took = [_timed(torch, device, copy) for _ in range(4)]
        rates.append(_PINNED_BYTES / min(took) / 1000)
    return {"launch_us": launches, "pinned_gb_per_s": rates}


_KEPT: list[Any] = []
