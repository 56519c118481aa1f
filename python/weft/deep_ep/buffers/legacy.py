"""V1 `Buffer`, where DeepEP 2 has it."""

from __future__ import annotations

from weft.deep_ep.buffer import Buffer
from weft.deep_ep.config import Config
from weft.deep_ep.utils.event import EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
