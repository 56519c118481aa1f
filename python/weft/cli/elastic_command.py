"""`weft elastic`: a plan in, processes that join and leave, a table out."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from weft.cli import options
from weft.cli.output import EXIT_FAILED, command_output

_PLAN_HELP = "JSON: a list of phases, each a list of active ranks; -2: rank 2 is killed in it. None: plans are drawn."


def elastic(
    plan: Annotated[str | None, typer.Argument(metavar="PLAN.json", help=_PLAN_HELP)] = None,
    tokens: options.Tokens = 32,
    hidden: options.Hidden = 64,
    top_k: options.TopK = 2,
    experts: Annotated[int, typer.Option("--experts", metavar="N", min=1, help="Experts a rank.")] = 2,
    ops: Annotated[int, typer.Option("--ops", metavar="N", min=2, help="Dispatches and combines a phase.")] = 20,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of drawn plans: the first one's.")] = 0,
    drawn: Annotated[int, typer.Option("--drawn", "--trials", metavar="N", min=1, help="How many plans.")] = 1,
    json: options.Json = False,
) -> None:
    """Let ranks join and leave a running group by a plan, every word against the reference; cpu engine."""
    with command_output(json_lines=json) as output:
        from weft.elastic.plan import draw_plan, read_plan
        from weft.elastic.run import play
        from weft.elastic.worker import Load

        load = Load(tokens, hidden, experts, top_k, ops)
        plans = [(plan, read_plan(plan))] if plan is not None else []
        plans += [(f"seed {each}", draw_plan(each)) for each in range(seed, seed + drawn) if plan is None]
        has_failed = False
        for name, phases in plans:
            rows: list[tuple[str, ...]] = []

            def tell(played: Any, name: str = name, rows: list[tuple[str, ...]] = rows) -> None:
                row = {key: value for key, value in dataclasses.asdict(played).items() if key != "address"}
                output.row({"kind": "phase", "plan": name, **row})
                rows.append(
                    (
                        str(played.number),
                        ",".join(f"-{rank}" if rank in played.killed else str(rank) for rank in played.ranks),
                        str(played.ops),
                        str(played.wrong),
                        f"{played.change_ms:.2f}",
                        f"{played.pause_ms:.1f}",
                        f"{played.recover_ms:.1f}",
                        f"{played.gb_s:.3f}",
                        played.error or "; ".join(played.leftovers),
                    )
                )

            all_played = play(phases, load, tell)
            columns = ("phase", "ranks", "ops", "wrong", "change ms", "pause ms", "recover ms", "GB/s", "what else")
            output.table(f"plan {name}", columns, rows, left=(1, 8))
            has_failed |= any(each.wrong or each.error or each.leftovers for each in all_played)
        if has_failed:
            raise typer.Exit(EXIT_FAILED)
