"""Names that some programs take from the native module of the original."""

from __future__ import annotations

from weft.deep_ep import topk_idx_t
from weft.deep_ep.config import Config
from weft.deep_ep.utils.event import EventHandle

__all__ = ["Config", "EventHandle", "is_sm90_compiled", "topk_idx_t"]


def is_sm90_compiled() -> bool:
    """True: FP8 is always there."""
    return True
