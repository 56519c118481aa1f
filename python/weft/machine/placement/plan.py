"""`place`: the placements of all ranks of a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.errors import InvalidArgument
from weft.machine.placement.cores import CoreShare, share_cores
from weft.machine.placement.model import Placement
from weft.machine.placement.rails import Rails, deal_nics
from weft.machine.topology.model import Gpu, Machine

__all__ = ["place", "visible_gpus"]


def place(
    machine: Machine,
    *,
    num_local_ranks: int | None = None,
    gpus: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[Placement, ...]:
    """Where each local rank runs, in rank order. Binds nothing.

    Args:
        machine: from `weft.machine.topology.read`.
        num_local_ranks: default: one a GPU, without GPUs one.
        gpus: NVML index of the GPU of each rank, in turn if there are more ranks; (): ranks use no GPU; default: the
            visible ones (CUDA_VISIBLE_DEVICES of `environment`).
        environment: variables to look at; default: none.

    Raises:
        InvalidArgument: num_local_ranks is below 1, or a GPU does not exist.
    """
    chosen, notes = _gpus_of_ranks(machine, gpus, environment or {})
    if num_local_ranks is None:
        num_local_ranks = max(len(chosen), 1)
    if isinstance(num_local_ranks, bool) or not isinstance(num_local_ranks, int) or num_local_ranks < 1:
        raise InvalidArgument(f"num_local_ranks is {num_local_ranks!r}; allowed is 1 or more")
    owned = [chosen[rank % len(chosen)] if chosen else None for rank in range(num_local_ranks)]
    nodes = _wanted_nodes(machine, owned)
    group = _Group(owned, nodes, share_cores(machine.cpus, nodes), deal_nics(machine), notes)
    return tuple(_placement(machine, rank, group) for rank in range(num_local_ranks))


@dataclass(frozen=True)
class _Group:
    """What was found for all ranks; the lists are by rank."""

    gpus: list[Gpu | None]
    nodes: list[int | None]
    shares: list[CoreShare]
    rails: Rails
    notes: list[str]


def visible_gpus(machine: Machine, environment: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs in the order in which CUDA numbers them for this process, and a warning, "" if there is none.

    CUDA_VISIBLE_DEVICES holds indices or (beginnings of) UUIDs; CUDA ends the list at the first one that does not
    exist. Equal GPUs are numbered in order of PCI addresses, as NVML does.
    """
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return machine.gpus, ""
    found: list[Gpu] = []
    for word in (part.strip() for part in text.split(",")):
        gpu = _named(machine, word)
        if gpu is None:
            if word.startswith("MIG-"):
                return machine.gpus, "CUDA_VISIBLE_DEVICES names MIG instances: GPUs are taken in order"
            break
        found.append(gpu)
    return tuple(found), ""


def _named(machine: Machine, word: str) -> Gpu | None:
    if word.isascii() and word.isdigit() and len(word) < 10:
        return next((gpu for gpu in machine.gpus if gpu.idx == int(word)), None)
    matches = [gpu for gpu in machine.gpus if word.startswith("GPU-") and (gpu.uuid or "").startswith(word)]
    return matches[0] if len(matches) == 1 else None


def _gpus_of_ranks(
    machine: Machine, wanted: Sequence[int] | None, environment: Mapping[str, str]
) -> tuple[tuple[Gpu, ...], list[str]]:
    if wanted is None:
        gpus, note = visible_gpus(machine, environment)
        return gpus, [note] if note else []
    known = {gpu.idx: gpu for gpu in machine.gpus}
    wrong = [idx for idx in wanted if idx not in known]
    if wrong:
        raise InvalidArgument(f"gpus contains {wrong}; this machine's GPUs are {sorted(known)}")
    return tuple(known[idx] for idx in wanted), []


def _wanted_nodes(machine: Machine, owned: list[Gpu | None]) -> list[int | None]:
    """The node of each rank's GPU; ranks without GPUs are dealt out to the nodes with allowed CPUs, in blocks."""
    allowed = set(machine.cpus.allowed)
    usable = [node.idx for node in machine.cpus.cpu_nodes if allowed & set(node.cpus)]
    count = len(owned)
    return [
        gpu.numa_node if gpu is not None else usable[rank * len(usable) // count] if usable else None
        for rank, gpu in enumerate(owned)
    ]


def _placement(machine: Machine, rank: int, group: _Group) -> Placement:
    gpu, node, share = group.gpus[rank], group.nodes[rank], group.shares[rank]
    warnings = [*group.notes, *share.warnings]
    reasons = list(share.reasons)
    if gpu is not None:
        where = "of unknown NUMA node" if node is None else f"on NUMA node {node}"
        reasons.insert(0, f"GPU {gpu.idx} is {where}: {gpu.why.get('numa_node', 'as given')}")
        warnings += group.rails.warnings.get(gpu.idx, [])
    memory_node = node if node is not None else share.node
    allowed = machine.cpus.memory_nodes
    if memory_node is not None and allowed is not None and memory_node not in allowed:
        reasons.append(f"memory is not bound: node {memory_node} is not among the allowed memory nodes")
        memory_node = None
    elif memory_node is not None and len(machine.cpus.cpu_nodes) > 1 and machine.limits.can_bind_memory is False:
        reasons.append("memory will not be bound: the kernel refuses it here (containers need CAP_SYS_NICE)")
        memory_node = None
    return Placement(
        mode="process",
        local_rank=rank,
        num_local_ranks=len(group.gpus),
        gpu=None if gpu is None else gpu.idx,
        gpu_address=None if gpu is None else gpu.pci.address,
        cpus=share.cpus,
        num_cores=share.num_cores,
        node=share.node,
        memory_node=memory_node,
        nics=group.rails.choices.get(-1 if gpu is None else gpu.idx, ()),
        left_out=tuple(group.rails.left_out),
        reasons=tuple(reasons),
        warnings=tuple(warnings),
    )
