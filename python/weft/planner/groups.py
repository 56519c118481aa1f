"""Which published tables share constants, which of their cells are held out, and which no such model describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from weft.planner.published import Cell

__all__ = ["BOUNDS", "GROUPS", "NOT_MODELLED", "Group", "group_of", "reason_against"]

# What a constant may be: no link faster than its data sheet says, no time below zero. GB/s, us; see weft.planner.model.
BOUNDS: Mapping[str, tuple[float, float]] = {
    "network": (5, 50),
    "nvlink": (50, 900),
    "sm_row": (1e-4, 2),
    "sm_rate": (2, 200),
    "sm_ring_row": (1e-4, 2),
    "sm_rank": (1e-4, 1),
    "start": (1, 1000),
    "overlap": (1, 16),
    "crowd": (0.01, 1),
    "call": (1, 1000),
    "call_mb": (0.01, 5),
    "call_map": (0.01, 30),
}


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cells that are described by one set of constants.

    Attributes:
        free: the constants that are fitted to its cells.
        has: whether a cell belongs to it, unless NOT_MODELLED leaves it out.
        held_out: the cells that are predicted by a fit to the others; `held_out_words` says which.
        kernel: for figures of whole calls the group, by (op, dtype), whose constants its kernels have.
        predicted: whether a cell is never fitted, neither here nor in the hold-out.
    """

    name: str
    free: tuple[str, ...]
    has: Callable[[Cell], bool]
    held_out: Callable[[Cell], bool]
    held_out_words: str
    kernel: Mapping[tuple[str, str], str] = field(default_factory=dict)
    predicted: Callable[[Cell], bool] = lambda cell: False


def _is(system: str, *machines: str, op: str = "", dtype: str = "", measured: str = "") -> Callable[[Cell], bool]:
    def accepts(cell: Cell) -> bool:
        wanted = ((op, cell.op), (dtype, cell.dtype), (measured, cell.measured))
        is_one = cell.system == system and cell.machine in machines
        return is_one and all(part in ("", found) for part, found in wanted)

    return accepts


_H100, _GB200, _B200 = "H100, IB", "GB200 NVL", "8 x B200"
_EOS = "2 x 8 H100, 8 x CX7 (EOS)"
_LINKED = ("hybrid-gb200-dispatch-fp8", "hybrid-gb200-dispatch-bf16", "hybrid-gb200-combine")


def _hybrid_rack(name: str, op: str, dtype: str) -> Group:
    return Group(
        name=name,
        free=("nvlink", "sm_rank", "overlap"),
        has=_is("Hybrid-EP", _GB200, _B200, op=op, dtype=dtype, measured="kernel"),
        held_out=lambda cell: cell.ranks >= 32 or cell.machine == _B200,
        held_out_words="32 and 36 ranks from 8 to 24, and 8 x B200",
        predicted=lambda cell: cell.machine == _B200,
    )


_EP64 = "EP64 from EP16 and EP32"

GROUPS: tuple[Group, ...] = (
    Group(
        name="hybrid-h100-dispatch",
        free=("network", "sm_ring_row", "sm_rate", "start", "overlap"),
        has=_is("Hybrid-EP", _H100, op="dispatch", measured="kernel"),
        held_out=lambda cell: cell.ranks == 64,
        held_out_words=_EP64,
    ),
    Group(
        name="hybrid-h100-combine",
        free=("network", "nvlink", "sm_rate", "overlap"),
        has=_is("Hybrid-EP", _H100, op="combine", measured="kernel"),
        held_out=lambda cell: cell.ranks == 64,
        held_out_words=_EP64,
    ),
    Group(
        name="hybrid-h100-call",
        free=("call", "call_mb", "call_map"),
        has=_is("Hybrid-EP", _H100, measured="api"),
        held_out=lambda cell: cell.ranks == 64,
        held_out_words=_EP64,
        kernel={
            ("dispatch", "fp8"): "hybrid-h100-dispatch",
            ("dispatch", "bf16"): "hybrid-h100-dispatch",
            ("combine", "bf16"): "hybrid-h100-combine",
        },
    ),
    _hybrid_rack(_LINKED[0], "dispatch", "fp8"),
    _hybrid_rack(_LINKED[1], "dispatch", "bf16"),
    _hybrid_rack(_LINKED[2], "combine", "bf16"),
    Group(
        name="hybrid-gb200-call",
        free=("call", "call_mb", "call_map"),
        has=_is("Hybrid-EP", _GB200, _B200, measured="api"),
        held_out=lambda cell: cell.ranks >= 32 or cell.machine == _B200,
        held_out_words="32 and 36 ranks from 8 to 24, and 8 x B200",
        kernel=dict(zip((("dispatch", "fp8"), ("dispatch", "bf16"), ("combine", "bf16")), _LINKED, strict=True)),
        predicted=lambda cell: cell.machine == _B200,
    ),
    Group(
        name="deepep-v1-nvlink5-dispatch",
        free=("nvlink", "sm_row", "sm_rate", "overlap"),
        has=_is("DeepEP V1", _GB200, _B200, op="dispatch"),
        held_out=lambda cell: cell.ranks == 24,
        held_out_words="24 ranks from 8 and 16",
    ),
    Group(
        name="deepep-v1-nvlink5-combine",
        free=("nvlink", "sm_rate", "sm_rank", "overlap"),
        has=_is("DeepEP V1", _GB200, _B200, op="combine"),
        held_out=lambda cell: cell.ranks == 16,
        held_out_words="16 ranks from 8",
    ),
    Group(
        name="deepep-v1-h800",
        free=("network", "nvlink", "overlap"),
        has=lambda cell: cell.source == "deepep-readme" and not cell.is_low_latency,
        held_out=lambda cell: cell.ranks == 64,
        held_out_words="EP64 from EP8, EP16 and EP32",
    ),
    Group(
        name="deepep-v1-low-latency",
        free=("network", "crowd"),
        has=lambda cell: cell.source == "deepep-readme" and cell.is_low_latency,
        held_out=lambda cell: cell.ranks >= 128,
        held_out_words="EP128 and EP256 from EP8 to EP64",
    ),
    Group(
        name="deepep-v1-h100",
        free=("network", "nvlink"),
        has=lambda cell: cell.source in ("ibrc", "azure"),
        held_out=lambda cell: cell.ranks == 64 or cell.source == "azure",
        held_out_words="EP64 from EP16 and EP32, and Azure's two machines",
        predicted=lambda cell: cell.source == "azure",
    ),
    Group(
        name="deepep-main-dispatch",
        free=("network",),
        has=_is("DeepEP main", _EOS, op="dispatch"),
        held_out=lambda cell: cell.dtype == "fp8",
        held_out_words="FP8 from BF16",
    ),
    Group(
        name="nixl-dispatch",
        free=("network",),
        has=_is("NIXL PR", _EOS, op="dispatch"),
        held_out=lambda cell: cell.dtype == "fp8",
        held_out_words="FP8 from BF16",
    ),
    *(
        Group(
            name=name,
            free=("network",),
            has=_is(system, _EOS, op=op),
            held_out=lambda cell: False,
            held_out_words="nothing: one run",
        )
        for name, system, op in (
            ("deepep-main-combine", "DeepEP main", "combine"),
            ("nixl-combine", "NIXL PR", "combine"),
        )
    ),
)

# Reasons for cells that are left out of every fit, looked at in this order.
NOT_MODELLED: tuple[tuple[Callable[[Cell], bool], str], ...] = (
    (
        lambda cell: cell.unit in ("us min", "us max"),
        "spread of the times of one run: the model has one time for a call",
    ),
    (
        lambda cell: (
            cell.system == "DeepEP V1" and cell.machine == _GB200 and cell.op == "combine" and cell.ranks == 24
        ),
        "the published rate falls to less than half beyond 16 ranks; no term of bytes, SMs or ranks does",
    ),
    (
        lambda cell: cell.is_low_latency and cell.source == "nixl-pr",
        "one run of kernels that use NVLink inside a machine; the model has small batches through the NIC alone",
    ),
    (
        lambda cell: cell.system == "IBRC, NCCL 2.22.3",
        "connections made late by NCCL 2.22.3 and later (59 to 37 GB/s), a setting and no rate",
    ),
)


def reason_against(cell: Cell) -> str:
    """Why no constants are fitted to a cell; "" if some are."""
    return next((reason for leaves_out, reason in NOT_MODELLED if leaves_out(cell)), "")


def group_of(cell: Cell) -> Group:
    """The group whose constants describe a cell: exactly one for each cell that a reason does not leave out."""
    (group,) = [group for group in GROUPS if group.has(cell)]
    return group
