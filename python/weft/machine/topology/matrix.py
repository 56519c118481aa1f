"""How far GPUs and NICs are apart, as `nvidia-smi topo -m` writes it."""

from __future__ import annotations

from dataclasses import dataclass

from weft.machine.topology.model import Machine
from weft.machine.topology.pci_model import Distance

__all__ = ["LEGEND", "Matrix", "matrix"]

LEGEND = {
    "NV#": "NVLink, # links (through switches too)",
    "PIX": "at most one PCIe bridge between",
    "PXB": "several PCIe bridges, no host bridge",
    "PHB": "through the host bridge of one root bus",
    "NODE": "through host bridges of one NUMA node",
    "SYS": "across NUMA nodes",
    "?": "not known",
}


@dataclass(frozen=True)
class Matrix:
    """Words of `LEGEND`: `gpu_gpu[i][j]` of two GPUs ("X": one and the same), `gpu_nic[i][j]` of a GPU and a NIC, both
    in the machine's order."""

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    gpu_gpu: tuple[tuple[str, ...], ...]
    gpu_nic: tuple[tuple[str, ...], ...]


def matrix(machine: Machine) -> Matrix:
    """The distances of a machine's GPUs and NICs."""
    numbers = [gpu.idx for gpu in machine.gpus]
    return Matrix(
        gpus=tuple(f"GPU{number}" for number in numbers),
        nics=tuple(nic.name for nic in machine.nics),
        gpu_gpu=tuple(tuple(_between(machine, one, other) for other in numbers) for one in numbers),
        gpu_nic=tuple(tuple(_word(machine.nic_distance(gpu, nic)) for nic in machine.nics) for gpu in machine.gpus),
    )


def _between(machine: Machine, one: int, other: int) -> str:
    if one == other:
        return "X"
    pair = machine.pair(one, other)
    if pair is None:
        return "?"
    return f"NV{pair.num_nvlinks}" if pair.num_nvlinks else _word(pair.distance)


def _word(distance: Distance) -> str:
    return "?" if distance is Distance.UNKNOWN else distance.name
