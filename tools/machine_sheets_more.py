"""More made-up machines: dual-port RoCE, Grace, Google's VMs, a VM without NIC, containers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from machine_sheets import (
    RDMA_MODULES,
    UNKNOWN_LINK,
    Sheet,
    gpu_at,
    nic_at,
    roce_gids,
    roce_nic,
    switched,
    two_sockets,
)
from machine_tree import NVIDIA, Pci, Port, Tree

from weft.topology.tree import to_hex


def dual_port() -> Sheet:
    """Eight dual-port cards, no bonds."""
    tree = Tree()
    two_sockets(tree, 64, "Intel(R) Xeon(R) Platinum 8592+")
    tree.system(modules=RDMA_MODULES)
    for idx in range(8):
        bus = 0x18 + 0x18 * idx
        above_nic, above_gpu = switched(bus)
        tree.bridges(above_nic, idx // 4)
        tree.bridges(above_gpu, idx // 4)
        tree.gpu(gpu_at(f"0000:{bus + 3:02x}:00.0", above_gpu, idx // 4))
        card = tree.guid()
        for function in (0, 1):
            pci = nic_at(f"0000:{bus:02x}:00.{function}", above_nic, idx // 4, class_code=0x020000)
            netdev, host = f"ens{bus}f{function}np{function}", 2 * idx + function + 1
            gids = roce_gids(tree, netdev, host)
            port = Port("200 Gb/sec (4X HDR)", "Ethernet", lid="0x0", gids=gids)
            tree.nic(f"mlx5_{2 * idx + function}", pci, port, card=card, netdev=netdev)
    tree.nvml()
    return Sheet(
        tree,
        "Eight dual-port RoCE cards without bonds: 16 RDMA devices of 200 Gb/s, two on each card",
        "One RDMA device a port, equal system image GUIDs on a card, cores and the distances GPU-NIC are from kernel "
        "documents and a listing in a public pull request.",
        "Addresses, bridges, names of interfaces, GIDs, rates, NVML values.",
    )


def bonded() -> Sheet:
    """The same cards, each with its ports bonded."""
    tree = Tree()
    two_sockets(tree, 64, "Intel(R) Xeon(R) Platinum 8592+")
    tree.system(modules=RDMA_MODULES)
    for idx in range(8):
        bus = 0x18 + 0x18 * idx
        above_nic, above_gpu = switched(bus)
        tree.bridges(above_nic, idx // 4)
        tree.bridges(above_gpu, idx // 4)
        tree.gpu(gpu_at(f"0000:{bus + 3:02x}:00.0", above_gpu, idx // 4))
        bond = f"bond{idx}"
        first = nic_at(f"0000:{bus:02x}:00.0", above_nic, idx // 4, class_code=0x020000)
        port = Port("200 Gb/sec (4X HDR)", "Ethernet", lid="0x0", gids=roce_gids(tree, bond, idx + 1))
        tree.nic(f"mlx5_bond_{idx}", first, port)
        slaves = []
        for function in (0, 1):
            pci = replace(first, address=f"0000:{bus:02x}:00.{function}")
            slaves.append(f"ens{bus}f{function}np{function}")
            tree.interface(slaves[-1], tree.pci(pci), speed=200000, master=bond)
        where = f"/sys/devices/virtual/net/{bond}"
        tree.put(f"/sys/class/net/{bond}", {"@link": where})
        tree.files(where, {"mtu": "4200", "operstate": "up", "speed": "400000"})
        bonding = {"mode": "802.3ad 4", "slaves": " ".join(slaves), "xmit_hash_policy": "layer3+4 1"}
        tree.files(f"{where}/bonding", bonding)
    tree.nvml()
    return Sheet(
        tree,
        "Eight dual-port RoCE cards, the ports of each bonded (RoCE LAG): 8 RDMA devices",
        "Names mlx5_bond_N, what becomes of the single devices, bond mode and hash, cores and distances are from "
        "kernel documents, a vendor's how-to and listings in public pull requests.",
        "Addresses, bridges, names of interfaces, GIDs, NVML values; the rate is that of one member.",
    )


def grace() -> Sheet:
    """A tray of GB200 NVL72."""
    tree = Tree()
    empty = dict.fromkeys(range(2, 34), "")
    tree.processors({0: "0-71", 1: "72-143", **empty}, lambda cpu: cpu, "Neoverse-V2")
    tree.put("/proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd sve2")
    tree.process("0-143", architecture="aarch64", memory_nodes="0-33")
    tree.system(modules=RDMA_MODULES, kernel="6.8.0-1024-nvidia-64k")
    tree.put("/proc/devices", "Character devices:\n234 nvidia-caps-imex-channels")
    tree.put("/dev/nvidia-caps-imex-channels/channel0", {})
    for node in range(34):
        kib = {0: 500, 1: 500, 2: 186, 10: 186, 18: 186, 26: 186}.get(node, 0) << 20
        tree.put(f"/sys/devices/system/node/node{node}/meminfo", f"Node {node} MemTotal:       {kib} kB")
    fabric = {"state": "completed", "status": "success", "clique_id": 4026, "health_mask": 0xAA}
    fabric["cluster_uuid"] = "00000000-0000-4000-8000-0000000000cc"
    domains = (0x8, 0x9, 0x18, 0x19)
    for idx, domain in enumerate(domains):
        above = [f"pci{domain:04x}:00", f"{domain:04x}:00:00.0"]
        tree.bridges(above, idx // 2)
        function = gpu_at(f"{domain:04x}:01:00.0", above, idx // 2)
        near = "0,3-9,11-17" if idx < 2 else "1,19-25,27-33"
        own = (2, 10, 18, 26)[idx]
        facts: dict[str, Any] = {"name": "NVIDIA GB200", "compute_capability": [10, 0], "memory_bytes": 199_447_543_808}
        tree.gpu(replace(function, device=0x2941), own_node=own, memory_nodes=near, is_c2c=True, fabric=fabric, **facts)
    cards = (("mlx5_0", 0x0, 0), ("mlx5_1", 0x2, 0), ("mlx5_4", 0x10, 1), ("mlx5_5", 0x12, 1))
    for name, domain, node in cards:
        above = [f"pci{domain:04x}:00", f"{domain:04x}:00:00.0"]
        tree.bridges(above, node)
        tree.nic(name, nic_at(f"{domain:04x}:03:00.0", above, node), Port(), netdev=f"ibP{domain}p3s0")
    for names, domain, node in ((("mlx5_2", "mlx5_3"), 0x6, 0), (("mlx5_6", "mlx5_7"), 0x16, 1)):
        above, card = [f"pci{domain:04x}:00", f"{domain:04x}:00:00.0"], tree.guid()
        tree.bridges(above, node)
        for function, name in enumerate(names):
            pci = nic_at(f"{domain:04x}:03:00.{function}", above, node, device=0xA2DC, class_code=0x020000)
            netdev = f"enP{domain}p3s0f{function}np{function}"
            gids = roce_gids(tree, netdev, 64 + 2 * node + function)
            port = Port("400 Gb/sec (4X NDR)", "Ethernet", lid="0x0", gids=gids)
            tree.nic(name, pci, port, card=card, netdev=netdev)
    tree.nvml()
    return Sheet(
        tree,
        "Tray of a GB200 NVL72: 2 Grace, 4 GPUs that are memory nodes themselves, 4 ConnectX-7, 2 BlueField-3",
        "Cores, 34 NUMA nodes, CPU and memory affinity, the GPUs' own nodes, names and roles of the first Grace's NICs "
        "are from listings in public issues and pull requests.",
        "PCI addresses, names on the second Grace, NUMA nodes of the NICs, one thread a core, clique and UUID of the "
        "fabric, BlueField ports at 400 Gb/s, memory sizes.",
    )


def google(kind: str) -> Sheet:
    """Google's VMs: "ultra", "mega", and "a4" with siblings numbered next to each other."""
    tree = Tree()
    flags = "fpu sse2 hypervisor"
    if kind == "a4":
        model = "INTEL(R) XEON(R) PLATINUM 8581C"
        tree.processors({0: "0-111", 1: "112-223"}, lambda cpu: cpu ^ 1, model, flags=flags)
        tree.process("0-223")
    else:
        two_sockets(tree, 52 if kind == "mega" else 56, "Intel(R) Xeon(R) Platinum 8481C", flags=flags)
    tree.system(modules=RDMA_MODULES if kind != "mega" else ("nvidia", "nvidia_uvm", "gve"))
    buses = (0x0C, 0x14, 0x40, 0x47, 0x8A, 0x91, 0xBD, 0xC4)
    for idx, bus in enumerate(buses):
        above = [f"pci0000:{bus - 2:02x}", f"0000:{bus - 2:02x}:00.0"]
        node = idx // 4
        if kind == "ultra":  # GPU and NIC below one switch
            above = [f"pci0000:{bus - 4:02x}", f"0000:{bus - 4:02x}:00.0", f"0000:{bus - 3:02x}:00.0"]
            nic_above = [*above, f"0000:{bus - 2:02x}:01.0"]
            above = [*above, f"0000:{bus - 2:02x}:00.0"]
            tree.bridges(nic_above, node)
            virtual = nic_at(
                f"0000:{bus + 1:02x}:00.0", nic_above, node, device=0x101E, max_vfs=None, link=UNKNOWN_LINK
            )
            roce_nic(tree, f"mlx5_{idx}", virtual, f"gpu{idx}rdma0", idx + 1)
        tree.bridges(above, node)
        function = gpu_at(f"0000:{bus:02x}:00.0", above, node)
        if kind == "a4":
            tree.gpu(replace(function, device=0x2901), name="NVIDIA B200", compute_capability=[10, 0])
            card_bus = 0x13 if node == 0 else 0x90
            slot = [f"pci0000:{card_bus:02x}"]
            nic = nic_at(f"0000:{card_bus:02x}:00.{idx % 4}", slot, node, max_vfs=None, link=UNKNOWN_LINK)
            roce_nic(tree, f"mlx5_{idx}", nic, f"gpu{idx}rdma0", idx + 1)
        else:
            tree.gpu(function, **({"name": "NVIDIA H200"} if kind == "ultra" else {}))
        if kind == "mega":
            gvnic = Pci(f"0000:{bus + 2:02x}:00.0", [f"pci0000:{bus + 2:02x}"], 0x1AE0, 0x42, 0x020000, node, "gvnic")
            tree.interface(f"eth{idx + 1}", tree.pci(replace(gvnic, link=UNKNOWN_LINK)), speed=200000, mtu=8244)
    tree.nvml()
    known = {
        "ultra": "Eight NICs of 400 Gb/s over RoCE, one aligned with each GPU, virtual functions: Google's documents.",
        "mega": "Eight ports of 200 Gb/s without RDMA: Google's documents.",
        "a4": "Siblings c and c xor 1, seven of the GPUs' addresses and four functions of a NIC on one bus are from a "
        "public pull request about this guest.",
    }
    assumed = {
        "ultra": "Core numbers (sibling c + 112), addresses, bridges, names, GIDs, NVML values.",
        "mega": "Core numbers (sibling c + 104), addresses, interface names, NVML values.",
        "a4": "The eighth GPU, the second node's NIC, that each function is a rail of its own, names, GIDs, no bridges "
        "above the NICs, NVML values.",
    }
    titles = {
        "ultra": "Google A3 Ultra: a VM with one RoCE function beside each GPU",
        "mega": "Google A3 Mega: a VM without any RDMA device",
        "a4": "Google A4: a VM whose CPUs number siblings next to each other, and four rails on one bus",
    }
    return Sheet(tree, titles[kind], known[kind], assumed[kind])


def no_nic() -> Sheet:
    """Four H200 in a microVM."""
    tree = Tree()
    tree.processors({0: "0-63"}, lambda cpu: cpu, "Intel(R) Xeon(R) Platinum 8481C", flags="fpu sse2 hypervisor")
    tree.process("0-63", memory_nodes="0", memlock_bytes=8 << 20)
    tree.system(modules=("nvidia", "nvidia_uvm", "nvidia_modeset"), kernel="6.18.44")
    for idx in range(4):
        function = Pci(f"0000:00:{5 + idx:02x}.0", ["pci0000:00"], NVIDIA, 0x2335, 0x030200, -1, "nvidia", UNKNOWN_LINK)
        facts: dict[str, Any] = {"name": "NVIDIA H200", "memory_bytes": 150_754_820_096, "memory_nodes": None}
        facts["fabric"] = {"state": "not supported"}
        tree.gpu(replace(function, config=to_hex(bytes.fromhex("de103523").ljust(64, b"\0"))), cpus="0-63", **facts)
    tree.nvml(driver="580.159.04")
    return Sheet(
        tree,
        "Four H200 in a microVM: one NUMA node of 64 cores, no NIC",
        "GPUs, 18 NVLinks each, one node with all 64 cores, no NIC, driver: measured on such a machine.",
        "PCI addresses, NUMA node -1, 64 bytes of configuration space, no visible threads, no fabric registration, "
        "modules: no file of such a machine had been recorded when this was written.",
    )


CONTAINERS = {
    "container-half-cores": ("half of each socket, siblings kept", "0-27,56-83,112-139,168-195", "0-1"),
    "container-first-threads": ("the first thread of every core", "0-111", "0-1"),
    "container-one-socket": ("socket 0 only", "0-55,112-167", "0"),
    "container-odd-cpus": ("odd CPUs", ",".join(str(cpu) for cpu in range(1, 224, 2)), "0-1"),
    "container-quota": ("all CPUs, but only 112 CPUs' worth of time", "0-223", "0-1"),
    "container-one-cpu": ("one CPU", "5", "0"),
    "container-six-cores-a-node": ("six cores of each node, first threads", "0-5,56-61", "0-1"),
    "container-three-cores-a-node": ("three cores of each node, first threads", "0-2,56-58", "0-1"),
    "launcher-one-core": ("a launcher's mask of one core, no cpuset", "14,126", "0-1"),
}


def container(name: str) -> Sheet:
    """The DGX H100 with 112 cores, seen from a container; only what differs."""
    what, allowed, memory = CONTAINERS[name]
    tree = Tree()
    tree.node_cpus = {0: "0-55,112-167", 1: "56-111,168-223"}
    is_container = name.startswith("container")
    tree.process(allowed, memory_nodes=memory, memlock_bytes=64 << 10 if is_container else "unlimited")
    if is_container:
        tree.put("/sys/fs/cgroup/cpuset.cpus.effective", allowed)
    tree.put("/sys/fs/cgroup/cpu.max", "11200000 100000" if name == "container-quota" else "max 100000")
    tree.nodes["@base"] = "../dgx-h100-112-cores/tree.json"
    return Sheet(
        tree,
        f"DGX H100 with 112 cores, of which a process may use: {what}",
        "The machine below it (see dgx-h100-112-cores); that sysfs shows the host and the affinity mask the truth is "
        "the kernel's behaviour.",
        "The sets themselves are invented to test every rule of the division.",
    )


MORE: dict[str, Callable[[], Sheet]] = {
    "dual-port-roce": dual_port,
    "dual-port-roce-bond": bonded,
    "gb200-nvl72-tray": grace,
    "gcp-a3-mega": lambda: google("mega"),
    "gcp-a3-ultra": lambda: google("ultra"),
    "gcp-a4": lambda: google("a4"),
    "h200-vm-no-nic": no_nic,
    **{name: (lambda name=name: container(name)) for name in CONTAINERS},
}
