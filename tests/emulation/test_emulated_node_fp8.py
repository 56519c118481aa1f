"""Guards against sums of nodes that are not made FP8, twice, with another group's scale, or read as rows.

docs/protocols/nodes.md, "Sums in FP8".
"""

import dataclasses

import pytest
import torch
from combine_cases import CombineCase, reseeded
from dispatch_cases import Case
from kernels import Compiler, Mutant
from machine import is_found
from node_cases import with_nodes
from test_emulated_node_experts import MASKED, SUMS, UNEVEN_EXPERTS
from test_emulated_node_sums import DROPPED, PULLED, UNEVEN
from world import Shape


def in_fp8(case: CombineCase, **changed: object) -> CombineCase:
    """Of an odd seed, so that rows are of all sizes."""
    seed = case.dispatch.seed // 2 * 2 + 1
    return dataclasses.replace(reseeded(case, seed), wire_is_fp8=True, **changed)  # type: ignore[arg-type]


ONE_EACH = Case(shape=Shape(top_k=3, max_tokens=40), tokens=(40, 37), num_rounds=2)
THREE_ONES = Case(
    shape=Shape(num_ranks=3, num_experts=6, top_k=3, max_tokens=24),
    tokens=(24, 0, 19),
    layout="expert_major",
    spread_blocks=2,
    num_duplicates=2,
)
EXPERTS = in_fp8(
    SUMS, has_side=True, hidden=400, dispatch=dataclasses.replace(SUMS.dispatch, capacity=40, num_rounds=1)
)
# Each with the ranks of a node; the last node may have fewer.
CASES = {
    "2 x 2, pulled": (2, in_fp8(PULLED)),
    "2 x 2, pushed, several chunks, bias, side": (
        2,
        in_fp8(PULLED, heap_ranks=(), hidden=1424, bias="rows", has_side=True, shared_bytes=24 << 10),
    ),
    "2 x 2, rows without room, fp32": (2, in_fp8(DROPPED, dtype=torch.float32, hidden=272, bias="row")),
    "2 x 2, expert_major, side": (2, EXPERTS),
    "2 x 2, masked, less than a group, fp16": (
        2,
        in_fp8(SUMS, dispatch=dataclasses.replace(MASKED, is_repeated=False), hidden=40, dtype=torch.float16),
    ),
    "4 + 2, two have left": (
        4,
        in_fp8(CombineCase(dispatch=dataclasses.replace(UNEVEN, lost_ranks=(1, 4)), sum_domain=4, hidden=600)),
    ),
    "4 + 2, expert_major": (
        4,
        in_fp8(
            CombineCase(
                dispatch=dataclasses.replace(UNEVEN_EXPERTS, is_repeated=False, num_rounds=1), sum_domain=4, hidden=128
            )
        ),
    ),
    "2 x 1, without room": (1, in_fp8(CombineCase(dispatch=dataclasses.replace(ONE_EACH, capacity=30), hidden=600))),
    "3 x 1, expert_major, side": (1, in_fp8(CombineCase(dispatch=THREE_ONES, hidden=400, has_side=True))),
}


@pytest.mark.parametrize("name", CASES)
def test_sums_are_those_of_the_reference(compiler: Compiler, name: str) -> None:
    """In every bit, chunks, messages and credits coming in any order."""
    node_ranks, case = CASES[name]
    assert with_nodes(compiler, case, node_ranks).run() == []


NODES, REDUCE, DOMAINS = (f"weft/kernels/{name}.cuh" for name in ("combine/nodes", "combine/reduce", "domains"))
MUTANTS = (
    (
        Mutant(
            "a sum that has come is made FP8 again, as a row",
            REDUCE,
            "if ((domain & mates) == 0) {",
            "if (false) {",
        ),
        2,
        in_fp8(PULLED),
    ),
    (
        Mutant(
            "the scales of a chunk lie behind those of a whole row",
            REDUCE,
            "reinterpret_cast<float*>(out + kConfig.scales_at(elements));",
            "reinterpret_cast<float*>(out + kConfig.scales_at(kConfig.chunk));",
        ),
        2,
        in_fp8(PULLED),
    ),
    (
        Mutant(
            "each lane's vector has a scale of its own",
            DOMAINS,
            "for (i32 step = 1; step < kLanes; step *= 2) {",
            "for (i32 step = 1; step < 1; step *= 2) {",
        ),
        2,
        in_fp8(PULLED),
    ),
    (
        Mutant(
            "a record is as long as a row in its own type, and chunks go where its chunks would",
            NODES,
            "+ kConfig.node_bytes_of(before);",
            "+ kConfig.wire_bytes_of(before);",
        ),
        2,
        CASES["2 x 2, pushed, several chunks, bias, side"][1],
    ),
    (
        Mutant(
            "a node of one rank that keeps no row sends what the slot had",
            REDUCE,
            "item.count > 0 ? *reinterpret_cast<const Packed*>(row + at) : Packed{}",
            "*reinterpret_cast<const Packed*>(row + at)",
        ),
        1,
        CASES["2 x 1, without room"][1],
    ),
)


@pytest.mark.parametrize(("mutant", "node_ranks", "case"), MUTANTS, ids=lambda value: getattr(value, "name", ""))
@pytest.mark.long
def test_mistakes_are_found(compiler: Compiler, mutant: Mutant, node_ranks: int, case: CombineCase) -> None:
    """An emulation that finds none of these proves nothing."""

    def run(seed: int) -> list[str]:
        again = reseeded(case, case.dispatch.seed + 2 * seed)
        found: list[str] = with_nodes(compiler, again, node_ranks, mutant, num_slots=2).run()
        return found

    assert is_found(run)
