"""All checks, and the loop that asks them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from weft.env import set_among
from weft.machine import topology
from weft.machine.doctor import cpu, deep_ep, gpu, memory, network, pcie, process, scaleout, settings, software
from weft.machine.doctor.model import Answer, Check, Facts, Finding, skip
from weft.machine.redact import VARIABLES, redact

__all__ = ["CHECKS", "diagnose", "facts_of"]

CHECKS: tuple[Check, ...] = (
    *software.CHECKS,
    *deep_ep.CHECKS,
    *process.CHECKS,
    *gpu.CHECKS,
    *cpu.CHECKS,
    *memory.CHECKS,
    *pcie.CHECKS,
    *network.CHECKS,
    *scaleout.CHECKS,
    *settings.CHECKS,
)


def facts_of(root: str | os.PathLike[str] = "/", *, environment: Mapping[str, str] | None = None) -> Facts:
    """The facts about the machine below `root`: "/" is this one, anything else a recording.

    `environment` is by default that of this process (documented variables only), for a recording empty.
    """
    live = os.path.realpath(root) == "/"
    if environment is None:
        environment = set_among(VARIABLES) if live else {}
    return Facts(topology.read(root), environment, live)


def diagnose(facts: Facts, checks: Sequence[Check] = CHECKS) -> Iterator[Finding]:
    """The findings of all checks, in their order. A check that raises is n/a, with the reason."""
    for check in checks:
        for answer in _answers(check, facts):
            yield Finding(check.group, check.name, answer.status, answer.found, check.why, answer.cost, answer.fix)


def _answers(check: Check, facts: Facts) -> list[Answer]:
    try:
        return list(check.look(facts))
    except Exception as error:  # noqa: BLE001  one broken check must not hide the others
        return [skip(redact(f"could not be checked: {type(error).__name__}: {error}"))]
