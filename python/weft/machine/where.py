"""How far a long run is, in a line: rank 0 writes it, the process that started the ranks reads it.

The memory is shared with ranks that are forked after this import. Only the display lives on it.
"""

from __future__ import annotations

import mmap

__all__ = ["read", "say"]

_shared = mmap.mmap(-1, 256)


def say(text: str) -> None:
    """Replace the line; a longer one is cut. Call it from one rank only."""
    _shared[:] = text.encode()[: len(_shared)].ljust(len(_shared), b"\0")


def read() -> str:
    """What was said last, "" before."""
    return _shared[:].rstrip(b"\0").decode("utf-8", "replace")
