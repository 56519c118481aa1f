"""The flags that several commands share, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

LayoutName = Literal["rank_major", "expert_major", "masked"]
QuantizeName = Literal["none", "fp8", "fp8_ue8m0"]
DtypeName = Literal["bf16", "fp16", "fp32"]
RoutingName = Literal["uniform", "zipf", "all_to_one", "empty_rank", "group_limited"]
DeviceName = Literal["auto", "cpu", "cuda"]
PlacementName = Literal["auto", "process", "off"]

_TRACE_HELP = "Replay ids and weights recorded with weft.routing.record (npz)."

Json = Annotated[bool, typer.Option("--json", help="Print JSON objects only, one a line.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of all random data.")]
Device = Annotated[DeviceName, typer.Option("--device", help="Where the tensors lie.")]
_PLACEMENT_HELP = "Bind the ranks to cores and memory near their GPUs: all of each process, Weft's threads, or not."
Placement = Annotated[PlacementName, typer.Option("--placement", help=_PLACEMENT_HELP)]
Trace = Annotated[Path | None, typer.Option("--trace", help=_TRACE_HELP)]

Ranks = Annotated[int, typer.Option("--ranks", min=1, max=64, help="Ranks, one process each.")]
Tokens = Annotated[int, typer.Option("--tokens", min=0, help="Tokens T of each rank.")]
Hidden = Annotated[int, typer.Option("--hidden", min=1, help="Hidden size H: elements of a row.")]
Experts = Annotated[int, typer.Option("--experts", min=1, help="Experts E in all, a multiple of the ranks.")]
TopK = Annotated[int, typer.Option("--top-k", min=1, max=128, help="Experts K of each token.")]
Layout = Annotated[LayoutName, typer.Option("--layout", help="Order of the received rows.")]
Quantize = Annotated[QuantizeName, typer.Option("--quantize", help="Quantise the rows on the way.")]
Dtype = Annotated[DtypeName, typer.Option("--dtype", help="Type of the rows.")]
Routing = Annotated[RoutingName, typer.Option("--routing", help="How tokens choose their experts.")]

_RANDOM = "Random in every trial unless given."
AnyRanks = Annotated[int | None, typer.Option("--ranks", min=1, max=64, help=f"Ranks, one process each. {_RANDOM}")]
AnyTokens = Annotated[int | None, typer.Option("--tokens", min=0, help=f"Tokens T of each rank. {_RANDOM}")]
AnyHidden = Annotated[int | None, typer.Option("--hidden", min=1, help=f"Hidden size H. {_RANDOM}")]
AnyExperts = Annotated[int | None, typer.Option("--experts", min=1, help=f"Experts E in all. {_RANDOM}")]
AnyTopK = Annotated[int | None, typer.Option("--top-k", min=1, max=128, help=f"Experts K of each token. {_RANDOM}")]
AnyLayout = Annotated[LayoutName | None, typer.Option("--layout", help=f"Order of the received rows. {_RANDOM}")]
AnyQuantize = Annotated[QuantizeName | None, typer.Option("--quantize", help=f"Quantise on the way. {_RANDOM}")]
AnyDtype = Annotated[DtypeName | None, typer.Option("--dtype", help=f"Type of the rows. {_RANDOM}")]
AnyRouting = Annotated[RoutingName | None, typer.Option("--routing", help=f"How tokens choose experts. {_RANDOM}")]
