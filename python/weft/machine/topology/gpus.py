"""GPUs: what NVML says (live or recorded, the same JSON), joined with sysfs; from sysfs alone where there is no NVML.

The JSON: {"error": null or why there is none, "driver": text, "cuda_driver": text, "gpus": [...], "pairs": [...]}, see
`weft.machine.topology.live_nvml`, which writes it.
"""

from __future__ import annotations

from typing import Any

from weft.machine.topology import parse
from weft.machine.topology.distance import distance
from weft.machine.topology.model import Cpus, Fabric, Gpu, GpuPair, NvLink
from weft.machine.topology.nics import node_of_device
from weft.machine.topology.pci import DEVICES, read_pci
from weft.machine.topology.pci_model import Distance, PciDevice
from weft.machine.topology.tree import Tree

__all__ = ["NVML_FILE", "find_switches", "read_gpus", "read_pairs"]

NVML_FILE = "/weft/nvml.json"
_NVIDIA = 0x10DE
_GPU_CLASSES = (0x0300, 0x0302)
_SWITCH_CLASS = 0x0680
_MAX_LINKS = 64
_ANCESTORS = {
    0: Distance.SELF,
    10: Distance.PIX,
    20: Distance.PXB,
    30: Distance.PHB,
    40: Distance.NODE,
    50: Distance.SYS,
}


def read_gpus(tree: Tree, cpus: Cpus, nvml: dict[str, Any]) -> tuple[Gpu, ...]:
    """The GPUs in NVML's order; without NVML those of sysfs in order of addresses."""
    entries = _objects(nvml.get("gpus"))
    if not entries:
        return tuple(
            _gpu(tree, cpus, {"pci": address}, idx)
            for idx, address in enumerate(_find(tree, _GPU_CLASSES))
            if nvml.get("error") or "gpus" not in nvml
        )
    return tuple(_gpu(tree, cpus, entry, idx) for idx, entry in enumerate(entries))


def find_switches(tree: Tree) -> tuple[str, ...]:
    """PCI addresses of NVSwitches."""
    return tuple(_find(tree, (_SWITCH_CLASS,)))


def _find(tree: Tree, classes: tuple[int, ...]) -> list[str]:
    found = []
    for name in tree.names(DEVICES):
        where = f"{DEVICES}/{name}"
        if parse.integer(tree.text(f"{where}/vendor"), 0) != _NVIDIA or not parse.pci_address(name):
            continue
        code = parse.integer(tree.text(f"{where}/class"), 0)
        if code is not None and code >> 8 in classes:
            found.append(name)
    return sorted(found, key=parse.address_key)


def _gpu(tree: Tree, cpus: Cpus, entry: dict[str, Any], idx: int) -> Gpu:
    address = parse.pci_address(entry.get("pci"))
    pci = read_pci(tree, address) if address else PciDevice("unknown", why={"path": "NVML gave no PCI address"})
    affinity = parse.cpu_list(entry["cpus"]) if isinstance(entry.get("cpus"), str) else None
    node, node_why = _node(pci, cpus, affinity)
    capability = entry.get("compute_capability")
    errors = entry.get("errors")
    why = {str(name): str(text) for name, text in errors.items()} if isinstance(errors, dict) else {}
    return Gpu(
        idx=idx,
        pci=pci,
        name=_word(entry.get("name")),
        uuid=_word(entry.get("uuid")),
        numa_node=node,
        cpus=affinity,
        memory_nodes=parse.cpu_list(entry["memory_nodes"]) if isinstance(entry.get("memory_nodes"), str) else None,
        own_node=_natural(entry.get("own_node")),
        memory_bytes=_natural(entry.get("memory_bytes")),
        compute_capability=_capability(capability),
        nvlinks=_links(entry.get("nvlinks")),
        fabric=_fabric(entry.get("fabric")),
        is_c2c=_flag(entry.get("is_c2c")),
        is_mig=_flag(entry.get("is_mig")),
        why={**why, "numa_node": node_why},
    )


def _node(pci: PciDevice, cpus: Cpus, affinity: tuple[int, ...] | None) -> tuple[int | None, str]:
    """The node with CPUs: the kernel's word, else NVML's affinity if it is within one node."""
    node, why = node_of_device(pci, cpus)
    if node is not None or not affinity:
        return node, why
    near = {entry.idx for entry in cpus.cpu_nodes if set(entry.cpus) & set(affinity)}
    if len(near) == 1:
        return next(iter(near)), "CPU affinity of NVML"
    return None, f"{why}; NVML's CPU affinity spans {len(near)} nodes"


def _links(value: Any) -> tuple[NvLink, ...] | None:
    """A list of links; {"count": n, ...} stands for n equal ones."""
    if isinstance(value, dict):
        value = [{**value, "idx": idx} for idx in range(min(_natural(value.get("count")) or 0, _MAX_LINKS))]
    return tuple(_link(entry, idx) for idx, entry in enumerate(_objects(value))) if isinstance(value, list) else None


def _link(entry: dict[str, Any], idx: int) -> NvLink:
    number = _natural(entry.get("idx"))
    return NvLink(
        idx if number is None else number,
        _flag(entry.get("active")),
        _natural(entry.get("version")),
        _natural(entry.get("speed_mbps")),
        parse.pci_address(entry.get("remote")),
        _word(entry.get("remote_type")),
    )


def _fabric(entry: Any) -> Fabric:
    if not isinstance(entry, dict):
        return Fabric()
    return Fabric(
        _word(entry.get("state")),
        _word(entry.get("status")),
        _word(entry.get("cluster_uuid")),
        _natural(entry.get("clique_id")),
        _natural(entry.get("health_mask")),
    )


def read_pairs(gpus: tuple[Gpu, ...], nvml: dict[str, Any]) -> tuple[GpuPair, ...]:
    """Every pair of GPUs. NVLinks count if both ends have them, directly or through a switch."""
    listed = {(_natural(entry.get("a")), _natural(entry.get("b"))): entry for entry in _objects(nvml.get("pairs"))}
    pairs = []
    for first in gpus:
        for second in gpus[first.idx + 1 :]:
            entry = listed.get((first.idx, second.idx)) or listed.get((second.idx, first.idx)) or {}
            near = distance(first.pci, second.pci, first.numa_node, second.numa_node)
            if near is Distance.UNKNOWN:
                near = _ANCESTORS.get(_natural(entry.get("ancestor")) or -1, Distance.UNKNOWN)
            p2p = entry.get("p2p")
            said = p2p if isinstance(p2p, dict) else {}
            words = [_word(said.get(name)) for name in ("read", "write", "nvlink", "atomics")]
            pairs.append(GpuPair(first.idx, second.idx, near, _common_links(first, second), *words))
    return tuple(pairs)


def _common_links(first: Gpu, second: Gpu) -> int | None:
    if first.nvlinks is None or second.nvlinks is None:
        return None

    def towards(gpu: Gpu, other: Gpu) -> int:
        active = [link for link in gpu.nvlinks or () if link.active]
        return sum(link.remote_type == "switch" or link.remote == other.pci.address for link in active)

    return min(towards(first, second), towards(second, first))


def _objects(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)][:4096] if isinstance(value, list) else []


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _natural(value: Any) -> int | None:
    number = parse.real_integer(value)
    return number if number is not None and number >= 0 else None


def _capability(value: Any) -> tuple[int, int] | None:
    if not isinstance(value, list) or len(value) != 2:
        return None
    major, minor = (_natural(part) for part in value)
    return None if major is None or minor is None else (major, minor)
