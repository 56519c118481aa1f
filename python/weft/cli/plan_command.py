"""`weft plan`: flags in, weft.plan, tables out. Imports no torch."""

from __future__ import annotations

import dataclasses
import json as json_module
import textwrap
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from weft.cli import options
from weft.cli.output import Output, command_output
from weft.errors import InvalidArgument
from weft.planner.compare import BOTH, Comparison, to_row
from weft.planner.compare import compare as compare_with
from weft.planner.machines import PRESETS, Machine, preset
from weft.planner.planning import MAX_RANKS, Plan, PlannedCall
from weft.planner.planning import plan as make_plan

_COLUMNS = 79  # tables and lines fit a terminal of 80
_PART_COLUMNS = 60
_SYSTEM_COLUMNS = 24
_EVEN = 1.005

ModeName = Literal["throughput", "latency"]

_PRESET_HELP = f"The machine: {', '.join(PRESETS)}."
_DOMAIN_HELP = "Ranks that reach each other by NVLink, if not the preset's."
_NIC_HELP = "GB/s of the data sheet of a GPU's NIC, if not the preset's."
_NVLINK_HELP = "GB/s that stores between GPUs reach, if not the preset's."
_LATENCY_HELP = "Microseconds one way over the network, if not the preset's."
_RANKS_HELP = f"Ranks, one a GPU, 2 to {MAX_RANKS}; may be given several times."
_TOKENS_HELP = "Tokens T of each rank; 4096, with --mode latency 128."
_EXPERTS_HELP = "Experts E in all; the least multiple of the ranks from 256 on without it."
_MODE_HELP = "Large calls, or the kernels for small batches."
_SMS_HELP = "SMs of a call; may be given several times."
_GROUPS_HELP = "Groups of experts of a group-limited gate."
_HISTOGRAM_HELP = "A JSON list of the picks that each expert got, in place of uniform routing."
_COMPARE_HELP = "Published figures for as many ranks, each beside Weft at its own shape."
_PLOT_HELP = "Draw bandwidth against ranks and SMs (png, pdf, svg; needs matplotlib)."


def plan(
    name: Annotated[str, typer.Option("--preset", metavar="NAME", help=_PRESET_HELP)] = "dgx-h100",
    ranks: Annotated[
        list[int] | None, typer.Option("--ranks", metavar="N", min=2, max=MAX_RANKS, help=_RANKS_HELP)
    ] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", metavar="N", min=1, help=_TOKENS_HELP)] = None,
    hidden: options.Hidden = 7168,
    experts: Annotated[int | None, typer.Option("--experts", metavar="N", min=1, help=_EXPERTS_HELP)] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="N", min=1, max=128, help="Experts K of each token; 8.")
    ] = None,
    mode: Annotated[ModeName, typer.Option("--mode", help=_MODE_HELP)] = "throughput",
    sms: Annotated[list[int] | None, typer.Option("--sms", metavar="N", min=1, help=_SMS_HELP)] = None,
    groups: Annotated[int | None, typer.Option("--groups", metavar="N", min=1, help=_GROUPS_HELP)] = None,
    topk_groups: Annotated[
        int | None, typer.Option("--topk-groups", metavar="N", min=1, help="Groups that a token may use.")
    ] = None,
    histogram: Annotated[Path | None, typer.Option("--histogram", help=_HISTOGRAM_HELP)] = None,
    trace: options.Trace = None,
    domain: Annotated[int | None, typer.Option("--ranks-per-domain", metavar="N", min=1, help=_DOMAIN_HELP)] = None,
    nic: Annotated[float | None, typer.Option("--nic", metavar="N", min=0, help=_NIC_HELP)] = None,
    nic_ports: Annotated[
        int | None, typer.Option("--nic-ports", metavar="N", min=1, help="Ports of a GPU's NIC.")
    ] = None,
    nvlink: Annotated[float | None, typer.Option("--nvlink", metavar="N", min=1, help=_NVLINK_HELP)] = None,
    latency_us: Annotated[float | None, typer.Option("--latency-us", metavar="N", min=0, help=_LATENCY_HELP)] = None,
    compare: Annotated[bool, typer.Option("--compare", help=_COMPARE_HELP)] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help=_PLOT_HELP)] = None,
    json: options.Json = False,
) -> None:
    """Say what to expect of a machine before renting it: time, bandwidth, what binds, memory, connections.

    No GPU is needed. All is a model, and says so, but where Weft was measured; docs/planner.md says what it is worth.
    """
    with command_output(json_lines=json) as output:
        if plot is not None:
            from weft.planner.plot import require_matplotlib

            require_matplotlib()
        wanted: dict[str, Any] = {
            "num_tokens": tokens,
            "hidden": hidden,
            "num_experts": experts,
            "top_k": top_k,
            "mode": mode,
            "num_sms": sms or None,
            "num_groups": groups,
            "topk_groups": topk_groups,
            "histogram": None if histogram is None else _read_histogram(histogram),
            "trace": trace,
        }
        machine = _machine(
            preset(name),
            ranks_per_domain=domain,
            nic=nic,
            nic_ports=nic_ports,
            nvlink_push=nvlink,
            latency_us=latency_us,
        )
        plans = [make_plan(machine, num_ranks=number, **wanted) for number in ranks or [16]]
        for planned in plans:
            for row in planned.to_rows():
                output.row(row)
            _show(output, planned)
            if compare:
                _compare(output, planned)
        if plot is not None:
            _draw(output, plans[0], wanted, plot)


def _machine(known: Machine, **changed: Any) -> Machine:
    """The preset with what the flags change; loads over NVLink keep their share of stores."""
    changed = {name: value for name, value in changed.items() if value is not None}
    if not changed:
        return known
    if "nvlink_push" in changed:
        changed["nvlink_pull"] = known.nvlink_pull / known.nvlink_push * changed["nvlink_push"]
    return dataclasses.replace(known, name=f"{known.name} (changed)", gpu=f"{known.gpu} (changed)", **changed)


def _read_histogram(file: Path) -> list[float]:
    try:
        loads = json_module.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"--histogram {file}: {error}") from error
    if not isinstance(loads, list) or not all(type(load) in (int, float) for load in loads) or not loads:
        raise InvalidArgument(f"--histogram {file}: it needs a JSON list of numbers, one an expert")
    return [float(load) for load in loads]


def _say(output: Output, text: str) -> None:
    output.text(textwrap.fill(text, _COLUMNS, subsequent_indent="  "))


def _show(output: Output, planned: Plan) -> None:
    where = f"{planned.num_domains} x {planned.ranks_per_domain}" if planned.num_domains > 1 else "one domain"
    _say(output, f"{planned.machine.name}: {planned.machine.description}")
    _say(
        output,
        f"{planned.num_ranks} ranks ({where}), T = {planned.num_tokens}, H = {planned.hidden}, "
        f"E = {planned.num_experts}, K = {planned.top_k}",
    )
    _say(
        output,
        f"routing {planned.routing}: a token reaches {planned.ranks_per_token:.2f} ranks in "
        f"{planned.domains_per_token:.2f} domains"
        + (f"; busiest rank {planned.imbalance:.2f} x the mean" if planned.imbalance > _EVEN else ""),
    )
    columns = ("call", "SMs", "us", "tables\nGB/s", "wire\nGB/s", "NVLink\nGB/s", "binds", "figures")
    rows = [_call_row(call) for call in planned.calls]
    title = f"{planned.mode}: GB/s of a rank, counted as in tables, on the wire, on NVLink"
    output.table(title, columns, rows, left=(0, 6, 7))
    for text in sorted({f"measured at {call.measured_at}" for call in planned.calls if call.measured_at}):
        _say(output, text)
    parts = [
        (escape(textwrap.fill(part.meaning, _PART_COLUMNS)), f"{part.num_bytes / 2**20:,.1f}")
        for part in planned.memory
    ]
    output.table("memory of each rank", ("part", "MiB"), parts)
    network = planned.network
    if network is not None:
        _say(
            output,
            f"connections of each rank [model]: {network.qps} QPs over rails to {network.peers} peers "
            f"({network.qps_full} to all ranks), {network.signals} signals, chunks of {network.chunk_rows} rows",
        )
    for text in planned.machine.assumed:
        _say(output, f"assumed: {text}")


def _call_row(call: PlannedCall) -> tuple[str, ...]:
    rates = (call.published_gb_per_s, call.wire_gb_per_s, call.nvlink_gb_per_s)
    words = f"{call.op} {call.dtype.upper()}"
    return (
        words,
        str(call.num_sms),
        f"{call.time_us:,.0f}",
        *(f"{rate:.1f}" for rate in rates),
        call.binds,
        call.basis,
    )


def _compare(output: Output, planned: Plan) -> None:
    found = compare_with(planned)
    for one in found:
        output.row(to_row(one))
    if not found:
        output.text(f"nothing published for {planned.num_ranks} ranks, {planned.mode}")
        return
    rows = [_compare_row(one) for one in found]
    columns = ("call", "published", "SMs", "us", "Weft us", "x")
    output.table(f"published, and Weft at the same shape: {planned.num_ranks} ranks", columns, rows, left=(0, 1))


def _compare_row(one: Comparison) -> tuple[str, ...]:
    system = one.system + (f", {one.measured}" if one.measured else "")
    return (
        f"{one.op.replace(BOTH, 'both')} {one.dtype.upper().replace(' / ', '/')}",
        "\n".join(textwrap.fill(part, _SYSTEM_COLUMNS) for part in (system, f"{one.machine}; {one.routing}")),
        "?" if one.num_sms is None else str(one.num_sms),
        f"{one.published_us:,.0f}",
        f"{one.weft_us:,.0f} {one.basis}",
        f"{one.ratio:.2f}",
    )


def _draw(output: Output, planned: Plan, wanted: dict[str, Any], file: Path) -> None:
    from weft.planner.plot import write_plot

    try:
        write_plot(planned, wanted, file)
    except OSError as error:
        raise InvalidArgument(f"--plot can't be written: {error.strerror}: {error.filename}") from error
    output.text(f"wrote {file}")
