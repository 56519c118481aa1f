"""Guards against combines that add in another order than was asked for, multiply by wrong weights, or read picks
that are absent. Memory is poisoned; sums of fp32 show their order, those rounded to bf16 hardly ever; with an odd seed
rows have infinities and NaNs (combine_cases.py).
"""

import dataclasses

import pytest
import torch
from combine_cases import CombineCase, reseeded, run_combine
from dispatch_cases import Case
from kernels import Compiler, Mutant
from machine import is_found
from world import Shape

WINDOW = Shape(num_ranks=3, num_experts=12, top_k=3, max_tokens=40, landing_row_bytes=2048, small_tokens=24)
PLAIN = Case(shape=WINDOW, tokens=(40, 23, 31), hidden=64, num_rounds=1)
SMALL = dataclasses.replace(PLAIN, tokens=(24, 13, 21), is_small=True)
EXPERT = dataclasses.replace(PLAIN, seed=3, layout="expert_major", alignment=4, num_duplicates=2)
MANY = Shape(num_ranks=2, num_experts=8, top_k=7, max_tokens=16, landing_row_bytes=1024, small_tokens=16)

LAST_PICK = {
    "rank_major, pulled and pushed, bias": CombineCase(
        dispatch=PLAIN, hidden=600, dtype=torch.float32, heap_ranks=(0, 2), bias="rows", num_combines=2
    ),
    "rank_major, pushed": CombineCase(dispatch=dataclasses.replace(PLAIN, seed=8), hidden=600, dtype=torch.float32),
    "expert_major, fp8 on the wire, one bias": CombineCase(
        dispatch=dataclasses.replace(EXPERT, seed=7), hidden=400, wire_is_fp8=True, bias="row", bias_is_fp32=True
    ),
    "small, rank_major, bias": CombineCase(
        dispatch=SMALL, hidden=304, dtype=torch.float32, bias="rows", num_combines=2
    ),
    "small, expert_major, two launches": CombineCase(
        dispatch=dataclasses.replace(EXPERT, tokens=(24, 0, 20), is_small=True, is_split=True, capacity=200),
        hidden=304,
        dtype=torch.float32,
        has_side=True,
    ),
}
PICK = {
    "expert_major, the owner's weights, bias": CombineCase(dispatch=EXPERT, hidden=600, bias="rows", num_combines=2),
    "expert_major, picks that have gone": CombineCase(
        dispatch=dataclasses.replace(EXPERT, seed=4), hidden=600, bias="rows", owner_ids=torch.int64, num_combines=2
    ),
    "masked, side, no weights, several passes": CombineCase(
        dispatch=dataclasses.replace(
            PLAIN, seed=1, layout="masked", capacity=9, shape=dataclasses.replace(WINDOW, landing_row_bytes=256)
        ),
        hidden=264,
        dtype=torch.float16,
        is_weighted=False,
        has_side=True,
    ),
    "seven picks on two ranks": CombineCase(
        dispatch=Case(shape=MANY, tokens=(16, 9), hidden=64, layout="expert_major", num_rounds=1, seed=5),
        hidden=1040,
        dtype=torch.float32,
        bias="row",
        owner_ids=torch.int32,
    ),
    "small, masked, dropped picks, bias": CombineCase(
        dispatch=dataclasses.replace(SMALL, seed=2, layout="masked", capacity=5),
        hidden=600,
        bias="rows",
        num_combines=3,
    ),
    "small, masked, picks that have gone": CombineCase(
        dispatch=dataclasses.replace(SMALL, seed=3, layout="masked", capacity=5),
        hidden=600,
        bias="rows",
        owner_ids=torch.int32,
        num_combines=3,
    ),
    "small, expert_major, two launches, picks that have gone": CombineCase(
        dispatch=dataclasses.replace(EXPERT, seed=2, tokens=(24, 0, 20), is_small=True, is_split=True, capacity=200),
        hidden=304,
        has_side=True,
        owner_ids=torch.int64,
    ),
    "small, expert_major, two launches, side": CombineCase(
        dispatch=dataclasses.replace(EXPERT, tokens=(24, 0, 20), is_small=True, is_split=True, capacity=200),
        hidden=304,
        has_side=True,
        is_weighted=False,
    ),
}
CASES = {f"last_pick: {name}": dataclasses.replace(case, order="last_pick") for name, case in LAST_PICK.items()}
CASES |= {f"pick: {name}": dataclasses.replace(case, order="pick") for name, case in PICK.items()}

REDUCE, SMALL_REDUCE = "weft/kernels/combine/reduce.cuh", "weft/kernels/small/combine_reduce.cuh"
MUTANTS = {
    "last_pick: rank_major, pushed": Mutant(
        "ranks are added by their number", REDUCE, "last = first + 31 - __clz", "last = first + 31 + 0 * __clz"
    ),
    "last_pick: small, rank_major, bias": Mutant(
        "a rank is added at its first pick", SMALL_REDUCE, "(same >> b_.lane) == 1u &&", "__ffs(same) - 1 == b_.lane &&"
    ),
    "pick: expert_major, the owner's weights, bias": Mutant(
        "a pick of weight 0 is read",
        REDUCE,
        "b_.flight.is_active(to) && weight != 0.0f;",
        "b_.flight.is_active(to);",
    ),
    "pick: expert_major, picks that have gone": Mutant(
        "a pick whose id has gone is read", REDUCE, "is_gone ? 0.0f : has_weight", "has_weight"
    ),
    "pick: small, masked, picks that have gone": Mutant(
        "a pick whose id has gone is read", SMALL_REDUCE, "is_gone ? 0.0f : has_weight", "has_weight"
    ),
    "pick: small, expert_major, two launches, picks that have gone": Mutant(
        "of an id of two words the one before is read",
        SMALL_REDUCE,
        "b_.a.owner_ids[pick * b_.a.owner_id_words]",
        "b_.a.owner_ids[pick]",
    ),
    "pick: small, masked, dropped picks, bias": Mutant(
        "of a dropped pick the slot is left as it was",
        "weft/kernels/small/combine_push.cuh",
        "rows | __ballot_sync(0xffffffffu, row == kGpuDroppedRow);",
        "rows;",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_combine(compiler: Compiler, name: str) -> None:
    """Sums and side values are those of the specification."""
    assert run_combine(compiler, CASES[name]) == []


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.long
def test_mistakes_are_found(compiler: Compiler, name: str) -> None:
    """In one of a few cases of other values."""
    assert is_found(lambda seed: run_combine(compiler, reseeded(CASES[name], seed), MUTANTS[name]))
