"""The demo: a small mixture-of-experts language model, trained over several ranks through Weft.

    config = DemoConfig(kill_rank=2)
    report = run_demo(config, console=rich.console.Console())
    show_report(report, console)  # of weft.demo.show

`weft demo` is this with flags. Importing this package imports neither torch nor rich nor matplotlib.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.demo.config import DemoConfig

if TYPE_CHECKING:
    from rich.console import Console

    from weft.demo.report import DemoReport

__all__ = ["DemoConfig", "run_demo"]


def run_demo(config: DemoConfig, *, console: Console | None = None, verbose: bool = False) -> DemoReport:
    """Trains the model on `config.num_ranks` local ranks, then the one-rank baseline, and reports on both.

    Starts and ends its own ranks (`weft.spawn`); leaves no process and no file behind but those asked for by
    `config.plot` and `config.record`. With `console`, says what it is doing as it goes: a progress bar if the console
    is a terminal, and, when a rank dies, what the others see; with `verbose` also what they log. None: silent.

    `weft.demo.show.show_report(report, console)` prints the report, `report.as_dict()` is for JSON, `report.ok` and
    `report.problems` say whether the losses fell and agree with the baseline's.

    Raises:
        InvalidArgument: `config.text` can't be read or is too small, the folder of `config.record` or `config.plot`
            can't be written.
        Unsupported: `config.plot` without matplotlib, device "cuda" without a GPU. Both before anything starts.
        Error: whatever ended a rank that nobody meant to kill.
    """
    from weft.demo.run import run

    return run(config, console, verbose=verbose)
