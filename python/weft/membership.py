"""Who belongs to a group, and what a recovery changed: plain values. This module imports neither torch nor the native
module."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Change", "Membership"]


@dataclass(frozen=True)
class Membership:
    """Who belongs to the group, as this rank knows it."""

    epoch: int
    """Number of the membership."""
    active: tuple[int, ...]
    """Ranks that take part in calls, ascending."""
    evicted: tuple[int, ...]
    """Ranks that were left out and may still live: nothing that they do reaches the members."""
    safe_to_delete: tuple[int, ...]
    """Ranks that were left out and have ended or closed: they touch no memory any more."""


@dataclass(frozen=True)
class Change:
    """What `Communicator.recover` has done."""

    epoch: int
    """The new one."""
    active: tuple[int, ...]
    """Ranks that go on, ascending."""
    lost: tuple[int, ...]
    """Ranks left out that this rank knows to be gone: they have died, closed, or were cut off."""
    evicted: tuple[int, ...]
    """Ranks left out that may still live."""
