"""What the links between the GPUs can do here and now, by SM count: our own kernels, all GPUs at once.

include/weft/kernels/link_limit.cuh says what they do. `weft bench` sets every rate against the limit of the same kind,
row size and SM count, measured in the same run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.bench.apart import apart
from weft.machine import where

if TYPE_CHECKING:
    import torch

_PAIR_BYTES = 64 << 20  # that a GPU moves to or from each peer in a launch
_LAUNCHES, _ROUNDS = 4, 5


@dataclass(frozen=True, order=True)
class LinkPoint:
    """One measurement: kind "push" (bulk stores to peers) or "pull" (bulk loads), bytes of a row, SMs of each GPU."""

    kind: str
    row_bytes: int
    num_sms: int


def measure(points: Iterable[LinkPoint], num_gpus: int) -> dict[LinkPoint, float]:
    """Bytes a second that each GPU sends (push) or receives (pull) while all do, the slowest GPU; best of rounds.

    Runs in a process of its own, so that the caller is free to fork ranks afterwards. Empty for less than two GPUs.

    Raises:
        Error: the process died or took too long; else what went wrong in it.
    """
    wanted = sorted(set(points))
    if num_gpus < 2 or not wanted:
        return {}
    where.say("rates of the links")
    rates: dict[LinkPoint, float] = apart(_measure, wanted, num_gpus)
    return rates


def rising(rates: Mapping[LinkPoint, float]) -> dict[LinkPoint, float]:
    """The limits that rates show: with more SMs never less than with fewer of the same kind and row, since some of them
    can be left idle.
    """
    return {
        point: max(
            rate
            for other, rate in rates.items()
            if (other.kind, other.row_bytes) == (point.kind, point.row_bytes) and other.num_sms <= point.num_sms
        )
        for point in rates
    }


def _measure(points: list[LinkPoint], num_gpus: int) -> dict[LinkPoint, float]:
    import torch

    devices = [torch.device("cuda", idx) for idx in range(num_gpus)]
    buffers = [torch.zeros(_PAIR_BYTES * (num_gpus - 1), dtype=torch.uint8, device=device) for device in devices]
    for device, buffer in zip(devices, buffers, strict=True):
        for other in buffers:
            if other.device != device:
                other[:1].copy_(buffer[:1])  # torch lets the two GPUs reach each other's memory at the first copy
    kernels = {key: _kernels(devices, *key) for key in {(point.kind, point.row_bytes) for point in points}}
    return {point: _rate(kernels[point.kind, point.row_bytes], buffers, point) for point in points}


def _kernels(devices: list[torch.device], kind: str, row_bytes: int) -> list[Any]:
    """The kernel on every GPU; they are alike, so it is compiled once."""
    import torch

    from weft import _load
    from weft.kernels import paths as kernel_paths

    native = _load.native()
    major, minor = torch.cuda.get_device_capability(devices[0])
    cubin = native.compile_kernel(
        native.render_link_limit(row_bytes=row_bytes, is_pull=kind == "pull"),
        arch=f"sm_{major}{minor}",
        **kernel_paths.compiler_paths(cache=""),
    )
    return [native.LinkLimitKernel(device.index, cubin) for device in devices]


def _rate(kernels: list[Any], buffers: list[torch.Tensor], point: LinkPoint) -> float:
    """Of some rounds the best; in each all GPUs run a few launches back to back and the slowest one counts."""
    import torch

    num_gpus = len(buffers)
    rows_each = _PAIR_BYTES // point.row_bytes // point.num_sms * point.num_sms  # equally many for every block
    peers = [  # rank r has a part of its own in every peer's memory
        [
            buffers[(rank + step) % num_gpus].data_ptr() + (num_gpus - 1 - step) * _PAIR_BYTES
            for step in range(1, num_gpus)
        ]
        for rank in range(num_gpus)
    ]
    streams = [torch.cuda.Stream(buffer.device) for buffer in buffers]
    rates = []
    for _ in range(_ROUNDS):
        events = []
        for kernel, stream, addresses in zip(kernels, streams, peers, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            for _ in range(_LAUNCHES):
                kernel.launch(
                    peers=addresses,
                    num_rows=rows_each * (num_gpus - 1),
                    num_blocks=point.num_sms,
                    stream=stream.cuda_stream,
                )
            end.record(stream)
            events.append((begin, end))
        for stream in streams:
            stream.synchronize()
        seconds = max(begin.elapsed_time(end) for begin, end in events) / 1e3 / _LAUNCHES
        rates.append(rows_each * (num_gpus - 1) * point.row_bytes / seconds)
    return float(max(rates))
