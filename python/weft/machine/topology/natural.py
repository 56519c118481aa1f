"""Names in the order people expect: mlx5_2 before mlx5_10."""

from __future__ import annotations

import re

__all__ = ["natural_key"]


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key with the numbers in a name as numbers."""
    return tuple(
        (0, int(part), part) if part.isascii() and part.isdigit() and len(part) < 20 else (1, 0, part)
        for part in re.split(r"(\d+)", name)
    )
