"""Guards against combines over nodes that lose a contribution, add it twice or at the wrong level, or wait for ever.

A node's ranks are added there, and one sum crosses the network. docs/protocols/nodes.md.
"""

import dataclasses

import pytest
import torch
from combine_cases import CombineCase, reseeded
from dispatch_cases import Case
from kernels import Compiler, Mutant
from machine import Streams, is_found
from node_cases import NODE_TIMEOUT_NS, causes_with_fewer_members, with_nodes
from test_emulated_failures import DEADLINE, words
from world import Shape

MOVED = 7

# Of two nodes of two ranks each, whose landing holds some tokens at a time.
TWO = Case(
    shape=Shape(num_ranks=4, num_experts=8, top_k=3, max_tokens=40), tokens=(40, 21, 0, 33), num_rounds=2, num_bad_ids=2
)
UNEVEN = Case(
    shape=Shape(num_ranks=6, num_experts=12, top_k=3, max_tokens=24, landing_row_bytes=2048),
    tokens=(24, 5, 19, 8, 24, 11),
    num_rounds=2,
    seed=5,
)
PULLED = CombineCase(dispatch=TWO, hidden=600, sum_domain=2, heap_ranks=(0, 1, 2, 3))
PUSHED = dataclasses.replace(PULLED, heap_ranks=())
DROPPED = dataclasses.replace(PULLED, dispatch=dataclasses.replace(TWO, capacity=20, seed=2), heap_ranks=(0, 3))
# Each with the ranks of a node; the last node may have fewer.
CASES = {
    "2 x 2, pulled": (2, PULLED),
    "2 x 2, pushed, a few tokens at a time, bias": (2, dataclasses.replace(PUSHED, bias="rows")),
    "2 x 2, pulled and pushed, rows without room": (2, DROPPED),
    "2 x 1, fp32": (
        1,
        CombineCase(
            dispatch=Case(shape=Shape(top_k=3, max_tokens=40), tokens=(40, 37), num_rounds=2, seed=3),
            hidden=48,
            dtype=torch.float32,
        ),
    ),
    "4 x 2, pulled and pushed": (
        2,
        CombineCase(
            dispatch=Case(
                shape=Shape(num_ranks=8, num_experts=16, top_k=4, max_tokens=24),
                tokens=(24, 9, 0, 1, 17, 24, 5, 8),
                num_rounds=2,
                seed=4,
            ),
            sum_domain=2,
            heap_ranks=(0, 2, 5, 7),
            bias="row",
        ),
    ),
    "3 x 4, pushed": (
        4,
        CombineCase(
            dispatch=Case(
                shape=Shape(num_ranks=12, num_experts=24, top_k=5, max_tokens=16),
                tokens=(16, 3, 0, 9, 16, 1, 2, 11, 4, 16, 7, 0),
                num_rounds=1,
                seed=6,
            ),
            sum_domain=4,
        ),
    ),
    "4 + 2, pulled and pushed": (4, CombineCase(dispatch=UNEVEN, sum_domain=4, hidden=600, heap_ranks=(1, 4))),
    "4 + 2, pushed, two have left": (
        4,
        CombineCase(dispatch=dataclasses.replace(UNEVEN, lost_ranks=(1, 4), seed=6), sum_domain=4, hidden=600),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_sums_are_those_of_the_reference(compiler: Compiler, name: str) -> None:
    """In every bit, chunks, messages and credits coming in any order."""
    node_ranks, case = CASES[name]
    assert with_nodes(compiler, case, node_ranks).run() == []


NODES, LOAD = "weft/kernels/combine/nodes.cuh", "weft/kernels/combine/load_nodes.cuh"
WHEN_DONE = "b_.s.done[this->cell_] = is_last ? done_ : 0;"
EARLY = (
    "b_.s.done[this->cell_] = is_last && {0} ? done_ : 0;"
    " if (this->lane_ == 0 && is_last && !({0})) nodes_.tell(done_);"
)
MUTANTS = (
    (Mutant("a chunk is put before its sums are written", LOAD, WHEN_DONE, EARLY.format("done_ >> 31 != 0")), PULLED),
    (
        Mutant(
            "a credit is given before the sums are added",
            NODES,
            "return records_of(node).has_arrived(b_.s.num_read[node]);",
            "const auto records = records_of(node); const bool is_here = records.has_arrived(b_.s.num_read[node]);"
            " if (is_here && records.ends_chunk(b_.s.num_read[node])) records.take(); return is_here;",
        ),
        PULLED,
    ),
    (
        Mutant(
            "the last chunk of a call is not put",
            NODES,
            "if (num_done > 0 && !records.is_put(num_done) && !b_.has_failed()) records.put(num_done);",
            "",
        ),
        PULLED,
    ),
    (
        Mutant(
            "chunks are taken without looking at their signals",
            NODES,
            "return records_of(node).has_arrived(b_.s.num_read[node]);",
            "return true;",
        ),
        PULLED,
    ),
    (
        Mutant(
            "a slot is filled without a place",
            NODES,
            "return records_to(source).has_place(b_.s.num_dealt[source]);",
            "return true;",
        ),
        PULLED,
    ),
    (
        Mutant(
            "a node that keeps no row of a token sends no zeros",
            LOAD,
            "__any_sync(0xffffffffu, entry != kNoForward ? 1 : 0)",
            "__any_sync(0xffffffffu, entry >= 0 ? 1 : 0)",
        ),
        DROPPED,
    ),
    (
        Mutant(
            "the sum of the owner's node is not rounded",
            "weft/kernels/combine/reduce.cuh",
            "if (!is_node_sum) return add_domains(item, own, warp);",
            "",
        ),
        PULLED,
    ),
    (
        Mutant(
            "rows for tokens of other nodes land where those of the forwarder do",
            NODES,
            "1 + nodes_.nth_brought_by(at, thread) : 0",
            "0 : 0",
        ),
        PUSHED,
    ),
    (
        Mutant(
            "a rank waits for no mate",
            "weft/kernels/combine/entry.cuh",
            "verdict = transport::wait_all(view, Phase::kReduce, b_.nodes().among_mates(),"
            " static_cast<i32>(blockIdx.x));",
            "",
        ),
        PULLED,
    ),
)


@pytest.mark.parametrize(("mutant", "case"), MUTANTS, ids=lambda value: getattr(value, "name", ""))
@pytest.mark.long
def test_mistakes_are_found(compiler: Compiler, mutant: Mutant, case: CombineCase) -> None:
    """An emulation that finds none of these proves nothing."""

    def run(seed: int) -> list[str]:
        again = reseeded(case, case.dispatch.seed + 2 * seed)
        found: list[str] = with_nodes(compiler, again, 2, mutant, num_slots=2).run()
        return found

    assert is_found(run)


@pytest.mark.parametrize("has_side", [False, True], ids=["rows", "side values"])
def test_a_graph_of_when_there_were_more_members(compiler: Compiler, has_side: bool) -> None:
    """A rank adds for more by now than its landing has room for: no row goes, and the windows go on."""
    case = dataclasses.replace(PUSHED, has_side=has_side)
    assert causes_with_fewer_members(compiler, case) == [(MOVED, 0)] * 3


@pytest.mark.long
def test_room_that_is_not_compared(compiler: Compiler) -> None:
    """The mistake is found."""
    mutant = Mutant(
        "room is not compared", "weft/kernels/nodes.cuh", "if (has_places && static_cast", "if (static_cast"
    )
    assert causes_with_fewer_members(compiler, PUSHED, mutant) != [(MOVED, 0)] * 3


@pytest.mark.parametrize("late", [1, 2])
def test_a_rank_that_does_not_come(compiler: Compiler, late: int) -> None:
    """All name it, also those that hear of it by others, and those from whom it keeps others back."""
    case = dataclasses.replace(PULLED, dispatch=dataclasses.replace(TWO, num_rounds=1))
    runner = with_nodes(compiler, case, 2)
    runner.add_round()
    runner.streams[late].pop()
    runner.world.set_timeout(NODE_TIMEOUT_NS)
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        for rank in set(runner.ranks) - {late}:
            wanted = {"cause": DEADLINE, "culprit": late, "broken": DEADLINE, "owner": 1}
            assert words(runner, rank) == wanted | {"sequence": runner.num_operations - 1}
    finally:
        runner.memory.close()
