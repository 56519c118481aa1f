"""Which NICs each GPU gets.

Left out: what no rank may use, with the reason. The rest is dealt out by card (the two ports of a dual-port card are
two paths of one card): first every GPU its nearest ones, then the others in order of PCI addresses, so that every GPU
has equally many and, where the machine allows, different ones. Where there are fewer cards than GPUs they are shared
evenly. Ties are broken by order: without a visible PCIe switch that is how clouds pair GPUs and NICs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.machine.placement.model import LeftOut, NicChoice
from weft.machine.topology.model import Gpu, Machine
from weft.machine.topology.network import Nic
from weft.machine.topology.parse import address_key
from weft.machine.topology.pci_model import Distance

__all__ = ["Rails", "deal_nics"]

_NEAR = Distance.PHB  # at most this far: the PCIe tree says that they belong together
_STORAGE_MODELS = ("BlueField",)


@dataclass
class Rails:
    """`choices[gpu]` by NVML index, what was left out, and warnings by GPU."""

    choices: dict[int, tuple[NicChoice, ...]] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    warnings: dict[int, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Card:
    """The RDMA devices of one card."""

    nics: tuple[Nic, ...]

    @property
    def node(self) -> int | None:
        return self.nics[0].numa_node

    @property
    def order(self) -> tuple[int, ...]:
        return address_key(self.nics[0].pci.address) if self.nics[0].pci else (1 << 41,)


def deal_nics(machine: Machine) -> Rails:
    """The NICs of every GPU; of a machine without GPUs, the NICs of a rank without GPU under the key -1."""
    rails = Rails()
    usable = _filter(machine, rails)
    cards = _cards(usable)
    if not machine.gpus:
        rails.choices[-1] = tuple(_choice(nic, port, "UNKNOWN", 1.0, "no GPU") for nic, port in _ports(cards))
        return rails
    owners = _owners(machine, cards, rails)
    users: dict[str, int] = {}
    for card_list in owners.values():
        for nic, _ in _ports(card_list):
            users[nic.name] = users.get(nic.name, 0) + 1
    for gpu in machine.gpus:
        mine = owners.get(gpu.idx, [])
        rails.choices[gpu.idx] = tuple(
            _choice(nic, port, machine.nic_distance(gpu, nic).name, 1.0 / users[nic.name], _why(machine, gpu, nic))
            for nic, port in _ports(mine)
        )
        _warn(machine, gpu, mine, rails)
    used = {nic.name for card_list in owners.values() for card in card_list for nic in card.nics}
    for nic in usable:
        if nic.name not in used:
            _leave_out(rails, nic, "every GPU has its NICs already; one more would make the rails uneven")
    return rails


def _choice(nic: Nic, port: int, distance: str, share: float, reason: str) -> NicChoice:
    return NicChoice(nic.name, port, distance, share, reason)


def _ports(cards: Sequence[_Card]) -> list[tuple[Nic, int]]:
    return [(nic, port.number) for card in cards for nic in card.nics for port in nic.ports if port.is_active]


def _leave_out(rails: Rails, nic: Nic, reason: str) -> None:
    rails.left_out.append(LeftOut(nic.name, nic.pci.address if nic.pci else None, reason))


# ---- what no rank may use


def _filter(machine: Machine, rails: Rails) -> list[Nic]:
    """The NICs that are fit, those left out are noted."""
    fit = list(machine.nics)
    for check in (_dead, _other_kind, _without_device_node, _function_of_listed, _without_atomics, _storage, _slow):
        reasons = {nic.name: check(nic, fit) for nic in fit}
        for nic in fit:
            if reasons[nic.name]:
                _leave_out(rails, nic, reasons[nic.name])
        fit = [nic for nic in fit if not reasons[nic.name]]
    far = _far_from_gpus(machine, fit)
    for nic in fit:
        if nic.name in far:
            _leave_out(rails, nic, "next to no GPU, while others are: storage or management")
    return [nic for nic in fit if nic.name not in far]


def _dead(nic: Nic, _: list[Nic]) -> str:
    if nic.is_active:
        return ""
    states = ", ".join(f"port {port.number} {port.state or 'unknown'}" for port in nic.ports) or "it has no port"
    return f"no active port: {states}"


def _other_kind(nic: Nic, fit: list[Nic]) -> str:
    if nic.kind != "efa" and any(other.kind == "efa" for other in fit):
        return "not an EFA device, while this machine's network is EFA"
    return ""


def _without_device_node(nic: Nic, _: list[Nic]) -> str:
    if nic.has_verbs_node is False:
        return "no /dev/infiniband/uverbs node: the device is not passed into this container"
    return ""


def _function_of_listed(nic: Nic, fit: list[Nic]) -> str:
    physical = nic.pci.physical_function if nic.pci else None
    owner = next((other.name for other in fit if physical and other.pci and other.pci.address == physical), None)
    return f"a virtual function of {owner}, which is here itself" if owner else ""


def _without_atomics(nic: Nic, fit: list[Nic]) -> str:
    if nic.atomics is False and any(other.atomics for other in fit) and nic.pci:
        ops = nic.pci.atomics
        sizes = (("32bit", ops.completer_32), ("64bit", ops.completer_64), ("128bitCAS", ops.completer_cas_128))
        signs = [f"{name}{'+' if has else '-'}" for name, has in sizes]
        return f"it can't do PCIe atomics (AtomicOpsCap {' '.join(signs)}), which the other NICs can"
    return ""


def _storage(nic: Nic, fit: list[Nic]) -> str:
    if not (nic.model or "").startswith(_STORAGE_MODELS):
        return ""
    others = [other for other in fit if not (other.model or "").startswith(_STORAGE_MODELS)]
    if any((other.rate_gbps or 0) >= (nic.rate_gbps or 0) for other in others):
        return f"a {nic.model}, for storage and front end, beside NICs that are at least as fast"
    return ""


def _slow(nic: Nic, fit: list[Nic]) -> str:
    best = max((other.rate_gbps or 0.0 for other in fit), default=0.0)
    if nic.rate_gbps is not None and nic.rate_gbps < best / 2:
        return f"{nic.rate_gbps:g} Gb/s, less than half of the best NIC's {best:g} Gb/s"
    return ""


def _far_from_gpus(machine: Machine, fit: list[Nic]) -> set[str]:
    """NICs near no GPU, on nodes where some NIC is near a GPU."""
    near = {nic.name for nic in fit if any(machine.nic_distance(gpu, nic) <= _NEAR for gpu in machine.gpus)}
    served = {nic.numa_node for nic in fit if nic.name in near}
    return {nic.name for nic in fit if nic.name not in near and nic.numa_node in served}


# ---- who gets what


def _cards(nics: list[Nic]) -> list[_Card]:
    """Devices with one system image GUID on functions of one slot are one card; equal slots alone mean nothing."""
    groups: dict[tuple[str, str], list[Nic]] = {}
    for nic in nics:
        slot = nic.pci.address.rpartition(".")[0] if nic.pci else nic.name
        key = (nic.card, slot) if nic.card else ("", nic.name)
        groups.setdefault(key, []).append(nic)
    return sorted((_Card(tuple(group)) for group in groups.values()), key=lambda card: card.order)


def _owners(machine: Machine, cards: list[_Card], rails: Rails) -> dict[int, list[_Card]]:
    """GPU -> its cards, node by node. GPUs without a card on their node share all cards."""
    by_node: dict[int | None, list[Gpu]] = {}
    for gpu in machine.gpus:
        by_node.setdefault(gpu.numa_node, []).append(gpu)
    local = {node: [card for card in cards if card.node == node] for node in by_node}
    if None in by_node or any(card.node is None for card in cards):
        return _deal(machine, list(machine.gpus), cards, None)  # sides unknown: order and PCIe paths decide
    rich = [len(local[node]) // len(gpus) for node, gpus in by_node.items() if len(local[node]) >= len(gpus)]
    owners: dict[int, list[_Card]] = {}
    for node, gpus in by_node.items():
        if local[node]:
            owners.update(_deal(machine, gpus, local[node], min(rich) if rich else None))
        elif cards:
            owners.update(_deal(machine, gpus, cards, None))
            for gpu in gpus:
                rails.warnings.setdefault(gpu.idx, []).append(f"no usable NIC on node {node}: another node's is used")
    return owners


def _deal(machine: Machine, gpus: list[Gpu], cards: list[_Card], most: int | None) -> dict[int, list[_Card]]:
    if not cards:
        return {}
    if len(cards) < len(gpus):
        return _share(machine, gpus, cards)
    each = min(len(cards) // len(gpus), most or len(cards))
    owners: dict[int, list[_Card]] = {gpu.idx: [] for gpu in gpus}
    free = list(cards)
    wishes = sorted(
        (_reach(machine, gpu, card), order, card.order, gpu.idx)
        for order, gpu in enumerate(gpus)
        for card in cards
        if _reach(machine, gpu, card) <= _NEAR
    )
    for _, _, place, idx in wishes:
        card = next((entry for entry in free if entry.order == place), None)
        if card is not None and len(owners[idx]) < each:
            owners[idx].append(card)
            free.remove(card)
    for gpu in gpus:
        while len(owners[gpu.idx]) < each:
            owners[gpu.idx].append(free.pop(0))
    return owners


def _share(machine: Machine, gpus: list[Gpu], cards: list[_Card]) -> dict[int, list[_Card]]:
    """Fewer cards than GPUs: every GPU whose nearest card is the only nearest one takes it, the others go to the card
    with the fewest GPUs, ties to that of the nearest GPU before them."""
    owners: dict[int, list[_Card]] = {}
    users = {card.order: 0 for card in cards}
    for gpu in gpus:
        reach = {card.order: _reach(machine, gpu, card) for card in cards}
        best = [card for card in cards if reach[card.order] == min(reach.values())]
        if len(best) == 1 and reach[best[0].order] <= _NEAR:
            owners[gpu.idx] = best
            users[best[0].order] += 1
    before: _Card | None = None
    for gpu in gpus:
        if gpu.idx not in owners:
            fewest = min(users.values())
            candidates = [card for card in cards if users[card.order] == fewest]
            chosen = before if before is not None and before in candidates else candidates[0]
            owners[gpu.idx] = [chosen]
            users[chosen.order] += 1
        before = owners[gpu.idx][0]
    return owners


def _reach(machine: Machine, gpu: Gpu, card: _Card) -> Distance:
    return min(machine.nic_distance(gpu, nic) for nic in card.nics)


def _why(machine: Machine, gpu: Gpu, nic: Nic) -> str:
    near = machine.nic_distance(gpu, nic)
    if near <= _NEAR:
        return f"{near.name}: nearest by PCIe path"
    if near is Distance.UNKNOWN:
        return "PCIe path and NUMA node unknown: dealt out by order of addresses"
    return f"{near.name}: dealt out evenly by order of addresses"


def _warn(machine: Machine, gpu: Gpu, mine: list[_Card], rails: Rails) -> None:
    """A nearer NIC exists but is down."""
    reach = min((_reach(machine, gpu, card) for card in mine), default=Distance.UNKNOWN)
    for nic in machine.nics:
        near = machine.nic_distance(gpu, nic)
        if not nic.is_active and near <= _NEAR and near < reach:
            names = ", ".join(member.name for card in mine for member in card.nics) or "none"
            text = f"its nearest NIC, {nic.name} ({near.name}), has no active port: {names} ({reach.name}) is used"
            rails.warnings.setdefault(gpu.idx, []).append(text)
