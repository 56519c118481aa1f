"""Settings of the libraries underneath (NCCL, NVSHMEM, libfabric) that follow from machine and placement.

Nothing is set by computing them. `Settings.apply` sets what is missing; a value that the user set stays, and is warned
about where it conflicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.machine.placement.model import Placement
from weft.machine.settings import nccl, nvshmem, topology_file
from weft.machine.settings.model import Setting, Settings
from weft.machine.settings.network import network_of
from weft.machine.topology.model import Machine

__all__ = ["Setting", "Settings", "settings"]


def settings(machine: Machine, placements: Sequence[Placement], environment: Mapping[str, str]) -> Settings:
    """The settings for the ranks of one machine, from `weft.placement.place`. `environment`: what the user has set; it
    is read, not written."""
    network = network_of(machine, placements)
    items = [*nccl.items(network, environment), *nvshmem.items(network, environment)]
    warnings = [
        *nccl.warnings(network, environment),
        *nvshmem.warnings(network, environment),
        *topology_file.warnings(machine, environment),
    ]
    return Settings(tuple(items), tuple(warnings), tuple(nccl.notes(network, environment)))
