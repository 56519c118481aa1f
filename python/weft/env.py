"""The one place of the Python package that reads the environment. The native module has its own, src/base/env.cc.

| variable | meaning |
| --- | --- |
| `WEFT_LOG_LEVEL` | `debug`, `info`, `warning`, `error`, `off`: level of the logger `weft`, with lines on stderr |
| `RANK`, `WORLD_SIZE` | set by torchrun: this rank and their number, for `Communicator.from_env`; none: one rank |
| `LOCAL_RANK` | set by torchrun: the GPU of this rank where ranks have one each |
| `CUDA_VISIBLE_DEVICES` | read, not set: which GPU a device number means, for placement |
| `MASTER_ADDR`, `MASTER_PORT` | set by torchrun, read by torch's `env://` rendezvous, not by Weft |

docs/environment.md holds the table of both.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from weft.errors import InvalidArgument

__all__ = ["Torchrun", "log_level", "set_among", "torchrun"]

_LEVELS = ("debug", "info", "warning", "error", "off")


@dataclass(frozen=True)
class Torchrun:
    """What torchrun says about this process."""

    rank: int
    num_ranks: int
    local_rank: int


def torchrun() -> Torchrun | None:
    """Rank and size from the environment, or None where neither is set.

    Raises:
        InvalidArgument: only one of RANK and WORLD_SIZE is set, or they are no numbers that fit each other.
    """
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        raise InvalidArgument(
            f"RANK is {rank!r} and WORLD_SIZE is {size!r} in the environment; set both (torchrun does) or neither"
        )
    numbers = [
        _number("RANK", rank),
        _number("WORLD_SIZE", size),
        _number("LOCAL_RANK", os.environ.get("LOCAL_RANK", rank)),
    ]
    if not 0 <= numbers[0] < numbers[1]:
        raise InvalidArgument(
            f"RANK is {numbers[0]} in the environment; allowed are 0 to WORLD_SIZE - 1 = {numbers[1] - 1}"
        )
    return Torchrun(*numbers)


def log_level() -> str | None:
    """The level asked for by WEFT_LOG_LEVEL in lower case, or None.

    Raises:
        InvalidArgument: it is set to another word.
    """
    level = os.environ.get("WEFT_LOG_LEVEL", "").lower()
    if level and level not in _LEVELS:
        raise InvalidArgument(f"WEFT_LOG_LEVEL is {level!r} in the environment; allowed are {', '.join(_LEVELS)}")
    return level or None


def set_among(names: Iterable[str]) -> dict[str, str]:
    """Those of the named variables that are set, as they are: for reports, not for settings."""
    return {name: os.environ[name] for name in names if name in os.environ}


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise InvalidArgument(f"{name} is {text!r} in the environment; a number from 0 is expected")
    return int(text)
