"""Pictures of the demo: losses and expert load as PNG files. Needs matplotlib, which the `plot` extra brings."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import Unsupported

if TYPE_CHECKING:
    from weft.demo.report import DemoReport

_BLUE, _ORANGE, _RED, _GREY = "#1f77b4", "#ff7f0e", "#d62728", "#888888"


def require_matplotlib() -> None:
    """Raises `weft.Unsupported` with the command that installs matplotlib, if it is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise Unsupported("--plot", have="no matplotlib", need="pip install 'weft[plot]'")


def write_plots(report: DemoReport, folder: Path) -> tuple[Path, ...]:
    """Writes loss.png and load.png into `folder`, which exists; returns their paths."""
    paths = folder / "loss.png", folder / "load.png"
    for draw, path in zip((_draw_losses, _draw_load), paths, strict=True):
        figure = _figure(*((8.0, 4.5) if draw is _draw_losses else (10.0, 5.5)))
        draw(report, figure)
        figure.savefig(path, dpi=120)
    return paths


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # no pyplot: no window system, no global state

    return Figure(figsize=(width, height), layout="constrained")


def _draw_losses(report: DemoReport, figure: Any) -> None:
    axes = figure.subplots()
    if report.baseline is not None:
        axes.plot(report.baseline.losses, color=_ORANGE, linewidth=4, alpha=0.5, label="1 rank, plain torch")
    axes.plot(report.losses, color=_BLUE, linewidth=1.2, label=f"{report.config.num_ranks} ranks, Weft")
    for rank, step in report.lost_ranks.items():
        axes.axvline(step, color=_RED, linestyle="--", linewidth=1, label=f"rank {rank} killed")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Training loss")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_load(report: DemoReport, figure: Any) -> None:
    layers, config = report.final_load(), report.config
    left, right = figure.subplots(1, 2)
    heat = left.imshow(layers, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
    for rank in range(1, config.num_ranks):
        left.axvline(rank * config.experts_per_rank - 0.5, color="white", linewidth=1)
    left.set(xlabel="expert (lines: ranks)", ylabel="layer", title="Picks per expert, last steps")
    left.set_yticks(range(config.layers))
    figure.colorbar(heat, ax=left)
    busiest, mean, idlest = zip(*(_extremes(step, report) for step in range(config.steps)), strict=True)
    right.fill_between(range(config.steps), idlest, busiest, color=_BLUE, alpha=0.3, label="least to most picked")
    right.plot(mean, color=_GREY, label="mean")
    for rank, step in report.lost_ranks.items():
        right.axvline(step, color=_RED, linestyle="--", linewidth=1, label=f"rank {rank} killed")
    right.set(xlabel="step", ylabel="picks per expert and step", title="The gate's bias evens the load out")
    right.legend()


def _extremes(step: int, report: DemoReport) -> tuple[int, float, int]:
    """Most, mean and least picks of an expert that was alive in this step, over all layers."""
    per_rank, lost = report.config.experts_per_rank, report.lost_ranks
    picks = [
        number
        for layer in report.ranks[0].loads[step]
        for expert, number in enumerate(layer)
        if step < lost.get(expert // per_rank, report.config.steps)
    ]
    return max(picks), sum(picks) / len(picks), min(picks)
