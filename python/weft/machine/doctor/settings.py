"""What the environment says against what the machine asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from weft.machine.doctor.model import Answer, Check, Facts, ok, skip, warn
from weft.machine.settings import Setting, Settings, settings

__all__ = ["CHECKS"]

# Left over from debugging: variable, value that is meant (None: any), what it costs.
_LEFT_OVER = (
    ("CUDA_LAUNCH_BLOCKING", "1", "the host waits for every kernel: nothing overlaps"),
    ("NCCL_P2P_DISABLE", "1", "NCCL copies between GPUs through host memory"),
    ("NCCL_SHM_DISABLE", "1", "NCCL goes over the network inside the machine"),
    ("NCCL_IB_DISABLE", "1", "NCCL uses TCP sockets between machines"),
    ("NVSHMEM_DISABLE_P2P", "1", "NVSHMEM goes over the network inside the machine"),
    ("CUDA_DISABLE_PTX_JIT", "1", "kernels shipped as PTX don't run"),
    ("CUDA_FORCE_PTX_JIT", "1", "every kernel is compiled again at its first use"),
)


def _left_over(facts: Facts) -> Iterable[Answer]:
    if not facts.environment and not facts.live:
        return [skip("a recording has no environment")]
    answers = [
        warn(f"{name}={value} is set", cost=cost, fix=f"unset {name}")
        for name, value, cost in _LEFT_OVER
        if facts.environment.get(name) == value
    ]
    return answers or [ok("no setting from debugging is left over")]


def _conflicts(facts: Facts) -> Iterable[Answer]:
    if not facts.environment and not facts.live:
        return [skip("a recording has no environment")]
    chosen = settings(facts.machine, facts.placements, facts.environment)
    answers = [
        warn(f"{item.name}={item.user_value} is set", cost=item.conflict, fix=_export(item))
        for item in chosen.items
        if item.conflict
    ]
    answers += [warn(text, fix="weft topo --settings  # what this machine asks for") for text in chosen.warnings]
    return answers or [ok("; ".join(["what is set agrees with this machine", *chosen.notes]))]


def _export(item: Setting) -> str:
    """The line that sets what would be right."""
    return Settings((dataclasses.replace(item, user_value=None),)).export_lines()[0].partition("  #")[0]


CHECKS = (
    Check("settings", "left-over", "Settings for debugging make everything slow and say nothing.", _left_over),
    Check("settings", "conflicts", "Weft never overwrites what the user set for NCCL and NVSHMEM.", _conflicts),
)
