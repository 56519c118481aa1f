"""What a check looks at and what it answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.machine.placement import Placement, place
from weft.machine.topology import Gpu, Machine, Nic

__all__ = ["Answer", "Check", "Facts", "Finding", "Status", "fail", "ok", "skip", "warn"]

Status = Literal["ok", "warn", "fail", "n/a"]


@dataclass(frozen=True)
class Answer:
    """What a check says: `found`, what it costs where that is known (with the source), the command that mends it."""

    status: Status
    found: str
    cost: str = ""
    fix: str = ""


def ok(found: str) -> Answer:
    """All is well, or there is something to know and nothing to do."""
    return Answer("ok", found)


def skip(reason: str) -> Answer:
    """The question does not arise here, or could not be answered."""
    return Answer("n/a", reason)


def warn(found: str, *, cost: str = "", fix: str = "") -> Answer:
    """It works, but slower than it could, or something else will be surprised."""
    return Answer("warn", found, cost, fix)


def fail(found: str, *, cost: str = "", fix: str = "") -> Answer:
    """It does not work."""
    return Answer("fail", found, cost, fix)


@dataclass(frozen=True)
class Finding:
    """An answer with the check that gave it; one row of the table, one JSON object."""

    group: str
    check: str
    status: Status
    found: str
    why: str
    cost: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Facts:
    """What checks may look at.

    Attributes: `machine`; `environment` the documented variables that are set; `live` whether `machine` is the one
    this process runs on (checks of the process itself say n/a for a recording); `measured` what
    weft.machine.doctor.measure.run measured, None: nothing was.
    """

    machine: Machine
    environment: Mapping[str, str] = field(default_factory=dict)
    live: bool = False
    measured: Mapping[str, Any] | None = None

    @functools.cached_property
    def placements(self) -> tuple[Placement, ...]:
        """What `weft.machine.placement.place` decides, one a GPU."""
        return place(self.machine, environment=self.environment)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs of the machine."""
        return self.machine.gpus

    @property
    def rdma(self) -> tuple[Nic, ...]:
        """The RDMA devices of the machine."""
        return self.machine.nics

    @functools.cached_property
    def used_nics(self) -> tuple[Nic, ...]:
        """The RDMA devices that some rank is to use."""
        names = {choice.name for placement in self.placements for choice in placement.nics}
        return tuple(nic for nic in self.rdma if nic.name in names)


@dataclass(frozen=True)
class Check:
    """A question: its group and name, why the answer matters, and the function that answers."""

    group: str
    name: str
    why: str
    look: Callable[[Facts], Iterable[Answer]]
