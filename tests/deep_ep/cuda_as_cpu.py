"""Runs programs that are written for GPUs on the CPU: device "cuda" is "cpu", NCCL is gloo, streams are nothing.

    python tests/deep_ep/cuda_as_cpu.py [--nodes N] SCRIPT [ARGUMENT...]

`import deep_ep` is Weft's there. For DeepEP's own test files, which are not part of this repository. With --nodes the
script is started N times, with WORLD_SIZE and RANK as on N machines; variables of docs/deep_ep.md say how many ranks
a node has.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_BUSY = 1 << 26  # elements of a matrix that is multiplied to keep a GPU busy; nobody reads the product


def _is_cuda(value: Any) -> bool:
    is_device = isinstance(value, torch.device) and value.type == "cuda"
    return is_device or (isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")))


_PRODUCTS = (torch.Tensor.matmul, torch.Tensor.__matmul__, torch.matmul)


class CudaAsCpu(TorchFunctionMode):
    """Of every function of torch that is given a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        args = tuple("cpu" if _is_cuda(each) else each for each in args)
        named = {name: "cpu" if _is_cuda(each) else each for name, each in (kwargs or {}).items()}
        named.pop("pin_memory", None)  # there is no such memory
        if func is torch.randn and args and isinstance(args[0], tuple) and math.prod(args[0]) >= _BUSY:
            return torch.empty(*args, **named)
        if func in _PRODUCTS and args[0].numel() >= _BUSY:
            return torch.empty_like(args[0])
        return func(*args, **named)


class _Nothing:
    """A stream, or an event that knows the time."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.at = 0.0

    def record(self, *args: Any) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: Any) -> float:
        return float(1e3 * (later.at - self.at))

    def wait_stream(self, *args: Any) -> None:
        pass

    synchronize = wait = wait_event = wait_stream


class _Profile(torch.profiler.profile):
    """Of calls in place of kernels: they have the same names (weft::dispatch, weft::combine)."""

    def __init__(self, *, activities: Any = None, **named: Any) -> None:
        super().__init__(activities=[torch.profiler.ProfilerActivity.CPU], **named)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """gloo does not know FP8."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 and tensor.dtype != torch.bool else tensor


def _spawn(fn: Any, args: Any = (), nprocs: int = 1, **named: Any) -> None:
    """Forked: the mode and the loaded script are there. Where one fails the others are ended."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=fn, args=(rank, *args)) for rank in range(nprocs)]
    for each in ranks:
        each.start()
    running = list(ranks)
    while running and not any(each.exitcode for each in ranks):
        connection.wait([each.sentinel for each in running])
        running = [each for each in running if each.exitcode is None]
    for each in running:
        each.kill()
    for each in ranks:
        each.join()
    codes = [each.exitcode for each in ranks]
    if any(codes):
        sys.exit(f"exit codes of the ranks: {codes}")


@contextlib.contextmanager
def cuda_as_cpu() -> Iterator[None]:
    """For the rest of a process: what it replaces in torch stays so."""
    importlib.import_module("torch._inductor")  # profilers load it, and it looks at what is replaced here
    nothing: Any = lambda *args, **named: None  # noqa: E731
    cuda: Any = torch.cuda
    for name in ("synchronize", "set_device", "_sleep", "manual_seed_all", "manual_seed"):
        setattr(cuda, name, nothing)
    cuda.Stream = cuda.Event = _Nothing
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_stream = _Nothing
    cuda.nvtx.range = lambda *args: contextlib.nullcontext()
    cuda.profiler.start = cuda.profiler.stop = nothing
    torch.set_default_device = nothing
    torch.profiler.profile = _Profile  # type: ignore[misc]
    init, gather, exchange = dist.init_process_group, dist.all_gather_into_tensor, dist.all_to_all_single

    def init_process_group(backend: Any = None, **named: Any) -> None:
        named.pop("device_id", None)
        init("gloo", **named)

    def all_gather_into_tensor(output: torch.Tensor, value: torch.Tensor, *args: Any, **named: Any) -> Any:
        return gather(_plain(output).view(-1), _plain(value).contiguous().view(-1), *args, **named)

    def all_to_all_single(output: torch.Tensor, value: torch.Tensor, *args: Any, **named: Any) -> Any:
        return exchange(_plain(output), _plain(value), *args, **named)

    dist.init_process_group = init_process_group
    dist.all_gather_into_tensor, dist.all_to_all_single = all_gather_into_tensor, all_to_all_single
    torch.multiprocessing.spawn = _spawn  # type: ignore[assignment]
    torch.set_num_threads(1)
    with CudaAsCpu():
        yield


def free_port() -> str:
    """Of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def on_nodes(num_nodes: int, *arguments: str) -> int:
    """Run `main` once for each node; 0 if all went well."""
    of_all = {**os.environ, "MASTER_PORT": free_port(), "WORLD_SIZE": str(num_nodes)}
    command = [sys.executable, __file__, *arguments]
    nodes = [subprocess.Popen(command, env={**of_all, "RANK": str(node)}) for node in range(num_nodes)]
    return max(abs(each.wait()) for each in nodes)


def main(script: str, *arguments: str) -> None:
    """Run a script as a program, with its folder on sys.path."""
    import weft.deep_ep

    weft.deep_ep.install()
    sys.path.insert(0, str(Path(script).parent))
    sys.argv = [script, *arguments]
    if "WORLD_SIZE" not in os.environ:
        os.environ["MASTER_PORT"] = free_port()
    with cuda_as_cpu():
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "--nodes":
        sys.exit(on_nodes(int(sys.argv[2]), *sys.argv[3:]))
    main(*sys.argv[1:])
