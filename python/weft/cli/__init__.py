"""The `weft` command. Parses flags and prints; weft.verify, weft.bench, weft.planner and so on do the work.

Exit codes: 0 ok, 1 a check failed, 2 wrong usage, 3 unsupported here, 130 interrupted. Nothing here imports torch
before a command needs it.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from weft.cli.bench_command import bench
from weft.cli.cache_command import cache
from weft.cli.collect_env_command import collect_env
from weft.cli.demo_command import demo
from weft.cli.doctor_command import doctor
from weft.cli.plan_command import plan
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


class _Command(TyperCommand):
    """Refused choices without the words that pydantic, which some versions of typer use, puts before the text."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


for _function in (demo, verify, bench, tune, plan, size, doctor, topo, collect_env):
    app.command(cls=_Command)(_function)
app.add_typer(cache, name="cache")


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
