"""Guards against side values of a token that are summed over other ranks than those that hold it, or come to other rows
along a handle: by both kinds of kernels, with rows that a capacity has dropped. Memory is poisoned (combine_cases.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from combine_cases import CombineCase, reseeded, run_combine
from dispatch_cases import Case
from emulated_gpu import EmulatedRanks
from kernels import Compiler, Mutant
from machine import is_found
from test_side_along import checked_side
from test_side_lanes import checked_lanes
from world import Shape

pytestmark = pytest.mark.long

WINDOW = Shape(num_ranks=3, num_experts=12, top_k=3, max_tokens=40, landing_row_bytes=2048, small_tokens=24)
PLAIN = Case(shape=WINDOW, tokens=(40, 23, 31), hidden=64, num_rounds=2)
SMALL = dataclasses.replace(PLAIN, tokens=(24, 13, 21), is_small=True)
CASES = {
    name: CombineCase(dispatch=case, hidden=264, has_side=True, adds_side=True)
    for name, case in {
        "exact": PLAIN,
        "dropped rows": dataclasses.replace(PLAIN, seed=2, capacity=30),
        "small, dropped rows": dataclasses.replace(SMALL, seed=3, capacity=20),
        "small, two launches": dataclasses.replace(SMALL, tokens=(24, 0, 20), capacity=72, is_split=True),
    }.items()
}
MUTANTS = {
    "exact": Mutant(
        "of a rank that has no row of the token the landing is added",
        "weft/kernels/combine/side.cuh",
        "if (plan.row()[token * kRanks + from] >= 0) add(from);",
        "add(from);",
    ),
    "small, two launches": Mutant(
        "of a rank that does not hold the token the slot is added",
        "weft/kernels/small/combine_side.cuh",
        "if (ranks.has(from)) add(from);",
        "add(from);",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_lanes_of_all_ranks(compiler: Compiler, name: str) -> None:
    """Every word."""
    assert run_combine(compiler, CASES[name]) == []


@pytest.mark.parametrize("name", MUTANTS)
def test_mistakes_are_found(compiler: Compiler, name: str) -> None:
    """In one of a few cases of other values."""
    assert is_found(lambda seed: run_combine(compiler, reseeded(CASES[name], seed), MUTANTS[name]))


@pytest.mark.parametrize("work", [checked_lanes, checked_side])
def test_through_python(monkeypatch: pytest.MonkeyPatch, work: Any) -> None:
    """On ranks that share the emulated GPU."""
    ranks: Any = EmulatedRanks(monkeypatch)
    ranks.run(2, lambda state, _: work(state.comm), [None] * 2)
