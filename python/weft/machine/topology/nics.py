"""RDMA devices and network interfaces from sysfs."""

from __future__ import annotations

import dataclasses

from weft.machine.topology import parse
from weft.machine.topology.model import Cpus
from weft.machine.topology.network import Gid, NetDevice, Nic, NicPort
from weft.machine.topology.pci import address_of, atomics_on_path, read_pci
from weft.machine.topology.pci_model import PciDevice
from weft.machine.topology.tree import Tree

__all__ = ["node_of_device", "read_netdevs", "read_nics", "with_path"]

_INFINIBAND = "/sys/class/infiniband"
_VERBS = "/sys/class/infiniband_verbs"
_NET = "/sys/class/net"
_AMAZON = 0x1D0F
_MELLANOX = 0x15B3
MODELS = {
    0x1017: "ConnectX-5",
    0x1019: "ConnectX-5 Ex",
    0x101A: "ConnectX-5 Ex VF",
    0x101B: "ConnectX-6",
    0x101D: "ConnectX-6 Dx",
    0x101E: "ConnectX VF",
    0x1021: "ConnectX-7",
    0x1023: "ConnectX-8",
    0xA2D6: "BlueField-2",
    0xA2DC: "BlueField-3",
}


def read_nics(tree: Tree, cpus: Cpus) -> tuple[Nic, ...]:
    """Every RDMA device, in natural order of names."""
    verbs = _verbs_nodes(tree)
    return tuple(_nic(tree, cpus, name, verbs) for name in tree.names(_INFINIBAND))


def with_path(nic: Nic, bridges: dict[str, PciDevice]) -> Nic:
    """The NIC with `atomics_path`, which needs the bridges."""
    return nic if nic.pci is None else dataclasses.replace(nic, atomics_path=atomics_on_path(nic.pci, bridges))


def node_of_device(pci: PciDevice | None, cpus: Cpus) -> tuple[int | None, str]:
    """The NUMA node with CPUs near a device, and where that is known from."""
    nodes = {node.idx for node in cpus.cpu_nodes}
    if pci is not None and pci.numa_node in nodes:
        return pci.numa_node, "numa_node of its PCI function"
    if len(nodes) == 1:
        return next(iter(nodes)), "the machine has one NUMA node"
    if pci is not None and pci.local_cpus:
        near = {node.idx for node in cpus.cpu_nodes if set(node.cpus) & set(pci.local_cpus)}
        if len(near) == 1:
            return next(iter(near)), "local_cpulist of its PCI function"
    return None, "numa_node is -1 or missing, local_cpulist does not tell either"


def _nic(tree: Tree, cpus: Cpus, name: str, verbs: dict[str, str] | None) -> Nic:
    where = f"{_INFINIBAND}/{name}"
    address = address_of(tree, f"{where}/device")
    pci = read_pci(tree, address) if address else None
    netdevs = tuple(tree.names(f"{where}/device/net"))
    ports = tuple(_port(tree, f"{where}/ports/{number}", int(number)) for number in _port_numbers(tree, where))
    bonds = [gid.netdev for port in ports for gid in port.gids if gid.netdev]
    bond = next((netdev for netdev in bonds if tree.exists(f"{_NET}/{netdev}/bonding")), None)
    node, node_why = node_of_device(pci, cpus)
    why = {"numa_node": node_why}
    if pci is None:
        why["pci"] = "its device link does not lead to a PCI function"
    atomics = pci.atomics.completer_64 if pci else None
    if atomics is None:
        why["atomics"] = pci.why.get("atomics", "unknown") if pci else "no PCI function"
    node_type = tree.text(f"{where}/node_type")
    guid = _guid(tree.text(f"{where}/sys_image_guid"))
    return Nic(
        name=name,
        pci=pci,
        kind=_kind(pci, ports, node_type),
        ports=ports,
        numa_node=node,
        node_guid=_guid(tree.text(f"{where}/node_guid")),
        card=guid,
        node_type=node_type,
        firmware=tree.text(f"{where}/fw_ver") or None,
        model=MODELS.get(pci.device) if pci and pci.vendor == _MELLANOX and pci.device else None,
        netdevs=netdevs,
        bond=parse.word_list(tree.text(f"{_NET}/{bond}/bonding/slaves")) if bond else (),
        bond_mode=tree.text(f"{_NET}/{bond}/bonding/mode") if bond else None,
        is_virtual_function=_is_virtual_function(pci),
        atomics=atomics,
        has_verbs_node=None if verbs is None else name in verbs and tree.exists(f"/dev/infiniband/{verbs[name]}"),
        why=why,
    )


def _is_virtual_function(pci: PciDevice | None) -> bool | None:
    """A guest does not see a `physfn`: there only the device number tells."""
    if pci is None:
        return None
    if pci.physical_function or (pci.vendor == _MELLANOX and pci.device in (0x1018, 0x101A, 0x101E)):
        return True
    return False if pci.max_vfs is not None else None


def _kind(pci: PciDevice | None, ports: tuple[NicPort, ...], node_type: str | None) -> str:
    if pci is not None and (pci.driver == "efa" or (pci.vendor == _AMAZON and pci.driver is None)):
        return "efa"
    if (node_type or "").startswith("4:"):
        return "iwarp"
    layers = {port.link_layer for port in ports}
    return "infiniband" if "InfiniBand" in layers else "roce" if "Ethernet" in layers else "unknown"


def _port_numbers(tree: Tree, where: str) -> list[str]:
    return [name for name in tree.names(f"{where}/ports") if name.isascii() and name.isdigit() and len(name) < 4]


def _port(tree: Tree, where: str, number: int) -> NicPort:
    gids = []
    for idx in tree.names(f"{where}/gids")[:256]:
        value = tree.text(f"{where}/gids/{idx}")
        kind = parse.gid_kind(value) if value else None
        if value and kind and idx.isascii() and idx.isdigit():
            netdev = tree.text(f"{where}/gid_attrs/ndevs/{idx}") or None
            gids.append(Gid(int(idx), value, kind, tree.text(f"{where}/gid_attrs/types/{idx}") or None, netdev))
    netdev = next((gid.netdev for gid in gids if gid.netdev), None)
    return NicPort(
        number=number,
        state=parse.port_word(tree.text(f"{where}/state")),
        phys_state=parse.port_word(tree.text(f"{where}/phys_state")),
        rate_gbps=parse.leading_number(tree.text(f"{where}/rate")),
        link_layer=tree.text(f"{where}/link_layer") or None,
        lid=parse.integer(tree.text(f"{where}/lid"), 0),
        gids=tuple(gids),
        mtu=parse.integer(tree.text(f"{_NET}/{netdev}/mtu")) if netdev else None,
    )


def _guid(text: str | None) -> str | None:
    """A GUID; all zeros are none."""
    return text if text and text.strip("0:") else None


def _verbs_nodes(tree: Tree) -> dict[str, str] | None:
    """RDMA device -> its uverbs node; None: sysfs has no such class."""
    if not tree.exists(_VERBS):
        return None
    nodes = {}
    for node in tree.names(_VERBS):
        device = tree.text(f"{_VERBS}/{node}/ibdev")
        if device:
            nodes[device] = node
    return nodes


def read_netdevs(tree: Tree, cpus: Cpus) -> tuple[NetDevice, ...]:
    """Network interfaces that hang on a PCI function, and bonds."""
    found = []
    for name in tree.names(_NET):
        where = f"{_NET}/{name}"
        address = address_of(tree, f"{where}/device")
        if address is None and not tree.exists(f"{where}/bonding"):
            continue
        pci = read_pci(tree, address) if address else None
        speed = parse.integer(tree.text(f"{where}/speed"))
        master = tree.real(f"{where}/master").rsplit("/", 1)[-1] if tree.exists(f"{where}/master") else None
        found.append(
            NetDevice(
                name,
                address,
                node_of_device(pci, cpus)[0] if pci else None,
                tree.text(f"{where}/operstate"),
                speed if speed is not None and speed > 0 else None,
                parse.integer(tree.text(f"{where}/mtu")),
                pci.driver if pci else None,
                master,
            )
        )
    return tuple(found)
