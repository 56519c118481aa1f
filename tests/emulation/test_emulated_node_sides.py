"""Guards against side values that stay in another node, come from a mate that keeps no row of the pick, or too early.

docs/protocols/nodes.md, "Side values".
"""

import dataclasses

import pytest
from combine_cases import CombineCase, reseeded
from kernels import Compiler, Mutant
from machine import is_found
from node_cases import with_nodes
from test_emulated_node_experts import MASKED, SUMS, UNEVEN_EXPERTS
from test_emulated_node_sums import DROPPED, PULLED, PUSHED, UNEVEN


def with_side(case: CombineCase, **dispatch: object) -> CombineCase:
    """And with another dispatch in front."""
    return dataclasses.replace(case, has_side=True, dispatch=dataclasses.replace(case.dispatch, **dispatch))  # type: ignore[arg-type]


BY_EXPERT = with_side(SUMS, capacity=40)
# Each with the ranks of a node; the last node may have fewer.
CASES = {
    "2 x 2, pulled": (2, with_side(PULLED)),
    "2 x 2, pushed, bias": (2, dataclasses.replace(with_side(PUSHED), bias="rows")),
    "2 x 2, pulled and pushed, rows without room": (2, with_side(DROPPED)),
    "2 x 2, expert_major, picks without room": (2, BY_EXPERT),
    "2 x 2, masked, picks without room": (
        2,
        with_side(dataclasses.replace(SUMS, dispatch=MASKED, is_weighted=False), is_repeated=False),
    ),
    "4 + 2, pulled and pushed": (
        4,
        with_side(CombineCase(dispatch=UNEVEN, sum_domain=4, hidden=600, heap_ranks=(1, 4))),
    ),
    "4 + 2, two have left, a few tokens at a time": (
        4,
        with_side(CombineCase(dispatch=UNEVEN, sum_domain=4, hidden=64), lost_ranks=(1, 4), seed=6),
    ),
    "4 + 2, expert_major": (
        4,
        with_side(
            CombineCase(dispatch=UNEVEN_EXPERTS, sum_domain=4, hidden=64), is_repeated=False, num_rounds=1, capacity=60
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_side_values_are_those_of_the_reference(compiler: Compiler, name: str) -> None:
    """In every bit, and the sums with them, chunks, messages and credits coming in any order."""
    node_ranks, case = CASES[name]
    assert with_nodes(compiler, case, node_ranks).run() == []


NODES = "weft/kernels/combine/nodes.cuh"
MUTANTS = (
    (
        Mutant(
            "a record goes before the side values of mates are here",
            "weft/kernels/combine/load_nodes.cuh",
            "if (!has_side_ && !nodes_.side_has_come(missing_side_)) return false;",
            "",
        ),
        with_side(PULLED),
    ),
    (
        Mutant(
            "a mate without room for the row is taken for one that keeps its picks",
            "weft/kernels/dispatch/nodes.cuh",
            "const bool is_kept = keeper < nodes_.size && rows[keeper] >= 0;",
            "const bool is_kept = keeper < nodes_.size;",
        ),
        with_side(DROPPED),
    ),
    (
        Mutant(
            "a pick without room is taken for one that is kept",
            "weft/kernels/dispatch/forward_picks.cuh",
            "row >= 0 ? static_cast<u8>(mate) : kNoMate",
            "mate >= 0 ? static_cast<u8>(mate) : kNoMate",
        ),
        BY_EXPERT,
    ),
    (
        Mutant(
            "a record is as long as one without side values",
            NODES,
            "kSideAt + (kConfig.has_side ? (kTopk * 4 + 15) / 16 * 16 : 0);",
            "kSideAt;",
        ),
        with_side(PULLED),
    ),
    (
        Mutant(
            "the values of a node are read from the record before",
            NODES,
            "if ((from >> node & 1u) != 0) value += reinterpret_cast<const float*>(next_record(node) + kSideAt)[k];",
            "if ((from >> node & 1u) != 0)"
            " value += reinterpret_cast<const float*>(next_record(node) - kRecordBytes + kSideAt)[k];",
        ),
        with_side(PULLED),
    ),
    (
        Mutant(
            "the side warp writes what came from other nodes",
            "weft/kernels/combine/side.cuh",
            "if (from >= 0 && !b_.nodes().map.are_mates(from, b_.a.view.rank)) continue;",
            "if (from >= 0 && !b_.nodes().map.are_mates(from, b_.a.view.rank)) {"
            " b_.a.side_out[token * kTopk + k] = 0.0f; continue; }",
        ),
        with_side(PULLED),
    ),
    (
        Mutant(
            "values for tokens of other nodes lie where those of the own tokens do",
            "weft/kernels/combine/block.cuh",
            "node_place(owner, token, contributor) * kConfig.top_k",
            "node_place(a.view.rank, token, contributor) * kConfig.top_k",
        ),
        with_side(PULLED),
    ),
)


@pytest.mark.parametrize(("mutant", "case"), MUTANTS, ids=lambda value: getattr(value, "name", ""))
@pytest.mark.long
def test_mistakes_are_found(compiler: Compiler, mutant: Mutant, case: CombineCase) -> None:
    """An emulation that finds none of these proves nothing."""

    def run(seed: int) -> list[str]:
        again = reseeded(case, case.dispatch.seed + 2 * seed)
        found: list[str] = with_nodes(compiler, again, 2, mutant, num_slots=2).run()
        return found

    assert is_found(run)
