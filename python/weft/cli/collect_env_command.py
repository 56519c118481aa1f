"""`weft collect-env`: weft.collect_env's report."""

from __future__ import annotations

from typing import Annotated

import typer

from weft import collect_env as report_of
from weft.cli import options
from weft.cli.output import command_output

_TORCH_HELP = "Import torch too, in a process of its own, and add what it says."


def collect_env(
    import_torch: Annotated[bool, typer.Option("--import-torch", help=_TORCH_HELP)] = False,
    json: options.Json = False,
) -> None:
    """Print what a bug report needs, nothing secret; `python -m weft.collect_env` does so without typer and rich."""
    with command_output(json_lines=json) as output:
        report = report_of.collect(import_torch=import_torch)
        output.row({"kind": "environment", **report})
        for line in report_of.lines(report):
            output.text(line)
