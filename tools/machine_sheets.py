"""The made-up machines under tests/data/machines, written from descriptions of real ones.

Each function returns a tree and the text of its README: where the facts come from, and what is assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from machine_tree import AMAZON, COMPLETES_ALL, MELLANOX, NVIDIA, Link, Pci, Port, Tree, config_space

RDMA_MODULES = ("nvidia", "nvidia_uvm", "nvidia_peermem", "mlx5_core", "mlx5_ib", "ib_core", "ib_uverbs")
FULL_LINK = Link()
UNKNOWN_LINK = Link(None, 0)


@dataclass(frozen=True)
class Sheet:
    """A machine: its tree, one line, what is known from where, what is assumed."""

    tree: Tree
    title: str
    known: str
    assumed: str


def gpu_at(address: str, above: list[str], node: int, link: Link = FULL_LINK) -> Pci:
    """An H100."""
    return Pci(address, above, NVIDIA, 0x2330, 0x030200, node, "nvidia", link, config_space("endpoint", COMPLETES_ALL))


def nic_at(address: str, above: list[str], node: int, **other: Any) -> Pci:
    """A ConnectX-7 that can do atomics."""
    space = config_space("endpoint", COMPLETES_ALL, 1 << 6)
    function = Pci(address, above, MELLANOX, 0x1021, 0x020700, node, "mlx5_core", Link(), space, 16)
    return replace(function, **other)


def roce_gids(tree: Tree, netdev: str, host: int) -> list[tuple[str, str, str]]:
    """Link-local and IPv4 GIDs, each as RoCE v1 and v2."""
    local = f"fe80:0000:0000:0000:{tree.guid()}"
    mapped = f"0000:0000:0000:0000:0000:ffff:0a00:{host:04x}"
    return [(value, kind, netdev) for value in (local, mapped) for kind in ("IB/RoCE v1", "RoCE v2")]


def two_sockets(tree: Tree, cores: int, model: str, *, threads: int = 2, flags: str = "fpu sse2") -> None:
    """Two nodes; with two threads a core the sibling of c is c + 2 * cores."""
    first, second = f"0-{cores - 1}", f"{cores}-{2 * cores - 1}"
    if threads == 2:
        first, second = f"{first},{2 * cores}-{3 * cores - 1}", f"{second},{3 * cores}-{4 * cores - 1}"
        tree.processors({0: first, 1: second}, lambda cpu: (cpu + 2 * cores) % (4 * cores), model, flags=flags)
    else:
        tree.processors({0: first, 1: second}, lambda cpu: cpu, model, flags=flags)
    tree.process(f"0-{2 * cores * threads - 1}")


def switched(bus: int) -> tuple[list[str], list[str]]:
    """What lies above the NIC on `bus` and above the GPU on `bus` + 3: one switch, behind it a second one."""
    nic = [f"pci0000:{bus - 3:02x}", f"0000:{bus - 3:02x}:01.0", f"0000:{bus - 2:02x}:00.0", f"0000:{bus - 1:02x}:00.0"]
    gpu = [*nic[:3], f"0000:{bus - 1:02x}:01.0", f"0000:{bus + 1:02x}:00.0", f"0000:{bus + 2:02x}:00.0"]
    return nic, gpu


def dgx(cores: int) -> Sheet:
    """DGX H100 with so many cores a socket."""
    tree = Tree()
    two_sockets(tree, cores, "Intel(R) Xeon(R) Platinum 8480C")
    tree.system(modules=RDMA_MODULES)
    compute = {"mlx5_0": 0x18, "mlx5_3": 0x40, "mlx5_4": 0x4F, "mlx5_5": 0x5E}
    compute |= {"mlx5_6": 0x9A, "mlx5_9": 0xC0, "mlx5_10": 0xCE, "mlx5_11": 0xDC}
    for idx, (name, bus) in enumerate(compute.items()):
        above_nic, above_gpu = switched(bus)
        node = idx // 4
        tree.bridges(above_nic, node)
        tree.bridges(above_gpu, node)
        tree.nic(name, nic_at(f"0000:{bus:02x}:00.0", above_nic, node), Port(), netdev=f"ibp{bus}s0")
        tree.gpu(gpu_at(f"0000:{bus + 3:02x}:00.0", above_gpu, node))
    for node, bus, names in ((0, 0x29, ("mlx5_1", "mlx5_2")), (1, 0xAA, ("mlx5_7", "mlx5_8"))):
        above = [f"pci0000:{bus - 1:02x}", f"0000:{bus - 1:02x}:01.0"]
        tree.bridges(above, node)
        card = tree.guid()
        for function, name in enumerate(names):
            port = Port(rate="200 Gb/sec (4X HDR)")
            address, netdev = f"0000:{bus:02x}:00.{function}", f"ibp{bus}s0f{function}"
            tree.nic(name, nic_at(address, above, node), port, card=card, netdev=netdev)
    for idx in range(4):
        bus = 0xE1 + idx
        above = [f"pci0000:{bus:02x}"]
        tree.pci(Pci(f"0000:{bus:02x}:02.0", above, NVIDIA, 0x22A3, 0x068000, 1, "nvidia"))
    tree.nvml()
    return Sheet(
        tree,
        f"DGX H100, 2 sockets of {cores} cores: 8 GPUs, 8 ConnectX-7 for them, 2 dual-port cards for storage",
        "NIC names, their buses and the distances of `nvidia-smi topo -m` (GPU-NIC PXB for one NIC each, else NODE or "
        "SYS) are from NVIDIA's user guide and a published listing. The listing has 56 cores a socket; 48 are the "
        "number that Weft's first placement was specified with, so there is a tree of each.",
        "GPU addresses (bus of the NIC + 3), the bridges and their numbers, rates of the storage ports, GUIDs, "
        "configuration spaces (all atomics, no ACS redirection), NVML values, unlimited locked memory.",
    )


def azure() -> Sheet:
    """Azure ND H100 v5."""
    tree = Tree("/sys/devices/LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/00000000-0000-4000-8000-0000000000aa")
    two_sockets(tree, 48, "Intel(R) Xeon(R) Platinum 8480C", threads=1, flags="fpu sse2 hypervisor")
    tree.system(modules=RDMA_MODULES)
    domains = (0x1, 0x2, 0x3, 0x8, 0x9, 0xA, 0xB, 0xC)
    for idx, domain in enumerate(domains):
        tree.gpu(gpu_at(f"{domain:04x}:00:00.0", [f"pci{domain:04x}:00"], idx // 4, UNKNOWN_LINK))
    for idx in range(8):
        domain = 0x101 + idx
        function = nic_at(f"{domain:04x}:00:00.0", [f"pci{domain:04x}:00"], idx // 4, device=0x101E, link=UNKNOWN_LINK)
        tree.nic(f"mlx5_ib{idx}", replace(function, max_vfs=None), Port(), netdev=f"ib{idx}")
    space = config_space("endpoint", 0)
    ethernet = nic_at("14a7:00:02.0", ["pci14a7:00"], 0, device=0x101A, class_code=0x020000, link=UNKNOWN_LINK)
    gids = roce_gids(tree, "eth1", 4)
    port = Port("100 Gb/sec (4X EDR)", "Ethernet", lid="0x0", gids=gids)
    tree.nic("mlx5_an0", replace(ethernet, config=space, max_vfs=None), port, netdev="eth1")
    tree.nvml()
    return Sheet(
        tree,
        "Azure ND H100 v5: a VM, every GPU and NIC alone in its PCI domain",
        "Two nodes of 48 cores, addresses of GPUs and NICs, the AtomicOpsCap of both kinds of NIC (InfiniBand: 32bit+ "
        "64bit+ 128bitCAS+; Ethernet: 32bit- 64bit- 128bitCAS-) and the placement are from Azure's blog and topology "
        "file.",
        "One thread a core, which name has which address, rates, unknown link speed of virtual functions, the Hyper-V "
        "part of the paths, GIDs, NVML values.",
    )


def aws() -> Sheet:
    """AWS p5: 32 EFA devices."""
    tree = Tree()
    two_sockets(tree, 48, "AMD EPYC 7R13 Processor", flags="fpu sse2 hypervisor")
    tree.system(modules=("nvidia", "nvidia_uvm", "efa", "ib_core", "ib_uverbs"))
    for idx in range(8):
        first = 79 + 17 * idx
        for bus in range(first, first + 4):
            link = Link(16.0, 8)
            function = Pci(
                f"0000:{bus:02x}:00.0", [f"pci0000:{bus:02x}"], AMAZON, 0xEFA2, 0x020000, idx // 4, "efa", link
            )
            gids = [(f"fe80:0000:0000:0000:{tree.guid()}", "", "")]
            port = Port("100 Gb/sec (4X EDR)", "Unspecified", lid="0x0", gids=gids)
            tree.nic(f"rdmap{bus}s0", replace(function, config=config_space("endpoint")), port)
        bus = first + 4
        tree.gpu(gpu_at(f"0000:{bus:02x}:00.0", [f"pci0000:{bus:02x}"], idx // 4))
    real = tree.pci(Pci("0000:1a:00.0", ["pci0000:1a"], AMAZON, 0xEC20, 0x020000, 0, "ena", Link(16.0, 8)))
    tree.interface("ens32", real, speed=100000, mtu=9001)
    tree.nvml()
    return Sheet(
        tree,
        "AWS p5.48xlarge: 32 EFA devices of 100 Gb/s, four for each GPU",
        "Device names (the bus in decimal), rates and their pairing with GPUs are from the topology file of AWS's "
        "libfabric plugin; 192 vCPUs from public lists.",
        "Node numbers, sibling of c is c + 96, GPU addresses (the bus after its four EFAs), no visible bridges, so "
        "that every NIC of a node ties, EFA's sysfs values, NVML values.",
    )


def two_per_nic() -> Sheet:
    """Two GPUs and one NIC under each switch."""
    tree = Tree()
    two_sockets(tree, 32, "Intel(R) Xeon(R) Platinum 8358", flags="fpu sse2 hypervisor")
    tree.system(modules=RDMA_MODULES)
    groups = ((0x02, 0, "pci0000:00", "02.0"), (0x09, 0, "pci0000:08", "01.0"))
    groups += ((0x82, 1, "pci0000:80", "02.0"), (0x89, 1, "pci0000:88", "01.0"))
    for idx, (bus, node, root, slot) in enumerate(groups):
        top = [root, f"{root[3:]}:{slot}", f"0000:{bus:02x}:00.0"]
        for at, slot_below in ((bus + 2, 0), (bus + 3, 1), (bus + 4, 2)):
            above = [*top, f"0000:{bus + 1:02x}:{slot_below:02x}.0"]
            tree.bridges(above, node)
            if slot_below < 2:
                tree.gpu(gpu_at(f"0000:{at:02x}:00.0", above, node, Link(16.0, 16)))
            else:
                nic = nic_at(f"0000:{at:02x}:00.0", above, node, device=0x101B, link=Link(16.0, 16))
                tree.nic(f"mlx5_{idx}", nic, Port("200 Gb/sec (4X HDR)"), netdev=f"ibp{at}s0")
    tree.nvml()
    return Sheet(
        tree,
        "Two GPUs a NIC: four PCIe switches, each with two GPUs and one 200 Gb/s NIC",
        "The shape, the addresses on NUMA node 1 and 200 Gb/s over Gen4 x16 are from a log in a public issue.",
        "Node 0 by the same pattern, the second NIC of each switch left out, 2 sockets of 32 cores with two threads, "
        "bridges, GUIDs, configuration spaces, NVML values.",
    )


def two_per_nic_uneven() -> Sheet:
    """8 GPUs, four of which have a NIC on their switch, and one NIC next to nobody."""
    tree = Tree()
    two_sockets(tree, 28, "Intel(R) Xeon(R) Gold 6348")
    tree.system(modules=RDMA_MODULES)
    name_of = {0: "mlx5_0", 2: "mlx5_1", 4: "mlx5_2", 6: "mlx5_4"}
    lonely = ["pci0000:e0", "0000:e0:01.0"]
    for idx in range(8):
        bus = 0x18 + 0x18 * idx
        node = idx // 4
        root = [f"pci0000:{bus:02x}", f"0000:{bus:02x}:01.0", f"0000:{bus + 1:02x}:00.0"]
        gpu_above, nic_above = [*root, f"0000:{bus + 2:02x}:00.0"], [*root, f"0000:{bus + 2:02x}:01.0"]
        tree.bridges(gpu_above, node)
        tree.gpu(gpu_at(f"0000:{bus + 3:02x}:00.0", gpu_above, node), name="NVIDIA H20")
        if idx in name_of:
            tree.bridges(nic_above, node)
            roce_nic(tree, name_of[idx], nic_at(f"0000:{bus + 4:02x}:00.0", nic_above, node), f"ens{bus}np0", idx + 1)
    tree.bridges(lonely, 1)
    roce_nic(tree, "mlx5_3", nic_at("0000:e1:00.0", lonely, 1), "ens225np0", 99)
    tree.nvml()
    return Sheet(
        tree,
        "Eight GPUs of which four have a NIC on their switch; one NIC is next to no GPU",
        "Cores and the matrix GPU x NIC (PIX for GPU 0, 2, 4, 6, else NODE or SYS) are from a public issue.",
        "Names, addresses, bridges, RoCE at 400 Gb/s, that NIC 3 is for management, NVML values.",
    )


def roce_nic(tree: Tree, name: str, function: Pci, netdev: str, host: int, rate: str = "400 Gb/sec (4X NDR)") -> None:
    """An Ethernet port with the four usual GIDs."""
    port = Port(rate, "Ethernet", lid="0x0", gids=roce_gids(tree, netdev, host))
    tree.nic(name, replace(function, class_code=0x020000), port, netdev=netdev)


def port_down() -> Sheet:
    """The nearest NIC of most GPUs has no cable."""
    tree = Tree()
    two_sockets(tree, 48, "Intel(R) Xeon(R) Platinum 8468")
    tree.system(modules=RDMA_MODULES)
    nearest = (0, 1, 2, 7, 8, 9, 10, 13)
    cabled = (1, 7, 9, 13)
    for idx in range(8):
        above_nic, above_gpu = switched(0x18 + 0x18 * idx)
        tree.bridges(above_nic, idx // 4)
        tree.bridges(above_gpu, idx // 4)
        down = Port("10 Gb/sec (4X SDR)", state="1: DOWN", phys_state="2: Polling", lid="0xffff")
        nic = nic_at(f"0000:{0x18 + 0x18 * idx:02x}:00.0", above_nic, idx // 4)
        tree.nic(f"mlx5_{nearest[idx]}", nic, Port() if nearest[idx] in cabled else down)
        tree.gpu(gpu_at(f"0000:{0x1B + 0x18 * idx:02x}:00.0", above_gpu, idx // 4))
    tree.nvml()
    return Sheet(
        tree,
        "Eight GPUs, eight NICs of which four have a cable",
        "Cores, which NICs have a cable, and what a port without one prints are from a public issue.",
        "The pairs of node 1, addresses, bridges (so PXB in place of the issue's PIX); the issue's other six devices "
        "without a cable are left out; NVML values.",
    )


SHEETS: dict[str, Callable[[], Sheet]] = {
    "aws-p5": aws,
    "azure-nd-h100-v5": azure,
    "dgx-h100": lambda: dgx(48),
    "dgx-h100-112-cores": lambda: dgx(56),
    "two-gpus-per-nic": two_per_nic,
    "two-gpus-per-nic-port-down": port_down,
    "two-gpus-per-nic-uneven": two_per_nic_uneven,
}
