"""Memory that Weft takes on a rank: the formulas of weft.limits with the words that explain them.

Needs neither torch nor a GPU nor ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.limits import memory

__all__ = ["Part", "Shape", "parts"]

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_MEANING = {
    "control_bytes": "control words of one window",
    "staging_bytes": "staging of one window",
    "heap_bytes": "heap of one window, where received rows lie",
    "windows_bytes": "all windows; layers of equal shape share them",
    "rows_bytes": "rows a layer receives, balanced routing",
    "rows_worst_bytes": "the same if all tokens of all ranks come here",
    "handle_bytes": "what a layer's handle keeps besides",
    "layers_bytes": "rows and handles kept at the same time",
    "total_bytes": "total of this rank",
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the memory depends on. `layers`: MoE layers of this shape; `training` keeps their rows for backward.
    `engine`: "cpu" or "nvlink".
    """

    ranks: int = 4
    tokens: int = 1024
    hidden: int = 2048
    experts: int = 64
    top_k: int = 8
    dtype: str = "bf16"
    heap_bytes: int | None = None
    windows: int = 1
    layers: int = 1
    training: bool = False
    engine: str = "cpu"


@dataclass(frozen=True)
class Part:
    """One figure: its name in weft.limits, bytes on each rank, and what it is."""

    name: str
    num_bytes: int
    meaning: str


def parts(shape: Shape) -> tuple[Part, ...]:
    """The memory of one rank, part by part, the total last. Raises InvalidArgument for a shape Weft would refuse."""
    figures = memory(
        shape.ranks,
        shape.experts,
        shape.top_k,
        shape.hidden,
        shape.tokens,
        _DTYPES[shape.dtype],
        heap_bytes=shape.heap_bytes,
        num_windows=shape.windows,
        num_layers=shape.layers,
        training=shape.training,
        engine=shape.engine,
    )
    return tuple(Part(name, num_bytes, _MEANING.get(name, name)) for name, num_bytes in figures.items())
