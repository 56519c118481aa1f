"""What others have published: every cell of their tables, its source, and what the model says to it.

published.json holds the figures, fitted.json the constants of each group of tables (weft.planner.fit makes it).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.planner import traffic
from weft.planner.model import Load, load_of, time_of, time_of_copies_us

__all__ = ["FP8", "Cell", "cells", "row_bytes", "sources"]

FP8 = "fp8"
_FILE = Path(__file__).with_name("published.json")
_RANKS_OF_A_MACHINE = 8
_LOW_LATENCY_ROW = 7168 + 224 + 16  # as DeepEP's low-latency tables count an FP8 row: values, scales, a header
# Where a source names no shape or SMs: those of DeepEP's own test programs.
_TOKENS, _HIDDEN, _TOP_K, _SMS = 4096, 7168, 8, 20


def row_bytes(dtype: str, hidden: int = _HIDDEN) -> float:
    """Bytes of a row: bf16, or FP8 with an fp32 scale for each 128 values."""
    return hidden * (1 + 4 / 128) if dtype == FP8 else 2.0 * hidden


@dataclass(frozen=True)
class Cell:
    """One published figure. `value` in `unit`; `op`: dispatch, combine or both; the rest as the source says it."""

    source: str
    system: str
    machine: str
    op: str
    dtype: str
    ranks: int
    value: float
    unit: str
    kind: str
    tokens: int = _TOKENS
    hidden: int = _HIDDEN
    top_k: int = _TOP_K
    experts: int | None = None
    local_experts: int | None = None
    top_groups: int | None = None
    routing: str = "uniform"
    sms: int | None = None
    measured: str = ""
    where: str = ""
    nccl: str = ""
    note: str = ""

    @property
    def is_low_latency(self) -> bool:
        """Whether this is a small batch."""
        return self.kind == "low latency"

    @property
    def ranks_per_domain(self) -> int:
        """8, or all ranks of a rack of NVLink."""
        return self.ranks if self.machine == "GB200 NVL" else min(self.ranks, _RANKS_OF_A_MACHINE)

    @property
    def num_experts(self) -> int:
        """E: as published, else 256 (low latency and DeepEP V1 of one machine or many) or 8 a rank (NVLink racks)."""
        if self.local_experts is not None:
            return self.local_experts * self.ranks
        if self.experts is not None:
            return self.experts
        return 8 * self.ranks if self.source == "hybrid-ep-readme" else 256

    @property
    def measurement(self) -> tuple[object, ...]:
        """The same for figures of one run in different units."""
        where = (self.source, self.system, self.machine, self.kind, self.where, self.measured)
        return (*where, self.op, self.dtype, self.ranks, self.sms)

    @property
    def point(self) -> tuple[object, ...]:
        """What the model knows of a run: runs with the same get the same prediction from the same constants."""
        return (self.kind, self.dtype, self.ranks, self.num_sms, self.num_experts, self.top_groups, self.measured)

    @property
    def num_sms(self) -> int:
        """SMs, 20 (DeepEP's own test) where nothing is said."""
        return self.sms or _SMS

    def reach(self) -> traffic.Reach:
        """Where its tokens went."""
        size, num_domains = self.ranks_per_domain, self.ranks // self.ranks_per_domain
        if self.top_groups is None or num_domains <= self.top_groups:
            return traffic.uniform(self.num_experts, self.top_k, self.ranks, size)
        return traffic.group_limited(
            self.num_experts,
            self.top_k,
            self.ranks,
            size,
            num_groups=num_domains,
            topk_groups=self.top_groups,
        )

    def load(self) -> Load:
        """What a rank had to move."""
        return _load(self)

    def time_us(self, constants: Mapping[str, float]) -> float:
        """The model's time with these constants."""
        if self.is_low_latency:
            return time_of_copies_us(self.load(), constants)
        return time_of(self.load(), constants, self.num_sms).total_us

    def in_unit(self, time_us: float) -> float:
        """A time of this call in the unit of this cell."""
        if self.unit.startswith("us"):
            return time_us
        return self.counted_bytes() / time_us / 1e3

    def counted_bytes(self) -> float:
        """The bytes that the source divides by the time."""
        load = self.load()
        if self.is_low_latency:
            return load.copies * (_LOW_LATENCY_ROW if self.dtype == FP8 else load.row_bytes)
        rows = load.rank_rows if "NVLink" in self.unit else load.domain_rows
        return rows * load.row_bytes


@functools.cache
def _load(cell: Cell) -> Load:
    return load_of(cell.reach(), num_tokens=cell.tokens, row_bytes=row_bytes(cell.dtype, cell.hidden))


@functools.cache
def cells() -> tuple[Cell, ...]:
    """All of them, in the order of the file."""
    return tuple(Cell(**cell) for cell in json.loads(_FILE.read_text(encoding="utf-8"))["cells"])


@functools.cache
def sources() -> Mapping[str, str]:
    """The documents, by the key that cells give."""
    found: Mapping[str, str] = json.loads(_FILE.read_text(encoding="utf-8"))["sources"]
    return found
