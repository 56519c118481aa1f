"""Guards against a small-batch combine that adds wrong rows, waits too little, or does not fit the dispatch before it.

Each case runs a small-batch dispatch first, so that its plans are used as they are.
"""

import dataclasses

import pytest
import torch
from combine_cases import CombineCase, CombineRunner, reseeded, run_combine, run_silent, without_rows
from dispatch_cases import Case
from kernels import NO_SEQUENCE, ONE_BUFFER, Compiler, Mutant
from machine import is_found
from world import Shape

WINDOW = Shape(num_ranks=3, num_experts=12, top_k=3, max_tokens=40, landing_row_bytes=2048, small_tokens=24)
PLAIN = Case(shape=WINDOW, tokens=(24, 13, 21), hidden=64, is_small=True, num_rounds=3)
CASES = {
    "rank_major, bias": CombineCase(
        dispatch=dataclasses.replace(PLAIN, num_rounds=2), hidden=600, bias="rows", num_combines=3
    ),
    "rank_major, side, capacity, two launches": CombineCase(
        dispatch=dataclasses.replace(PLAIN, seed=1, tokens=(24, 0, 20), capacity=25, is_split=True),
        hidden=304,
        dtype=torch.float32,
        has_side=True,
    ),
    "rank_major, fp8 on the wire, capacity": CombineCase(
        dispatch=dataclasses.replace(PLAIN, seed=5, capacity=25, num_rounds=1), hidden=656, wire_is_fp8=True
    ),
    "expert_major, fp8 on the wire": CombineCase(
        dispatch=dataclasses.replace(PLAIN, seed=7, layout="expert_major", alignment=4, num_duplicates=2),
        hidden=400,
        wire_is_fp8=True,
        bias="row",
        bias_is_fp32=True,
        num_combines=2,
    ),
    "masked, side, no weights": CombineCase(
        dispatch=dataclasses.replace(PLAIN, seed=3, layout="masked", capacity=5),
        hidden=264,
        dtype=torch.float16,
        is_weighted=False,
        has_side=True,
    ),
}

CASES |= {
    f"{layout} of a throughput dispatch": CombineCase(
        dispatch=dataclasses.replace(
            PLAIN, seed=4, layout=layout, is_small=False, is_small_behind=True, capacity=capacity, num_rounds=2
        ),
        has_side=True,
    )
    for layout, capacity in (("rank_major", 25), ("masked", 5))
}

MUTANTS = (
    Mutant(
        "the header is sent while other warps store sums",
        "weft/kernels/small/combine_entry.cuh",
        "ptx::bar_sync_apart(kStored, kWithOne);",
        "",
    ),
    Mutant(
        "nobody waits for the header that says that sums are there",
        "weft/kernels/small/combine_entry.cuh",
        "mine == Verdict::kOk)\n"
        "      mine = transport::wait(b_.a.view, Phase::kReduce, flight, b_.lane, block, waited_ns);",
        "false) mine = Verdict::kOk;",
    ),
    ONE_BUFFER,
    NO_SEQUENCE,
)


# On one block, so that units are enough for two headers.
MANY = dataclasses.replace(
    CASES["rank_major, bias"],
    dispatch=dataclasses.replace(PLAIN, num_blocks=1, shape=dataclasses.replace(WINDOW, num_blocks=1)),
)
CASES["rank_major, early units"] = MANY
EARLY = Mutant(
    "nobody waits for the header of the early units",
    "weft/kernels/small/combine_entry.cuh",
    "mine = transport::wait(b_.a.view, Phase::kSend, flight, b_.lane, block, waited_ns);",
    "mine = Verdict::kOk;",
)


EMPTY = without_rows(CASES["rank_major, bias"])
CASES["rank_major, a rank without rows"] = EMPTY
SAY = "    meet_stored();\n    if (tells(flight)) peers.notify(Phase::kReduce, flight, b_.lane, block);"
SILENT = Mutant(
    "a rank without rows sends no header (R3)",
    "weft/kernels/small/combine_entry.cuh",
    SAY,
    SAY.replace("tells(flight)", "tells(flight) && b_.a.num_rows > 0"),
)


@pytest.fixture(scope="module", autouse=True)
def _compile_ahead(compiler: Compiler, runs_long: bool) -> None:
    for case in CASES.values():
        CombineRunner(compiler, case).start_compiling()
    if not runs_long:
        return
    for mutant in MUTANTS:
        CombineRunner(compiler, CASES["rank_major, bias"], mutant).start_compiling()
    CombineRunner(compiler, MANY, EARLY).start_compiling()
    CombineRunner(compiler, EMPTY, SILENT).start_compiling()


@pytest.mark.parametrize("name", CASES)
def test_small_combine_is_the_reference(compiler: Compiler, name: str) -> None:
    """y, side, and the words of the window."""
    assert run_combine(compiler, CASES[name]) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.long
def test_mistakes_are_found(compiler: Compiler, mutant: Mutant) -> None:
    """An emulation that finds none of these proves nothing."""
    assert is_found(lambda seed: run_combine(compiler, reseeded(CASES["rank_major, bias"], seed), mutant))


@pytest.mark.long
def test_mistakes_of_early_units_are_found(compiler: Compiler) -> None:
    """As above."""
    assert is_found(lambda seed: run_combine(compiler, reseeded(MANY, seed), EARLY))


@pytest.mark.long
def test_a_silent_rank_is_found(compiler: Compiler) -> None:
    """The others wait for it until the deadline."""
    assert is_found(lambda seed: run_silent(compiler, reseeded(EMPTY, seed), SILENT), tries=1)
