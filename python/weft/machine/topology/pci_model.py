"""Frozen facts about PCIe devices; part of the model, see `weft.machine.topology.model`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["AccessControl", "AtomicOps", "Distance", "PciDevice", "PcieLink"]


class Distance(enum.IntEnum):
    """How far two devices are apart, in the words of `nvidia-smi topo -m`; smaller is nearer.

    PIX: at most one PCIe bridge between them; PXB: several bridges, no host bridge; PHB: through the host bridge of one
    root bus; NODE: through host bridges of one NUMA node; SYS: across NUMA nodes.
    """

    SELF = 0
    PIX = 1
    PXB = 2
    PHB = 3
    NODE = 4
    SYS = 5
    UNKNOWN = 6


@dataclass(frozen=True)
class PcieLink:
    """A PCIe link: giga-transfers a second and lanes, now and at most. An idle GPU slows its link down."""

    speed_gts: float | None = None
    width: int | None = None
    max_speed_gts: float | None = None
    max_width: int | None = None


@dataclass(frozen=True)
class AtomicOps:
    """PCIe atomics by configuration space (DevCap2, DevCtl2). None: the space or that part of it could not be read."""

    routing: bool | None = None  # ports only
    completer_32: bool | None = None
    completer_64: bool | None = None
    completer_cas_128: bool | None = None
    requester_enabled: bool | None = None
    egress_blocked: bool | None = None


@dataclass(frozen=True)
class AccessControl:
    """PCIe access control services (ACS) switched on in a bridge. `redirect` sends peer traffic up to the root: slow
    between GPU and NIC."""

    source_validation: bool
    request_redirect: bool
    completion_redirect: bool
    upstream_forwarding: bool

    @property
    def redirect(self) -> bool:
        """Whether traffic between two devices below is sent up to the root."""
        return self.request_redirect or self.completion_redirect


@dataclass(frozen=True)
class PciDevice:
    """A PCI function.

    Attributes: `address` as sysfs writes it ("0000:1b:00.0"); `path` what lies above it, from the root bus
    ("pci0000:16") through the bridges down, without itself; empty: unknown. `numa_node` as the kernel says, None for
    its -1. `port_type` "endpoint", "root port", "upstream", "downstream". `acs` None: no such capability, or unknown
    (then `why["acs"]`). `physical_function` of a virtual function (None in a guest); `num_vfs` None: it can't have any.
    """

    address: str
    path: tuple[str, ...] = ()
    class_code: int | None = None
    vendor: int | None = None
    device: int | None = None
    numa_node: int | None = None
    local_cpus: tuple[int, ...] | None = None
    driver: str | None = None
    port_type: str | None = None
    link: PcieLink = PcieLink()
    atomics: AtomicOps = AtomicOps()
    acs: AccessControl | None = None
    physical_function: str | None = None
    num_vfs: int | None = None
    max_vfs: int | None = None
    iommu_group: int | None = None
    why: Mapping[str, str] = field(default_factory=dict)
