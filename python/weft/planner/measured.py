"""Weft's own measurements, which take the place of the model where they fit.

measured.json has each with its commit and its file in benchmarks/results.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Measured", "find", "measurements"]

_FILE = Path(__file__).with_name("measured.json")


@dataclass(frozen=True)
class Measured:
    """The median time of a call, everything inside its boundary, uniform routing, all ranks in one domain.

    `mode`: throughput or latency; `layout` of the rows; `file` in benchmarks/results, with `case` its name there.
    """

    gpu: str
    ranks: int
    mode: str
    op: str
    dtype: str
    sms: int
    tokens: int
    hidden: int
    experts: int
    top_k: int
    layout: str
    case: str
    commit: str
    file: str
    time_us: float


@functools.cache
def measurements() -> tuple[Measured, ...]:
    """All of them."""
    return tuple(Measured(**entry) for entry in json.loads(_FILE.read_text(encoding="utf-8")))


def find(**wanted: object) -> Measured | None:
    """The first measurement with these values."""
    for entry in measurements():
        if all(getattr(entry, name) == value for name, value in wanted.items()):
            return entry
    return None
