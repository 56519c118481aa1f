"""Guards against a small-batch dispatch that puts a word in the wrong place or waits too little.

As test_emulated_dispatch.
"""

import dataclasses

import pytest
import torch
from dispatch_cases import Case, Runner, run_case
from kernels import NO_SEQUENCE, ONE_BUFFER, Compiler, Mutant
from machine import is_found
from world import Shape

WINDOW = Shape(num_ranks=3, num_experts=12, top_k=3, max_tokens=40, landing_row_bytes=2048, small_tokens=24)
PLAIN = Case(shape=WINDOW, tokens=(24, 13, 21), hidden=600, is_small=True, num_rounds=4)
LONG_ROWS = Case(
    shape=Shape(
        num_ranks=2, num_experts=6, top_k=2, num_blocks=1, max_tokens=17, landing_row_bytes=7200, small_tokens=17
    ),
    tokens=(17, 16),
    num_blocks=1,
    is_small=True,
    num_rounds=1,
)
CASES = {
    "rank_major, more blocks than tokens": dataclasses.replace(
        PLAIN, tokens=(2, 1, 2), num_blocks=4, shape=dataclasses.replace(WINDOW, num_blocks=4), num_bad_ids=1
    ),
    "masked, fp8, more blocks than tokens": dataclasses.replace(
        PLAIN,
        seed=7,
        tokens=(2, 1, 2),
        layout="masked",
        rows="fp8",
        hidden=1552,
        capacity=6,
        num_blocks=4,
        shape=dataclasses.replace(WINDOW, num_blocks=4, small_tokens=2),
    ),
    "rank_major, capacity, repeated": dataclasses.replace(
        PLAIN, seed=1, tokens=(24, 0, 20), capacity=30, int32_ranks=(0, 2), has_weights=False, is_repeated=True
    ),
    "expert_major, ue8m0": dataclasses.replace(
        PLAIN, seed=2, layout="expert_major", rows="fp8_ue8m0", hidden=272, alignment=8, num_duplicates=3
    ),
    "masked, bytes with scales, two launches": dataclasses.replace(
        PLAIN,
        seed=3,
        layout="masked",
        rows="bytes",
        hidden=592,
        scale_bytes=3,
        capacity=9,
        num_duplicates=2,
        is_split=True,
        is_repeated=True,
    ),
    # A warp has whole rows, in several turns.
    "rank_major, rows of six steps": dataclasses.replace(LONG_ROWS, hidden=1536),
    "masked, rows of fifteen steps": dataclasses.replace(LONG_ROWS, hidden=3600, layout="masked", capacity=9),
    "rank_major, more picks than threads": dataclasses.replace(
        PLAIN,
        seed=13,
        shape=dataclasses.replace(WINDOW, num_experts=96, top_k=32),
        hidden=8,
        num_bad_ids=1,
        num_rounds=1,
    ),
    "rank_major, a lost rank": dataclasses.replace(PLAIN, seed=5, lost_ranks=(0,), num_bad_ids=1),
    "expert_major, fp8, capacity": dataclasses.replace(
        PLAIN,
        seed=4,
        layout="expert_major",
        rows="fp8",
        dtype=torch.float32,
        hidden=144,
        capacity=40,
        alignment=4,
        is_repeated=True,
    ),
    "expert_major, ue8m0, holes as they were": dataclasses.replace(
        PLAIN,
        seed=8,
        layout="expert_major",
        rows="fp8_ue8m0",
        hidden=272,
        alignment=8,
        zeroes_holes=False,
        num_rounds=2,
        is_repeated=True,
    ),
    "expert_major, ue8m0, column-major scales": dataclasses.replace(
        PLAIN, seed=9, layout="expert_major", rows="fp8_ue8m0", hidden=656, scale_word_bytes=4, alignment=8
    ),
    "masked, fp8, column-major scales": dataclasses.replace(
        PLAIN,
        seed=10,
        layout="masked",
        rows="fp8",
        hidden=144,
        scale_word_bytes=4,
        capacity=9,
        is_split=True,
        is_repeated=True,
    ),
    "masked, powers of two, column-major scales": dataclasses.replace(
        PLAIN, seed=12, layout="masked", rows="fp8_pow2", hidden=656, scale_word_bytes=4, capacity=9, num_rounds=1
    ),
    "rank_major, bytes, column-major scales": dataclasses.replace(
        PLAIN, seed=11, rows="bytes", hidden=592, scale_bytes=272, scale_word_bytes=8, is_repeated=True
    ),
    "masked, bytes, column-major scales given": dataclasses.replace(
        PLAIN,
        seed=12,
        layout="masked",
        rows="bytes",
        hidden=592,
        scale_bytes=592,
        columns_given=True,
        capacity=9,
        is_split=True,
        is_repeated=True,
    ),
    "expert_major of a throughput dispatch, repeated": dataclasses.replace(
        PLAIN, seed=6, layout="expert_major", is_small=False, is_small_behind=True, is_repeated=True, alignment=8
    ),
}

KERNEL, RECEIVE = "weft/kernels/small/dispatch_entry.cuh", "weft/kernels/small/dispatch_receive.cuh"
MUTANTS = (
    Mutant(
        "nobody waits for the header that says that rows are there",
        KERNEL,
        "if (wait(Phase::kCount, 0)) wait(Phase::kSend, static_cast<i32>(blockIdx.x));",
        "wait(Phase::kCount, 0);\n    verdict(Phase::kSend) = Verdict::kOk;\n"
        "    ptx::bar_arrive(kSendHeard, kWithOne);",
    ),
    Mutant(
        "the header is sent while other warps store rows",
        KERNEL,
        "      send.send_rows();\n    }\n    ptx::bar_arrive(kStored, kWithOne);",
        "      ptx::bar_arrive(kStored, kWithOne);\n      send.send_rows();\n    }",
    ),
    Mutant(
        "both parities share their slots",
        "weft/layout/gpu_window.h",
        "const u64 row = WindowLayout::parity(sequence) * static_cast<u64>(num_ranks) + static_cast<u64>(source);\n"
        "    return row * static_cast<u64>(small_tokens);",
        "return static_cast<u64>(source) * static_cast<u64>(small_tokens);",
    ),
    Mutant(
        "picks of another operation are taken for this one's",
        "weft/kernels/small/dispatch_block.cuh",
        "return sync::progress_in(pick, flight.turn) != 0;",
        "return pick != 0;",
    ),
    Mutant(
        "lanes count a pick while others still look",
        RECEIVE,
        "__syncwarp();\n    if (group >= 0 && (same >> lane) == 1u)",
        "if (group >= 0 && (same >> lane) == 1u)",
    ),
    ONE_BUFFER,
    NO_SEQUENCE,
)


REPEATED = dataclasses.replace(PLAIN, layout="expert_major", alignment=8, is_repeated=True, num_rounds=2)
GAPS = Mutant(
    "gaps between the groups of a repeated routing are left as they were",
    RECEIVE,
    "const i64 begin = i64{a.offsets[group]} + a.counts[group];",
    "const i64 begin = a.offsets[group + 1];",
)


COLUMNS = dataclasses.replace(PLAIN, rows="fp8_ue8m0", hidden=656, scale_word_bytes=4, num_rounds=1)
UNPADDED = Mutant(
    "columns of scales follow each other without padding",
    RECEIVE,
    "return align_rows(num_rows, 16 / kWordBytes);",
    "return num_rows;",
)


EMPTY = dataclasses.replace(PLAIN, tokens=(24, 0, 21), num_rounds=1)
SILENT = Mutant(
    "a rank without tokens sends no header (R3)",
    KERNEL,
    "if (tells(s_.lane)) {",
    "if (tells(s_.lane) && s_.a.num_tokens > 0) {",
)


@pytest.fixture(scope="module", autouse=True)
def _compile_ahead(compiler: Compiler, runs_long: bool) -> None:
    for case in CASES.values():
        Runner(compiler, case).start_compiling()
    if not runs_long:
        return
    for mutant in MUTANTS:
        Runner(compiler, PLAIN, mutant).start_compiling()
    Runner(compiler, REPEATED, GAPS).start_compiling()
    Runner(compiler, COLUMNS, UNPADDED).start_compiling()
    Runner(compiler, EMPTY, SILENT).start_compiling()


@pytest.mark.parametrize("name", CASES)
def test_small_dispatch_is_the_reference(compiler: Compiler, name: str) -> None:
    """Rows, ids, weights, counts, offsets, plans and the words of the window."""
    assert run_case(compiler, CASES[name]) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.long
def test_mistakes_are_found(compiler: Compiler, mutant: Mutant) -> None:
    """An emulation that finds none of these proves nothing."""
    assert is_found(lambda seed: run_case(compiler, dataclasses.replace(PLAIN, seed=seed), mutant))


@pytest.mark.long
def test_mistakes_of_repetitions_are_found(compiler: Compiler) -> None:
    """As above."""
    assert is_found(lambda seed: run_case(compiler, dataclasses.replace(REPEATED, seed=seed), GAPS))


@pytest.mark.long
def test_mistakes_of_columns_are_found(compiler: Compiler) -> None:
    """As above."""
    assert is_found(lambda seed: run_case(compiler, dataclasses.replace(COLUMNS, seed=seed), UNPADDED))


@pytest.mark.long
def test_a_silent_rank_is_found(compiler: Compiler) -> None:
    """The others wait for it until the deadline."""

    def run(seed: int) -> list[str]:
        runner = Runner(compiler, dataclasses.replace(EMPTY, seed=seed), SILENT)
        runner.world.set_timeout(1_000_000_000)
        return runner.run()

    assert is_found(run, tries=1)
