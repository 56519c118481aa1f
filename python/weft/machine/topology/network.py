"""Frozen facts about RDMA devices and network interfaces; part of the model, see `weft.machine.topology.model`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.machine.topology.pci_model import PciDevice

__all__ = ["Gid", "NetDevice", "Nic", "NicPort"]


@dataclass(frozen=True)
class Gid:
    """An address of a port. `type` "IB/RoCE v1", "RoCE v2" or None; `kind` "link-local", "ipv4", "other"."""

    idx: int
    value: str
    kind: str
    type: str | None = None
    netdev: str | None = None


@dataclass(frozen=True)
class NicPort:
    """A port. `state` "ACTIVE", "DOWN", "INIT", ...; a rate is printed by dead ports, too. `link_layer` "InfiniBand",
    "Ethernet", "Unspecified" (EFA)."""

    number: int
    state: str | None = None
    phys_state: str | None = None
    rate_gbps: float | None = None
    link_layer: str | None = None
    lid: int | None = None
    gids: tuple[Gid, ...] = ()
    mtu: int | None = None  # of its netdev, bytes

    @property
    def is_active(self) -> bool | None:
        """Whether traffic can flow; None: unknown."""
        return None if self.state is None else self.state == "ACTIVE"


@dataclass(frozen=True)
class Nic:
    """An RDMA device.

    Attributes: `kind` "infiniband", "roce", "efa", "iwarp" or "unknown"; `card` equal for the devices of one card (its
    system image GUID); `atomics_path` None: unknown, else whether atomics of the card's
    sizes get from it to the root; `bond` slaves if this is one device over both ports (RoCE LAG); `has_verbs_node`
    whether /dev/infiniband/uverbsN of it is there.
    """

    name: str
    pci: PciDevice | None = None
    kind: str = "unknown"
    ports: tuple[NicPort, ...] = ()
    numa_node: int | None = None
    node_guid: str | None = None
    card: str | None = None
    node_type: str | None = None
    firmware: str | None = None
    model: str | None = None
    netdevs: tuple[str, ...] = ()
    bond: tuple[str, ...] = ()
    bond_mode: str | None = None
    is_virtual_function: bool | None = None
    atomics: bool | None = None
    atomics_path: bool | None = None
    has_verbs_node: bool | None = None
    why: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_active(self) -> bool:
        """Whether at least one port is known to be up."""
        return any(port.is_active for port in self.ports)

    @property
    def rate_gbps(self) -> float | None:
        """The sum over active ports; None: unknown."""
        rates = [port.rate_gbps for port in self.ports if port.is_active and port.rate_gbps]
        return sum(rates) if rates else None


@dataclass(frozen=True)
class NetDevice:
    """A network interface that hangs on a PCI function, with or without an RDMA device."""

    name: str
    pci_address: str | None = None
    numa_node: int | None = None
    state: str | None = None
    speed_mbps: int | None = None
    mtu: int | None = None
    driver: str | None = None
    master: str | None = None
