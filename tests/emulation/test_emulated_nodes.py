"""Guards against dispatches that lose, repeat or misplace rows on their way to other nodes, or forward them too early.

Rows cross the network once a node; a rank of the same index there forwards them. docs/protocols/nodes.md.
"""

import dataclasses
from pathlib import Path

import pytest
from dispatch_cases import Case
from kernels import Compiler, Mutant
from machine import Streams, is_found, sleeping
from node_cases import NODE_TIMEOUT_NS, with_nodes
from test_emulated_failures import DEADLINE, words
from world import Shape

# Of two nodes of two ranks each.
TWO = Case(shape=Shape(num_ranks=4, num_experts=8, top_k=3, max_tokens=40), tokens=(40, 21, 0, 33))
# Each with the ranks of a node; the last node may have fewer.
CASES = {
    "2 x 2": (2, TWO),
    "2 x 2, capacity, bad ids, int32 ids on a rank, no weights": (
        2,
        dataclasses.replace(TWO, capacity=50, num_bad_ids=3, int32_ranks=(3,), has_weights=False, seed=1),
    ),
    "2 x 2, no room in the heap of some": (2, dataclasses.replace(TWO, staged_ranks=(1, 2), num_rounds=2, seed=2)),
    "2 x 2, made FP8": (2, dataclasses.replace(TWO, rows="fp8", hidden=400, num_rounds=2, seed=7)),
    "2 x 2, bytes and scales": (
        2,
        dataclasses.replace(TWO, rows="bytes", hidden=160, scale_bytes=48, num_rounds=2, seed=8),
    ),
    "4 x 2": (
        2,
        Case(
            shape=Shape(num_ranks=8, num_experts=16, top_k=4, max_tokens=24),
            tokens=(24, 9, 0, 1, 17, 24, 5, 8),
            num_rounds=2,
            seed=3,
        ),
    ),
    "3 x 4": (
        4,
        Case(
            shape=Shape(num_ranks=12, num_experts=24, top_k=5, max_tokens=16),
            tokens=(16, 3, 0, 9, 16, 1, 2, 11, 4, 16, 7, 0),
            num_rounds=2,
            seed=4,
        ),
    ),
    "4 + 2": (
        4,
        Case(
            shape=Shape(num_ranks=6, num_experts=12, top_k=3, max_tokens=24),
            tokens=(24, 5, 19, 8, 24, 11),
            num_rounds=2,
            seed=5,
        ),
    ),
    "4 + 2, two have left": (
        4,
        Case(
            shape=Shape(num_ranks=6, num_experts=12, top_k=3, max_tokens=24),
            tokens=(24, 5, 19, 8, 24, 11),
            num_rounds=2,
            lost_ranks=(1, 4),
            seed=6,
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_the_reference(compiler: Compiler, name: str) -> None:
    """In every word, chunks, messages and credits coming in any order."""
    node_ranks, case = CASES[name]
    assert with_nodes(compiler, case, node_ranks).run() == []


NODES, ITEMS = "weft/kernels/nodes.cuh", "weft/kernels/dispatch/nodes.cuh"
RELAY = "    for (i32 mate = first; mate < first + size; ++mate) {\n"
SEND_HEADER = (
    "    if (lane < size && map.is_active(first + lane)) {\n"
    "      peers_.relay_call(flight_, source, first + lane, message->header, message->caller);\n    }\n"
)
MUTANTS = (
    Mutant(
        "a chunk is put before its rows are stored",
        "weft/kernels/dispatch/stages.cuh",
        "== 0) note_arrived<0>(store_warp, j);",
        "== 0) { if (lane == 0) ptx::st_release_cta(&s.num_arrived[store_warp], static_cast<u32>(j)); }",
    ),
    Mutant(
        "the last chunk of a call is not put",
        ITEMS,
        "if (records.ends_chunk(num_stored) || num_stored == s.num_to[node]) records.put(num_stored);",
        "if (records.ends_chunk(num_stored)) records.put(num_stored);",
    ),
    Mutant(
        "a credit is given before the rows are stored",
        ITEMS,
        "return records_of(source).has_arrived(s.num_loaded[source]);",
        "const bool is_here = records_of(source).has_arrived(s.num_loaded[source]);"
        " if (is_here && records_of(source).ends_chunk(s.num_loaded[source])) nodes_.ring(source).give_credit();"
        " return is_here;",
    ),
    Mutant(
        "chunks are taken without looking at their signals",
        ITEMS,
        "return records_of(source).has_arrived(s.num_loaded[source]);",
        "return true;",
    ),
    Mutant(
        "a slot is filled without a place",
        ITEMS,
        "if (goes_to(node, token) && !records_to(node).has_place(s.num_dealt[node])) return node;",
        "",
    ),
    Mutant(
        "a header is written on before its payload", NODES, RELAY, f"{SEND_HEADER}    ptx::nanosleep(20000);\n{RELAY}"
    ),
    Mutant(
        "rows of earlier blocks are not counted",
        "weft/kernels/dispatch/forward_plan.cuh",
        "for (i32 first = 0; first < row; first += 32) {",
        "for (i32 first = 0; first < 0; first += 32) {",
    ),
    Mutant(
        "a rank waits for no mate",
        NODES,
        "mates.active = mates.active & GpuRankMask{GpuRankMask::first(size).word << first};",
        "mates.active = GpuRankMask::none();",
    ),
    Mutant(
        "a smaller node has no forwarder for an index",
        "weft/layout/rail.h",
        "(index + step) % size(node)",
        "(index + step) % node_size()",
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.long
def test_mistakes_are_found(compiler: Compiler, mutant: Mutant) -> None:
    """An emulation that finds none of these proves nothing."""
    node_ranks, case = CASES["4 + 2" if mutant.path.endswith("rail.h") else "2 x 2"]

    def run(seed: int) -> list[str]:
        again = dataclasses.replace(case, seed=seed)
        found: list[str] = with_nodes(compiler, again, node_ranks, mutant, num_slots=2).run()
        return found

    assert is_found(run)


@pytest.mark.parametrize("late", [1, 2])
def test_a_rank_that_does_not_come(compiler: Compiler, late: int) -> None:
    """All name it, also those that hear of it by others, and those from whom it keeps others back."""
    runner = with_nodes(compiler, dataclasses.replace(TWO, num_rounds=1), 2)
    runner.add_round()
    runner.streams[late].clear()
    runner.world.set_timeout(NODE_TIMEOUT_NS)
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        for rank in set(runner.ranks) - {late}:
            wanted = {"cause": DEADLINE, "culprit": late, "broken": DEADLINE, "owner": 1, "sequence": 0}
            assert words(runner, rank) == wanted
    finally:
        runner.memory.close()


def test_sequences_that_begin_anew(compiler: Compiler) -> None:
    """Messages are counted on from the last sequence of 32 bits to the first."""
    runner = with_nodes(compiler, dataclasses.replace(TWO, num_rounds=3), 2)
    rounds = [runner.add_round() for _ in range(3)]
    runner.nodes.begin_at(0xFFFFFFFE)
    runner.world.set_timeout(40_000_000_000)
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        for rank in runner.ranks:
            seen = words(runner, rank)
            assert (seen["cause"], seen["broken"], seen["owner"], seen["sequence"]) == (0, 0, 0, 1)
        assert [text for each in rounds for text in runner.differences(each)] == []
    finally:
        runner.memory.close()


DEADLINE_NS, LATE_NS = 6_000_000_000, 4_000_000_000
SLOW = Mutant(
    "a rank stops once between two rows",
    ITEMS,
    "    i32 found = kEndOfItems;\n",
    f"""
    i32 found = kEndOfItems, num_items = token - this->queue_begin(block(), a.num_tokens);
    for (i32 from = 0; from < kRanks; ++from) num_items += s.num_loaded[from];
    const u64 begin_ns = ptx::globaltimer_ns();
    while (rank() == 1 && num_items == 6 && ptx::globaltimer_ns() - begin_ns < {LATE_NS}) ptx::nanosleep(0);
""",
)


def test_a_call_longer_than_the_deadline(compiler: Compiler, tmp_path: Path) -> None:
    """A rank comes late, and stops once more: no wait is too long, and the network carries what comes then."""
    runner = with_nodes(compiler, dataclasses.replace(TWO, num_rounds=1), 2, SLOW, num_slots=2, chunk_rows=1)
    round_ = runner.add_round()
    runner.streams[1].insert(0, sleeping(tmp_path, LATE_NS))
    runner.world.set_timeout(DEADLINE_NS)
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        assert runner.world.problems(runner.num_operations) == []
        assert runner.differences(round_) == []
    finally:
        runner.memory.close()
