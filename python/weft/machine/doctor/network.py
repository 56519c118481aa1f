"""NICs: are they there, up, near, wide enough, and able to do what GPUs ask of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from weft.machine.doctor.model import Answer, Check, Facts, fail, ok, skip, warn
from weft.machine.topology import Distance, Gpu, Nic
from weft.machine.topology.parse import format_cpus

__all__ = ["CHECKS"]

_NONE = "no RDMA device"
_WRONG_NODE = "users lost up to a third of their bandwidth to a NIC behind the other root complex"
_ROCE_MTU = 4200  # a 4096-byte RoCE packet with its headers
_EFA_GBPS = 400  # of each GPU


def _nics(facts: Facts) -> Iterable[Answer]:
    if not facts.rdma:
        return [skip(f"{_NONE}: one machine works, scale-out over several does not")]
    kinds = Counter((nic.kind, nic.model or "", nic.rate_gbps) for nic in facts.rdma)
    texts = []
    for (kind, model, rate), count in kinds.items():
        texts.append(f"{count} x {kind}{f' {model}' if model else ''}" + (f", {rate:g} Gb/s" if rate else ""))
    return [ok("; ".join(texts))]


def _ports(facts: Facts) -> Iterable[Answer]:
    if not facts.rdma:
        return [skip(_NONE)]
    answers = []
    for nic in facts.rdma:
        waiting = [port.number for port in nic.ports if port.state == "INIT"]
        if waiting:
            found = f"{nic.name} port {_list(waiting)} is INIT: the link is up, no subnet manager configured it"
            answers.append(
                fail(found, cost="it carries nothing", fix="sudo systemctl start opensm  # on one host of the fabric")
            )
    answers += [answer for gpu in facts.gpus if (answer := _nearest_down(facts, gpu))]
    up = [nic.name for nic in facts.rdma if nic.is_active]
    if not up and not answers:
        return [
            fail(
                "no RDMA port is active", cost="no scale-out", fix="rdma link show  # then: cables, ip link set DEV up"
            )
        ]
    down = [nic.name for nic in facts.rdma if not nic.is_active]
    return answers or [
        ok(f"{len(up)} of {len(facts.rdma)} active" + (f"; not active: {', '.join(down)}" if down else ""))
    ]


def _is_down(nic: Nic) -> bool:
    """Whether each of its ports is known to be down."""
    return bool(nic.ports) and all(port.is_active is False for port in nic.ports)


def _nearest_down(facts: Facts, gpu: Gpu) -> Answer | None:
    """Whether a NIC beside the GPU is down, and only farther ones are up."""
    distances = {nic.name: facts.machine.nic_distance(gpu, nic) for nic in facts.rdma}
    near = min(distances.values())
    if near > Distance.PXB:
        return None
    beside = [nic for nic in facts.rdma if distances[nic.name] == near]
    if not all(_is_down(nic) for nic in beside):
        return None
    names = ", ".join(nic.name for nic in beside)
    found = f"the NIC beside GPU {gpu.idx} is down ({names}): a farther one is used"
    return warn(
        found, cost="the traffic crosses the root complex", fix=f"rdma link show {names}/1  # then: cable, switch port"
    )


def _slots(facts: Facts) -> Iterable[Answer]:
    """What a card's ports may carry against what its slot does: 400 Gb/s need 32 GT/s x16."""
    if not facts.rdma:
        return [skip(_NONE)]
    cards: defaultdict[str, list[Nic]] = defaultdict(list)
    for nic in _in_use(facts):
        cards[nic.card or nic.name].append(nic)
    judged = [answer for nics in cards.values() if (answer := _slot(nics))]
    if not judged:
        return [skip("link speeds are not visible (a virtual machine?)")]
    return [answer for answer in judged if answer.status != "ok"] or [ok(f"{len(judged)} slots are wide enough")]


def _slot(nics: list[Nic]) -> Answer | None:
    """The verdict on one card; None where its link or its rates are not known."""
    pci, capacity = nics[0].pci, _slot_gbps(nics[0])
    rates = [nic.rate_gbps for nic in nics if nic.rate_gbps]
    if pci is None or capacity is None or not rates:
        return None
    names = ", ".join(nic.name for nic in nics)
    slot = f"a slot of {pci.link.speed_gts:g} GT/s x{pci.link.width} ({capacity:.0f} Gb/s)"
    fix = f"sudo lspci -vv -s {pci.address} | grep LnkSta  # then reseat the card or use a wider slot"
    if max(rates) > capacity:
        cost = f"{100 - 100 * capacity / max(rates):.0f} % of its rate"
        return fail(f"{names}: {max(rates):g} Gb/s in {slot}", cost=cost, fix=fix)
    if sum(rates) > capacity:
        cost = f"{100 - 100 * capacity / sum(rates):.0f} % when all ports are busy"
        return warn(f"{names}: {sum(rates):g} Gb/s together in {slot}", cost=cost, fix=fix)
    return ok(names)


def _slot_gbps(nic: Nic) -> float | None:
    """What its PCIe link carries, Gb/s; 128 of 130 bits from 8 GT/s on, 8 of 10 below. None: unknown."""
    link = nic.pci.link if nic.pci else None
    if link is None or not link.speed_gts or not link.width or nic.is_virtual_function:
        return None
    return link.speed_gts * link.width * (128 / 130 if link.speed_gts >= 8 else 0.8)


def _mtu(facts: Facts) -> Iterable[Answer]:
    roce = [nic for nic in _in_use(facts) if nic.kind == "roce"]
    sizes = {nic.name: [port.mtu for port in nic.ports if port.mtu] for nic in roce}
    if not any(sizes.values()):
        return [skip("no RoCE device, or its MTU is not known")]
    small = {name: min(mtus) for name, mtus in sizes.items() if mtus and min(mtus) < _ROCE_MTU}
    if small:
        text = ", ".join(f"{name} {mtu}" for name, mtu in small.items())
        devices = sorted({netdev for nic in roce if nic.name in small for netdev in nic.netdevs})
        cost = "packets of 1024 bytes in place of 4096: more headers, more work for the NIC"
        fix = "; ".join(f"sudo ip link set dev {name} mtu 9000" for name in devices)
        return [
            warn(f"an Ethernet MTU below {_ROCE_MTU}: {text}", cost=cost, fix=f"{fix}  # on switches and peers too")
        ]
    return [ok(f"MTU {_list(sorted({mtu for mtus in sizes.values() for mtu in mtus}))}")]


def _gids(facts: Facts) -> Iterable[Answer]:
    roce = [nic for nic in _in_use(facts) if nic.kind == "roce"]
    if not roce:
        return [skip("no RoCE device")]
    known = [(nic, gids) for nic in roce if (gids := [gid for port in nic.ports for gid in port.gids])]
    if not known:
        return [skip("the GIDs of the RoCE devices are not known")]
    answers = []
    for nic, gids in known:
        if not any(gid.type == "RoCE v2" and gid.kind != "link-local" for gid in gids):
            device = nic.netdevs[0] if nic.netdevs else "its interface"
            found = f"{nic.name} has no RoCE v2 GID with an IP address"
            answers.append(fail(found, cost="no routed RoCE", fix=f"sudo ip addr add ADDRESS/PREFIX dev {device}"))
    return answers or [ok(f"RoCE v2 GIDs with an address on {len(known)} devices")]


def _atomics(facts: Facts) -> Iterable[Answer]:
    if not facts.rdma:
        return [skip(_NONE)]
    used = [nic for nic in facts.used_nics if nic.kind != "efa"]  # EFA's signals are no PCIe atomics
    if not used:
        return [skip("no device that signals by PCIe atomics is used")]
    without = [nic.name for nic in used if nic.atomics is False]
    if without:
        cost = "NVSHMEM's signals over it fail when queue pairs are made"
        return [fail(f"no PCIe atomics: {', '.join(without)}", cost=cost, fix=_fix_atomics(used))]
    blocked = [nic.name for nic in used if nic.atomics_path is False]
    if blocked:
        cost = "atomics of the NIC end in an error; signals have to go through a proxy"
        fix = (
            "sudo lspci -vvv | grep -E 'AtomicOps(Cap|Ctl)'  # a bridge on the way does not route them, or blocks them"
        )
        return [warn(f"PCIe atomics don't get from {', '.join(blocked)} to the root", cost=cost, fix=fix)]
    unknown = [nic.name for nic in used if nic.atomics is None]
    if unknown:
        why = next((nic.why["atomics"] for nic in used if "atomics" in nic.why), "configuration space was not readable")
        return [skip(f"not known for {len(unknown)} of {len(used)} devices: {why} (sudo weft doctor)")]
    return [ok(f"{len(used)} devices complete PCIe atomics")]


def _fix_atomics(used: list[Nic]) -> str:
    """Leave those without out of NVSHMEM's list, which counts only with the mapping; where none is left, the firmware
    may have them switched off."""
    without = [nic for nic in used if nic.atomics is False]
    if len(without) < len(used):
        return f"export NVSHMEM_ENABLE_NIC_PE_MAPPING=1 NVSHMEM_HCA_LIST=^{','.join(nic.name for nic in without)}"
    address = without[0].pci.address if without[0].pci else without[0].name
    return f"sudo mlxconfig -d {address} query PCI_ATOMIC_MODE  # the firmware may have them switched off"


def _left_out(facts: Facts) -> Iterable[Answer]:
    if not facts.rdma:
        return [skip(_NONE)]
    left = {entry.name: entry.reason for placement in facts.placements for entry in placement.left_out}
    if not left:
        return [ok("every device is used")]
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in left.items():
        names[reason].append(name)
    return [ok("; ".join(f"not used: {', '.join(those)}: {reason}" for reason, those in names.items()))]


def _distance(facts: Facts) -> Iterable[Answer]:
    if not (facts.rdma and facts.gpus):
        return [skip("no GPU and RDMA device to join")]
    answers, texts = [], []
    for placement in facts.placements:
        if not placement.nics:
            continue
        best = placement.nics[0]
        texts.append(f"GPU {placement.gpu}: {', '.join(choice.name for choice in placement.nics)} ({best.distance})")
        if best.distance == "SYS":
            found = f"GPU {placement.gpu} reaches its NIC {best.name} across sockets only"
            answers.append(
                warn(found, cost=_WRONG_NODE, fix="nvidia-smi topo -m  # then: a NIC on the GPU's own socket")
            )
    shared = Counter(choice.name for placement in facts.placements for choice in placement.nics)
    for name, count in shared.items():
        if count > 1:
            texts.append(f"{count} GPUs share {name}: 1/{count} of its rate each")
    return [*answers, ok("; ".join(texts))] if texts else answers or [skip("no NIC is used")]


def _numa(facts: Facts) -> Iterable[Answer]:
    if not facts.rdma or len(facts.machine.cpus.cpu_nodes) < 2:
        return [skip("no RDMA device, or one NUMA node")]
    lost = [nic.name for nic in facts.rdma if nic.numa_node is None]
    if lost:
        fix = "nvidia-smi topo -m  # then name the near NICs: weft.Placement(nics=...), NCCL_IB_HCA"
        return [warn(f"the NUMA node of {', '.join(lost)} is not known", cost=_WRONG_NODE, fix=fix)]
    by_node: defaultdict[int, list[str]] = defaultdict(list)
    for nic in facts.rdma:
        by_node[nic.numa_node or 0].append(nic.name)
    return [ok("; ".join(f"node {node}: {', '.join(names)}" for node, names in sorted(by_node.items())))]


def _device_nodes(facts: Facts) -> Iterable[Answer]:
    if not facts.rdma:
        return [skip(_NONE)]
    missing = [nic.name for nic in _in_use(facts) if nic.has_verbs_node is False]
    if missing:
        fix = "docker run --device /dev/infiniband ...  # without a container: sudo modprobe ib_uverbs"
        return [fail(f"no /dev/infiniband/uverbs node: {', '.join(missing)}", cost="no process can open them", fix=fix)]
    if any(nic.has_verbs_node is None for nic in _in_use(facts)):
        return [skip("not known")]
    return [ok("every device has its node in /dev/infiniband")]


def _bonds(facts: Facts) -> Iterable[Answer]:
    bonds = [nic for nic in facts.rdma if nic.bond or nic.bond_mode]
    if not bonds:
        return [skip("no bond")]
    answers = []
    for nic in bonds:
        mode = (nic.bond_mode or "").split(" ")[0]
        if mode in ("balance-rr", "broadcast", "balance-tlb", "balance-alb"):
            fix = "give the bond mode 802.3ad, balance-xor or active-backup, or take it apart"
            answers.append(fail(f"{nic.name}: bond mode {mode} makes no RoCE LAG", cost="RDMA uses one port", fix=fix))
        states = {entry.name: entry.state for entry in facts.machine.netdevs}
        down = [name for name in nic.bond if states.get(name) == "down"]
        if down:
            cost = f"{100 * len(down) // len(nic.bond)} % of its rate"
            answers.append(
                warn(f"{nic.name}: {', '.join(down)} of its bond is down", cost=cost, fix=f"ip link show {down[0]}")
            )
    return answers or [ok("; ".join(f"{nic.name} over {', '.join(nic.bond)}, {nic.bond_mode}" for nic in bonds))]


def _functions(facts: Facts) -> Iterable[Answer]:
    if not facts.rdma:
        return [skip(_NONE)]
    addresses = {nic.pci.address: nic.name for nic in facts.rdma if nic.pci}
    both = [
        f"{nic.name} of {addresses[nic.pci.physical_function]}"
        for nic in facts.rdma
        if nic.pci and nic.pci.physical_function in addresses and nic.pci.physical_function is not None
    ]
    if both:
        cost = "NCCL merges a virtual function with its own card as if they were two ports"
        found = f"virtual functions beside their physical ones: {', '.join(both)}"
        return [
            warn(found, cost=cost, fix="export NCCL_IB_MERGE_NICS=0  # or pass only one of them into the container")
        ]
    return [ok("no virtual function beside its physical one")]


def _efa(facts: Facts) -> Iterable[Answer]:
    efa = [nic for nic in facts.rdma if nic.kind == "efa"]
    if not efa:
        return [skip("no EFA device")]
    answers = []
    full = _full_efa(facts, efa)
    if len(efa) < full:
        cost = f"{100 - 100 * len(efa) / full:.0f} % of the network's rate"
        fix = "attach the missing interfaces to the instance (InterfaceType=efa-only)"
        answers.append(
            warn(f"{len(efa)} EFA devices for {len(facts.gpus)} GPUs, {full} make it whole", cost=cost, fix=fix)
        )
    answers.append(ok(f"{len(efa)} EFA devices: NCCL needs its libfabric plugin; verbs and IBGDA can't use them"))
    return answers


def _full_efa(facts: Facts, efa: list[Nic]) -> int:
    """Devices of a whole instance: equally many a GPU, and of eight GPUs from Hopper on 400 Gb/s each (p5: four of
    100 Gb/s, p5en: two of 200, p6: one of 400)."""
    num_gpus, rate = len(facts.gpus), efa[0].rate_gbps
    if not num_gpus:
        return len(efa)
    each = -(-len(efa) // num_gpus)
    if num_gpus == 8 and rate and all((gpu.compute_capability or (0, 0))[0] >= 9 for gpu in facts.gpus):
        each = max(each, round(_EFA_GBPS / rate))
    return num_gpus * each


def _in_use(facts: Facts) -> tuple[Nic, ...]:
    """The devices that ranks use; where no rank is placed on one, all that are up."""
    return facts.used_nics or tuple(nic for nic in facts.rdma if nic.is_active)


def _list(numbers: Iterable[int]) -> str:
    return format_cpus(numbers)


CHECKS = (
    Check("network", "nics", "Scale-out needs RDMA devices.", _nics),
    Check("network", "ports", "A port that is down leaves its GPU a farther one.", _ports),
    Check("network", "slots", "A card is as fast as its PCIe link: 400 Gb/s need 32 GT/s x16.", _slots),
    Check("network", "mtu", "RoCE packets are at most as large as the interface's MTU allows.", _mtu),
    Check("network", "gids", "RoCE v2 is routed by the IP address in a GID.", _gids),
    Check("network", "atomics", "Signals of GPU-initiated RDMA are PCIe atomics of the NIC.", _atomics),
    Check("network", "left-out", "A NIC that can't serve must not be in any list.", _left_out),
    Check("network", "distance", "A NIC below the GPU's own switch is reached without the root complex.", _distance),
    Check("network", "nic-numa", "Without it the near NIC can't be told from the far one.", _numa),
    Check("network", "device-nodes", "A container sees devices in sysfs that it was not given.", _device_nodes),
    Check("network", "bonds", "Only some bond modes make one RDMA device of two ports.", _bonds),
    Check("network", "functions", "Two functions of one card look like two cards.", _functions),
    Check("network", "efa", "EFA speaks SRD, not the verbs of InfiniBand.", _efa),
)
