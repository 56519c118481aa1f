"""Draws a plan: bandwidth against ranks and SMs. Lines are Weft's model, points are published. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.errors import InvalidArgument, Unsupported
from weft.planner.compare import comparable, machine_of
from weft.planner.planning import MAX_RANKS, Plan, PlannedCall, plan
from weft.planner.published import Cell, cells
from weft.planner.weft_rates import CALLS, Call

__all__ = ["require_matplotlib", "write_plot"]

_COLORS = dict(zip(CALLS, ("#1f77b4", "#2ca02c", "#d62728"), strict=True))
_MARKERS = "osD^vPX*<>"
_SUFFIXES = (".png", ".pdf", ".svg")
_SMS = (2, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 64)


def require_matplotlib() -> None:
    """Raises `weft.Unsupported` with the command that installs matplotlib, if it is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise Unsupported("--plot", have="no matplotlib", need="pip install 'weft[plot]'")


def write_plot(planned: Plan, options: dict[str, Any], file: Path) -> None:
    """Write the picture; its format is that of the file's name. `options`: the other arguments of `weft.plan`.

    Left: against ranks, at the plan's first number of SMs; right: against SMs, at the plan's ranks. Lines are Weft's
    [model], at the plan's routing; hollow points are what others published for these ranks and a known number of SMs
    (right), or for any ranks over the same link (left); full points are Weft's measurements.

    Raises:
        InvalidArgument: another format than png, pdf and svg.
    """
    if file.suffix not in _SUFFIXES:
        raise InvalidArgument(f"--plot {file}: allowed endings are {', '.join(_SUFFIXES)}")
    from matplotlib.figure import Figure  # no pyplot: no window system, no global state

    figure = Figure(figsize=(12.5, 5.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    sms = planned.calls[0].num_sms
    by_ranks = [_again(planned, options, num_ranks=ranks, num_sms=(sms,)) for ranks in _ranks(planned)]
    most = planned.machine.num_sms
    by_sms = _again(planned, options, num_sms=tuple(number for number in _SMS if number <= most))
    _lines(left, [(p.num_ranks, call) for p in by_ranks for call in p.calls])
    _lines(right, [(call.num_sms, call) for call in by_sms.calls])
    published = _published(planned)
    markers = dict(zip(sorted({_label(cell) for cell in published}), _MARKERS, strict=False))
    _points(left, markers, [(cell.ranks, cell) for cell in _nearest(published, sms)])
    shown = [cell for cell in published if cell.ranks == planned.num_ranks and cell.sms]
    _points(right, markers, [(cell.num_sms, cell) for cell in shown])
    unit = "GB/s a rank, own domain counted" if planned.num_domains > 1 else "GB/s a rank, own rank counted"
    unit = "GB/s a rank, a copy for every expert" if planned.mode == "latency" else unit
    left.set(
        xscale="log", xlabel="ranks", ylabel=unit, ylim=(0, None), title=f"{sms} SMs (published: the nearest number)"
    )
    shown_ranks = {*_ranks(planned), *(cell.ranks for cell in published)}
    ticks = sorted(shown_ranks & {2**power for power in range(1, MAX_RANKS.bit_length())})
    left.set_xticks(ticks, [str(tick) for tick in ticks])
    left.minorticks_off()
    right.set(xlabel="SMs", ylim=(0, None), title=f"{planned.num_ranks} ranks")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    handles: dict[str, Any] = {}
    for axes in (left, right):
        handles.update({label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)})
    names = sorted(handles, key=lambda name: (not name.startswith("Weft"), name))
    figure.legend([handles[name] for name in names], names, loc="outside right center", fontsize="small")
    figure.suptitle(
        f"{planned.machine.name}, T = {planned.num_tokens}, {planned.routing}: lines model, hollow points published"
    )
    figure.savefig(file, dpi=110)


def _ranks(planned: Plan) -> list[int]:
    """Powers of two from 2 to 512 and the plan's own, over the same kind of link as the plan."""
    every = sorted({2**power for power in range(1, MAX_RANKS.bit_length())} | {planned.num_ranks})
    is_network = planned.num_domains > 1
    return [ranks for ranks in every if (planned.machine.domain_size(ranks) < ranks) == is_network]


def _again(planned: Plan, options: dict[str, Any], **changed: Any) -> Plan:
    """The same plan with other ranks or SMs; what can't be kept (E of other ranks, groups) follows from the ranks."""
    options = {**options, "num_ranks": planned.num_ranks, **changed}
    experts = options.get("num_experts")
    if experts and experts % options["num_ranks"]:
        options["num_experts"] = None
    return plan(planned.machine, **options)


def _nearest(found: Sequence[Cell], sms: int) -> list[Cell]:
    """Of cells that differ in SMs alone the one with the nearest number; of those that name none, each."""
    best: dict[tuple[object, ...], Cell] = {}
    for cell in sorted(found, key=lambda cell: abs((cell.sms or sms) - sms)):
        best.setdefault((cell.source, cell.system, cell.machine, cell.op, cell.dtype, cell.ranks), cell)
    return list(best.values())


def _published(planned: Plan) -> list[Cell]:
    """Figures over the same link as the plan's, one a call; of kernels where a source has both kernels and calls."""
    is_network, is_small, machine = planned.num_domains > 1, planned.mode == "latency", planned.machine
    rate = "nic" if is_network or is_small else "nvlink_push"
    found = [
        cell
        for cell in comparable(cells())
        if cell.is_low_latency == is_small
        and cell.op in ("dispatch", "combine")
        and (is_small or (cell.ranks > cell.ranks_per_domain) == is_network)
        and getattr(machine_of(cell), rate) == getattr(machine, rate)
    ]
    with_kernels = {cell.system for cell in found if cell.measured == "kernel"}
    return [cell for cell in found if cell.measured != "api" or cell.system not in with_kernels]


def _label(cell: Cell) -> str:
    return f"{cell.system}, {cell.measured}" if cell.measured else cell.system


def _lines(axes: Any, points: Sequence[tuple[int, PlannedCall]]) -> None:
    """A line of the model for each call; full points where Weft was measured."""
    for call in CALLS:
        mine = sorted(
            ((x, one) for x, one in points if (one.op, one.dtype) == (call.op, call.dtype)), key=lambda point: point[0]
        )
        modelled = [(x, one.published_gb_per_s * one.time_us / one.model_us) for x, one in mine]
        style = "--" if call.op == "combine" else "-"
        label = f"Weft {call.words} [model]"
        axes.plot(*zip(*modelled, strict=True), style, color=_COLORS[call], linewidth=2, label=label)
        known = [(x, one.published_gb_per_s) for x, one in mine if one.basis == "measured"]
        if known:
            axes.plot(*zip(*known, strict=True), "o", color=_COLORS[call])
            axes.plot([], [], "o", color="#555555", label="Weft, measured")


def _points(axes: Any, markers: Mapping[str, str], points: Sequence[tuple[int, Cell]]) -> None:
    """Hollow points: the colour is that of the call, the form that of the system."""
    for system, marker in markers.items():
        style = {"marker": marker, "linestyle": "none", "markerfacecolor": "white", "markersize": 7}
        mine = [(x, cell) for x, cell in points if _label(cell) == system]
        for call in CALLS:
            drawn = [(x, cell.counted_bytes() / _us(cell) / 1e3) for x, cell in mine if _is(cell, call)]
            if drawn:
                axes.plot(*zip(*drawn, strict=True), color=_COLORS[call], **style)
        if mine:
            axes.plot([], [], color="#555555", label=f"published: {system}", **style)


def _is(cell: Cell, call: Call) -> bool:
    return (cell.op, cell.dtype) == (call.op, call.dtype)


def _us(cell: Cell) -> float:
    return cell.value if cell.unit.startswith("us") else cell.counted_bytes() / cell.value / 1e3
