"""`weft size`: flags in, weft.size, a table out. Imports no torch."""

from __future__ import annotations


def size() -> None:
    """Print the memory that Weft takes on each rank."""
