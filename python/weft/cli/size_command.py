"""`weft size`: flags in, weft.memory, a table out. Imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import typer

from weft.cli import options
from weft.cli.output import command_output
from weft.memory import Shape, parts

EngineName = Literal["cpu", "nvlink"]
_HEAP_HELP = "Heap of a window in bytes; without it what ExpertParallel takes by itself."


def size(
    ranks: options.Ranks = 4,
    tokens: options.Tokens = 1024,
    hidden: options.Hidden = 2048,
    experts: options.Experts = 64,
    top_k: options.TopK = 8,
    dtype: options.Dtype = "bf16",
    heap_bytes: Annotated[int | None, typer.Option("--heap-bytes", metavar="N", min=0, help=_HEAP_HELP)] = None,
    windows: Annotated[int, typer.Option("--windows", metavar="N", min=1, help="Windows (num_windows).")] = 1,
    layers: Annotated[int, typer.Option("--layers", metavar="N", min=1, help="MoE layers of this shape.")] = 1,
    training: Annotated[bool, typer.Option("--training", help="Layers keep their rows for backward.")] = False,
    engine: Annotated[EngineName, typer.Option("--engine", help="Whose windows: in host or in GPU memory.")] = "cpu",
    json: options.Json = False,
) -> None:
    """Print the memory that Weft takes on each rank; --tokens is the most a rank ever sends."""
    with command_output(json_lines=json) as output:
        shape = Shape(
            ranks=ranks,
            tokens=tokens,
            hidden=hidden,
            experts=experts,
            top_k=top_k,
            dtype=dtype,
            heap_bytes=heap_bytes,
            windows=windows,
            layers=layers,
            training=training,
            engine=engine,
        )
        memory = parts(shape)
        figures = {part.name: part.num_bytes for part in memory}
        output.row({"kind": "size", **dataclasses.asdict(shape), **figures})
        rows = [(part.meaning, f"{part.num_bytes:,}", f"{part.num_bytes / 2**20:,.1f}") for part in memory]
        output.table("memory of each rank", ("part", "bytes", "MiB"), rows)
        for line in _explained(figures, shape):
            output.text(line)


def _explained(figures: dict[str, int], shape: Shape) -> list[str]:
    """How the total comes about."""
    windows, heap = figures["windows_bytes"], figures["heap_bytes"] * shape.windows
    kept, outside = figures["layers_bytes"], figures["total_bytes"] - windows
    layers = f"{shape.layers} layers in training keep" if shape.training else "a layer at a time keeps"
    lines = [
        f"windows: {shape.windows} x (control words + staging + heap) = {_mib(windows)} MiB",
        f"kept: {layers} {_mib(kept)} MiB, of which {_mib(min(kept, heap))} MiB lie in the heap",
        f"total: {_mib(windows)} + {_mib(outside)} outside the heap = {_mib(figures['total_bytes'])} MiB",
    ]
    if shape.engine == "cpu":
        lines.append("Pages of host memory that are never touched take none: less is resident.")
    return lines


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"
