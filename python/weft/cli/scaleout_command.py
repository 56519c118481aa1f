"""`weft scaleout fetch`: what the network engine needs besides Weft itself."""

from __future__ import annotations

from typing import Annotated

import typer

from weft import env
from weft.cli import options
from weft.cli.options import examples_epilog
from weft.cli.output import command_output
from weft.scaleout import nccl

__all__ = ["scaleout"]

scaleout = typer.Typer(help="What several machines need.", no_args_is_help=True, add_completion=False)

_FROM_HELP = "A wheel that lies here already, for machines without a package index."


@scaleout.callback()
def _group() -> None:
    pass


@scaleout.command("fetch", epilog=examples_epilog(["weft scaleout fetch", "weft scaleout fetch --from FILE.whl"]))
def fetch(
    file: Annotated[str | None, typer.Option("--from", metavar="FILE", help=_FROM_HELP)] = None,
    json: options.Json = False,
) -> None:
    """Bring a private copy of NCCL into Weft's cache (about 300 MB), checked by its hash; torch's stays as it is."""
    with command_output(json_lines=json) as output:
        found = nccl.fetch(env.cache_folder(), file)
        version = ".".join(map(str, found.version))
        output.row({"kind": "nccl", "version": version, "library": str(found.library), "include": str(found.include)})
        output.text(f"{found}")
