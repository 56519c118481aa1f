"""What Weft knows about a machine: frozen dataclasses, filled by `weft.machine.topology.read`.

Unknown is a value: a field that could not be found out is None (for a collection whose absence and emptiness differ,
too), and `why[field]` says why where there is more to say than "not there". `why` may also say where a known value
comes from. Nothing here reads anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.machine.topology.network import NetDevice, Nic
from weft.machine.topology.pci_model import Distance, PciDevice

__all__ = [
    "Core",
    "Cpus",
    "Fabric",
    "Gpu",
    "GpuDirect",
    "GpuPair",
    "HugePages",
    "Limits",
    "Machine",
    "NumaNode",
    "NvLink",
    "System",
    "to_json",
]


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node: its CPUs (none: memory only), distances to all nodes in their order, memory."""

    idx: int
    cpus: tuple[int, ...]
    distances: tuple[int, ...] = ()
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Core:
    """A physical core: its hardware threads, ascending, its NUMA node and package."""

    cpus: tuple[int, ...]
    node: int | None = None
    package: int | None = None


@dataclass(frozen=True)
class Cpus:
    """Processors.

    Attributes: `online` of the machine; `allowed` to this process (affinity mask: the truth for placement);
    `cgroup` the set of the cgroup, None where it has none; `quota` CPUs' worth of time, None: unlimited or unknown;
    `nodes`; `cores` by node, then number; `isolated` taken from the scheduler by isolcpus; `memory_nodes` this
    process may allocate on; `is_virtual` the kernel sees a hypervisor.
    """

    online: tuple[int, ...] = ()
    allowed: tuple[int, ...] = ()
    cgroup: tuple[int, ...] | None = None
    quota: float | None = None
    nodes: tuple[NumaNode, ...] = ()
    cores: tuple[Core, ...] = ()
    isolated: tuple[int, ...] = ()
    memory_nodes: tuple[int, ...] | None = None
    model: str | None = None
    is_virtual: bool | None = None
    why: Mapping[str, str] = field(default_factory=dict)

    @property
    def cpu_nodes(self) -> tuple[NumaNode, ...]:
        """The nodes that have CPUs."""
        return tuple(node for node in self.nodes if node.cpus)

    def node_of(self, cpu: int) -> int | None:
        """The NUMA node of a CPU."""
        return next((node.idx for node in self.nodes if cpu in node.cpus), None)


@dataclass(frozen=True)
class NvLink:
    """One NVLink of a GPU. `remote` is the PCI address at the other end, `remote_type` "gpu", "switch" or another word;
    `speed_mbps` in each direction, in 10^6 bytes a second; `version` as NVML numbers them: 6 is NVLink 4."""

    idx: int
    active: bool | None = None
    version: int | None = None
    speed_mbps: int | None = None
    remote: str | None = None
    remote_type: str | None = None


@dataclass(frozen=True)
class Fabric:
    """What NVML says of the NVLink fabric. GPUs share a domain if cluster_uuid and clique_id are both equal and the
    former is not zero; `status` counts only where `state` is "completed"."""

    state: str | None = None
    status: str | None = None
    cluster_uuid: str | None = None
    clique_id: int | None = None
    health_mask: int | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes: `idx` in NVML's order; `numa_node` with CPUs, resolved (see `why`); `cpus` and `memory_nodes` near it
    as NVML says, of the host, not of the container; `own_node` the memory-only node of the GPU itself (Grace);
    `nvlinks` None: unknown; `is_c2c` GPU and CPU are on a coherent link, so that PCIe says nothing of its bandwidth.
    """

    idx: int
    pci: PciDevice
    name: str | None = None
    uuid: str | None = None
    numa_node: int | None = None
    cpus: tuple[int, ...] | None = None
    memory_nodes: tuple[int, ...] | None = None
    own_node: int | None = None
    memory_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    nvlinks: tuple[NvLink, ...] | None = None
    fabric: Fabric = Fabric()
    is_c2c: bool | None = None
    is_mig: bool | None = None
    why: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_active_links(self) -> int | None:
        """NVLinks that are up."""
        return None if self.nvlinks is None else sum(link.active is True for link in self.nvlinks)


@dataclass(frozen=True)
class GpuPair:
    """Two GPUs, `first` < `second`: PCIe distance, NVLinks between them (through switches too), and what peer access
    NVML reports: "ok" or another word, None unknown."""

    first: int
    second: int
    distance: Distance = Distance.UNKNOWN
    num_nvlinks: int | None = None
    p2p_read: str | None = None
    p2p_write: str | None = None
    p2p_nvlink: str | None = None
    p2p_atomics: str | None = None


@dataclass(frozen=True)
class HugePages:
    """Huge pages of one size."""

    size_kib: int
    total: int | None = None
    free: int | None = None


@dataclass(frozen=True)
class Limits:
    """Limits of this process and of shared memory. `memlock_bytes` None with `memlock_unlimited` False: unknown."""

    memlock_bytes: int | None = None
    memlock_unlimited: bool | None = None
    max_files: int | None = None
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    huge_pages: tuple[HugePages, ...] = ()
    transparent_huge_pages: str | None = None
    can_bind_memory: bool | None = None
    why: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuDirect:
    """Ways by which a NIC reaches GPU memory; one suffices. `dma_buf` is inferred from driver and kernel: asking CUDA
    would start it."""

    peermem: bool | None = None
    dma_buf: bool | None = None
    gdrcopy: bool | None = None
    open_kernel_modules: bool | None = None
    why: Mapping[str, str] = field(default_factory=dict)

    @property
    def available(self) -> bool | None:
        """Whether one of the two ways is there; None: unknown."""
        if self.peermem or self.dma_buf:
            return True
        return False if self.peermem is False and self.dma_buf is False else None


@dataclass(frozen=True)
class System:
    """Kernel, driver, IOMMU. `iommu` "off", "passthrough", "translating"; `imex_channel` whether one is there;
    `modules` of GPU and RDMA that are loaded or built in, None: unknown."""

    kernel: str | None = None
    driver: str | None = None
    cuda_driver: str | None = None
    architecture: str | None = None
    iommu: str | None = None
    modules: tuple[str, ...] | None = None
    imex_channel: bool | None = None
    why: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """All that is known about one machine.

    Attributes: `root` where it was read from; `bridges` by address: every bridge above a GPU or NIC; `switches` PCI
    addresses of NVSwitches; `problems` what went wrong while reading, a line each (for a person); `recorded` None for a
    live machine, else the recording's own description.
    """

    root: str = "/"
    cpus: Cpus = Cpus()
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[GpuPair, ...] = ()
    nics: tuple[Nic, ...] = ()
    netdevs: tuple[NetDevice, ...] = ()
    bridges: Mapping[str, PciDevice] = field(default_factory=dict)
    switches: tuple[str, ...] = ()
    limits: Limits = Limits()
    gpu_direct: GpuDirect = GpuDirect()
    system: System = System()
    nvml: str | None = None  # why there is no NVML, None: it answered
    problems: tuple[str, ...] = ()
    recorded: str | None = None

    def pair(self, one: int, other: int) -> GpuPair | None:
        """The facts about two GPUs, in any order; None for one GPU or unknown numbers."""
        low, high = sorted((one, other))
        return next((pair for pair in self.pairs if (pair.first, pair.second) == (low, high)), None)

    def nic_distance(self, gpu: Gpu, nic: Nic) -> Distance:
        """How far a NIC is from a GPU."""
        from weft.machine.topology.distance import distance

        return distance(gpu.pci, nic.pci, gpu.numa_node, nic.numa_node)


def to_json(value: Any) -> Any:
    """A dataclass, or a tuple or mapping of them, as lists, dicts, texts and numbers; distances by name."""
    if isinstance(value, Distance):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: to_json(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [to_json(entry) for entry in value]
    return value
