"""A healthy machine for tests of single checks: 2 nodes of 4 cores, 4 GPUs and 4 NICs, each pair below a switch."""

from __future__ import annotations

import dataclasses
from typing import Any

from weft.machine.doctor import CHECKS, Facts, Finding, diagnose
from weft.machine.topology import (
    AccessControl,
    AtomicOps,
    Core,
    Cpus,
    Fabric,
    Gid,
    Gpu,
    GpuDirect,
    GpuPair,
    Limits,
    Machine,
    Nic,
    NicPort,
    NumaNode,
    NvLink,
    PciDevice,
    PcieLink,
    System,
)

NUM_GPUS, NUM_LINKS = 4, 18
NO_ACS = AccessControl(
    source_validation=False, request_redirect=False, completion_redirect=False, upstream_forwarding=False
)
REDIRECT = dataclasses.replace(NO_ACS, request_redirect=True)


def node_of(idx: int) -> int:
    return idx // 2


def path_of(idx: int) -> tuple[str, ...]:
    return (f"pci0000:{idx}0", f"0000:{idx}0:01.0", f"0000:{idx}1:00.0")


def gpu(idx: int, **changes: Any) -> Gpu:
    links = tuple(NvLink(link, True, 4, 26562, None, "switch") for link in range(NUM_LINKS))
    facts: dict[str, Any] = {"name": "NVIDIA H100", "numa_node": node_of(idx), "nvlinks": links, "is_mig": False}
    facts |= {"fabric": Fabric("completed", "success", "00000000-0000-0000-0000-000000000000", 0), "is_c2c": False}
    return Gpu(idx, PciDevice(f"0000:{idx}3:00.0", path=(*path_of(idx), f"0000:{idx}2:00.0")), **facts | changes)


def nic(idx: int, **changes: Any) -> Nic:
    pci = PciDevice(
        f"0000:{idx}4:00.0",
        path=(*path_of(idx), f"0000:{idx}2:01.0"),
        link=PcieLink(32.0, 16, 32.0, 16),
        atomics=AtomicOps(completer_32=True, completer_64=True, completer_cas_128=True),
    )
    gids = (Gid(3, "::ffff:0a00:0001", "ipv4", "RoCE v2", f"eth{idx}"),)
    port = NicPort(1, "ACTIVE", "LinkUp", 400.0, "Ethernet", 0, gids, 9000)
    facts: dict[str, Any] = {"pci": pci, "kind": "roce", "ports": (port,), "numa_node": node_of(idx)}
    facts |= {"card": f"card{idx}", "netdevs": (f"eth{idx}",), "is_virtual_function": False, "atomics": True}
    facts |= {"atomics_path": True, "has_verbs_node": True}
    return Nic(f"mlx5_{idx}", **facts | changes)


def port(**changes: Any) -> tuple[NicPort, ...]:
    return (dataclasses.replace(nic(0).ports[0], **changes),)


def replaced(items: tuple[Any, ...], idx: int, **changes: Any) -> tuple[Any, ...]:
    return (*items[:idx], dataclasses.replace(items[idx], **changes), *items[idx + 1 :])


def machine(**changes: Any) -> Machine:
    nodes = (NumaNode(0, (0, 1, 2, 3), (10, 21)), NumaNode(1, (4, 5, 6, 7), (21, 10)))
    cores = tuple(Core((cpu,), node.idx, node.idx) for node in nodes for cpu in node.cpus)
    cpus = Cpus(tuple(range(8)), tuple(range(8)), None, None, nodes, cores, (), (0, 1), "a CPU", False)
    pairs = tuple(
        GpuPair(one, other, num_nvlinks=NUM_LINKS, p2p_read="ok", p2p_write="ok", p2p_nvlink="ok", p2p_atomics="ok")
        for one in range(NUM_GPUS)
        for other in range(one + 1, NUM_GPUS)
    )
    bridges = {
        address: PciDevice(address, port_type="downstream" if place else "upstream", acs=NO_ACS if place else None)
        for idx in range(NUM_GPUS)
        for place, address in enumerate((f"0000:{idx}1:00.0", f"0000:{idx}2:00.0", f"0000:{idx}2:01.0"))
    }
    facts: dict[str, Any] = {
        "cpus": cpus,
        "gpus": tuple(gpu(idx) for idx in range(NUM_GPUS)),
        "nics": tuple(nic(idx) for idx in range(NUM_GPUS)),
        "pairs": pairs,
        "bridges": bridges,
        "limits": Limits(None, True, 1 << 20, 64 << 30, 64 << 30, (), "madvise", True),
        "gpu_direct": GpuDirect(peermem=True, dma_buf=True, gdrcopy=False, open_kernel_modules=True),
        "system": System("6.8.0", "580.159.04", "13.0", "x86_64", "passthrough", ("nvidia", "nvidia_peermem")),
    }
    return Machine(**facts | changes)


def findings_of(of: Machine, **environment: str) -> list[Finding]:
    return list(diagnose(Facts(of, environment), CHECKS))
