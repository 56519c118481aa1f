"""`Setting`, `Settings`: variables for the libraries underneath, each with its reason."""

from __future__ import annotations

import shlex
from collections.abc import MutableMapping
from dataclasses import dataclass

__all__ = ["Setting", "Settings"]


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
    """The settings of the ranks of one machine; `warnings` about variables of the user that no item answers; `notes`:
    what Weft can't know and somebody should."""

    items: tuple[Setting, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, str]:
        """Variable to value, the user's own value where there is one."""
        return {item.name: item.value if item.user_value is None else item.user_value for item in self.items}

    def export_lines(self) -> list[str]:
        """`export NAME=value  # reason` for what the user has not set."""
        return [
            f"export {item.name}={_quote(item.value)}  # {item.reason}"
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


def _quote(value: str) -> str:
    """For a shell; zsh takes a "=" at the beginning for the name of a command."""
    return f"'{value}'" if value.startswith("=") and "'" not in value else shlex.quote(value)
