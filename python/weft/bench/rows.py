"""What the rows of one shape and of the suites have in common: the bytes of a case, and their rates
(docs/benchmarking.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.bench.cases import Case
from weft.bench.ranks import Row, slowest

__all__ = ["between_nodes", "exposed", "name_of", "row_bytes", "target", "traffic"]

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_SCALE_BYTES = {"none": 0, "fp8": 4, "fp8_ue8m0": 1, "fp8_pow2": 4}  # of a scale, of 128 values each


def row_bytes(case: Case) -> tuple[int, int]:
    """Bytes of a row on the wire, scales included: on its way to the experts, and back; 0 where the case has no such
    way.
    """
    wide, num_groups = case.hidden * _BYTES[case.dtype], -(-case.hidden // 128)
    scale_bytes = _SCALE_BYTES["fp8" if case.rows == "fp8" else case.quantize]
    dispatched = case.hidden + num_groups * scale_bytes if scale_bytes else wide
    combined = case.hidden + 4 * num_groups if case.wire == "fp8" else wide
    return dispatched * (case.op != "combine"), combined * (case.op != "dispatch")


def exposed(note: Sequence[Row]) -> list[Row]:
    """The ranks' notes of a call in halves, less the work that a graph has beside it: of each sample the slowest rank
    with the calls less the slowest without.
    """
    if "work_gpu_us" not in note[0]:
        return list(note)
    both = (slowest([rank[name] for rank in note]) for name in ("gpu_us", "work_gpu_us"))
    gpu_us = [with_calls - alone for with_calls, alone in zip(*both, strict=True)]
    return [{**rank, "gpu_us": gpu_us} for rank in note]


def name_of(row: Row) -> str:
    """Words for tables, of a row of one shape."""
    source = f", {row['source']} tensor" if row["op"] == "combine" and row["source"] else ""
    halves = ", halves" if row["is_halved"] else ""
    return f"{row['library']} {row['op']}{source}{halves}{', graph' if row['is_graphed'] else ''}"


def target(
    what: str, unit: str, value: float, must: float, stretch: float | None, *, more_is_better: bool = False
) -> Row:
    """A target beside what was measured: `met` is "stretch", "must" or "no"."""

    def reaches(goal: float) -> bool:
        return value >= goal if more_is_better else value <= goal

    met = "stretch" if stretch is not None and reaches(stretch) else "must" if reaches(must) else "no"
    found: Row = {"kind": "target", "target": what, "unit": unit, "value": value}
    return {**found, "must": must, "stretch": stretch, "met": met}


def traffic(case: Case, note: Row, time_us: float) -> Row:
    """Bytes to other ranks, of the rank that sends most, and with those that stay; `note`: of a rank."""
    found: Row = {}
    for name, rows in (("wire", note["out_rows"]), ("logical", note["logical_rows"])):
        found[f"{name}_bytes"] = max(rows) * sum(row_bytes(case))
        found[f"{name}_gb_per_s"] = found[f"{name}_bytes"] / time_us / 1e3
    return found


def between_nodes(case: Case, note: Row, time_us: float) -> Row:
    """Bytes to other nodes, of the rank that sends most: a row a token and node; null without nodes."""
    rows = note.get("network_rows")
    num_bytes = None if rows is None else max(rows) * sum(row_bytes(case))
    rate = None if num_bytes is None else num_bytes / time_us / 1e3
    return {"network_bytes": num_bytes, "network_gb_per_s": rate}
