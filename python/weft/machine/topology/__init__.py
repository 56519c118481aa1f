"""What the machine is made of: GPUs, processors, NICs, PCIe, limits. `read()` returns a `Machine`.

Everything is read below a `root=`: "/" for this machine, or a recording made by `weft topo --record DIR`. Reading never
raises: what is missing, refused or nonsense is unknown (None), with the reason beside it. Neither torch nor the native
module is imported, CUDA is not started.
"""

from __future__ import annotations

from weft.machine.topology.model import (
    Core,
    Cpus,
    Fabric,
    Gpu,
    GpuDirect,
    GpuPair,
    HugePages,
    Limits,
    Machine,
    NumaNode,
    NvLink,
    System,
    to_json,
)
from weft.machine.topology.network import Gid, NetDevice, Nic, NicPort
from weft.machine.topology.pci_model import AccessControl, AtomicOps, Distance, PciDevice, PcieLink
from weft.machine.topology.reader import read
from weft.machine.topology.recorder import record

__all__ = [
    "AccessControl",
    "AtomicOps",
    "Core",
    "Cpus",
    "Distance",
    "Fabric",
    "Gid",
    "Gpu",
    "GpuDirect",
    "GpuPair",
    "HugePages",
    "Limits",
    "Machine",
    "NetDevice",
    "Nic",
    "NicPort",
    "NumaNode",
    "NvLink",
    "PciDevice",
    "PcieLink",
    "System",
    "read",
    "record",
    "to_json",
]
