"""Distance of two PCI devices from their paths, as `nvidia-smi topo -m` counts it."""

from __future__ import annotations

from weft.machine.topology.pci_model import Distance, PciDevice

__all__ = ["distance"]


def distance(
    one: PciDevice | None, other: PciDevice | None, one_node: int | None = None, other_node: int | None = None
) -> Distance:
    """How far two devices are apart. `one_node`, `other_node`: their NUMA nodes if better known than by the kernel.

    Two devices below one switch are PIX apart if at most one bridge lies between them (the switch's upstream port and
    the two downstream ports count as the one switch), else PXB.
    """
    if one is None or other is None:
        return Distance.UNKNOWN
    if one.address == other.address:
        return Distance.SELF
    if one.path and other.path and one.path[0] == other.path[0]:
        common = 0
        while common < min(len(one.path), len(other.path)) and one.path[common] == other.path[common]:
            common += 1
        if common == 1:
            return Distance.PHB
        # Below what they share: one downstream port each at most means a single switch.
        return Distance.PIX if max(len(one.path), len(other.path)) - common <= 1 else Distance.PXB
    nodes = [
        one_node if one_node is not None else one.numa_node,
        other_node if other_node is not None else other.numa_node,
    ]
    if None in nodes:
        return Distance.UNKNOWN
    return Distance.NODE if nodes[0] == nodes[1] else Distance.SYS
