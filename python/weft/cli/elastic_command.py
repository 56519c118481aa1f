"""`weft elastic`: a plan in, processes that join and leave, a table out."""

from __future__ import annotations

import dataclasses
import json as json_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import options
from weft.cli.output import EXIT_FAILED, Output, command_output
from weft.errors import Error

if TYPE_CHECKING:
    from weft.elastic.plan import Phase
    from weft.elastic.steps import Load, Way

_PLAN_HELP = "JSON: a list of phases, each a list of active ranks; -2: rank 2 is killed in it. None: plans are drawn."
_FRESH_HELP = "Who joins is a new interpreter that has nothing but the address, not one forked from a warm process."
_TRAFFIC_HELP = "Steps go on between phases, too, while ranks start, join and close."


def elastic(
    plan: Annotated[str | None, typer.Argument(metavar="PLAN.json", help=_PLAN_HELP)] = None,
    tokens: options.Tokens = 32,
    hidden: options.Hidden = 64,
    top_k: options.TopK = 2,
    experts: Annotated[int, typer.Option("--experts", metavar="N", min=1, help="Experts a rank.")] = 2,
    ops: Annotated[int, typer.Option("--ops", metavar="N", min=2, help="Dispatches and combines a phase.")] = 20,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of drawn plans: the first one's.")] = 0,
    drawn: Annotated[int, typer.Option("--drawn", "--trials", metavar="N", min=1, help="How many plans.")] = 1,
    fresh: Annotated[bool, typer.Option("--fresh", help=_FRESH_HELP)] = False,
    traffic: Annotated[bool, typer.Option("--traffic", help=_TRAFFIC_HELP)] = False,
    json: options.Json = False,
) -> None:
    """Let ranks join and leave a running group by a plan, every word against the reference; cpu engine."""
    with command_output(json_lines=json) as output:
        from weft.elastic.plan import draw_plan, read_plan
        from weft.elastic.steps import Load, Way

        way = Way(fresh, traffic)
        load = Load(tokens, hidden, experts, top_k, ops)
        plans = [(plan, read_plan(plan))] if plan is not None else []
        plans += [(f"seed {each}", draw_plan(each)) for each in range(seed, seed + drawn) if plan is None]
        failed = [name for name, phases in plans if not _play(output, name, phases, load, way)]
        if failed:
            raise typer.Exit(EXIT_FAILED)


def _play(output: Output, name: str, phases: list[Phase], load: Load, way: Way) -> bool:
    """Whether all went well; else how to play it again stands in the output."""
    from weft.elastic.plan import as_json
    from weft.elastic.run import play

    rows: list[tuple[str, ...]] = []

    def tell(played: Any) -> None:
        row = {key: value for key, value in dataclasses.asdict(played).items() if key != "address"}
        output.row({"kind": "phase", "plan": name, **row})
        rows.append(
            (
                str(played.number),
                ",".join(f"-{rank}" if rank in played.killed else str(rank) for rank in played.ranks),
                ",".join(map(str, played.standby)),
                *([str(played.between)] if way.traffic else []),
                str(played.ops),
                str(played.wrong),
                f"{played.change_ms:.2f}",
                f"{played.pause_ms:.1f}",
                f"{played.recover_ms:.1f}",
                f"{played.gb_s:.3f}",
                played.error or "; ".join(played.leftovers),
            )
        )

    hung: Error | None = None
    has_failed = False
    try:
        has_failed = any(each.wrong or each.error or each.leftovers for each in play(phases, load, tell, way))
    except Error as error:
        hung = error
    before = ("phase", "ranks", "standby", *(["between"] if way.traffic else []))
    columns = (*before, "ops", "wrong", "change ms", "pause ms", "recover ms", "GB/s", "what else")
    output.table(f"plan {name}", columns, rows, left=(1, 2, len(columns) - 1))
    if has_failed or hung:
        options = [f"--{field.replace('_', '-')} {value}" for field, value in dataclasses.asdict(load).items()]
        again = " ".join(options + [f"--{field}" for field, is_on in dataclasses.asdict(way).items() if is_on])
        output.row({"kind": "failed", "plan": name, "phases": json_module.loads(as_json(phases)), "options": again})
        output.text(f"FAILED plan {name}; `weft elastic PLAN.json {again}` plays it again:", style="bold red")
        output.text(as_json(phases))
    if hung:
        raise hung
    return not has_failed
