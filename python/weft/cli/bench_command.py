"""`weft bench`: flags in, weft.bench, rows out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from weft.bench.cases import SUITES
from weft.bench.options import Options, SuiteOptions
from weft.bench.rows import name_of
from weft.cli import options
from weft.cli.bench_control import run_control
from weft.cli.bench_deep_ep import run_deep_ep
from weft.cli.bench_elastic import run_elastic
from weft.cli.bench_late import run_who_is_late
from weft.cli.bench_suite import print_targets, run_suite
from weft.cli.output import EXIT_FAILED, Output, command_output
from weft.errors import InvalidArgument

_MODE_HELP = "As in dispatch: auto, throughput, latency."
_CAPACITY_HELP = "As in dispatch; masked takes twice the mean load if it is not given."
_COLUMNS = (
    "operation",
    "median us",
    "p99 us",
    "host us",
    "wire MB",
    "wire GB/s",
    "logical GB/s",
    "result MB",
    "x all_to_all",
    "x memory copy",
)


_SUITE_HELP = f"""Run cases with targets at their own shapes: {", ".join(SUITES)}, with commas between, or all. What
--device cuda does when no shape is given."""
_LATE_HELP = "Time nothing; show who waited how long for whom, with one rank delayed on purpose."
_CONTROL_HELP = """Time the control plane: --iters groups (10) are made, rebuilt, lose a rank by kill -9 and go on,
and leave out one that is late."""
_ELASTIC_HELP = """Time ranks that come and go: --iters groups (10) take a warm spare in, lose ranks by kill -9,
with and without a spare, let one go, and work on while a new process starts and joins."""
_DEEP_EP_HELP = "Time the calls of weft.deep_ep beside Weft's own: host time a call."
_PLOT_HELP = "Draw the suite's bandwidth against SMs and T (png, pdf, svg; needs matplotlib)."
_NODES_HELP = "The ranks are in so many nodes of equal size, though on one machine; see docs/benchmarking.md."
_ISOLATION_HELP = "Ranks as processes or threads; auto: processes, but threads where ranks of nodes share a GPU."
_HALVES_HELP = """Time dispatch and combine in two halves (staged=True) too, with the wire hidden behind other work of
the GPU; see docs/benchmarking.md."""
_PRESET_HELP = "Print what `weft plan` says of this machine beside each time."
_ONE_SHAPE_FLAGS = {"nodes": "--nodes", "isolation": "--isolation", "machine": "--preset", "halves": "--halves"}
# Flags that make `weft bench --device cuda` time this one shape.
_SHAPE_FLAGS = [
    "tokens",
    "hidden",
    "experts",
    "top_k",
    "dtype",
    "layout",
    "alignment",
    "quantize",
    "capacity",
    "routing",
    "num_sms",
    "mode",
    "nodes",
    "machine",
    "halves",
]


def bench(
    ctx: typer.Context,
    ranks: options.Ranks = 4,
    tokens: options.Tokens = 1024,
    hidden: options.Hidden = 2048,
    experts: options.Experts = 64,
    top_k: options.TopK = 8,
    dtype: options.Dtype = "bf16",
    layout: options.Layout = "rank_major",
    alignment: Annotated[
        int, typer.Option("--alignment", metavar="N", min=1, help="Of expert_major groups, in rows.")
    ] = 1,
    quantize: options.Quantize = "none",
    capacity: Annotated[int | None, typer.Option("--capacity", metavar="N", min=1, help=_CAPACITY_HELP)] = None,
    routing: options.Routing = "uniform",
    trace: options.Trace = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    placement: options.Placement = Options.placement,
    iters: Annotated[int, typer.Option("--iters", metavar="N", min=1, help="Calls timed of each operation.")] = 50,
    warmup: Annotated[int, typer.Option("--warmup", metavar="N", min=0, help="Calls before them that are not.")] = 5,
    num_sms: Annotated[
        int | None, typer.Option("--num-sms", metavar="N", min=1, help="SMs a kernel may use (GPU engines).")
    ] = None,
    mode: Annotated[
        Literal["auto", "throughput", "latency"], typer.Option("--mode", metavar="NAME", help=_MODE_HELP)
    ] = "auto",
    baseline: Annotated[bool, typer.Option(help="Time all_to_all_single doing the same job too.")] = True,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", min=1, help=_NODES_HELP)] = 1,
    isolation: Annotated[
        Literal["auto", "process", "thread"], typer.Option("--isolation", metavar="NAME", help=_ISOLATION_HELP)
    ] = "auto",
    halves: Annotated[bool, typer.Option("--halves", help=_HALVES_HELP)] = False,
    machine: Annotated[str | None, typer.Option("--preset", metavar="NAME", help=_PRESET_HELP)] = None,
    suite: Annotated[str | None, typer.Option("--suite", help=_SUITE_HELP)] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help=_PLOT_HELP)] = None,
    who_is_late: Annotated[bool, typer.Option("--who-is-late", help=_LATE_HELP)] = False,
    late_rank: Annotated[
        int | None, typer.Option("--late-rank", metavar="N", min=0, help="Whom to delay; the last rank.")
    ] = None,
    late_us: Annotated[
        float, typer.Option("--late-us", metavar="N", min=0, help="By how much, before each step.")
    ] = 5000,
    control: Annotated[bool, typer.Option("--control", help=_CONTROL_HELP)] = False,
    hosts: Annotated[
        int | None,
        typer.Option("--hosts", metavar="N", help="With --control: between so many network namespaces; needs root."),
    ] = None,
    elastic: Annotated[bool, typer.Option("--elastic", help=_ELASTIC_HELP)] = False,
    deep_ep: Annotated[bool, typer.Option("--deep-ep", help=_DEEP_EP_HELP)] = False,
    json: options.Json = False,
) -> None:
    """Time dispatch, combine and both; results are checked first."""
    with command_output(json_lines=json) as output:
        given = {name for name in ctx.params if _is_given(ctx, name)}
        is_shape = not (control or elastic or who_is_late or deep_ep or suite is not None)
        for name, flag in _ONE_SHAPE_FLAGS.items():
            if name in given and not is_shape:
                raise InvalidArgument(f"{flag}: only where calls of one shape are timed")
        if control:
            run_control(output, ranks, iters if "iters" in given else 10, device, hosts)
            return
        if elastic:
            run_elastic(output, ranks, iters if "iters" in given else 10)
            return
        asks_else = who_is_late or deep_ep
        if suite is None and device == "cuda" and not given.intersection(_SHAPE_FLAGS) and not asks_else:
            suite = "all"
        if suite is not None:
            common: dict[str, Any] = {"ranks": ranks, "seed": seed, "device": device, "baseline": baseline}
            common["placement"] = placement
            numbers = {"tokens": tokens, "hidden": hidden, "iters": iters, "warmup": warmup}
            chosen: dict[str, Any] = {name: value for name, value in numbers.items() if name in given}
            names = SUITES if suite == "all" else tuple(suite.split(","))
            trace_file = None if trace is None else str(trace)
            run_suite(output, SuiteOptions(suites=names, trace=trace_file, **common, **chosen), plot)
            return
        if plot is not None:
            raise InvalidArgument(f"--plot {plot}: only with --suite, which has the curves")
        one_shape = Options(
            ranks=ranks,
            tokens=tokens,
            hidden=hidden,
            experts=experts,
            top_k=top_k,
            dtype=dtype,
            layout=layout,
            alignment=alignment,
            quantize=quantize,
            capacity=capacity,
            routing=routing,
            trace=None if trace is None else str(trace),
            seed=seed,
            device=device,
            placement=placement,
            iters=iters,
            warmup=warmup,
            num_sms=num_sms,
            mode=mode,
            baseline=baseline and not asks_else and ("baseline" in given or (nodes == 1 and isolation != "thread")),
            nodes=nodes,
            isolation=isolation,
            preset=machine,
            halves=halves,
        )
        from weft.verify.check import Mismatch

        try:
            if who_is_late:
                run_who_is_late(output, one_shape, late_rank, late_us)
            elif deep_ep:
                run_deep_ep(output, one_shape)
            else:
                _bench(output, one_shape)
        except Mismatch as mismatch:
            output.error(mismatch)
            raise typer.Exit(EXIT_FAILED) from mismatch


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _bench(output: Output, chosen: Options) -> None:
    from weft.bench import run
    from weft.machine import where

    with output.progress(1, "bench", where.read):
        report = run(chosen)
    for row in report.all_rows():
        output.row(row)
    machine, startup, shape = report.machine, report.startup, report.rows[0]
    built = f"{machine['weft']} ({machine['commit'] or 'no commit'})"
    output.text(f"weft {built}, torch {machine['torch']}, {machine['engine']} engine")
    output.text(f"{machine['device_name'] or machine['cpu']}, {machine['cpus']} CPUs, {machine['os']}")
    output.text(
        f"{shape['ranks']} ranks, T={shape['tokens']} H={shape['hidden']} K={shape['top_k']} E={shape['experts']} "
        f"{shape['dtype']} {shape['layout']} quantize={shape['quantize']} routing={shape['routing']}, "
        f"{shape['iters']} calls"
    )
    output.text(f"placement {machine['placement']}: CPUs {'; '.join(machine['rank_cpus'])}")
    columns: tuple[str, ...] = _COLUMNS
    cells = [_cells(row) for row in report.rows]
    if chosen.nodes > 1 or chosen.preset is not None:
        columns = (*columns[:3], "planned us", "network MB", "network GB/s", *columns[3:])
        cells = [(*row[:3], *more, *row[3:]) for row, more in zip(cells, map(_more_cells, report.rows), strict=True)]
    if any(row["must_us"] is not None for row in report.rows):
        columns = (*columns[:2], "must us", *columns[2:])
        cells = [(*row[:2], _number(of["must_us"]), *row[2:]) for row, of in zip(cells, report.rows, strict=True)]
    if chosen.halves:
        columns = (*columns[:2], "send us", "receive us", *columns[2:])
        cells = [(*row[:2], *_halves(of), *row[2:]) for row, of in zip(cells, report.rows, strict=True)]
    spare = tuple(map(columns.index, ("result MB", "wire MB", "host us", "logical GB/s")))
    output.table("slowest rank; results were compared with the reference first", columns, cells, spare=spare)
    if chosen.nodes > 1:
        network = "NCCL's network" if machine["network"] == "nccl" else "no network was there"
        output.text(f"{chosen.nodes} nodes of {chosen.node_ranks} ranks, all on this machine: {network}")
    _print_halves(output, report.rows)
    print_targets(output, report.targets)
    _print_ports(output, report.ports)
    output.text(
        f"memory copy, all ranks at once: {machine['memory_copy_gb_per_s']:.2f} GB/s; "
        f"start-up: import {startup['import_s']:.2f} s, ranks {startup['start_s']:.2f} s, "
        f"first call {startup['first_call_s']:.2f} s"
    )


def _print_halves(output: Output, rows: Sequence[dict[str, Any]]) -> None:
    """What hid the wire, and what was refused."""
    work_us = {row["work_us"] for row in rows if row["work_us"] is not None}
    if work_us:
        output.text(f"in two halves: without the work of up to {max(work_us):.0f} us before each, in which rows arrive")
    for row in rows:
        if row["unsupported"] is not None:
            output.text(f"{name_of(row)}: {row['unsupported']}")


def _print_ports(output: Output, ports: Sequence[dict[str, Any]]) -> None:
    """What NICs carried meanwhile, whoever sent it, and what does not look right."""
    from weft.machine.port_counters import MEANINGS

    for port in ports:
        carried = [
            f"{_number(port[f'{way}_bytes'], 2, 1e9)} GB {way}"
            for way in ("sent", "received")
            if port[f"{way}_bytes"] is not None
        ]
        output.text(f"port {port['port']}: {', '.join(carried) or 'bytes are not counted'}")
        for name, value in port["grown"].items():
            output.text(f"  {name.split('/')[-1]} +{value}: {MEANINGS[name]}")


def _number(value: float | None, digits: int = 0, scale: float = 1.0) -> str:
    return "" if value is None else f"{value / scale:.{digits}f}"


def _halves(row: dict[str, Any]) -> tuple[str, str]:
    return _number(row["send_us"], 1), _number(row["receive_us"], 1)


def _more_cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "time_us" not in row:
        return "", "", ""
    rate = _number(row["network_gb_per_s"], 2)
    return _number(row["planned_us"]), _number(row["network_bytes"], 2, 1e6), rate


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "time_us" not in row:
        return (name_of(row), "unsupported", *[""] * (len(_COLUMNS) - 2))
    digits = 1 if row["is_halved"] else 0
    return (
        name_of(row),
        _number(row["time_us"], digits),
        _number(row["time_p99_us"], digits),
        _number(row["host_us"]),
        _number(row["wire_bytes"], 2, 1e6),
        _number(row["wire_gb_per_s"], 2),
        _number(row["logical_gb_per_s"], 2),
        _number(row["result_bytes"], 2, 1e6),
        _number(row["ratio_vs_all_to_all"], 2),
        _number(row["ratio_vs_memory_copy"], 2),
    )
