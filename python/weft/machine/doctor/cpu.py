"""Where the host threads of the ranks may run: cores near their GPUs, enough of them, and time on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from weft.machine.doctor.model import Answer, Check, Facts, ok, skip, warn
from weft.machine.topology import Gpu
from weft.machine.topology.parse import format_cpus

__all__ = ["CHECKS"]

_MAX_LIST = 60  # characters
_WRONG_NODE = "users lost up to a third of their bandwidth to a process on the wrong socket"


def _allowed(facts: Facts) -> Iterable[Answer]:
    cpus = facts.machine.cpus
    if not cpus.allowed or not cpus.online:
        return [skip("the CPUs of this machine are not known")]
    text = f"{len(cpus.allowed)} of {len(cpus.online)} CPUs allowed"
    if len(cpus.allowed) < len(cpus.online):
        listed = format_cpus(cpus.allowed)
        text += f": {listed}" if len(listed) <= _MAX_LIST else f": {listed[:_MAX_LIST]}..."
    return [ok(text)]


def _siblings(facts: Facts) -> Iterable[Answer]:
    cpus = facts.machine.cpus
    allowed = set(cpus.allowed)
    wide = [core for core in cpus.cores if len(core.cpus) > 1 and allowed & set(core.cpus)]
    if not wide:
        return [skip("one hardware thread a core")]
    split = [core for core in wide if not set(core.cpus) <= allowed]
    if split:
        return [
            ok(f"SMT siblings of {len(split)} of {len(wide)} cores are not allowed: threads of others may run there")
        ]
    return [ok("SMT siblings are allowed together")]


def _gpu_nodes(facts: Facts) -> Iterable[Answer]:
    if not facts.gpus:
        return [skip("no GPU")]
    nodes = facts.machine.cpus.cpu_nodes
    if len(nodes) < 2:
        return [ok("one NUMA node: every core is equally near")]
    unknown = [gpu.idx for gpu in facts.gpus if gpu.numa_node is None]
    if unknown:
        cost = f"all CPUs are used for them; {_WRONG_NODE}"
        fix = "nvidia-smi topo -m  # then give the nodes yourself: weft.Placement(cpus=..., memory_node=...)"
        return [warn(f"the NUMA node of {_gpus(unknown)} is not known", cost=cost, fix=fix)]
    text = "; ".join(f"{_gpus(gpu.idx for gpu in gpus)} on node {node}" for node, gpus in _by_node(facts).items())
    return [ok(text)]


def _gpu_cores(facts: Facts) -> Iterable[Answer]:
    cpus = facts.machine.cpus
    if not facts.gpus:
        return [skip("no GPU")]
    if not cpus.allowed or not cpus.nodes:
        return [skip("the allowed CPUs or their nodes are not known")]
    if _is_launchers_mask(facts):
        return [skip("a launcher's mask: it says nothing of the cores that other ranks have")]
    answers, parts = [], []
    for node, gpus in _by_node(facts).items():
        all_near = set(next((entry.cpus for entry in cpus.nodes if entry.idx == node), cpus.allowed))
        near = all_near & set(cpus.allowed)
        num_cores = sum(bool(near & set(core.cpus)) for core in cpus.cores) or len(near)
        name = _gpus(gpu.idx for gpu in gpus)
        fix = f"docker run --cpuset-cpus={format_cpus(all_near | set(cpus.allowed))} ...  # or the launcher's mask"
        if not near:
            found = f"no allowed CPU on node {node}: ranks of {name} run across the socket link"
            answers.append(warn(found, cost=_WRONG_NODE, fix=fix))
        elif num_cores < len(gpus):
            found = f"on node {node} {num_cores} allowed core{'s' * (num_cores > 1)} for {len(gpus)} ranks ({name})"
            answers.append(warn(found, cost="they share CPUs: a thread that spins starves the others", fix=fix))
        each = num_cores // len(gpus)
        parts.append(f"{each} core{'s' * (each != 1)} a rank on node {node}")
    if not parts:
        return [skip("the NUMA nodes of the GPUs are not known")]
    return answers or [ok("; ".join(parts))]


def _is_launchers_mask(facts: Facts) -> bool:
    """Whether this process is bound to one core of several that its container, or the machine, has."""
    cpus = facts.machine.cpus
    allowed = set(cpus.allowed)
    return len(facts.gpus) > 1 and _num_cores(facts) == 1 and allowed < set(cpus.cgroup or cpus.online)


def _num_cores(facts: Facts) -> int:
    """Cores of which this process may use a part."""
    allowed = set(facts.machine.cpus.allowed)
    return sum(bool(allowed & set(core.cpus)) for core in facts.machine.cpus.cores)


def _single_core(facts: Facts) -> Iterable[Answer]:
    cpus = facts.machine.cpus
    if not cpus.cores or not cpus.allowed:
        return [skip("the mask or the cores are not known")]
    if _is_launchers_mask(facts):
        found = f"the mask of this process is one core ({format_cpus(cpus.allowed)})"
        cost = "Weft's and NCCL's threads share it; NCCL intersects its own mask with it"
        fix = "mpirun --bind-to numa ...  # or --bind-to none; for NCCL alone: export NCCL_IGNORE_CPU_AFFINITY=1"
        return [warn(found, cost=cost, fix=fix)]
    if _num_cores(facts) == 1:
        return [ok(f"one core ({format_cpus(cpus.allowed)}) is allowed: all threads of this process share it")]
    return [ok("this process is not bound to a single core")]


def _quota(facts: Facts) -> Iterable[Answer]:
    cpus = facts.machine.cpus
    if cpus.quota is None:
        return [ok("no CPU quota")]
    if cpus.quota < max(len(facts.gpus), 1):
        found = f"a quota of {cpus.quota:g} CPUs' time for {max(len(facts.gpus), 1)} ranks"
        cost = "every rank is stopped for a part of each period of 100 ms"
        return [warn(found, cost=cost, fix="docker run --cpuset-cpus=... in place of --cpus=...")]
    return [ok(f"a quota of {cpus.quota:g} CPUs' time: more busy threads than that are stopped now and then")]


def _memory_nodes(facts: Facts) -> Iterable[Answer]:
    cpus = facts.machine.cpus
    if len(cpus.cpu_nodes) < 2:
        return [skip("one NUMA node")]
    if cpus.memory_nodes is None:
        return [skip("the allowed memory nodes are not known")]
    missing = sorted({gpu.numa_node for gpu in facts.gpus if gpu.numa_node is not None} - set(cpus.memory_nodes))
    if missing:
        fix = f"docker run --cpuset-mems={format_cpus({*cpus.memory_nodes, *missing})} ..."
        return [
            warn(f"no memory may be taken on node {_list(missing)}", cost="host memory lies on the far socket", fix=fix)
        ]
    if facts.machine.limits.can_bind_memory is False:
        return [ok("memory can't be bound to a node here (docker run --cap-add SYS_NICE): first touch places it")]
    return [ok(f"memory nodes {format_cpus(cpus.memory_nodes)} allowed")]


def _by_node(facts: Facts) -> dict[int, list[Gpu]]:
    """GPUs by the NUMA node of their cores; on a machine of one node all are there."""
    nodes = facts.machine.cpus.cpu_nodes
    found: defaultdict[int, list[Gpu]] = defaultdict(list)
    for gpu in facts.gpus:
        node = gpu.numa_node if gpu.numa_node is not None or len(nodes) != 1 else nodes[0].idx
        if node is not None:
            found[node].append(gpu)
    return dict(sorted(found.items()))


def _gpus(numbers: Iterable[int]) -> str:
    listed = format_cpus(numbers)
    return f"GPU {listed}" if listed.isdecimal() else f"GPUs {listed}"


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


CHECKS = (
    Check(
        "cpu", "allowed-cpus", "Ranks are placed on the CPUs that this process may use, never beyond them.", _allowed
    ),
    Check("cpu", "smt", "Two threads of one core share its caches and units.", _siblings),
    Check("cpu", "gpu-numa", "The near node is found by it; a kernel that does not know says -1.", _gpu_nodes),
    Check(
        "cpu",
        "gpu-cores",
        "Each rank's threads belong on cores of its GPU's node, and not on each other's.",
        _gpu_cores,
    ),
    Check("cpu", "launcher-mask", "Launchers bind ranks narrowly; Weft keeps such a mask.", _single_core),
    Check("cpu", "quota", "A quota is time, not a set of CPUs: threads that poll use it up.", _quota),
    Check(
        "cpu", "memory-nodes", "Host buffers belong on the node of the GPU and the NIC that read them.", _memory_nodes
    ),
)
