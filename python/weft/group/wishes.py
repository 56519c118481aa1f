"""What a change of the membership may be asked for with."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from weft.errors import InvalidArgument, rank_list

__all__ = ["checked_ranks", "left_of", "number_of", "spare_ranks"]


def checked_ranks(name: str, ranks: Iterable[int], num_ranks: int) -> list[int]:
    """Ascending, each once."""
    listed: list[Any] = list(ranks) if isinstance(ranks, Iterable) else [None]
    if any(type(rank) is not int or not 0 <= rank < num_ranks for rank in listed):
        raise InvalidArgument(f"{name} is {ranks!r}; allowed are ranks, 0 to {num_ranks - 1}")
    if len(set(listed)) < len(listed):
        raise InvalidArgument(f"{name} is {ranks!r}: {rank_list(listed)}; allowed is each rank once")
    return sorted(listed)


def left_of(wanted: dict[str, list[int]], active: Sequence[int]) -> dict[str, list[int]]:
    """What is still to be done of it, by the names of `propose`."""
    return {
        name: [rank for rank in ranks if (rank in active) == (name in ("remove", "suspend"))]
        for name, ranks in wanted.items()
    }


def spare_ranks(spares: str | int | Iterable[int], num_ranks: int) -> list[int] | None:
    """None: as many as are lost."""
    if spares == "auto":
        return None
    if spares == 0 and not isinstance(spares, str):
        return []
    if isinstance(spares, str | int):
        raise InvalidArgument(f"spares is {spares!r}; allowed are 'auto', 0 and a list of ranks that are ready")
    return checked_ranks("spares", spares, num_ranks)


def number_of(name: int | str | None) -> int:
    """64 bits: ranks that name one change alike mean the same one."""
    if name is None:
        return secrets.randbits(63) | 1
    if isinstance(name, str):
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") | 1
    if type(name) is not int or not 0 < name < 2**64:
        raise InvalidArgument(f"id is {name!r}; allowed are None, a str, and ints from 1 to 2**64 - 1")
    return name
