"""What NVSHMEM should be told. Names, defaults and rules as in its documentation of environment variables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from weft.machine.settings.hca_list import nvshmem_selects
from weft.machine.settings.model import Setting
from weft.machine.settings.nccl import CLASSES
from weft.machine.settings.network import Network

__all__ = ["items", "warnings"]

_MAPPING = "NVSHMEM_ENABLE_NIC_PE_MAPPING"
_LIST = "NVSHMEM_HCA_LIST"
_PE_LIST = "NVSHMEM_HCA_PE_MAPPING"


def items(network: Network, environment: Mapping[str, str]) -> Iterator[Setting]:
    """The settings, those of the user marked."""
    if network.is_verbs:
        yield from _mapping(network, environment)
        yield from _classes(network, environment)
    elif network.kind == "efa":
        reason = "its own transport speaks to verbs devices, which EFA is not"
        yield _setting("NVSHMEM_REMOTE_TRANSPORT", "libfabric", reason, environment)
        yield _setting("NVSHMEM_LIBFABRIC_PROVIDER", "efa", "the NICs are EFA devices", environment)
    elif network.kind == "none" and network.machine.gpus:
        reason = "there is no RDMA device: it would look for one and complain"
        yield _setting("NVSHMEM_REMOTE_TRANSPORT", "none", reason, environment)


def _mapping(network: Network, environment: Mapping[str, str]) -> Iterator[Setting]:
    lists = [name for name in (_LIST, _PE_LIST) if name in environment]
    value = environment.get(_MAPPING)
    conflict = f"without it {' and '.join(lists)} are ignored" if lists and value not in (None, "1") else ""
    reason = "NIC lists count only with it; otherwise each rank takes what it finds nearest, fit or not"
    yield _setting(_MAPPING, "1", reason, environment, conflict)
    counts = {port: network.firsts.count(port) for port in dict.fromkeys(network.firsts)}
    if max(counts.values()) > 1:
        text = ",".join(f"{port}:{len(list(run))}" for port, run in itertools.groupby(network.firsts))
        reason = "name:port:number of ranks, in rank order: ranks share NICs"
        yield _setting(_PE_LIST, text, reason, environment, _list_conflict(network, environment, _PE_LIST))
        return
    reason = "the NIC of each rank, in rank order" + ("; one port a rank" if network.num_per_rank > 1 else "")
    yield _setting(_LIST, ",".join(counts), reason, environment, _list_conflict(network, environment, _LIST))


def _list_conflict(network: Network, environment: Mapping[str, str], name: str) -> str:
    text = environment.get(name)
    if text is None or text.startswith("="):  # warned about elsewhere
        return ""
    selected = nvshmem_selects(text, network.machine)
    reasons = {entry.name: entry.reason for placement in network.placements for entry in placement.left_out}
    more = [f"{port} ({reasons[name]})" for port in sorted(selected) if (name := port.split(":")[0]) in reasons]
    return f"it also takes {', '.join(more)}" if more else ""


def _classes(network: Network, environment: Mapping[str, str]) -> Iterator[Setting]:
    """Service level and traffic class as NCCL has them, and the GID that carries RoCE v2 over IPv4."""
    for nccl, ours in CLASSES:
        if nccl in environment:
            yield _setting(ours, environment[nccl], f"the same lossless class as {nccl}", environment)
    indices = {
        gid.idx
        for nic in network.nics
        for port in nic.ports
        for gid in port.gids
        if gid.type == "RoCE v2" and gid.kind == "ipv4"
    }
    if network.kind == "roce" and len(indices) == 1:
        reason = "the RoCE v2 address with an IPv4 address behind it; older versions take number 0"
        yield _setting("NVSHMEM_IB_GID_INDEX", str(next(iter(indices))), reason, environment)


def warnings(network: Network, environment: Mapping[str, str]) -> Iterator[str]:
    """About variables of the user that are no setting of ours."""
    if environment.get(_LIST, "").startswith("="):
        yield f'{_LIST}={environment[_LIST]}: NVSHMEM knows no "=", names match as a whole anyway; leave it out'
    for name in (_LIST, _PE_LIST):
        if name in environment and _MAPPING not in environment:
            yield f"{name} is set, but ignored: it counts only with {_MAPPING}=1"


def _setting(name: str, value: str, reason: str, environment: Mapping[str, str], conflict: str = "") -> Setting:
    return Setting(name, value, "NVSHMEM", reason, environment.get(name), conflict)
