"""`weft tune`: flags in, weft.bench.tune, a table of weft.kernels.tuning out."""

from __future__ import annotations

import datetime
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from weft import env
from weft.bench.cases import EXPERTS, HIDDEN, SMALL_SWEEP, TOP_K
from weft.bench.tune import NODE_TOKENS, Tuned, TuneOptions
from weft.cli import options
from weft.cli.output import Output, command_output
from weft.errors import InvalidArgument
from weft.kernels import tables as tuning_files

_TOKENS_HELP = "A T to measure, may be given several times. Without it 1, 2, 4 ... 512."
_NODES_HELP = (
    "The ranks are in so many nodes of equal size: measure SMs of large calls, T = 512 and 4096 without --tokens."
)
_OUTPUT_HELP = "Write the table here in place of the cache folder."


def tune(
    ranks: options.Ranks = 4,
    hidden: options.Hidden = HIDDEN,
    experts: options.Experts = EXPERTS,
    top_k: options.TopK = TOP_K,
    tokens: Annotated[list[int] | None, typer.Option("--tokens", metavar="N", min=1, help=_TOKENS_HELP)] = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    placement: options.Placement = "process",
    samples: Annotated[int, typer.Option("--samples", metavar="N", min=1, help="Times of each call.")] = 40,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", min=1, help=_NODES_HELP)] = 1,
    output_file: Annotated[Path | None, typer.Option("--output", help=_OUTPUT_HELP)] = None,
    json: options.Json = False,
) -> None:
    """Measure which kernels are faster up to which T here, and store it where ExpertParallel finds it."""
    with command_output(json_lines=json) as output:
        folder = env.cache_folder()
        if output_file is None and not folder:
            raise InvalidArgument("--output is not given and WEFT_CACHE_DIR is empty: there is no place for the table")
        chosen = TuneOptions(
            ranks=ranks,
            hidden=hidden,
            experts=experts,
            top_k=top_k,
            tokens=tuple(tokens) if tokens else SMALL_SWEEP if nodes == 1 else NODE_TOKENS,
            nodes=nodes,
            seed=seed,
            device=device,
            placement=placement,
            samples=samples,
        )
        tuned, machine = _measure(output, chosen)
        day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        versions = f"weft {machine['weft']} ({machine['commit'] or 'no commit'}), driver {machine['driver']}"
        tuning = tuning_files.Tuning(
            tuned.device_name,
            ranks,
            tuned.table,
            f"weft tune on {machine['machine']}, {versions}, torch {machine['torch']}, {day}",
            {"hidden": hidden, "experts": experts, "top_k": top_k, "dtype": "bf16", "tokens": list(chosen.tokens)},
        )
        tuning = _beside(tuning_files.find(tuned.device_name, ranks), tuning, nodes)
        _print(output, tuned)
        if output_file is None:
            file = tuning_files.path_in(folder, tuned.device_name, ranks)
            tuning_files.write(file, tuning)
        else:
            file = output_file
            file.write_text(tuning.text(), encoding="utf-8")
        output.row({"kind": "table", "file": str(file), "source": tuning.source})
        output.text(f"wrote {file}")


def _beside(known: tuning_files.Tuning, found: tuning_files.Tuning, nodes: int) -> tuning_files.Tuning:
    """What is known of these ranks with other nodes stays, and of them without nodes if `found` is of nodes."""
    keys = {key for key, _ in found.table.node_num_sms}
    others = tuple(pair for pair in known.table.node_num_sms if pair[0] not in keys)
    if nodes == 1:
        return replace(found, table=replace(found.table, node_num_sms=others))
    table = replace(known.table, node_num_sms=others + found.table.node_num_sms)
    return replace(known, table=table, source=f"{nodes} nodes: {found.source}; else: {known.source}")


def _measure(output: Output, chosen: TuneOptions) -> tuple[Tuned, dict[str, Any]]:
    from weft.bench.apart import apart
    from weft.bench.facts import machine_facts
    from weft.bench.tune import tune as measure

    machine: dict[str, Any] = apart(machine_facts, chosen.device)
    output.row({"kind": "machine", **machine, "ranks": chosen.ranks, "seed": chosen.seed})
    return measure(chosen, machine["arch"]), machine


def _print(output: Output, tuned: Tuned) -> None:
    cells: dict[tuple[str, ...], list[str]] = {}
    for point, us in tuned.times.items():
        median, ordered = statistics.median(us), sorted(us)
        times = {"time_us": median, "time_p99_us": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]}
        output.row({"kind": "tuned", **vars(point), "num_sms": point.num_sms or None, **times})
        key = (point.op, point.layout, point.form, str(point.tokens))
        sms = f" ({point.num_sms} SMs)" if point.num_sms else ""
        cells.setdefault(key, []).append(f"{median:.1f} {point.mode}{sms}")
    rows = [(*key, ", ".join(times)) for key, times in cells.items()]
    output.table("us a call", ("operation", "layout", "form", "T", "median"), rows, left=(0, 1, 2, 4))
    for most, num_sms in tuned.table.num_sms:
        output.row({"kind": "tuned_sms", "most_tokens": most, "num_sms": num_sms})
        output.text(f"up to T = {most}: {num_sms} SMs")
    for (node_ranks, op, layout), num_sms in tuned.table.node_num_sms:
        words = {"node_ranks": node_ranks, "op": op, "layout": layout, "num_sms": num_sms}
        output.row({"kind": "tuned_node_sms", **words})
        output.text(f"nodes of {node_ranks}, {op}, {layout}: {num_sms} SMs")
    found = []
    for (op, layout, form), most in tuned.table.most_tokens:
        output.row({"kind": "tuned_crossover", "op": op, "layout": layout, "form": form, "most_tokens": most})
        found.append((op, layout, form, str(most)))
    if found:
        output.table(
            "crossovers", ("operation", "layout", "form", "small-batch kernels up to T"), found, left=(0, 1, 2)
        )
