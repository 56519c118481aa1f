"""Guards against a combine kernel that adds wrong rows or in another order, waits too little, or frees slots too early.

Each case runs a dispatch first, so that its plans are used as they are.
"""

import dataclasses
import itertools

import pytest
import torch
from combine_cases import CombineCase, CombineRunner, reseeded, run_combine, run_silent, without_rows
from dispatch_cases import Case
from kernels import NO_SEQUENCE, Compiler, Mutant
from machine import is_found
from world import Shape

WINDOW = Shape(num_ranks=3, num_experts=12, top_k=3, max_tokens=40, landing_row_bytes=2048)
PLAIN = Case(shape=WINDOW, tokens=(40, 23, 31), hidden=64, num_rounds=2)
CASES = {
    "rank_major, pulled and pushed, bias": CombineCase(
        dispatch=PLAIN, hidden=600, heap_ranks=(0, 2), bias="rows", shared_bytes=24 << 10, num_combines=2
    ),
    "rank_major, brought into the landing, one rank's rows in the heap": CombineCase(
        dispatch=dataclasses.replace(
            PLAIN, seed=5, tokens=(17, 0, 26), capacity=200, shape=dataclasses.replace(WINDOW, landing_row_bytes=4096)
        ),
        hidden=1864,
        stage_blocks=2,
        heap_ranks=(1,),
        shared_bytes=24 << 10,
        num_combines=2,
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
        dispatch=dataclasses.replace(PLAIN, seed=7, layout="expert_major", alignment=4, num_duplicates=2),
        hidden=400,
        wire_is_fp8=True,
        bias="row",
        bias_is_fp32=True,
        shared_bytes=32 << 10,
    ),
    "rank_major, rows of more than four ranks, bias": CombineCase(
        dispatch=Case(
            shape=Shape(num_ranks=6, num_experts=6, top_k=6, num_blocks=1, max_tokens=4, landing_row_bytes=512),
            tokens=(4, 3, 0, 2, 4, 1),
            hidden=64,
            num_blocks=1,
            num_rounds=1,
        ),
        hidden=64,
        heap_ranks=(0, 2),
    ),
    "masked, side, no weights": CombineCase(
        dispatch=dataclasses.replace(PLAIN, seed=3, layout="masked", capacity=9),
        hidden=264,
        dtype=torch.float16,
        is_weighted=False,
        has_side=True,
    ),
}

PULLED = dataclasses.replace(CASES["rank_major, pulled and pushed, bias"], heap_ranks=(0, 1, 2))

# With an odd seed rows are of all sizes, with infinities and NaNs (combine_cases.py).
QUANTIZED = CombineCase(
    dispatch=dataclasses.replace(PLAIN, seed=5), hidden=2192, wire_is_fp8=True, bias="rows", shared_bytes=40 << 10
)
CASES["rank_major, fp8 on the wire, rows of all sizes"] = QUANTIZED


# Of tokens enough that slots and cells of rings, and pieces of the plan, are used again and again.
def long(case: CombineCase) -> CombineCase:
    dispatch = dataclasses.replace(
        case.dispatch,
        shape=dataclasses.replace(WINDOW, max_tokens=120),
        tokens=(120, 90, 110),
        num_rounds=1,
    )
    return dataclasses.replace(case, dispatch=dispatch)


# Rings of contributions to be added: one for each of the two groups that add, or one for both.
RINGS = {
    "rank_major, fp8 on the wire, two rings, side": CombineCase(
        dispatch=dataclasses.replace(PLAIN, seed=7),
        hidden=1040,
        dtype=torch.float32,
        wire_is_fp8=True,
        has_side=True,
        shared_bytes=160 << 10,
    ),
    "rank_major, pulled, two rings": PULLED,
    "rank_major, pulled, one ring": dataclasses.replace(PULLED, shared_bytes=16 << 10),
}
RINGS = {name: long(case) for name, case in RINGS.items()}
CASES |= RINGS
CASES["rank_major, pushed, two rings"] = CombineCase(
    dispatch=dataclasses.replace(PLAIN, seed=8), hidden=600, shared_bytes=160 << 10
)
BROUGHT = CASES["rank_major, brought into the landing, one rank's rows in the heap"]
STAGE = "weft/kernels/stage_rows.cuh"
STAGE_MUTANTS = (
    Mutant("a row is brought to the next one's place", STAGE, "(a.landing + at", "(a.landing + at + a.row_bytes"),
    Mutant("only the first piece is brought", STAGE, "copy(row, item % num_pieces_);", "copy(row, 0);"),
    Mutant("rows of one source are left out", STAGE, "other < a.rank ? other : other + 1;", "other;"),
)
RING = "weft/kernels/combine/ring.cuh"
RING_MUTANTS = (
    Mutant(
        "a slot is filled before those who add have left it",
        RING,
        "      if (!sync::wait_barrier(&r_.empty[oldest_], oldest_parity_)) return false;\n",
        "",
    ),
    Mutant(
        "those who add take an item for the next one in its cell",
        RING,
        "    cell_ -= kRingCells;\n    parity_ ^= 1;\n",
        "    cell_ -= kRingCells;\n",
    ),
)

PUSHED = CombineCase(dispatch=PLAIN, hidden=600, shared_bytes=16 << 10)
SUMMED = CombineCase(
    dispatch=dataclasses.replace(PLAIN, seed=4, layout="expert_major"), hidden=1280, shared_bytes=32 << 10
)
PUSH = "weft/kernels/combine/push.cuh"
SUM = "weft/kernels/combine/sum.cuh"
QUANTIZE = "weft/kernels/combine/quantize.cuh"
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
SUM_MUTANTS = (
    Mutant(
        "a stage is added before it is there", SUM, "ptx::fetch_wait<kStages - 1>();", "ptx::fetch_wait<kStages>();"
    ),
    Mutant("a slot of a sum is freed before its store has read it", PUSH, "ptx::bulk_wait_read<kRounds>();", ""),
    Mutant("sums are told before their stores are complete", PUSH, "      ptx::bulk_wait<kLag>();\n", ""),
)

LONG = long(SUMMED)
CASES["rank_major, fp8 on the wire, pieces of the plan take turns"] = long(QUANTIZED)
LEFT_EARLY = Mutant(
    "a piece of the plan is left before its rows are fetched",
    SUM,
    "leave_pieces(next_.piece);",
    "leave_pieces(next_.piece + 1);",
)
COMBINE = "weft/kernels/combine/entry.cuh"
PULLED_MUTANTS = (
    Mutant(
        "nobody waits for the header that says where rows lie",
        COMBINE,
        "transport::wait_all(view, Phase::kCount, b_.flight, 0)",
        "transport::worst_of(transport::Verdict::kOk)",
    ),
    Mutant(
        "a call ends before others have read its rows (R20)",
        COMBINE,
        "verdict = transport::wait_all(view, Phase::kReduce, b_.flight, static_cast<i32>(blockIdx.x));",
        "",
    ),
    NO_SEQUENCE,
)
EMPTY = without_rows(PULLED)
CASES["rank_major, a rank without rows"] = EMPTY
SILENT = Mutant(
    "a rank without rows sends no header (R3)",
    COMBINE,
    "if (has_peer) b_.peers().notify(Phase::kReduce,",
    "if (has_peer && b_.a.num_rows > 0) b_.peers().notify(Phase::kReduce,",
)
FP8_MUTANTS = (
    Mutant(
        "rows are not multiplied before they become FP8",
        "weft/kernels/numbers.cuh",
        "ptx::multiply_bf16x2(packed.word[word], factor)",
        "packed.word[word]",
    ),
    Mutant(
        "the largest numbers have scales whose products overflow",
        "weft/ptx/fp8_scale.h",
        "ceiled < kMostBiased ? ceiled : kMostBiased",
        "ceiled",
    ),
    Mutant(
        "scales are rounded down",
        "weft/ptx/fp8_scale.h",
        "(bits + 0x1fffffu) >> 23",
        "bits >> 23",
    ),
    Mutant("rows are multiplied by the factor of another group", QUANTIZE, "idx / kAMost * kWordLanes", "0"),
    Mutant(
        "the largest numbers of some lanes are left out",
        QUANTIZE,
        "_sync(0xffffffffu, given, kStepLanes)",
        "_sync(0xffffffffu, given, 1)",
    ),
    Mutant("a row's first unit is quantised again", QUANTIZE, "      from_ += kUnit * Row::kBytes;\n", ""),
)
QUANTIZE_MUTANTS = (
    Mutant("a unit is quantised before it is there", QUANTIZE, "      ptx::fetch_wait<0>();\n", ""),
    Mutant(
        "FP8 rows are told before they are stored",
        QUANTIZE,
        "tell(static_cast<u32>(item.index));",
        "tell(sync::kMaxProgress);",
    ),
)


@pytest.fixture(scope="module", autouse=True)
def _compile_ahead(compiler: Compiler, runs_long: bool) -> None:
    for case in CASES.values():
        CombineRunner(compiler, case).start_compiling()
    if not runs_long:
        return
    CombineRunner(compiler, SUMMED).start_compiling()
    for mutant in MUTANTS:
        CombineRunner(compiler, PUSHED, mutant).start_compiling()
    for mutant in SUM_MUTANTS:
        CombineRunner(compiler, SUMMED, mutant).start_compiling()
    CombineRunner(compiler, LONG).start_compiling()
    CombineRunner(compiler, LONG, LEFT_EARLY).start_compiling()
    for mutant in (*PULLED_MUTANTS, SILENT):
        CombineRunner(compiler, PULLED, mutant).start_compiling()
    for case, mutant in itertools.product(RINGS.values(), RING_MUTANTS):
        CombineRunner(compiler, case, mutant).start_compiling()
    for mutant in FP8_MUTANTS:
        CombineRunner(compiler, QUANTIZED, mutant).start_compiling()
    for mutant in QUANTIZE_MUTANTS:
        CombineRunner(compiler, long(QUANTIZED), mutant).start_compiling()


@pytest.mark.parametrize("name", CASES)
def test_combine_is_the_reference(compiler: Compiler, name: str) -> None:
    """y, side, and the words of the window."""
    if " ring" in name:
        source = CombineRunner(compiler, CASES[name]).source(has_push="pulled" not in name)
        assert f".reduce_rings = {2 if 'two rings' in name else 1}" in source
    assert run_combine(compiler, CASES[name]) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.long
def test_mistakes_are_found(compiler: Compiler, mutant: Mutant) -> None:
    """An emulation that finds none of these proves nothing."""
    assert is_found(lambda seed: run_combine(compiler, reseeded(PUSHED, seed), mutant))


@pytest.mark.parametrize("mutant", SUM_MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.long
def test_mistakes_in_sums_are_found(compiler: Compiler, mutant: Mutant) -> None:
    """The same of rows that are fetched, added and pushed by warps that do not wait for each other."""
    assert run_combine(compiler, SUMMED) == []
    assert is_found(lambda seed: run_combine(compiler, reseeded(SUMMED, seed), mutant))


@pytest.mark.long
def test_a_piece_left_early_is_found(compiler: Compiler) -> None:
    """The same of the receive plan, whose pieces take turns in memory."""
    assert run_combine(compiler, LONG) == []
    assert is_found(lambda seed: run_combine(compiler, reseeded(LONG, seed), LEFT_EARLY))


@pytest.mark.parametrize("mutant", PULLED_MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.long
def test_mistakes_in_waits_are_found(compiler: Compiler, mutant: Mutant) -> None:
    """The same of rows that others pull, and of headers."""
    assert is_found(lambda seed: run_combine(compiler, reseeded(PULLED, seed), mutant))


@pytest.mark.parametrize("mutant", STAGE_MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.long
def test_mistakes_in_what_is_brought_are_found(compiler: Compiler, mutant: Mutant) -> None:
    """The same of rows that are pulled from the landing."""
    assert is_found(lambda seed: run_combine(compiler, reseeded(BROUGHT, seed), mutant), tries=2)


@pytest.mark.long
def test_a_silent_rank_is_found(compiler: Compiler) -> None:
    """The others wait for it until the deadline."""
    assert is_found(lambda seed: run_silent(compiler, reseeded(EMPTY, seed), SILENT), tries=1)


@pytest.mark.parametrize("mutant", RING_MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.parametrize("name", RINGS)
@pytest.mark.long
def test_mistakes_in_rings_are_found(compiler: Compiler, name: str, mutant: Mutant) -> None:
    """The same of slots and cells that are used again."""
    assert is_found(lambda seed: run_combine(compiler, reseeded(RINGS[name], seed), mutant))


@pytest.mark.parametrize("mutant", FP8_MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.long
def test_mistakes_in_fp8_are_found(compiler: Compiler, mutant: Mutant) -> None:
    """The same of the scales of rows on the wire."""
    assert run_combine(compiler, QUANTIZED, mutant) != []


@pytest.mark.parametrize("mutant", QUANTIZE_MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.long
def test_mistakes_in_fp8_rows_are_found(compiler: Compiler, mutant: Mutant) -> None:
    """The same of warps that quantise and store and do not wait for each other."""
    assert is_found(lambda seed: run_combine(compiler, reseeded(long(QUANTIZED), seed), mutant))
