"""PCIe devices from sysfs."""

from __future__ import annotations

import re

from weft.machine.topology import parse
from weft.machine.topology.config_space import parse_config
from weft.machine.topology.pci_model import PciDevice, PcieLink
from weft.machine.topology.tree import Tree

__all__ = ["DEVICES", "address_of", "atomics_on_path", "read_bridges", "read_pci"]

DEVICES = "/sys/bus/pci/devices"
_ROOT_BUS = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", re.ASCII)
_MAX_WIDTH = 32  # 255 is what a driver prints for unknown


def read_pci(tree: Tree, address: str) -> PciDevice:
    """The function at an address; all unknown if sysfs does not have it."""
    where = f"{DEVICES}/{address}"
    if not tree.exists(where):
        return PciDevice(address, why={"path": f"{where} is not there"})
    facts = parse_config(tree.read(f"{where}/config"))
    node = parse.integer(tree.text(f"{where}/numa_node"))
    why = {"atomics": facts.atomics_why, "acs": facts.acs_why}
    if node is None or node < 0:
        why["numa_node"] = "the kernel says -1: unknown" if node is not None else tree.why(f"{where}/numa_node")
    physical = tree.real(f"{where}/physfn").rsplit("/", 1)[-1]
    group = tree.real(f"{where}/iommu_group").rsplit("/", 1)[-1]
    return PciDevice(
        address,
        path=_path_above(tree.real(where)),
        class_code=parse.integer(tree.text(f"{where}/class"), 0),
        vendor=parse.integer(tree.text(f"{where}/vendor"), 0),
        device=parse.integer(tree.text(f"{where}/device"), 0),
        numa_node=node if node is not None and node >= 0 else None,
        local_cpus=parse.cpu_list(tree.text(f"{where}/local_cpulist")) or None,  # empty: not known, not "none"
        driver=_driver(tree, where),
        port_type=facts.port_type,
        link=_link(tree, where),
        atomics=facts.atomics,
        acs=facts.acs,
        physical_function=parse.pci_address(physical),
        num_vfs=parse.integer(tree.text(f"{where}/sriov_numvfs")),
        max_vfs=parse.integer(tree.text(f"{where}/sriov_totalvfs")),
        iommu_group=parse.integer(group),
        why={name: text for name, text in why.items() if text},
    )


def read_bridges(tree: Tree, devices: list[PciDevice]) -> dict[str, PciDevice]:
    """Every bridge above the devices, by address."""
    addresses = {step for device in devices for step in device.path[1:]}
    return {address: read_pci(tree, address) for address in sorted(addresses, key=parse.address_key)}


def atomics_on_path(device: PciDevice, bridges: dict[str, PciDevice]) -> bool | None:
    """Whether 64-bit atomics of a device get to its root port, by the kernel's rule (pci_enable_atomic_ops_to_root):
    every switch port routes, no upstream port blocks egress, the root port completes. None: unknown."""
    above = [bridges.get(step) for step in device.path[1:]]
    if not above:
        return None
    answers: list[bool | None] = []
    for idx, bridge in enumerate(above):
        if bridge is None:
            answers.append(None)
        elif idx == 0:
            answers.append(bridge.atomics.completer_64)
        else:
            blocks = bridge.atomics.egress_blocked if bridge.port_type == "upstream" else False
            routes = bridge.atomics.routing
            answers.append(None if routes is None or blocks is None else routes and not blocks)
    return False if False in answers else None if None in answers else True


def address_of(tree: Tree, path: str) -> str | None:
    """The PCI function that a `device` link leads to or below (virtio devices hang on one)."""
    if not tree.exists(path):
        return None
    return next((found for step in reversed(tree.real(path).split("/")) if (found := parse.pci_address(step))), None)


def _path_above(real: str) -> tuple[str, ...]:
    """The root bus and the bridges of a device's real path. What lies before the root bus (ACPI, Hyper-V) is cut."""
    steps = real.split("/")[:-1]
    roots = [idx for idx, step in enumerate(steps) if _ROOT_BUS.fullmatch(step)]
    if not roots:
        return ()
    return (steps[roots[-1]], *(step for step in steps[roots[-1] + 1 :] if parse.pci_address(step)))


def _driver(tree: Tree, where: str) -> str | None:
    return tree.real(f"{where}/driver").rsplit("/", 1)[-1] if tree.exists(f"{where}/driver") else None


def _link(tree: Tree, where: str) -> PcieLink:
    def width(name: str) -> int | None:
        value = parse.integer(tree.text(f"{where}/{name}"))
        return value if value is not None and 0 < value <= _MAX_WIDTH else None

    return PcieLink(
        parse.transfer_rate(tree.text(f"{where}/current_link_speed")),
        width("current_link_width"),
        parse.transfer_rate(tree.text(f"{where}/max_link_speed")),
        width("max_link_width"),
    )
