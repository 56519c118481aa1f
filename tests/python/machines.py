"""The recorded and made-up machines under tests/data/machines, and what is expected of them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from weft.machine.topology import Machine, read

MACHINES = Path(__file__).resolve().parent.parent / "data" / "machines"
NAMES = sorted(path.parent.name for path in MACHINES.glob("*/tree.json"))


@functools.cache
def machine(name: str) -> Machine:
    """The machine of that name."""
    return read(MACHINES / name)


def expected(name: str) -> dict[str, Any]:
    """What is expected of it; written by hand."""
    value: dict[str, Any] = json.loads((MACHINES / name / "expected.json").read_text())
    return value
