"""The NICs that the ranks of a machine use, in the words that settings are decided by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.machine.placement.model import NicChoice, Placement
from weft.machine.topology.model import Machine
from weft.machine.topology.network import Nic

__all__ = ["Network", "network_of"]


@dataclass(frozen=True)
class Network:
    """`ports` ("mlx5_0:1") of all ranks, each once, in rank order; `firsts` the first one of each rank that has one,
    with repetitions; `nics` the devices behind `ports`; `num_per_rank` the most ports of a rank."""

    machine: Machine
    placements: tuple[Placement, ...]
    ports: tuple[str, ...]
    firsts: tuple[str, ...]
    nics: tuple[Nic, ...]
    num_per_rank: int

    @property
    def kind(self) -> str:
        """ "none", "efa", "roce", "infiniband" or "unknown"."""
        kinds = {nic.kind for nic in self.nics}
        return next((kind for kind in ("efa", "roce", "infiniband") if kind in kinds), "unknown" if kinds else "none")

    @property
    def is_verbs(self) -> bool:
        """Whether NCCL's and NVSHMEM's own transports can use it."""
        return self.kind in ("roce", "infiniband")

    @property
    def has_dual_port_cards(self) -> bool:
        """Whether ranks use both ports of one card as two devices."""
        cards = [nic.card for nic in self.nics if nic.card]
        return len(cards) != len(set(cards))

    @property
    def has_bonds(self) -> bool:
        """Whether a device stands for bonded ports."""
        return any(nic.bond for nic in self.nics)


def network_of(machine: Machine, placements: Sequence[Placement]) -> Network:
    """The network of these placements."""
    chosen: list[NicChoice] = [nic for placement in placements for nic in placement.nics]
    ports = tuple(dict.fromkeys(str(nic) for nic in chosen))
    names = {nic.name for nic in chosen}
    return Network(
        machine,
        tuple(placements),
        ports,
        tuple(str(placement.nics[0]) for placement in placements if placement.nics),
        tuple(nic for nic in machine.nics if nic.name in names),
        max((len(placement.nics) for placement in placements), default=0),
    )
