"""Ranks on GPUs for the tests: the pool of tests/python with device tensors, and ranks that are threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from pool import Pool, RankState, run_threads

NUM_GPUS = torch.cuda.device_count()  # by NVML: CUDA is not started
_cpu = Tensor.cpu


def to_host(tensor: Tensor) -> Tensor:
    """`weft.engine.to_host`, in place of `Tensor.cpu` itself."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return _cpu(tensor)


def moved(value: Any, device: torch.device | str) -> Any:
    """The same value with every tensor inside on `device`; leaves keep requires_grad."""
    if isinstance(value, Tensor):
        if value.dtype == torch.float4_e2m1fn_x2:  # torch copies none of it
            return moved(value.view(torch.uint8), device).view(value.dtype)
        value = value if torch.device(device).type == "cuda" else to_host(value)
        copy = torch.empty(value.shape, dtype=value.dtype, device=device).copy_(value.detach())  # plain strides
        return copy.requires_grad_(value.requires_grad)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: moved(getattr(value, f.name), device) for f in dataclasses.fields(value)}
        return type(value)(**fields)
    if isinstance(value, dict):
        return {name: moved(each, device) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(moved(each, device) for each in value)
    return value


@dataclasses.dataclass(frozen=True)
class OnDevice:
    """A function of the tests for the CPU, run with tensors on the rank's GPU."""

    function: Callable[[RankState, Any], Any]

    def __call__(self, state: RankState, argument: Any) -> Any:
        assert state.comm.engine == "nvlink", state.comm
        result = self.function(state, moved(argument, state.comm.device))
        return moved(result, "cpu")


class ThreadRanks:
    """`run` as that of `Pool`, on ranks that are threads; they share one GPU if there is only one."""

    def run(
        self,
        num_ranks: int,
        function: Callable[[RankState, Any], Any],
        args: Sequence[Any],
        *,
        may_die: Collection[int] = (),
    ) -> list[Any]:
        return run_threads(num_ranks, OnDevice(function), args, device="cuda")


class ProcessRanks:
    """Ranks that are processes, each on a GPU of its own if there are enough."""

    def __init__(self) -> None:
        self._pool = Pool(device="cuda")

    def run(
        self,
        num_ranks: int,
        function: Callable[[RankState, Any], Any],
        args: Sequence[Any],
        *,
        may_die: Collection[int] = (),
    ) -> list[Any]:
        return self._pool.run(num_ranks, OnDevice(function), args, may_die=may_die)

    def stop(self) -> None:
        self._pool.stop()
