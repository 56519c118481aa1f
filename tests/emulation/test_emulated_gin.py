"""Guards against kernels that lose or misplace what crosses NCCL's network, which keeps no order of puts.

A stand-in for NCCL's device calls carries them (include/nccl_device.h): it has not NCCL's machine code, but its rules.
"""

import dataclasses
from typing import Any

import pytest
from combine_cases import CombineCase
from dispatch_cases import Case, Runner
from kernels import Compiler, Mutant
from machine import LaunchFailed, Streams, is_found
from node_cases import CHUNK_ROWS, NODE_TIMEOUT_NS, GinNodes, with_nodes
from test_emulated_failures import DEADLINE, words
from test_emulated_node_small import BRIEF, COMBINES, DISPATCHES, behind
from test_emulated_node_small import TWO as TWO_SMALL
from test_emulated_node_sums import CASES as SUMS
from test_emulated_nodes import CASES, TWO

RING = "weft/transport/rail_gin.cuh"


def run(
    compiler: Compiler,
    case: Case | CombineCase,
    node_ranks: int,
    mutant: Mutant | None = None,
    chunk_rows: int = CHUNK_ROWS,
) -> list[str]:
    num_slots = 4 if mutant is None else 2
    options = {"num_slots": num_slots, "chunk_rows": chunk_rows}
    runner = with_nodes(compiler, case, node_ranks, mutant, network=GinNodes, **options)
    found: list[str] = runner.run()
    return found


@pytest.mark.parametrize("name", ["2 x 2", "2 x 2, made FP8", "4 x 2", "4 + 2", "4 + 2, two have left"])
def test_rows_are_those_of_the_reference(compiler: Compiler, name: str) -> None:
    """In every word. Nodes that are not whole connect all ranks."""
    node_ranks, case = CASES[name]
    assert run(compiler, case, node_ranks) == []


@pytest.mark.parametrize("name", ["2 x 2, pulled", "4 + 2, pulled and pushed"])
def test_sums_are_those_of_the_reference(compiler: Compiler, name: str) -> None:
    """In every bit."""
    node_ranks, case = SUMS[name]
    assert run(compiler, case, node_ranks) == []


@pytest.mark.parametrize("name", ["2 x 2", "2 x 2, two launches, repeated", "4 + 2, two have left"])
def test_rows_of_small_batches(compiler: Compiler, name: str) -> None:
    """The same."""
    node_ranks, case = DISPATCHES[name]
    assert run(compiler, case, node_ranks) == []


@pytest.mark.parametrize(
    "name", ["2 x 2, bias", "2 x 2, expert_major, weighted, side values, two launches", "4 + 2, two have left"]
)
def test_sums_of_small_batches(compiler: Compiler, name: str) -> None:
    """The same."""
    node_ranks, case = COMBINES[name]
    assert run(compiler, case, node_ranks, chunk_rows=8) == []


HALVES = {
    "dispatch": dataclasses.replace(TWO_SMALL, is_split=True, num_rounds=1),
    "combine": behind(dataclasses.replace(BRIEF, is_split=True, num_rounds=1, seed=1), 2, hidden=600),
}


def run_halves(compiler: Compiler, case: Case | CombineCase, mutant: Mutant | None = None) -> None:
    """The sending half of the last call runs while nothing crosses."""
    runner = with_nodes(compiler, case, 2, mutant, network=GinNodes, chunk_rows=8)

    def launch(streams: list[Any]) -> None:
        Streams(runner.memory, streams, seed=1, timeout_s=60).run()

    try:
        round_ = Runner.add_round(runner)
        if isinstance(case, CombineCase):
            launch(runner.streams)
            for stream in runner.streams:
                stream.clear()
            runner.add_combines(round_)
        runner.nodes.hold(True)
        launch([stream[:1] for stream in runner.streams])
        runner.nodes.hold(False)
        launch([stream[1:] for stream in runner.streams])
        assert [*runner.world.problems(runner.num_operations), *runner.differences(round_)] == []
    finally:
        runner.memory.close()


@pytest.mark.parametrize("op", HALVES)
def test_a_sending_half_waits_for_nothing_that_crosses(compiler: Compiler, op: str) -> None:
    """It ends; the other half finds all that it has posted."""
    run_halves(compiler, HALVES[op])


@pytest.mark.long
@pytest.mark.parametrize("op", HALVES)
def test_a_sending_half_that_waits_is_found(compiler: Compiler, op: str) -> None:
    """It would hold SMs."""
    mutant = Mutant("a sending half waits", "weft/transport/rail_gin.cuh", "  if (goes_on) return;\n", "")
    with pytest.raises(LaunchFailed, match="what is held in the network"):
        run_halves(compiler, HALVES[op], mutant)


MUTANTS = (
    Mutant(
        "all slots share a signal",
        "weft/transport/rail_gin.h",
        "return ring(lane, block) + n % (num_words_ - 1); }",
        "return ring(lane, block) + 0 * n; }",
    ),
    Mutant(
        "a ring has the signals of another",
        "weft/transport/rail_gin.h",
        "* num_rings_ + static_cast<u64>(block)) *",
        "* num_rings_) *",
    ),
    Mutant(
        "a put goes to the slot of another rank",
        RING,
        "receive_slot(rank_, n, block_), rail",
        "receive_slot(peer_, n, block_), rail",
    ),
    Mutant(
        "a chunk has arrived before its signal",
        RING,
        ">= sync::rail_fills(n, static_cast<u32>",
        "+ 1 >= sync::rail_fills(n, static_cast<u32>",
    ),
    Mutant("credits are those of another ring", RING, "credits(rank_, block_)), 1}", "credits(rank_, 0)), 1}"),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.long
def test_mistakes_are_found(compiler: Compiler, mutant: Mutant) -> None:
    """A network that keeps an order finds none of these."""
    node_ranks, case = CASES["2 x 2"]
    assert is_found(lambda seed: run(compiler, dataclasses.replace(case, seed=seed), node_ranks, mutant))


def test_a_rank_that_does_not_come(compiler: Compiler) -> None:
    """Nothing waits in the network: all waits have the deadline."""
    late = 2
    runner = with_nodes(compiler, dataclasses.replace(TWO, num_rounds=1), 2, network=GinNodes)
    runner.add_round()
    runner.streams[late].clear()
    runner.world.set_timeout(NODE_TIMEOUT_NS)
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        for rank in set(runner.ranks) - {late}:
            assert words(runner, rank)["culprit"] == late
            assert words(runner, rank)["cause"] == DEADLINE
    finally:
        runner.memory.close()
