"""What DeepEP offers beside its buffers: events, test data, timing, oracles."""

from __future__ import annotations

from weft.deep_ep.utils.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
