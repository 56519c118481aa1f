"""Which cores each rank gets.

1. The pool of a rank: the allowed CPUs of its GPU's NUMA node, by physical core, allowed siblings together.
2. Every rank of a node gets floor(cores / ranks) of them, contiguous in core order; what is left over stays unused.
3. Fewer cores than ranks on a node: its ranks share them all.
4. If any rank's pool is empty, or its node unknown, all ranks divide the whole allowed set: no two overlap.
5. An inherited mask that is no wider than a rank's share of the whole machine was made for this rank: it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.machine.topology.model import Cpus
from weft.machine.topology.parse import format_cpus

__all__ = ["CoreShare", "share_cores"]


@dataclass
class CoreShare:
    """The cores of one rank: `cpus` all their allowed threads, `node` of the cores, None if they are of several."""

    cpus: tuple[int, ...] = ()
    num_cores: int = 0
    node: int | None = None
    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


_CoreCpus = tuple[int, ...]


def share_cores(cpus: Cpus, nodes: Sequence[int | None]) -> list[CoreShare]:
    """A share for each rank; `nodes[rank]` is the node wanted, None: unknown. Empty shares if nothing is known."""
    usable, reason = _usable(cpus)
    cores = _cores_within(cpus, usable)
    if not cores or not nodes:
        return [CoreShare(warnings=["the allowed CPUs are unknown: nothing is bound"]) for _ in nodes]
    by_node = {idx: [core for node, core in cores if node == idx] for idx in set(nodes) if idx is not None}
    kept = _kept_mask(cpus, cores, nodes)
    if kept is not None:
        return [CoreShare(kept.cpus, kept.num_cores, kept.node, list(kept.reasons), list(kept.warnings)) for _ in nodes]
    if any(node is None or not by_node[node] for node in nodes):
        shares = _divide_all(cpus, cores, nodes, by_node)
    else:
        shares = _divide_nodes(cpus, by_node, nodes)
    for share in shares:
        share.reasons += [reason] if reason else []
    return shares


def _usable(cpus: Cpus) -> tuple[frozenset[int], str]:
    """The allowed CPUs, without isolated ones that nobody asked for."""
    allowed = frozenset(cpus.allowed)
    isolated = allowed & frozenset(cpus.isolated)
    if isolated and isolated != allowed and allowed >= frozenset(cpus.online):
        return allowed - isolated, f"CPUs {format_cpus(isolated)} are isolated (isolcpus): left to those who name them"
    return allowed, ""


def _cores_within(cpus: Cpus, usable: frozenset[int]) -> list[tuple[int | None, _CoreCpus]]:
    """(node, threads) of each core, in order of node and first thread."""
    found = [(core.node, tuple(cpu for cpu in core.cpus if cpu in usable)) for core in cpus.cores]
    known = {cpu for _, threads in found for cpu in threads}
    found += [(None, (cpu,)) for cpu in sorted(usable - known)]
    return [(node, threads) for node, threads in found if threads]


def _kept_mask(cpus: Cpus, cores: list[tuple[int | None, _CoreCpus]], nodes: Sequence[int | None]) -> CoreShare | None:
    """The inherited mask if it is narrower than what the machine (or the container's set) would give a rank."""
    whole = frozenset(cpus.cgroup or cpus.online) & frozenset(cpus.online or cpus.allowed)
    if len(nodes) < 2 or not frozenset(cpus.allowed) < whole:
        return None
    num_all = sum(1 for core in cpus.cores if whole & set(core.cpus))
    if len(cores) > max(num_all // len(nodes), 1):
        return None
    mask = tuple(sorted(cpu for _, threads in cores for cpu in threads))
    on = {node for node, _ in cores}
    share = CoreShare(mask, len(cores), next(iter(on)) if len(on) == 1 else None)
    share.reasons.append(f"this process was bound to CPUs {format_cpus(mask)} before: the mask is kept")
    if len(cores) == 1:
        share.warnings.append(
            f"only one core, CPUs {format_cpus(mask)}, is allowed: ranks or threads that share it starve each other; "
            "NCCL cuts its own masks to it, too, unless NCCL_IGNORE_CPU_AFFINITY=1"
        )
    return share


def _divide_nodes(cpus: Cpus, by_node: dict[int, list[_CoreCpus]], nodes: Sequence[int | None]) -> list[CoreShare]:
    """Each node's cores among the ranks that want it."""
    shares = []
    for rank, node in enumerate(nodes):
        assert node is not None  # noqa: S101  for mypy: the caller has looked
        ranks = [other for other, wanted in enumerate(nodes) if wanted == node]
        share = _piece(by_node[node], ranks.index(rank), len(ranks), f"node {node}")
        share.node = node
        if len(cpus.cpu_nodes) == 1 and len(nodes) > 1 and not share.warnings:
            share.reasons.append("one NUMA node: a split, not affinity; every core is equally far from every GPU")
        shares.append(share)
    return shares


def _divide_all(
    cpus: Cpus,
    cores: list[tuple[int | None, _CoreCpus]],
    nodes: Sequence[int | None],
    by_node: dict[int, list[_CoreCpus]],
) -> list[CoreShare]:
    """The whole allowed set among all ranks."""
    shares = []
    node_of = {threads: node for node, threads in cores}
    for rank, wanted in enumerate(nodes):
        pieces = [threads for _, threads in cores]
        share = _piece(pieces, rank, len(nodes), "the whole allowed set")
        on = {node_of[threads] for threads in pieces if threads[0] in share.cpus}
        share.node = next(iter(on)) if len(on) == 1 else None
        if wanted is None and len(cpus.cpu_nodes) > 1:
            share.warnings.append("NUMA node unknown: the cores are a share of all allowed CPUs, near or far")
        elif wanted is not None and not by_node[wanted]:
            share.warnings.append(f"no allowed CPU on node {wanted}: the rank runs on another node's cores")
        else:
            share.reasons.append("another rank has no core of its own node: all ranks divide the whole allowed set")
        shares.append(share)
    return shares


def _piece(cores: list[_CoreCpus], place: int, count: int, where: str) -> CoreShare:
    """The `place`-th of `count` equal contiguous pieces; everything if there are fewer cores than ranks."""
    each = len(cores) // count
    if each == 0:
        cpus = tuple(sorted(cpu for core in cores for cpu in core))
        text = f"{count} ranks share {len(cores)} core{'s' * (len(cores) > 1)} of {where}: a spinning thread of one"
        return CoreShare(cpus, len(cores), None, [], [f"{text} starves the others"])
    mine = cores[place * each : (place + 1) * each]
    cpus = tuple(sorted(cpu for core in mine for cpu in core))
    reason = f"{each} of the {len(cores)} allowed cores of {where}, which serves {count} rank{'s' * (count > 1)}"
    return CoreShare(cpus, each, None, [reason])
