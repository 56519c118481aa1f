"""The cases of weft.deep_ep that every engine runs, with the numbers of ranks that each is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import buffer_cases
import elastic_cases
import hybrid_cases
import low_latency_cases
import refusal_cases
import room_cases
import shape_cases
import torch
import trap_cases

from pool import RankState

_ALL = (1, 2, 3, 4, 8)
_SEVERAL = (2, 3, 4, 8)


class Case(NamedTuple):
    """`function(comm, *arguments)` on each rank."""

    function: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    ranks: tuple[int, ...] = _ALL


CASES = {
    "V1": Case(buffer_cases.against_the_reference, (torch.bfloat16, False)),
    "V1 fp32 and duplicates": Case(buffer_cases.against_the_reference, (torch.float32, True)),
    "V1 forms": Case(trap_cases.forms),
    "V1 more tokens": Case(trap_cases.more_tokens, (), _SEVERAL),
    "V1 widths": Case(trap_cases.other_widths, (), (2,)),
    "V1 room": Case(room_cases.grows, (0,), (3, 4)),
    "V1 room of the worst case": Case(room_cases.grows, (20000,), (3, 4)),
    "V1 as callers": Case(shape_cases.throughput),
    "low latency": Case(low_latency_cases.against_the_reference),
    "low latency of many picks": Case(low_latency_cases.against_the_reference, (17, 9), (2,)),
    "low latency weights": Case(low_latency_cases.with_weights),
    "low latency waits": Case(low_latency_cases.waits, ("row",), _SEVERAL),
    "low latency waits for a late rank": Case(low_latency_cases.waits_for_a_late_rank, (False,), _SEVERAL),
    "low latency waits in hooks": Case(low_latency_cases.waits_for_a_late_rank, (True,), _SEVERAL),
    "low latency results": Case(low_latency_cases.two_micro_batches),
    "low latency as callers": Case(shape_cases.two_micro_batches),
    "V2 by token": Case(elastic_cases.by_token),
    "V2 by expert": Case(elastic_cases.by_expert),
    "V2 bounds": Case(elastic_cases.other_calls),
    "V2 as callers": Case(shape_cases.elastic),
    "hybrid permuted": Case(hybrid_cases.permuted),
    "hybrid by token": Case(hybrid_cases.by_token),
    "hybrid too many": Case(hybrid_cases.too_many, (), (2, 3, 4)),
    "hybrid grows": Case(hybrid_cases.grows, (), (2,)),
    "nobody has tokens": Case(trap_cases.nobody_has_tokens, (), _SEVERAL),
    "bad input": Case(refusal_cases.wrong_input, (), (2,)),
    "bad input of one rank": Case(refusal_cases.wrong_on_one_rank, (), (2,)),
    "ids out of range": Case(refusal_cases.ids_out_of_range, (), (1,)),
}


def run_case(state: RankState, name: str) -> None:
    """For the ranks of a pool."""
    case = CASES[name]
    case.function(state.comm, *case.arguments)


def pairs(ranks: tuple[int, ...]) -> list[tuple[str, int]]:
    """Each case with those of `ranks` that it is for."""
    return [(name, each) for name, case in CASES.items() for each in ranks if each in case.ranks]
