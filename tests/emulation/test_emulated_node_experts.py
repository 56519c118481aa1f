"""Guards against dispatches and combines by expert over nodes that misplace a pick, or add it at the wrong level.

docs/protocols/nodes.md, "By expert".
"""

import dataclasses

import pytest
from combine_cases import CombineCase, reseeded
from kernels import Compiler, Mutant
from machine import is_found
from node_cases import with_nodes
from test_emulated_node_sums import UNEVEN
from test_emulated_nodes import TWO

EXPERTS = dataclasses.replace(
    TWO,
    layout="expert_major",
    alignment=4,
    spread_blocks=2,
    num_straight=8,
    num_duplicates=3,
    num_bad_ids=2,
    num_rounds=2,
    is_repeated=True,
)
UNEVEN_EXPERTS = dataclasses.replace(
    UNEVEN, layout="expert_major", alignment=2, spread_blocks=2, num_duplicates=2, is_repeated=True
)
MASKED = dataclasses.replace(EXPERTS, layout="masked", capacity=12, alignment=1, seed=1)
# Each with the ranks of a node; the last node may have fewer.
CASES = {
    "2 x 2": (2, EXPERTS),
    "2 x 2, masked": (2, MASKED),
    "2 x 2, capacity, no weights": (2, dataclasses.replace(EXPERTS, capacity=50, has_weights=False, seed=2)),
    "2 x 2, no room in the heap of some": (2, dataclasses.replace(EXPERTS, staged_ranks=(1, 2), seed=3)),
    "2 x 2, made FP8": (2, dataclasses.replace(EXPERTS, rows="fp8", hidden=400, num_rounds=1, seed=7)),
    "4 + 2": (4, UNEVEN_EXPERTS),
    "4 + 2, two have left": (4, dataclasses.replace(UNEVEN_EXPERTS, lost_ranks=(1, 4), seed=6)),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_the_reference(compiler: Compiler, name: str) -> None:
    """In every word, of a first dispatch and along its handle, chunks, messages and credits coming in any order."""
    node_ranks, case = CASES[name]
    assert with_nodes(compiler, case, node_ranks).run() == []


SUMS = CombineCase(dispatch=dataclasses.replace(EXPERTS, is_repeated=False), hidden=600, sum_domain=2)
SUM_CASES = {
    "2 x 2, bias": (2, dataclasses.replace(SUMS, bias="rows")),
    "2 x 2, masked, rows without room, not weighted": (
        2,
        dataclasses.replace(SUMS, dispatch=dataclasses.replace(MASKED, is_repeated=False), is_weighted=False),
    ),
    "4 + 2": (4, CombineCase(dispatch=dataclasses.replace(UNEVEN_EXPERTS, num_rounds=1), hidden=64, sum_domain=4)),
    "4 + 2, two have left": (
        4,
        CombineCase(
            dispatch=dataclasses.replace(UNEVEN_EXPERTS, num_rounds=1, lost_ranks=(1, 4), seed=6),
            hidden=64,
            sum_domain=4,
        ),
    ),
}


@pytest.mark.parametrize("name", SUM_CASES)
def test_sums_are_those_of_the_reference(compiler: Compiler, name: str) -> None:
    """In every bit."""
    node_ranks, case = SUM_CASES[name]
    assert with_nodes(compiler, case, node_ranks).run() == []


PICKS = "weft/kernels/dispatch/forward_picks.cuh"
MUTANTS = (
    Mutant(
        "picks of earlier blocks are not counted",
        PICKS,
        "for (i32 at = lane; at < s.first_row[source] * kTopk; at += 32) {",
        "for (i32 at = lane; at < 0; at += 32) {",
    ),
    Mutant(
        "picks of the sources between are not counted",
        PICKS,
        "for (i32 other = rank(); other < source; ++other) place += picks_of(other, global);",
        "",
    ),
    Mutant(
        "a row goes to the place of its last pick",
        PICKS,
        "kept != 0 ? __ffs(static_cast<i32>(kept)) - 1 : 0",
        "kept != 0 ? 31 - __clz(static_cast<i32>(kept)) : 0",
    ),
    Mutant(
        "counts of a mate's experts are not written on",
        "weft/kernels/dispatch/messages.cuh",
        "const i32 begin = kConfig.is_by_expert() ? 0 : (mate - nodes_.first) * kLocal;\n"
        "      const i32 end = kConfig.is_by_expert() ? nodes_.size * kLocal : begin + kLocal;",
        "const i32 begin = (mate - nodes_.first) * kLocal;\n      const i32 end = begin + kLocal;",
    ),
    Mutant(
        "weights of a pick stay behind",
        "weft/kernels/dispatch/nodes.cuh",
        "if (rows[mate] < 0 || !flight.is_active(to) || lane >= kTopk) continue;",
        "if (rows[mate] < 0 || !flight.is_active(to) || lane >= kTopk - 1) continue;",
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.long
def test_mistakes_are_found(compiler: Compiler, mutant: Mutant) -> None:
    """An emulation that finds none of these proves nothing."""
    case = dataclasses.replace(EXPERTS, is_repeated=False, num_rounds=1)

    def run(seed: int) -> list[str]:
        found: list[str] = with_nodes(compiler, dataclasses.replace(case, seed=seed), 2, mutant).run()
        return found

    assert is_found(run)


@pytest.mark.long
def test_own_sums_that_stay_behind_are_found(compiler: Compiler) -> None:
    """A forwarder that pushes no sum of its own for a token of another node."""
    mutant = Mutant(
        "a forwarder's own sums are not pushed",
        "weft/kernels/combine/push.cuh",
        "if constexpr (kConfig.has_nodes() && kConfig.adds_own_rows()) {",
        "if constexpr (kConfig.has_nodes()) {",
    )

    def run(seed: int) -> list[str]:
        found: list[str] = with_nodes(compiler, reseeded(SUMS, seed), 2, mutant).run()
        return found

    assert is_found(run)
