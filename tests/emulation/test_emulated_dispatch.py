"""Guards against a dispatch kernel that puts a word in the wrong place, waits too little, or reuses a stage too early.

The kernel is the library's, run on the CPU (README.md). Every word of every result is compared with weft.reference.
"""

import dataclasses

import pytest
import torch
from dispatch_cases import Case, Runner, run_case
from kernels import Compiler, Mutant
from machine import is_found
from world import Shape

WINDOW = Shape(num_ranks=3, num_experts=12, top_k=3, max_tokens=40, landing_row_bytes=2048)
# Few stages, so that each is used several times.
PLAIN = Case(shape=WINDOW, tokens=(40, 23, 31), hidden=600, shared_bytes=24 << 10)
CASES = {
    "rank_major": dataclasses.replace(PLAIN, num_bad_ids=2, num_duplicates=3, is_repeated=True),
    "rank_major, capacity, no tokens on a rank": dataclasses.replace(
        PLAIN, seed=1, tokens=(33, 0, 20), capacity=12, int32_ranks=(0, 2), has_weights=False
    ),
    "expert_major, ue8m0": dataclasses.replace(
        PLAIN, seed=2, layout="expert_major", rows="fp8_ue8m0", hidden=272, alignment=8, shared_bytes=20 << 10
    ),
    "rank_major, powers of two, half precision": dataclasses.replace(
        PLAIN, seed=8, rows="fp8_pow2", dtype=torch.float16, hidden=656, num_rounds=1
    ),
    "masked, bytes with scales, no room in a heap": dataclasses.replace(
        PLAIN,
        seed=3,
        layout="masked",
        rows="bytes",
        hidden=592,
        scale_bytes=3,
        capacity=17,
        num_duplicates=2,
        staged_ranks=(1,),
        is_repeated=True,
    ),
    "expert_major, a lost rank": dataclasses.replace(
        PLAIN, seed=5, layout="expert_major", lost_ranks=(1,), num_bad_ids=1
    ),
    "expert_major, fp8, holes as they were": dataclasses.replace(
        PLAIN,
        seed=6,
        layout="expert_major",
        rows="fp8",
        hidden=272,
        alignment=8,
        zeroes_holes=False,
        staged_ranks=(2,),
        is_repeated=True,
    ),
    "rank_major, column-major scales": dataclasses.replace(
        PLAIN, seed=7, rows="bytes", hidden=592, scale_bytes=20, columns_given=True, is_repeated=True
    ),
    "rank_major, lanes share tokens when they count": dataclasses.replace(
        PLAIN, seed=7, shape=dataclasses.replace(WINDOW, top_k=4), num_bad_ids=3, num_rounds=2
    ),
    # The bad id of rank 0 is one that only block 1 has seen.
    "rank_major, lanes read a token's ids in pieces": dataclasses.replace(
        PLAIN,
        seed=12,
        shape=dataclasses.replace(WINDOW, num_experts=96, top_k=6),
        tokens=(40, 0, 39),
        hidden=8,
        num_bad_ids=1,
        num_rounds=1,
    ),
    "rank_major, more blocks than groups of tokens": dataclasses.replace(
        PLAIN,
        seed=8,
        shape=dataclasses.replace(WINDOW, top_k=4, max_tokens=70, num_blocks=4),
        num_blocks=4,
        tokens=(70, 0, 33),
        hidden=272,
        num_bad_ids=1,
    ),
    "expert_major, blocks take over from each other": dataclasses.replace(
        PLAIN,
        seed=6,
        shape=dataclasses.replace(WINDOW, top_k=4, num_blocks=5),
        num_blocks=5,
        layout="expert_major",
        tokens=(40, 40, 17),
        rows="bytes",
        hidden=1232,
        scale_bytes=16,
        alignment=16,
        shared_bytes=20 << 10,
        is_repeated=True,
    ),
    "expert_major, scales long enough to be copied in bulk": dataclasses.replace(
        PLAIN, seed=8, layout="expert_major", rows="bytes", hidden=592, scale_bytes=528, alignment=4, num_duplicates=3
    ),
    "rank_major, fp8, no room in a heap": dataclasses.replace(
        PLAIN, seed=4, rows="fp8", dtype=torch.float32, hidden=144, staged_ranks=(0, 2)
    ),
}

FEW_STAGES = dataclasses.replace(PLAIN, shared_bytes=12 << 10)
SEND = "weft/kernels/dispatch/send.cuh"
STAGES = "weft/kernels/dispatch/stages.cuh"
BY_RANK, BY_EXPERT = "weft/kernels/dispatch/store_by_rank.cuh", "weft/kernels/dispatch/store_by_expert.cuh"
IDS_OUT = "weft/kernels/dispatch/ids_out.cuh"
IDS = "weft/kernels/dispatch/ids.cuh"
NO_TAG = Mutant(
    "counts of other blocks are taken without looking at their tags",
    IDS,
    "return sync::progress_in(word, flight.turn);",
    "return static_cast<u32>(word & sync::kMaxProgress);",
)
MUTANTS = (
    NO_TAG,
    Mutant(
        "a stage is freed before its stores have read it",
        STAGES,
        "    ptx::bulk_wait_read<kReading>();\n",
        "",
    ),
    Mutant(
        "the header is sent before the stores are complete",
        STAGES,
        "ptx::bulk_wait_all();\n    ptx::fence_proxy_async_global();\n    __syncwarp();",
        "__syncwarp();",
    ),
    Mutant(
        "nobody waits for the header that says that rows are there",
        "weft/kernels/dispatch/entry.cuh",
        "verdict = transport::wait_all(a.view, Phase::kSend, flight, block);",
        "",
    ),
    Mutant(
        "tokens of earlier groups are not counted",
        BY_RANK,
        "s.start[to] + this->rows_before(to, token / 32) +",
        "s.start[to] +",
    ),
)

MIXED_IDS = dataclasses.replace(FEW_STAGES, int32_ranks=(1,), num_rounds=1)
OWN_TYPE = Mutant(
    "ids are written in the type that the sender has",
    IDS_OUT,
    "if (s.with_int64.has(to)) {",
    "if (kConfig.topk_is_int64) {",
)
TAKEN_OVER = CASES["expert_major, blocks take over from each other"]
EXPERT_MUTANTS = (
    NO_TAG,
    Mutant(
        "picks of lower blocks are not counted",
        IDS,
        "num_lower += first + idx < block() ? count : 0;",
        "num_lower += 0;",
    ),
    Mutant(
        "a row is sent before its place is known",
        BY_EXPERT,
        "ptx::ld_acquire_cta(&s.num_planned[period]) >= num_picks",
        "true",
    ),
    Mutant(
        "rows are taken over before their places are known",
        SEND,
        "word / Base::kOnePlanned == kPeriods",
        "true",
    ),
    Mutant(
        "rows are copied to their other places before they have come",
        "weft/kernels/dispatch/fan.cuh",
        "if (lane < end - first) {",
        "if (lane < 0) {",
    ),
    Mutant(
        "each lane tells by what it has read itself",
        "weft/kernels/dispatch/tell.cuh",
        "__shfl_sync(0xffffffffu, read, mine * kLanesEach)",
        "read",
    ),
)


@pytest.fixture(scope="module", autouse=True)
def _compile_ahead(compiler: Compiler, runs_long: bool) -> None:
    for case in CASES.values():
        Runner(compiler, case).start_compiling()
    if not runs_long:
        return
    for mutant in MUTANTS:
        Runner(compiler, FEW_STAGES, mutant).start_compiling()
    Runner(compiler, MIXED_IDS, OWN_TYPE).start_compiling()
    for mutant in EXPERT_MUTANTS:
        Runner(compiler, TAKEN_OVER, mutant).start_compiling()


@pytest.mark.parametrize("name", CASES)
def test_dispatch_is_the_reference(compiler: Compiler, name: str) -> None:
    """Rows, ids, weights, counts, offsets, plans and the words of the window."""
    assert run_case(compiler, CASES[name]) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.long
def test_mistakes_are_found(compiler: Compiler, mutant: Mutant) -> None:
    """An emulation that finds none of these proves nothing."""
    assert is_found(lambda seed: run_case(compiler, dataclasses.replace(FEW_STAGES, seed=seed), mutant))


@pytest.mark.long
def test_mistakes_of_ids_are_found(compiler: Compiler) -> None:
    """As above."""
    assert is_found(lambda seed: run_case(compiler, dataclasses.replace(MIXED_IDS, seed=seed), OWN_TYPE))


@pytest.mark.parametrize("mutant", EXPERT_MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.long
def test_mistakes_by_expert_are_found(compiler: Compiler, mutant: Mutant) -> None:
    """The same of what rows placed by expert alone need."""
    assert is_found(lambda seed: run_case(compiler, dataclasses.replace(TAKEN_OVER, seed=seed), mutant))
