"""Published figures beside Weft's model, like with like: the same machine, ranks, routing, E, T and SMs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import InvalidArgument
from weft.planner.evidence import verdict_of
from weft.planner.machines import Machine, preset
from weft.planner.planning import Plan, plan
from weft.planner.published import Cell, cells

__all__ = ["Comparison", "beside", "comparable", "compare", "machine_of", "to_row"]

# What a machine of the tables is here.
_PRESETS = {
    "2 x 8 H100, 8 x 400 Gb/s IB": "azure-nd-h100-v5",
    "H800, 160 GB/s NVLink, 400 Gb/s CX7": "h800-deepep",
    "H800, 400 Gb/s CX7": "h800-deepep",
    "2 x 8 H100, 8 x CX7 (EOS)": "dgx-h100",
    "H100, RoCE": "dgx-h100",
    "H100, IB": "dgx-h100",
    "8 x B200": "b200-8",
    "GB200 NVL": "gb200-nvl72",
}
_SMALL_SMS = 32
BOTH = "dispatch + combine"


@dataclass(frozen=True)
class Comparison:
    """One published call and the same call of Weft [model].

    Attributes:
        system, machine, source: who, where, and the document.
        measured: "kernel" or "api" where the source says which.
        op, dtype, num_ranks, num_sms, num_tokens, num_experts, routing: the call; SMs None: not said.
        published_us: as published, or the bytes that the source counts / its rate.
        published: the figure as it stands in the source, with `unit`.
        weft_us, weft_sms: Weft's, and its SMs; `basis`: "model", or "measured".
        verdict, reason: whether the model describes the published figure with constants of its own.
    """

    system: str
    machine: str
    source: str
    measured: str
    op: str
    dtype: str
    num_ranks: int
    num_sms: int | None
    num_tokens: int
    num_experts: int
    routing: str
    published: float
    unit: str
    published_us: float
    weft_us: float
    weft_sms: int
    basis: str
    verdict: str
    reason: str

    @property
    def ratio(self) -> float:
        """Published time / Weft's: above 1 Weft is expected to take less."""
        return self.published_us / self.weft_us


def machine_of(cell: Cell) -> Machine:
    """The preset that stands for a machine of the tables."""
    return preset(_PRESETS[cell.machine])


def comparable(found: Sequence[Cell]) -> list[Cell]:
    """One figure for each published call: times first, spreads of times left out."""
    first: dict[tuple[object, ...], Cell] = {}
    for cell in sorted(found, key=lambda cell: not cell.unit.startswith("us")):
        if cell.unit not in ("us min", "us max"):
            first.setdefault(cell.measurement, cell)
    return list(first.values())


def compare(planned: Plan) -> list[Comparison]:
    """Published calls with as many ranks as the plan and its mode, over a network if the plan has one, else within a
    domain. Each beside Weft at the published routing, E, T and SMs on the published machine: a table of uniform routing
    is compared with uniform routing, whatever the plan's is.
    """
    is_small, is_network = planned.mode == "latency", planned.num_domains > 1
    mine = [
        cell
        for cell in comparable(cells())
        if cell.ranks == planned.num_ranks
        and cell.is_low_latency == is_small
        and (is_small or (cell.ranks > cell.ranks_per_domain) == is_network)
    ]
    order = {"dispatch": 0, "combine": 1, BOTH: 2}
    mine.sort(key=lambda cell: (order[cell.op], -ord(cell.dtype[0]), cell.system, cell.measured, cell.sms or 0))
    return [beside(cell) for cell in mine]


def beside(cell: Cell) -> Comparison:
    """A published call and Weft's."""
    num_domains = cell.ranks // cell.ranks_per_domain
    is_limited = cell.top_groups is not None and num_domains > cell.top_groups
    weft = plan(
        machine_of(cell),
        num_ranks=cell.ranks,
        num_tokens=cell.tokens,
        hidden=cell.hidden,
        num_experts=cell.num_experts,
        top_k=cell.top_k,
        mode="latency" if cell.is_low_latency else "throughput",
        num_sms=(_SMALL_SMS if cell.is_low_latency else cell.num_sms,),
        num_groups=num_domains if is_limited else None,
        topk_groups=cell.top_groups if is_limited else None,
    )
    if cell.op == BOTH:
        parts = [call for call in weft.calls if (call.op, call.dtype) in (("dispatch", "fp8"), ("combine", "bf16"))]
    else:
        parts = [call for call in weft.calls if (call.op, call.dtype) == (cell.op, cell.dtype)]
    if not parts:
        raise InvalidArgument(f"op={cell.op!r}, dtype={cell.dtype!r}: no call of Weft's")
    published_us = cell.value if cell.unit.startswith("us") else cell.counted_bytes() / cell.value / 1e3
    verdict = verdict_of(cell)
    return Comparison(
        system=cell.system,
        machine=cell.machine,
        source=cell.source,
        measured=cell.measured,
        op=cell.op,
        dtype=cell.dtype,
        num_ranks=cell.ranks,
        num_sms=cell.sms,
        num_tokens=cell.tokens,
        num_experts=cell.num_experts,
        routing=weft.routing,
        published=cell.value,
        unit=cell.unit,
        published_us=published_us,
        weft_us=sum(call.time_us for call in parts),
        weft_sms=parts[0].num_sms,
        basis="model" if any(call.basis == "model" for call in parts) else "measured",
        verdict=verdict.kind,
        reason=verdict.reason,
    )


def to_row(comparison: Comparison) -> dict[str, object]:
    """A JSON object of kind "plan_compare"."""
    return {"kind": "plan_compare", **dataclasses.asdict(comparison), "ratio": comparison.ratio}
