"""Who belongs to a group, and what a recovery changed: plain values. This module imports neither torch nor the native
module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    """Ranks that were left out or suspended and have ended or closed: they touch no memory any more."""
    standby: tuple[int, ...] = ()
    """Ranks that have joined and for which this rank is prepared: one change away."""
    joining: tuple[int, ...] = ()
    """Ranks that have joined and are not ready."""
    leaving: tuple[int, ...] = ()
    """Ranks that a change has let go, and that have neither ended nor closed."""
    slots: int = field(default=0, compare=False)
    """Most ranks that the group can have."""


@dataclass(frozen=True)
class Change:
    """What `Communicator.recover` or `boundary` has done."""

    epoch: int
    """The new one."""
    active: tuple[int, ...]
    """Ranks that go on, ascending."""
    lost: tuple[int, ...]
    """Ranks left out that this rank knows to be gone: they have died, closed, or were cut off."""
    evicted: tuple[int, ...]
    """Ranks left out that may still live."""
    id: int = 0
    """Of a change that was proposed; 0: a recovery."""
    added: tuple[int, ...] = ()
    """Ranks that were taken in."""
    removed: tuple[int, ...] = ()
    """Ranks that a planned change has let go."""
    boundary: int = 0
    """Number of the boundary, counted from the last recovery."""
    map_digest: str = ""
    """Of the `weft.ExpertMap` that begins with it, as `ExpertMap.digest`; "": none."""
    uncovered: tuple[int, ...] = ()
    """Logical experts that none of the ranks in `active` has, ascending, of any ExpertParallel of the communicator with
    num_logical_experts; `ep.uncovered` tells them apart. Their picks are absent."""
    timings_us: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Microseconds of this rank's call: "waited" for others, "installed" the rest."""
