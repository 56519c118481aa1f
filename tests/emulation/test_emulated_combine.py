"""Guards against a combine kernel that adds wrong rows or in another order, waits too little, or frees slots too early.

Each case runs a dispatch first, so that its plans are used as they are.
"""

import dataclasses

import pytest
import torch
from combine_cases import CombineCase, CombineRunner, reseeded, run_combine
from dispatch_cases import Case
from kernels import Compiler, Mutant
from machine import is_found
from world import Shape

WINDOW = Shape(num_ranks=3, num_experts=12, top_k=3, max_tokens=40, landing_row_bytes=2048)
PLAIN = Case(shape=WINDOW, tokens=(40, 23, 31), hidden=64, num_rounds=2)
CASES = {
    "rank_major, pulled and pushed, bias": CombineCase(
        dispatch=PLAIN, hidden=600, heap_ranks=(0, 2), bias="rows", shared_bytes=24 << 10
    ),
    "rank_major, side, capacity, several passes": CombineCase(
        dispatch=dataclasses.replace(
            PLAIN, seed=1, tokens=(33, 0, 20), capacity=30, shape=dataclasses.replace(WINDOW, landing_row_bytes=256)
        ),
        hidden=304,
        dtype=torch.float32,
        has_side=True,
    ),
    "expert_major, fp8 on the wire": CombineCase(
        dispatch=dataclasses.replace(PLAIN, seed=2, layout="expert_major", alignment=4, num_duplicates=2),
        hidden=400,
        wire_is_fp8=True,
        bias="row",
        bias_is_fp32=True,
        shared_bytes=32 << 10,
    ),
    "masked, side, no weights": CombineCase(
        dispatch=dataclasses.replace(PLAIN, seed=3, layout="masked", capacity=9),
        hidden=264,
        dtype=torch.float16,
        is_weighted=False,
        has_side=True,
    ),
}

PUSHED = CombineCase(dispatch=PLAIN, hidden=600, shared_bytes=16 << 10)
PUSH = "weft/kernels/combine_push.cuh"
MUTANTS = (
    Mutant(
        "a slot is freed before its store has read it",
        PUSH,
        "ptx::bulk_wait_read<kInFlight - 1>();",
        "",
    ),
    Mutant(
        "progress is told before the stores are complete",
        PUSH,
        "    ptx::bulk_wait<kPending>();\n",
        "",
    ),
)


@pytest.fixture(scope="module", autouse=True)
def _compile_ahead(compiler: Compiler) -> None:
    for case in CASES.values():
        CombineRunner(compiler, case).start_compiling()
    for mutant in MUTANTS:
        CombineRunner(compiler, PUSHED, mutant).start_compiling()


@pytest.mark.parametrize("name", CASES)
def test_combine_is_the_reference(compiler: Compiler, name: str) -> None:
    """y, side, and the words of the window."""
    assert run_combine(compiler, CASES[name]) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mistakes_are_found(compiler: Compiler, mutant: Mutant) -> None:
    """An emulation that finds none of these proves nothing."""
    assert is_found(lambda seed: run_combine(compiler, reseeded(PUSHED, seed), mutant))
