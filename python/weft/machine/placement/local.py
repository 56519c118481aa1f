"""The placement of a rank in this process: from the `placement=` argument to bound threads."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from weft import env
from weft.errors import InvalidArgument
from weft.machine.placement import binding
from weft.machine.placement.model import Placement
from weft.machine.placement.plan import place, visible_gpus
from weft.machine.topology.model import Gpu, Machine
from weft.machine.topology.parse import format_cpus
from weft.machine.topology.reader import read_here

if TYPE_CHECKING:
    import torch

__all__ = ["MODES", "check_placement", "machine_here", "resolve", "resolve_before_torch", "visible_here"]

MODES = ("auto", "process", "off")
_MAX_CPU = 1 << 16


_machines: dict[bool, Machine] = {}  # by whether NVML was asked; a forked rank has its parent's


def machine_here(*, with_gpus: bool = True) -> Machine:
    """This machine, read once in a process. Without GPUs NVML is not asked, which may take seconds."""
    if True in _machines:
        return _machines[True]
    if with_gpus not in _machines:
        _machines[with_gpus] = read_here(with_nvml=with_gpus)
    return _machines[with_gpus]


def visible_here(machine: Machine | None = None) -> tuple[Gpu, ...]:
    """The GPUs in the order in which CUDA numbers them for this process. Starts no CUDA."""
    return visible_gpus(machine or machine_here(), env.set_among(["CUDA_VISIBLE_DEVICES"]))[0]


def check_placement(placement: object) -> str | Placement:
    """The argument if it is allowed; WEFT_PLACEMENT in place of "auto", the default.

    Raises:
        InvalidArgument: it is neither a mode nor a `weft.Placement`, or one with CPUs that this process may not use; or
            WEFT_PLACEMENT is no mode.
    """
    if isinstance(placement, str) and placement in MODES:
        return env.placement() if placement == "auto" else placement
    if not isinstance(placement, Placement):
        allowed = ", ".join(f'"{mode}"' for mode in MODES)
        raise InvalidArgument(f"placement is {placement!r}; allowed are {allowed} and a weft.Placement")
    if placement.mode not in MODES:
        raise InvalidArgument(f"placement.mode is {placement.mode!r}; allowed are {', '.join(map(repr, MODES))}")
    cpus = placement.cpus
    if not isinstance(cpus, tuple) or any(type(cpu) is not int or not 0 <= cpu < _MAX_CPU for cpu in cpus):
        raise InvalidArgument(f"placement.cpus is {cpus!r}; allowed is a tuple of CPU numbers from 0")
    usable = binding.unbound_mask()
    if placement.mode != "off" and not set(cpus) <= usable:
        raise InvalidArgument(
            f"placement.cpus is {format_cpus(cpus)}; this process may use CPUs {format_cpus(usable)} only"
        )
    node = placement.memory_node
    if node is not None and (type(node) is not int or node < 0):
        raise InvalidArgument(f"placement.memory_node is {node!r}; allowed are None and node numbers from 0")
    return placement


def resolve(
    placement: str | Placement, *, local_rank: int, num_local_ranks: int, device: torch.device | None = None
) -> Placement:
    """The placement of this rank. Reads the machine for "auto" and "process"; binds nothing.

    device: where the tokens live: of a GPU the cores, memory and NICs near it are taken; of the CPU a share of all.
    """
    if isinstance(placement, Placement):
        return dataclasses.replace(placement, local_rank=local_rank, num_local_ranks=num_local_ranks, applied=())
    if placement == "off":
        return Placement(mode="off", local_rank=local_rank, num_local_ranks=num_local_ranks)
    on_gpu = device is not None and device.type == "cuda"
    index = device.index if on_gpu and device is not None else None
    return _resolve(placement, local_rank, num_local_ranks, index, on_gpu=on_gpu)


def resolve_before_torch(mode: str, *, local_rank: int, num_local_ranks: int) -> Placement:
    """The same for a program that has yet to start: the GPU of rank r is the r-th that it will see, if it sees any."""
    return _resolve(mode, local_rank, num_local_ranks, local_rank, on_gpu=bool(visible_here()))


def _resolve(mode: str, local_rank: int, num_local_ranks: int, index: int | None, *, on_gpu: bool) -> Placement:
    machine = machine_here(with_gpus=on_gpu)
    machine = dataclasses.replace(
        machine, cpus=dataclasses.replace(machine.cpus, allowed=tuple(sorted(binding.unbound_mask())))
    )
    gpus = _gpus(machine, index, local_rank, num_local_ranks) if on_gpu else ()
    found = place(machine, num_local_ranks=num_local_ranks, gpus=gpus)[local_rank]
    return dataclasses.replace(found, mode=mode)


def _gpus(machine: Machine, index: int | None, local_rank: int, num_local_ranks: int) -> tuple[int, ...]:
    """NVML index of the GPU of each local rank, of this one by its device. What the others use is not asked: they are
    taken to use theirs in the same order."""
    visible = visible_here(machine)
    if index is None or index >= len(visible):
        return ()
    mine = visible[index].idx
    in_turn = [visible[rank % len(visible)].idx for rank in range(num_local_ranks)]
    if len(visible) < num_local_ranks <= len(machine.gpus):  # each rank sees its own GPU only
        first = mine - local_rank
        if first >= 0 and first + num_local_ranks <= len(machine.gpus):
            in_turn = [first + rank for rank in range(num_local_ranks)]
    in_turn[local_rank] = mine
    return tuple(in_turn)
