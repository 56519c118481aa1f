"""The `weft` command. Parses flags and prints; weft.verify, weft.bench, weft.planner and so on do the work.

Exit codes: 0 ok, 1 a check failed, 2 wrong usage, 3 unsupported here, 130 interrupted. Nothing here imports torch
before a command needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from weft.cli.bench_command import bench
from weft.cli.cache_command import cache
from weft.cli.collect_env_command import collect_env
from weft.cli.demo_command import demo
from weft.cli.doctor_command import doctor
from weft.cli.elastic_command import elastic
from weft.cli.options import examples_epilog
from weft.cli.plan_command import plan
from weft.cli.run_command import run
from weft.cli.scaleout_command import scaleout
from weft.cli.size_command import size
from weft.cli.topo_command import topo
from weft.cli.tune_command import tune
from weft.cli.verify_command import verify

__all__ = ["app", "main"]

app = typer.Typer(
    name="weft",
    help="Dispatch the tokens of Mixture-of-Experts models to the ranks of their experts, and combine the results.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


_EXAMPLES: dict[Callable[..., None], tuple[str, str]] = {
    demo: ("weft demo --steps 60 --no-baseline", "weft demo --kill-rank 2"),
    verify: ("weft verify --trials 20", "weft verify --kill --device cpu --trials 4"),
    bench: ("weft bench --tokens 512 --iters 20", "weft bench --device cuda --suite targets --json"),
    elastic: ("weft elastic plan.json --ops 50", "weft elastic --drawn 20 --json"),
    tune: ("weft tune", "weft tune --ranks 8 --tokens 16 --tokens 128 --output table.json"),
    plan: (
        "weft plan --preset dgx-h100 --ranks 64 --groups 8 --topk-groups 4",
        "weft plan --preset h800-deepep --ranks 128 --mode latency --compare",
    ),
    size: ("weft size --layers 24 --training", "weft size --engine nvlink --ranks 8 --tokens 4096"),
    doctor: ("weft doctor --all --no-measure", "weft doctor --fleet host1.json host2.json"),
    run: (
        "weft run --bind --local-rank 0 --local-ranks 2 -- python train.py",
        "torchrun --nproc-per-node 8 --no-python weft run --bind -- python train.py",
    ),
    topo: ("weft topo --svg machine.svg", "weft topo --settings"),
    collect_env: ("weft collect-env > environment.txt", "weft collect-env --json --import-torch"),
}


class _Command(TyperCommand):
    """Refused choices without the words that pydantic, which some versions of typer use, puts before the text."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


for _function, _examples in _EXAMPLES.items():
    app.command(cls=_Command, epilog=examples_epilog(_examples))(_function)
app.add_typer(cache, name="cache")
app.add_typer(scaleout, name="scaleout", hidden=True)  # until an engine uses what it brings


def _print_version(wanted: bool) -> None:
    if wanted:
        import weft

        typer.echo(f"weft {weft.__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the `weft` command with the arguments of this process; does not return."""
    app(prog_name="weft")
