"""What NCCL should be told. Names, defaults and rules as in its documentation of environment variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.machine.settings.hca_list import nccl_selects
from weft.machine.settings.model import Setting
from weft.machine.settings.network import Network

__all__ = ["CLASSES", "items", "notes", "warnings"]

# Traffic class and service level, of NCCL and of NVSHMEM: they name one class of the fabric.
CLASSES = (("NCCL_IB_TC", "NVSHMEM_IB_TRAFFIC_CLASS"), ("NCCL_IB_SL", "NVSHMEM_IB_SL"))
_MAX_HCAS = 32
_LAZY = "connecting at first use, the default since NCCL 2.22, took DeepEP on 32 ranks over RoCE from 59 to 37 GB/s"
_SINGLE = "one port a GPU over RoCE: published for DeepEP with"


def items(network: Network, environment: Mapping[str, str]) -> Iterator[Setting]:
    """The settings, those of the user marked."""
    if network.is_verbs:
        yield from _hca(network, environment)
        yield from _roce(network, environment)
        for ours, nvshmem in CLASSES:
            if nvshmem in environment:
                yield _setting(ours, environment[nvshmem], f"the same lossless class as {nvshmem}", environment)
    elif network.kind == "efa":
        reason = "the NICs are EFA devices, which NCCL reaches through its libfabric plugin only"
        yield _setting("FI_PROVIDER", "efa", reason, environment, "libfabric")
    if _has_no_multicast(network) or (network.kind == "roce" and network.num_per_rank == 1):
        if _has_no_multicast(network):
            reason = "the GPUs are not registered with a fabric manager: NVLink multicast, which NCCL would use, fails"
        else:
            reason = f"{_SINGLE} NVLink multicast off"
        yield _setting("NCCL_NVLS_ENABLE", "0", reason, environment)


def _hca(network: Network, environment: Mapping[str, str]) -> Iterator[Setting]:
    if len(network.ports) <= _MAX_HCAS:
        value = "=" + ",".join(network.ports)
        left = sorted({entry.name for placement in network.placements for entry in placement.left_out})
        reason = 'the NICs near the GPUs; "=": whole names, for mlx5_1 would take mlx5_10, too'
        reason += f"; without {', '.join(left)}" if left else ""
        yield _setting("NCCL_IB_HCA", value, reason, environment, conflict=_hca_conflict(network, environment))
    if network.has_dual_port_cards and not network.has_bonds:
        yield _merge(environment)


_MERGE = "NCCL_IB_MERGE_NICS"


def _merge(environment: Mapping[str, str]) -> Setting:
    """Collectives want the ports of a card merged, NCCL's device API (GIN) wants them apart: the user's NCCL_GIN_* say
    which of them runs."""
    uses_gin = {"NCCL_GIN_ENABLE", "NCCL_GIN_TYPE"} & set(environment) and environment.get("NCCL_GIN_ENABLE") != "0"
    given = environment.get(_MERGE)
    if uses_gin:
        reason = "NCCL's device API (GIN), which NCCL_GIN_* ask for, can't use merged ports"
        conflict = "merged ports keep NCCL's device API (GIN) from starting" if given not in (None, "0") else ""
        return _setting(_MERGE, "0", reason, environment, conflict=conflict)
    reason = "the two ports of a card become one network device, for collectives; NCCL's device API (GIN) wants 0"
    conflict = "each port is a device of its own, and a ring uses one; right for NCCL's device API (GIN) alone"
    return _setting(_MERGE, "1", reason, environment, conflict=conflict if given == "0" else "")


def _hca_conflict(network: Network, environment: Mapping[str, str]) -> str:
    text = environment.get("NCCL_IB_HCA")
    if text is None:
        return ""
    selected, wanted = nccl_selects(text, network.machine), set(network.ports)
    reasons = {entry.name: entry.reason for placement in network.placements for entry in placement.left_out}
    extra = sorted(selected - wanted)
    more = [f"{port} ({reasons.get(port.split(':')[0], 'used by no rank here')})" for port in extra]
    parts = [f"it also takes {', '.join(more)}"] if more else []
    if more and not text.startswith(("=", "^")):
        parts.append('names match by their beginning unless the list begins with "="')
    if wanted - selected:
        parts.append(f"it lacks {', '.join(sorted(wanted - selected))}, the nearest of a GPU")
    return "; ".join(parts)


def _roce(network: Network, environment: Mapping[str, str]) -> Iterator[Setting]:
    if network.kind != "roce":
        return
    name = "NCCL_RUNTIME_CONNECT"
    yield _setting(name, "0", _LAZY, environment, conflict=_LAZY if environment.get(name) == "1" else "")
    if network.num_per_rank == 1:
        reason = f"{_SINGLE} four queue pairs a connection: more paths through switches that spread flows"
        if network.has_bonds:
            reason = "a bonded port gives each queue pair to one of its members: a single one uses half of the bond"
        number = environment.get("NCCL_IB_QPS_PER_CONNECTION", "4")
        conflict = reason if number == "1" else ""
        yield _setting("NCCL_IB_QPS_PER_CONNECTION", "4", reason, environment, conflict=conflict)
        yield _setting("NCCL_MAX_NCHANNELS", "4", f"{_SINGLE} four channels", environment)


def _has_no_multicast(network: Network) -> bool:
    """Known to be off: several GPUs with NVLinks, none registered with a fabric."""
    gpus = network.machine.gpus
    states = {gpu.fabric.state for gpu in gpus}
    return len(gpus) > 1 and any(gpu.num_active_links for gpu in gpus) and states <= {"not supported", "not started"}


def warnings(network: Network, environment: Mapping[str, str]) -> Iterator[str]:
    """About variables of the user that are no setting of ours."""
    if "NCCL_IB_HCA" in environment and not network.is_verbs and network.kind != "unknown":
        what = "EFA devices, which it has no effect on" if network.kind == "efa" else "no RDMA device that is fit"
        yield f"NCCL_IB_HCA={environment['NCCL_IB_HCA']} is set, but this machine has {what}"
    index = environment.get("NCCL_IB_GID_INDEX")
    if index is not None and network.kind == "roce":
        yield from _gid_warning(network, index)
    for nccl, nvshmem in CLASSES:
        one, other = environment.get(nccl), environment.get(nvshmem)
        if one is not None and other is not None and one != other:
            yield f"{nccl}={one} and {nvshmem}={other} differ: only one of them is the fabric's lossless class"
    if network.has_dual_port_cards and environment.get(_MERGE) != "0" and _mixes_functions(network):
        yield "a virtual function is used beside its card's own: NCCL merges them; set NCCL_IB_MERGE_NICS=0"


def _gid_warning(network: Network, index: str) -> Iterator[str]:
    for nic in network.nics:
        for port in nic.ports:
            gid = next((entry for entry in port.gids if str(entry.idx) == index), None)
            if port.gids and (gid is None or gid.type != "RoCE v2" or gid.kind == "link-local"):
                what = "nothing" if gid is None else f"a {gid.kind} address of type {gid.type}"
                yield (
                    f"NCCL_IB_GID_INDEX={index} is {what} on {nic.name}; NCCL 2.21 and later find the right one if it "
                    "is not set"
                )
                return


def _mixes_functions(network: Network) -> bool:
    kinds: dict[str, set[bool | None]] = {}
    for nic in network.nics:
        kinds.setdefault(nic.card or nic.name, set()).add(nic.is_virtual_function)
    return any(len(found) > 1 for found in kinds.values())


def notes(network: Network, environment: Mapping[str, str]) -> Iterator[str]:
    """What the machine does not say."""
    if network.kind == "roce" and not any(name in environment for pair in CLASSES for name in pair):
        yield (
            "NCCL_IB_TC, NCCL_IB_SL, NVSHMEM_IB_TRAFFIC_CLASS and NVSHMEM_IB_SL are not set: 0. They must name the "
            "fabric's lossless class; whoever runs the switches knows it"
        )


def _setting(
    name: str,
    value: str,
    reason: str,
    environment: Mapping[str, str],
    library: str = "NCCL",
    *,
    conflict: str = "",
) -> Setting:
    return Setting(name, value, library, reason, environment.get(name), conflict)
