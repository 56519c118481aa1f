"""The options of the two calls: the one table of their names, defaults and of what each accepts. Needs no torch.

`weft.limits` has the bounds of everything else, and what options must satisfy together is in weft/call/check.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, NamedTuple

__all__ = ["OPTIONS", "VALUE_TYPES", "Accepts", "CallOptions", "CombineOptions", "DispatchOptions", "options_of"]

LAYOUTS = ("rank_major", "expert_major", "masked")
QUANTIZE = ("fp8", "fp8_ue8m0", "fp8_pow2")
SCALE_LAYOUTS = ("row_major", "column_major")
MODES = ("auto", "throughput", "latency")
WIRES = ("fp8",)
ABSENT = ("drop", "renormalize")
SIDE_LANES = ("own", "all")
ORDERS = ("rank", "last_pick", "pick")  # SumOrder of include/weft/config/order.h
MAX_NUM_SMS = 64  # blocks of a GPU kernel: windows are laid out for so many
MAX_TOKENS_PER_RANK = (1 << 24) - 1  # kMaxRowsPerPair of include/weft/layout/window.h
MAX_ALIGNMENT = 1 << 20
MAX_CAPACITY = (1 << 31) - 1  # rows are counted in int32
MAX_SECONDS = 1e9  # in ns it fits 64 bits


class Accepts(NamedTuple):
    """Whether a value is allowed by itself, and the words that say which are."""

    test: Callable[[Any], bool]
    allowed: str


def is_int(least: int, most: int | None = None) -> Callable[[Any], bool]:
    """Tests for an int, no bool, of this range."""

    def accepts(value: Any) -> bool:
        is_int = isinstance(value, int) and not isinstance(value, bool)
        return is_int and value >= least and (most is None or value <= most)

    return accepts


def or_none(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Tests for None, or what `accepts`."""
    return lambda value: value is None or accepts(value)


def is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Of the type of an allowed one, too: tensors and arrays compare by element."""
    return any(type(value) is type(each) and value == each for each in allowed)


def is_seconds(value: Any) -> bool:
    """A time to wait."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value <= MAX_SECONDS


def _one_of(*allowed: Any) -> Accepts:
    return Accepts(lambda value: is_one_of(value, allowed), ", ".join(map(str, allowed)))


def _option(default: Any, accepts: Accepts) -> Any:
    return field(default=default, metadata={"accepts": accepts})


_FLAG = Accepts(lambda value: isinstance(value, bool), "True, False")


@dataclass(frozen=True, eq=False)
class CallOptions:
    """What both calls have. Values are as the user gave them: nothing is checked here."""

    num_sms: int | None = _option(None, Accepts(or_none(is_int(1, MAX_NUM_SMS)), f"None, or 1 to {MAX_NUM_SMS}"))
    deadline_s: float | None = _option(None, Accepts(or_none(is_seconds), "seconds above 0, at most 1e9"))
    mode: str = _option("auto", _one_of(*MODES))
    staged: bool = _option(False, _FLAG)
    async_op: bool = _option(False, _FLAG)
    window: int = _option(0, Accepts(or_none(is_int(0)), "None, or 0 to num_windows - 1"))


@dataclass(frozen=True, eq=False)
class DispatchOptions(CallOptions):
    """Of `ExpertParallel.dispatch`, where each is explained."""

    quantize: str | None = _option(None, _one_of(None, *QUANTIZE))
    layout: str = _option("rank_major", _one_of(*LAYOUTS))
    alignment: int = _option(1, Accepts(is_int(1, MAX_ALIGNMENT), f"1 to {MAX_ALIGNMENT}"))
    capacity: int | None = _option(None, Accepts(or_none(is_int(0, MAX_CAPACITY)), f"None, or 0 to {MAX_CAPACITY}"))
    max_tokens: int | None = _option(
        None, Accepts(or_none(is_int(0, MAX_TOKENS_PER_RANK)), "None, or 0 to max_tokens_per_rank")
    )
    scale_layout: str = _option("row_major", _one_of(*SCALE_LAYOUTS))
    zero_holes: bool = _option(True, _FLAG)
    absent: str = _option("drop", _one_of(*ABSENT))
    host_counts: bool = _option(False, _FLAG)


@dataclass(frozen=True, eq=False)
class CombineOptions(CallOptions):
    """Of `ExpertParallel.combine`, where each is explained."""

    weighted: bool = _option(True, _FLAG)
    wire: str | None = _option(None, _one_of(None, *WIRES))
    order: str = _option("rank", _one_of(*ORDERS))
    side_lanes: str = _option("own", _one_of(*SIDE_LANES))


OPTIONS: dict[type[CallOptions], dict[str, Accepts]] = {
    kind: {each.name: each.metadata["accepts"] for each in fields(kind)} for kind in (DispatchOptions, CombineOptions)
}


VALUE_TYPES = frozenset((NoneType, bool, int, float, str))


@functools.lru_cache(maxsize=1024, typed=True)
def options_of(kind: Any, *values: Any) -> Any:
    """kind(*values), the same object for the same values of the same types: what is kept for a call goes by it. Only
    of VALUE_TYPES: others are refused, and would be kept alive."""
    return kind(*values)
