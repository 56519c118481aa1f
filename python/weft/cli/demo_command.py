"""`weft demo`: flags in, weft.demo, the report out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli import options
from weft.cli.output import EXIT_FAILED, command_output
from weft.demo.config import DemoConfig

_TEXT_HELP = "File to learn from; without it a text found on this machine."
_KILL_HELP = "Kill this rank in the middle of the training and show what the others see."
_RECORD_HELP = "Save the routing of every dispatch, for --trace of bench and verify."


def demo(
    text: Annotated[Path | None, typer.Option("--text", help=_TEXT_HELP)] = None,
    ranks: options.Ranks = DemoConfig.num_ranks,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Training steps.")] = DemoConfig.steps,
    layers: Annotated[
        int, typer.Option("--layers", metavar="N", min=1, help="Layers of the model.")
    ] = DemoConfig.layers,
    hidden: options.Hidden = DemoConfig.hidden,
    experts: options.Experts = DemoConfig.experts,
    top_k: options.TopK = DemoConfig.top_k,
    generate: Annotated[
        int, typer.Option("--generate", metavar="N", min=0, help="Bytes of text to write.")
    ] = DemoConfig.generate,
    prompt: Annotated[str, typer.Option("--prompt", help="What the text begins with.")] = DemoConfig.prompt,
    baseline: Annotated[bool, typer.Option(help="Train in plain torch on one rank too, and compare.")] = True,
    kill_rank: Annotated[int | None, typer.Option("--kill-rank", metavar="N", min=0, help=_KILL_HELP)] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Folder for pictures of loss and load.")] = None,
    record: Annotated[Path | None, typer.Option("--record", help=_RECORD_HELP)] = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    placement: options.Placement = DemoConfig.placement,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what Weft logs, too.")] = False,
    json: options.Json = False,
) -> None:
    """Train a small mixture-of-experts language model across ranks; exit 1 if its losses are not as they should be."""
    with command_output(json_lines=json) as output:
        from weft.demo import run_demo
        from weft.demo.show import show_report

        config = DemoConfig(
            num_ranks=ranks,
            steps=steps,
            layers=layers,
            hidden=hidden,
            experts=experts,
            top_k=top_k,
            generate=generate,
            prompt=prompt,
            baseline=baseline,
            kill_rank=kill_rank,
            plot=plot,
            record=record,
            text=text,
            seed=seed,
            device=device,
            placement=placement,
        )
        report = run_demo(config, console=None if json else output.console, verbose=verbose)
        output.row(report.as_dict())
        if not json:
            show_report(report, output.console)
        if not report.ok:
            raise typer.Exit(EXIT_FAILED)
