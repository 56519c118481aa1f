"""The flags that several commands share, each written once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

LayoutName = Literal["rank_major", "expert_major", "masked"]
QuantizeName = Literal["none", "fp8", "fp8_ue8m0", "fp8_pow2"]
DtypeName = Literal["bf16", "fp16", "fp32"]
RoutingName = Literal["uniform", "zipf", "all_to_one", "empty_rank", "group_limited"]
DeviceName = Literal["auto", "cpu", "cuda"]
PlacementName = Literal["auto", "process", "off"]

_TRACE_HELP = "Replay ids and weights recorded with weft.routing.record (npz)."

_LAYOUTS, _ROUTINGS, _QUANTIZES = (", ".join(get_args(names)) for names in (LayoutName, RoutingName, QuantizeName))

Json = Annotated[bool, typer.Option("--json", help="Print JSON objects only, one a line.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of all random data.")]
Device = Annotated[DeviceName, typer.Option("--device", help="Where the tensors lie.")]
_PLACEMENT_HELP = "Bind the ranks to cores and memory near their GPUs: all of each process, Weft's threads, or not."
Placement = Annotated[PlacementName, typer.Option("--placement", help=_PLACEMENT_HELP)]
Trace = Annotated[Path | None, typer.Option("--trace", help=_TRACE_HELP)]

Ranks = Annotated[int, typer.Option("--ranks", metavar="N", min=1, max=64, help="Ranks, one process each.")]
Tokens = Annotated[int, typer.Option("--tokens", metavar="N", min=0, help="Tokens T of each rank.")]
Hidden = Annotated[int, typer.Option("--hidden", metavar="N", min=1, help="Hidden size H: elements of a row.")]
Experts = Annotated[
    int, typer.Option("--experts", metavar="N", min=1, help="Experts E in all, a multiple of the ranks.")
]
TopK = Annotated[int, typer.Option("--top-k", metavar="N", min=1, max=128, help="Experts K of each token.")]
Layout = Annotated[
    LayoutName, typer.Option("--layout", metavar="NAME", help=f"Order of the received rows: {_LAYOUTS}.")
]
Quantize = Annotated[
    QuantizeName, typer.Option("--quantize", metavar="NAME", help=f"Quantise the rows on the way: {_QUANTIZES}.")
]
Dtype = Annotated[DtypeName, typer.Option("--dtype", help="Type of the rows.")]
Routing = Annotated[
    RoutingName, typer.Option("--routing", metavar="NAME", help=f"How tokens choose experts: {_ROUTINGS}.")
]

_RANDOM = "Random in every trial unless given."
AnyRanks = Annotated[
    int | None, typer.Option("--ranks", metavar="N", min=1, max=64, help=f"Ranks, one process each. {_RANDOM}")
]
AnyTokens = Annotated[
    int | None, typer.Option("--tokens", metavar="N", min=0, help=f"Tokens T of each rank. {_RANDOM}")
]
AnyHidden = Annotated[int | None, typer.Option("--hidden", metavar="N", min=1, help=f"Hidden size H. {_RANDOM}")]
AnyExperts = Annotated[int | None, typer.Option("--experts", metavar="N", min=1, help=f"Experts E in all. {_RANDOM}")]
AnyTopK = Annotated[
    int | None, typer.Option("--top-k", metavar="N", min=1, max=128, help=f"Experts K of each token. {_RANDOM}")
]
AnyLayout = Annotated[LayoutName | None, typer.Option("--layout", metavar="NAME", help=f"{_LAYOUTS}. {_RANDOM}")]
AnyQuantize = Annotated[
    QuantizeName | None,
    typer.Option("--quantize", metavar="NAME", help=f"Quantise on the way: {_QUANTIZES}. {_RANDOM}"),
]
AnyDtype = Annotated[DtypeName | None, typer.Option("--dtype", help=f"Type of the rows. {_RANDOM}")]
AnyRouting = Annotated[RoutingName | None, typer.Option("--routing", metavar="NAME", help=f"{_ROUTINGS}. {_RANDOM}")]


def examples_epilog(examples: Sequence[str]) -> str:
    """The end of a help page: an example a line."""
    return "\n\n".join(["Examples:", *examples])
