"""Guards against kernels that add contributions of two domains together, or round a sum of one wrongly or not at all.

Kernels of a combine with domains, large and for small batches, behind a dispatch.
"""

import dataclasses

import pytest
import torch
from combine_cases import CombineCase, CombineRunner, reseeded, run_combine
from dispatch_cases import Case
from kernels import Compiler, Mutant
from machine import is_found
from world import Shape


def dispatch(num_ranks: int, tokens: tuple[int, ...], *, is_small: bool = False) -> Case:
    """Of a token for two thirds of the ranks or so."""
    shape = Shape(
        num_ranks=num_ranks, num_experts=2 * num_ranks, top_k=5, num_blocks=1, max_tokens=8, landing_row_bytes=2048,
        small_tokens=8 if is_small else 0,
    )  # fmt: skip
    return Case(shape=shape, tokens=tokens, hidden=64, num_blocks=1, num_rounds=1, is_small=is_small)


FOUR, FIVE, SIX = dispatch(4, (8, 3, 0, 7)), dispatch(5, (6, 0, 8, 3, 5)), dispatch(6, (4, 3, 0, 2, 4, 1))
CASES = {
    "rank_major, pulled and pushed, bias, the last domain is one rank": CombineCase(
        dispatch=FIVE, sum_domain=2, hidden=600, heap_ranks=(0, 3), bias="rows"
    ),
    "rank_major, in fp8, pushed, rows in chunks": CombineCase(
        dispatch=dataclasses.replace(FOUR, seed=2), sum_domain=2, hidden=1424, wire_is_fp8=True, shared_bytes=24 << 10
    ),
    "rank_major, in fp8, all ranks of a domain at once, fp32, values of all sizes": CombineCase(
        dispatch=dataclasses.replace(FOUR, seed=5),
        sum_domain=3,
        hidden=272,
        dtype=torch.float32,
        wire_is_fp8=True,
        bias="row",
        bias_is_fp32=True,
        heap_ranks=(0, 1, 2, 3),
    ),
    "rank_major, domains of five, side": CombineCase(dispatch=SIX, sum_domain=5, has_side=True),
    "expert_major, in fp8, fp16": CombineCase(
        dispatch=dataclasses.replace(FIVE, seed=4, layout="expert_major", alignment=4),
        sum_domain=3,
        hidden=384,
        dtype=torch.float16,
        wire_is_fp8=True,
        has_side=True,
    ),
    "masked, no weights": CombineCase(
        dispatch=dataclasses.replace(FOUR, seed=6, layout="masked", capacity=5), sum_domain=2, is_weighted=False
    ),
    "small, rank_major, bias": CombineCase(
        dispatch=dispatch(5, (6, 0, 8, 3, 5), is_small=True), sum_domain=2, hidden=600, bias="rows", num_combines=2
    ),
    "small, expert_major, in fp8": CombineCase(
        dispatch=dataclasses.replace(dispatch(4, (8, 3, 0, 7), is_small=True), seed=7, layout="expert_major"),
        sum_domain=3,
        hidden=400,
        wire_is_fp8=True,
        has_side=True,
    ),
}
PULLED = CASES["rank_major, pulled and pushed, bias, the last domain is one rank"]

IN_FP8 = CombineCase(dispatch=dataclasses.replace(FOUR, seed=1), sum_domain=2, hidden=384, wire_is_fp8=True)
CASES["rank_major, in fp8, values of all sizes"] = IN_FP8
SMALL_FP8 = CASES["small, expert_major, in fp8"]
DOMAINS, REDUCE = "weft/kernels/domains.cuh", "weft/kernels/combine/reduce.cuh"
MUTANTS = (
    (
        Mutant(
            "a domain begins with the first contributor",
            DOMAINS,
            "kOrder.domain_of(__ffs(static_cast<i32>(left)) - 1) * kOrder.sum_domain",
            "__ffs(static_cast<i32>(left)) - 1",
        ),
        PULLED,
    ),
    (
        Mutant(
            "the sum of a domain is not rounded",
            DOMAINS,
            "Row::unpack(Row::pack(sum), values);",
            "for (i32 at = 0; at < kVector; ++at) values[at] = sum[at];",
        ),
        PULLED,
    ),
    (
        Mutant("this rank's row is where another's is", REDUCE, "? __popc(item.owner & (own_lane - 1))", "? 0"),
        PULLED,
    ),
    (Mutant("two groups share a scale", DOMAINS, "step < kLanes", "step < 2 * kLanes"), IN_FP8),
    (Mutant("two groups share a scale, small", DOMAINS, "step < kLanes", "step < 2 * kLanes"), SMALL_FP8),
    (
        Mutant(
            "a lane behind the end stores what it has made of the last vector",
            REDUCE,
            "if (first + b_.lane * kVector < elements)",
            "if (true)",
        ),
        dataclasses.replace(IN_FP8, hidden=128),
    ),
)


@pytest.fixture(scope="module", autouse=True)
def _compile_ahead(compiler: Compiler, runs_long: bool) -> None:
    for case in (*CASES.values(), IN_FP8):
        CombineRunner(compiler, case).start_compiling()
    if not runs_long:
        return
    for mutant, case in MUTANTS:
        CombineRunner(compiler, case, mutant).start_compiling()


@pytest.mark.parametrize("name", CASES)
def test_sums_of_domains_are_the_references(compiler: Compiler, name: str) -> None:
    assert run_combine(compiler, CASES[name]) == []


@pytest.mark.parametrize(("mutant", "case"), MUTANTS, ids=lambda value: getattr(value, "name", ""))
@pytest.mark.long
def test_mistakes_are_found(compiler: Compiler, mutant: Mutant, case: CombineCase) -> None:
    """An emulation that finds none of these proves nothing. Of odd seeds: numbers of one size tell no scales apart."""
    assert is_found(lambda seed: run_combine(compiler, reseeded(case, 2 * seed + 1), mutant), tries=2)
