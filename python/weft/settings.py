"""Settings of the libraries underneath (NCCL, NVSHMEM) that follow from machine and placement, each with its reason.

Nothing is set by computing them. `apply` sets what is missing; a value that the user set stays, and is warned about
where it conflicts.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from weft.placement.model import Placement
from weft.topology.model import Machine

__all__ = ["Setting", "Settings", "settings"]


@dataclass(frozen=True)
class Setting:
    """One variable. `user_value` is what the user has set, `conflict` why that is worse, "" if it is not."""

    name: str
    value: str
    library: str
    reason: str
    user_value: str | None = None
    conflict: str = ""


@dataclass(frozen=True)
class Settings:
    """The settings of one rank, and warnings about variables of the user that no setting of ours answers."""

    items: tuple[Setting, ...] = ()
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, str]:
        """Variable to value, the user's own value where there is one."""
        return {item.name: item.value if item.user_value is None else item.user_value for item in self.items}

    def export_lines(self) -> list[str]:
        """`export NAME=value  # reason` for what the user has not set."""
        return [
            f"export {item.name}={shlex.quote(item.value)}  # {item.reason}"
            for item in self.items
            if item.user_value is None
        ]

    def all_warnings(self) -> list[str]:
        """Conflicts with what the user set, then the other warnings."""
        conflicts = [
            f"{item.name}={item.user_value} is set, {item.value} would be right: {item.conflict}"
            for item in self.items
            if item.conflict
        ]
        return [*conflicts, *self.warnings]

    def apply(self, environment: MutableMapping[str, str]) -> dict[str, str]:
        """Set in `environment` what the user has not set there; return what was set."""
        added = {item.name: item.value for item in self.items if item.name not in environment}
        environment.update(added)
        return added


def settings(machine: Machine, placements: Sequence[Placement], environment: Mapping[str, str]) -> Settings:
    """The settings for the ranks of one machine. `environment`: what the user has set, read, not written."""
    return Settings()
