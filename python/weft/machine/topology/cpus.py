"""Processors and NUMA nodes from sysfs, and what of them this process may use."""

from __future__ import annotations

import re
from typing import Any

from weft.machine.topology import parse
from weft.machine.topology.model import Core, Cpus, NumaNode
from weft.machine.topology.tree import Tree

__all__ = ["PROCESS_FILE", "read_cpus"]

PROCESS_FILE = "/weft/process.json"  # in a recording: what the recorded process was told about itself
_CPU = "/sys/devices/system/cpu"
_NODE = "/sys/devices/system/node"
_CGROUP_SETS = (
    "/sys/fs/cgroup/cpuset.cpus.effective",
    "/sys/fs/cgroup/cpuset/cpuset.effective_cpus",
    "/sys/fs/cgroup/cpuset/cpuset.cpus",
)


def read_cpus(tree: Tree) -> Cpus:
    """The processors. Without `node/` in sysfs all CPUs are of one node, 0."""
    process = tree.json(PROCESS_FILE)
    status = parse.key_values(tree.text("/proc/self/status"))
    why: dict[str, str] = {}
    online = parse.cpu_list(tree.text(f"{_CPU}/online"))
    nodes = _nodes(tree)
    if online is None:
        online = tuple(sorted({cpu for node in nodes for cpu in node.cpus}))
        why["online"] = f"{_CPU}/online: {tree.why(f'{_CPU}/online')}; taken from the nodes"
    allowed = _cpu_set(process.get("allowed"))
    if allowed is None:
        allowed = parse.cpu_list(status.get("Cpus_allowed_list"))
    if allowed is None:
        allowed = online
        why["allowed"] = "neither affinity mask nor /proc/self/status: all CPUs that are online"
    online = online or allowed
    if not nodes and online:
        nodes = (NumaNode(0, online, (10,)),)
        why["nodes"] = "no NUMA nodes in sysfs: one node with all CPUs"
    information = _processor(tree)
    memory_nodes = _cpu_set(process.get("memory_nodes"))
    if memory_nodes is None:
        memory_nodes = parse.cpu_list(status.get("Mems_allowed_list"))
    return Cpus(
        online=online,
        allowed=allowed,
        cgroup=_cgroup_set(tree, process),
        quota=_quota(tree, process),
        nodes=nodes,
        cores=_cores(tree, online, nodes),
        isolated=parse.cpu_list(tree.text(f"{_CPU}/isolated")) or (),
        memory_nodes=memory_nodes,
        model=information.get("model name"),
        is_virtual=_is_virtual(tree, information),
        why=why,
    )


def _nodes(tree: Tree) -> tuple[NumaNode, ...]:
    listed = parse.cpu_list(tree.text(f"{_NODE}/online"))
    if listed is None:
        found = [re.fullmatch(r"node(\d{1,5})", name) for name in tree.names(_NODE)]
        listed = tuple(sorted(int(match[1]) for match in found if match))
    nodes = []
    for idx in listed[:1024]:
        cpus = parse.cpu_list(tree.text(f"{_NODE}/node{idx}/cpulist"))
        distances = [parse.integer(word) for word in parse.word_list(tree.text(f"{_NODE}/node{idx}/distance"))]
        known = tuple(value for value in distances if value is not None)
        nodes.append(NumaNode(idx, cpus or (), known if len(known) == len(distances) else (), _memory(tree, idx)))
    return tuple(nodes)


def _memory(tree: Tree, idx: int) -> int | None:
    for line in (tree.text(f"{_NODE}/node{idx}/meminfo") or "").splitlines():
        match = re.fullmatch(r"Node \d+ MemTotal:\s+(\d{1,15}) kB", line.strip(), re.ASCII)
        if match:
            return int(match[1]) * 1024
    return None


def _cores(tree: Tree, online: tuple[int, ...], nodes: tuple[NumaNode, ...]) -> tuple[Core, ...]:
    """CPUs by physical core; one whose siblings are unknown is a core of its own."""
    node_of = {cpu: node.idx for node in nodes for cpu in node.cpus}
    known, taken, cores = set(online), set[int](), []
    for cpu in online:
        if cpu in taken:
            continue
        where = f"{_CPU}/cpu{cpu}/topology"
        siblings = parse.cpu_list(tree.text(f"{where}/thread_siblings_list")) or ()
        # A sibling list that lacks its own CPU, or crosses nodes, is nonsense.
        members = {other for other in siblings if other in known and node_of.get(other) == node_of.get(cpu)} - taken
        members = members | {cpu} if cpu in siblings else {cpu}
        taken |= members
        package = parse.integer(tree.text(f"{where}/physical_package_id"))
        cores.append(Core(tuple(sorted(members)), node_of.get(cpu), package))
    return tuple(sorted(cores, key=lambda core: (core.node is None, core.node or 0, core.cpus)))


def _cpu_set(value: Any) -> tuple[int, ...] | None:
    return parse.cpu_list(value) if isinstance(value, str) else None


def _cgroup_set(tree: Tree, process: dict[str, Any]) -> tuple[int, ...] | None:
    """The cpuset of the process's cgroup; an empty file or none means that no set is imposed."""
    found = _cpu_set(process.get("cgroup_cpus"))
    for path in _CGROUP_SETS:
        found = found or parse.cpu_list(tree.text(path))
    return found or None


def _quota(tree: Tree, process: dict[str, Any]) -> float | None:
    """CPUs' worth of time that the cgroup may use in a period."""
    words = parse.word_list(process.get("cgroup_quota") if isinstance(process.get("cgroup_quota"), str) else None)
    words = words or parse.word_list(tree.text("/sys/fs/cgroup/cpu.max"))
    if not words:
        old = "/sys/fs/cgroup/cpu/cpu.cfs_"
        words = tuple(tree.text(f"{old}{name}_us") or "" for name in ("quota", "period"))
    numbers = [parse.integer(word) for word in words]
    if len(numbers) != 2 or numbers[0] is None or not numbers[1] or numbers[0] <= 0 or numbers[1] < 0:
        return None
    return numbers[0] / numbers[1]


def _processor(tree: Tree) -> dict[str, str]:
    return parse.key_values((tree.text("/proc/cpuinfo") or "").split("\n\n")[0])


def _is_virtual(tree: Tree, information: dict[str, str]) -> bool | None:
    if "flags" in information:
        return "hypervisor" in information["flags"].split()
    return True if tree.exists("/sys/hypervisor/type") else None
