"""What DeepEP offers beside its buffers: events, test data, timing, oracles."""

from __future__ import annotations

import importlib
from typing import Any

from weft.deep_ep.utils.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]

_MODULES = ("comm", "envs", "event", "gate", "math", "refs", "semantic", "testing")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"weft.deep_ep.utils.{name}")
    raise AttributeError(f"module 'deep_ep.utils' has no attribute {name!r}")
