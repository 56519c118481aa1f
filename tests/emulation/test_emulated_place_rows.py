"""Guards against a dispatch in two launches that leaves a place empty, zeroes a row, or takes weights from elsewhere.

Cases as in test_emulated_dispatch.py: every word of every result is compared with weft.reference.
"""

import dataclasses

import pytest
import torch
from dispatch_cases import Case, run_case
from kernels import Compiler, Mutant
from machine import is_found
from world import Shape

WINDOW = Shape(num_ranks=3, num_experts=12, top_k=3, max_tokens=40, landing_row_bytes=2048)
PLAIN = Case(
    shape=WINDOW, tokens=(40, 23, 31), hidden=600, shared_bytes=24 << 10, layout="expert_major", spread_blocks=2,
    num_rounds=2,
)  # fmt: skip
CASES = {
    "aligned groups, repeated, some own rows straight": dataclasses.replace(
        PLAIN, seed=1, alignment=8, num_duplicates=5, num_bad_ids=2, is_repeated=True, num_straight=5
    ),
    "fp8, rows of several pieces": dataclasses.replace(
        PLAIN, seed=2, rows="fp8", hidden=7280, alignment=4, shared_bytes=48 << 10, num_straight=16, num_rounds=1,
        shape=dataclasses.replace(WINDOW, landing_row_bytes=16384), dtype=torch.float16,
    ),
    "masked, scales, capacity that cuts rows off": dataclasses.replace(
        PLAIN, seed=3, layout="masked", rows="bytes", hidden=592, scale_bytes=3, capacity=7, num_duplicates=4,
        is_repeated=True,
    ),
    "expert_major, capacity, holes as they were, a heap without room": dataclasses.replace(
        PLAIN, seed=4, capacity=130, alignment=4, zeroes_holes=False, staged_ranks=(1,), int32_ranks=(0,)
    ),
    "a lost rank, no tokens, many picks": dataclasses.replace(
        PLAIN, seed=5, shape=dataclasses.replace(WINDOW, top_k=35), tokens=(9, 0, 12), lost_ranks=(1,), hidden=64,
        num_straight=3,
    ),
    "quantized, bulk scales, blocks take over from each other": dataclasses.replace(
        PLAIN, seed=6, shape=dataclasses.replace(WINDOW, num_blocks=4), num_blocks=4, rows="fp8_ue8m0", hidden=272,
        alignment=8, is_repeated=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_like_the_reference(compiler: Compiler, name: str) -> None:
    assert run_case(compiler, CASES[name]) == []


KERNEL = "weft/kernels/place_rows.cuh"
MISTAKES = {
    "half of the pieces are left out": ("item += num_warps_", "item += 2 * num_warps_"),
    "a row is copied from nowhere": ("primary = __shfl_sync(0xffffffffu, row, holder);", "primary = 0;"),
    "weights of another token": ("a.table_tokens + token) * a.top_k + first", "a.table_tokens + 0) * a.top_k + first"),
    "holes begin a row early": (") + a.counts[group];", ") + a.counts[group] - 1;"),
    "all own rows are taken for placed": ("token % kStraightOf < a.num_straight;", "token >= 0;"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.long
def test_mistakes_are_found(compiler: Compiler, name: str) -> None:
    mutant = Mutant(name, KERNEL, *MISTAKES[name])
    case = dataclasses.replace(CASES["aligned groups, repeated, some own rows straight"], num_rounds=1)
    assert is_found(lambda seed: run_case(compiler, dataclasses.replace(case, seed=seed), mutant), tries=2)
