"""Guards against small batches between nodes that lose, repeat or misplace a row, a pick or a sum, or say too early that it is there.

As test_emulated_nodes and test_emulated_node_sums; docs/protocols/nodes.md, "Small batches".
"""

import dataclasses
from typing import Any

import pytest
import torch
from combine_cases import CombineCase
from dispatch_cases import Case
from kernels import Compiler
from node_cases import with_nodes
from world import Shape

# Of two nodes of two ranks each.
WINDOW = Shape(num_ranks=4, num_experts=8, top_k=3, max_tokens=40, landing_row_bytes=2048, small_tokens=24)
TWO = Case(shape=WINDOW, tokens=(24, 13, 0, 21), hidden=600, is_small=True)
FOUR = Case(
    shape=Shape(num_ranks=8, num_experts=16, top_k=4, max_tokens=16, landing_row_bytes=2048, small_tokens=16),
    tokens=(16, 9, 0, 1, 12, 16, 5, 8),
    is_small=True,
    num_rounds=2,
)
THREE = Case(
    shape=Shape(num_ranks=12, num_experts=24, top_k=5, max_tokens=12, landing_row_bytes=2048, small_tokens=12),
    tokens=(12, 3, 0, 9, 12, 1, 2, 11, 4, 12, 7, 0),
    is_small=True,
    num_rounds=2,
)
UNEVEN = Case(
    shape=Shape(num_ranks=6, num_experts=12, top_k=3, max_tokens=24, landing_row_bytes=2048, small_tokens=24),
    tokens=(16, 5, 14, 8, 16, 11),
    is_small=True,
    num_rounds=2,
)
FEW = dataclasses.replace(UNEVEN, tokens=(8, 5, 7, 8, 8, 3))  # one rank adds for three others
# Each with the ranks of a node; the last node may have fewer.
DISPATCHES = {
    "2 x 2": (2, TWO),
    "2 x 2, two launches, repeated": (2, dataclasses.replace(TWO, is_split=True, is_repeated=True, seed=1)),
    "2 x 2, capacity, bad ids, int32 ids on a rank, no weights": (
        2,
        dataclasses.replace(TWO, capacity=50, num_bad_ids=3, int32_ranks=(3,), has_weights=False, seed=2),
    ),
    "2 x 2, expert_major, made FP8": (
        2,
        dataclasses.replace(TWO, layout="expert_major", rows="fp8", hidden=400, alignment=8, is_repeated=True, seed=3),
    ),
    "2 x 2, masked, bytes with scales, two launches": (
        2,
        dataclasses.replace(
            TWO,
            layout="masked",
            rows="bytes",
            hidden=592,
            scale_bytes=3,
            capacity=9,
            num_duplicates=2,
            is_split=True,
            is_repeated=True,
            seed=4,
        ),
    ),
    "2 x 2, masked, bytes, column-major scales given": (
        2,
        dataclasses.replace(
            TWO,
            layout="masked",
            rows="bytes",
            hidden=592,
            scale_bytes=592,
            columns_given=True,
            scale_word_bytes=4,
            capacity=9,
            is_split=True,
            seed=5,
        ),
    ),
    "2 x 2, one token": (2, dataclasses.replace(TWO, tokens=(1, 0, 1, 1), seed=6)),
    "nodes of one rank": (
        1,
        dataclasses.replace(TWO, shape=dataclasses.replace(WINDOW, num_ranks=3, num_experts=6), tokens=(24, 0, 9), seed=7),
    ),
    "4 x 2": (2, dataclasses.replace(FOUR, is_repeated=True, seed=8)),
    "3 x 4": (4, dataclasses.replace(THREE, layout="expert_major", seed=9)),
    "4 + 2": (4, dataclasses.replace(UNEVEN, is_split=True, seed=10)),
    "4 + 2, two have left": (4, dataclasses.replace(UNEVEN, lost_ranks=(1, 4), seed=11)),
    "expert_major of a throughput dispatch, repeated": (
        2,
        dataclasses.replace(
            TWO, layout="expert_major", is_small=False, is_small_behind=True, is_repeated=True, alignment=8, seed=12
        ),
    ),
}


def behind(dispatch: Case, node_ranks: int, **options: Any) -> CombineCase:
    """Combines of a dispatch, in domains of the nodes."""
    return CombineCase(dispatch=dispatch, sum_domain=node_ranks, **options)


BRIEF = dataclasses.replace(TWO, hidden=64, num_rounds=2)
COMBINES = {
    "2 x 2, bias": (2, behind(BRIEF, 2, hidden=600, bias="rows", num_combines=2)),
    "2 x 2, expert_major, weighted, side values, two launches": (
        2,
        behind(
            dataclasses.replace(BRIEF, layout="expert_major", is_split=True, seed=1),
            2,
            hidden=328,
            is_weighted=True,
            has_side=True,
        ),
    ),
    "2 x 2, masked, capacity, side values": (
        2,
        behind(dataclasses.replace(BRIEF, layout="masked", capacity=7, seed=2), 2, hidden=64, has_side=True),
    ),
    "2 x 2, FP8": (2, behind(dataclasses.replace(BRIEF, seed=3), 2, hidden=784, wire_is_fp8=True)),
    "2 x 2, expert_major, FP8, side values": (
        2,
        behind(
            dataclasses.replace(BRIEF, layout="expert_major", seed=4),
            2,
            hidden=400,
            wire_is_fp8=True,
            is_weighted=True,
            has_side=True,
        ),
    ),
    "2 x 2, fp32 rows": (2, behind(dataclasses.replace(BRIEF, seed=5), 2, hidden=300, dtype=torch.float32)),
    "nodes of one rank, FP8": (
        1,
        behind(
            dataclasses.replace(
                BRIEF, shape=dataclasses.replace(WINDOW, num_ranks=3, num_experts=6), tokens=(24, 0, 9), seed=6
            ),
            0,
            hidden=784,
            wire_is_fp8=True,
        ),
    ),
    "4 x 2": (2, behind(dataclasses.replace(FOUR, seed=7), 2, hidden=200)),
    "3 x 4": (4, behind(dataclasses.replace(THREE, layout="expert_major", seed=8), 4, hidden=200, is_weighted=True)),
    "4 + 2": (4, behind(dataclasses.replace(UNEVEN, is_split=True, seed=9), 4, hidden=200, has_side=True)),
    "4 + 2, two have left": (4, behind(dataclasses.replace(FEW, lost_ranks=(1, 4), seed=10), 4, hidden=200)),
    "behind a throughput dispatch, capacity": (
        2,
        behind(
            dataclasses.replace(BRIEF, layout="masked", capacity=7, is_small=False, is_small_behind=True, seed=11),
            2,
            hidden=200,
            has_side=True,
        ),
    ),
}


@pytest.mark.parametrize("name", DISPATCHES)
def test_rows_are_those_of_the_reference(compiler: Compiler, name: str) -> None:
    """In every word, chunks, messages and credits coming in any order."""
    node_ranks, case = DISPATCHES[name]
    assert with_nodes(compiler, case, node_ranks).run() == []


@pytest.mark.parametrize("name", COMBINES)
def test_sums_are_those_of_the_reference(compiler: Compiler, name: str) -> None:
    """The same."""
    node_ranks, case = COMBINES[name]
    assert with_nodes(compiler, case, node_ranks, chunk_rows=8).run() == []
