"""Guards against small batches between nodes that lose, repeat or misplace rows, picks or sums, or tell too early.

As test_emulated_nodes and test_emulated_node_sums; docs/protocols/nodes.md, "Small batches".
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from combine_cases import CombineCase, CombineRunner
from dispatch_cases import Case, Runner
from kernels import Compiler, Mutant
from machine import Streams, is_found, sleeping
from node_cases import NODE_TIMEOUT_NS, causes_with_fewer_members, with_nodes
from test_emulated_failures import words
from world import Shape

MOVED = 7

# Of two nodes of two ranks each.
WINDOW = Shape(num_ranks=4, num_experts=8, top_k=3, max_tokens=40, landing_row_bytes=2048, small_tokens=24)
TWO = Case(shape=WINDOW, tokens=(24, 13, 0, 21), hidden=600, is_small=True)
FOUR = Case(
    shape=Shape(num_ranks=8, num_experts=16, top_k=4, max_tokens=16, landing_row_bytes=2048, small_tokens=16),
    tokens=(16, 9, 0, 1, 12, 16, 5, 8),
    is_small=True,
    num_rounds=2,
)
THREE = Case(
    shape=Shape(num_ranks=12, num_experts=24, top_k=5, max_tokens=12, landing_row_bytes=2048, small_tokens=12),
    tokens=(12, 3, 0, 9, 12, 1, 2, 11, 4, 12, 7, 0),
    is_small=True,
    num_rounds=2,
)
UNEVEN = Case(
    shape=Shape(num_ranks=6, num_experts=12, top_k=3, max_tokens=24, landing_row_bytes=2048, small_tokens=24),
    tokens=(16, 5, 14, 8, 16, 11),
    is_small=True,
    num_rounds=2,
)
FEW = dataclasses.replace(UNEVEN, tokens=(8, 5, 7, 8, 8, 3))  # one rank adds for three others
# Each with the ranks of a node; the last node may have fewer.
DISPATCHES = {
    "2 x 2": (2, TWO),
    "2 x 2, two launches, repeated": (2, dataclasses.replace(TWO, is_split=True, is_repeated=True, seed=1)),
    "2 x 2, capacity, bad ids, int32 ids on a rank, no weights": (
        2,
        dataclasses.replace(TWO, capacity=50, num_bad_ids=3, int32_ranks=(3,), has_weights=False, seed=2),
    ),
    "2 x 2, expert_major, made FP8": (
        2,
        dataclasses.replace(TWO, layout="expert_major", rows="fp8", hidden=400, alignment=8, is_repeated=True, seed=3),
    ),
    "2 x 2, masked, bytes with scales, two launches": (
        2,
        dataclasses.replace(
            TWO,
            layout="masked",
            rows="bytes",
            hidden=592,
            scale_bytes=3,
            capacity=9,
            num_duplicates=2,
            is_split=True,
            is_repeated=True,
            seed=4,
        ),
    ),
    "2 x 2, masked, bytes, column-major scales given": (
        2,
        dataclasses.replace(
            TWO,
            layout="masked",
            rows="bytes",
            hidden=592,
            scale_bytes=592,
            columns_given=True,
            scale_word_bytes=4,
            capacity=9,
            is_split=True,
            seed=5,
        ),
    ),
    "2 x 2, one token": (2, dataclasses.replace(TWO, tokens=(1, 0, 1, 1), seed=6)),
    "nodes of one rank": (
        1,
        dataclasses.replace(
            TWO, shape=dataclasses.replace(WINDOW, num_ranks=3, num_experts=6), tokens=(24, 0, 9), seed=7
        ),
    ),
    "4 x 2": (2, dataclasses.replace(FOUR, is_repeated=True, seed=8)),
    "3 x 4": (4, dataclasses.replace(THREE, layout="expert_major", seed=9)),
    "4 + 2": (4, dataclasses.replace(UNEVEN, is_split=True, seed=10)),
    "4 + 2, two have left": (4, dataclasses.replace(UNEVEN, lost_ranks=(1, 4), seed=11)),
    "expert_major of a throughput dispatch, repeated": (
        2,
        dataclasses.replace(
            TWO,
            layout="expert_major",
            is_small=False,
            is_small_behind=True,
            is_repeated=True,
            alignment=8,
            spread_blocks=2,
            seed=12,
        ),
    ),
}


def behind(dispatch: Case, node_ranks: int, **options: Any) -> CombineCase:
    """Combines of a dispatch, in domains of the nodes."""
    return CombineCase(dispatch=dispatch, sum_domain=node_ranks, **options)


BRIEF = dataclasses.replace(TWO, hidden=64, num_rounds=2)
COMBINES = {
    "2 x 2, bias": (2, behind(BRIEF, 2, hidden=600, bias="rows", num_combines=2)),
    "2 x 2, expert_major, weighted, side values, two launches": (
        2,
        behind(
            dataclasses.replace(BRIEF, layout="expert_major", is_split=True, seed=1),
            2,
            hidden=328,
            is_weighted=True,
            has_side=True,
        ),
    ),
    "2 x 2, masked, capacity, side values": (
        2,
        behind(dataclasses.replace(BRIEF, layout="masked", capacity=7, seed=2), 2, hidden=64, has_side=True),
    ),
    "nodes of one rank, side values": (
        1,
        behind(
            dataclasses.replace(
                BRIEF, shape=dataclasses.replace(WINDOW, num_ranks=3, num_experts=6), tokens=(24, 0, 9), seed=12
            ),
            0,
            hidden=64,
            has_side=True,
        ),
    ),
    "2 x 2, FP8": (2, behind(dataclasses.replace(BRIEF, seed=3), 2, hidden=784, wire_is_fp8=True)),
    "2 x 2, expert_major, FP8, side values": (
        2,
        behind(
            dataclasses.replace(BRIEF, layout="expert_major", seed=4),
            2,
            hidden=400,
            wire_is_fp8=True,
            is_weighted=True,
            has_side=True,
        ),
    ),
    "2 x 2, fp32 rows": (2, behind(dataclasses.replace(BRIEF, seed=5), 2, hidden=300, dtype=torch.float32)),
    "nodes of one rank, FP8": (
        1,
        behind(
            dataclasses.replace(
                BRIEF, shape=dataclasses.replace(WINDOW, num_ranks=3, num_experts=6), tokens=(24, 0, 9), seed=6
            ),
            0,
            hidden=784,
            wire_is_fp8=True,
        ),
    ),
    "4 x 2": (2, behind(dataclasses.replace(FOUR, seed=7), 2, hidden=200)),
    "3 x 4": (4, behind(dataclasses.replace(THREE, layout="expert_major", seed=8), 4, hidden=200, is_weighted=True)),
    "4 + 2": (
        4,
        behind(
            dataclasses.replace(UNEVEN, tokens=(12, 5, 11, 8, 12, 9), is_split=True, seed=9),
            4,
            hidden=200,
            has_side=True,
        ),
    ),
    "4 + 2, two have left": (4, behind(dataclasses.replace(FEW, lost_ranks=(1, 4), seed=10), 4, hidden=200)),
    "behind a throughput dispatch, capacity": (
        2,
        behind(
            dataclasses.replace(
                BRIEF, layout="masked", capacity=7, is_small=False, is_small_behind=True, spread_blocks=2, seed=11
            ),
            2,
            hidden=200,
            has_side=True,
        ),
    ),
}


@pytest.mark.parametrize("name", DISPATCHES)
def test_rows_are_those_of_the_reference(compiler: Compiler, name: str) -> None:
    """In every word, chunks, messages and credits coming in any order."""
    node_ranks, case = DISPATCHES[name]
    assert with_nodes(compiler, case, node_ranks).run() == []


@pytest.mark.parametrize("name", COMBINES)
def test_sums_are_those_of_the_reference(compiler: Compiler, name: str) -> None:
    """The same."""
    node_ranks, case = COMBINES[name]
    assert with_nodes(compiler, case, node_ranks, chunk_rows=8).run() == []


NO_ROWS = [
    {"cause": MOVED, "culprit": rank, "broken": 0, "owner": 0, "sequence": 3, "num_put": 0} for rank in (0, 1, 2)
]


def _run_with_others(compiler: Compiler, case: CombineCase, mutant: Mutant | None = None) -> list[dict[str, int]]:
    """A dispatch; then, with a member less, one by its handle and a combine. What the windows of the members say."""
    runner: CombineRunner = with_nodes(compiler, case, 2, mutant, chunk_rows=8)
    round_ = Runner.add_round(runner)
    runner.world.set_timeout(NODE_TIMEOUT_NS)
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        for stream in runner.streams:
            stream.clear()
        runner.add_repetition(round_)
        runner.add_combines(round_)
        runner.world.set_members((0, 1, 2))
        runner.nodes.renew()
        runner.streams[3].clear()
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        return [{**words(runner, rank), "num_put": runner.nodes.chunks(rank)[0]} for rank in (0, 1, 2)]
    finally:
        runner.memory.close()


MORE = behind(dataclasses.replace(BRIEF, tokens=(24, 24, 24, 24)), 2, hidden=200, has_side=True)


def test_a_graph_of_when_there_were_more_members(compiler: Compiler) -> None:
    """A rank adds for more by now than it has places for: no row goes, and the windows go on."""
    assert causes_with_fewer_members(compiler, MORE, chunk_rows=8) == [(MOVED, 0)] * 3


@pytest.mark.parametrize("is_split", [False, True], ids=["one launch", "two"])
def test_a_handle_of_other_members(compiler: Compiler, is_split: bool) -> None:
    """Who forwards and adds is another: no row goes on its way, and the window goes on behind each operation."""
    dispatch = dataclasses.replace(BRIEF, num_rounds=1, is_split=is_split)
    seen = _run_with_others(compiler, behind(dispatch, 2, hidden=200, has_side=True))
    assert seen == NO_ROWS


ENTRY, ROWS = "weft/kernels/small/dispatch_entry.cuh", "weft/kernels/small/dispatch_nodes.cuh"
SUM_ENTRY, SUMS = "weft/kernels/small/combine_entry.cuh", "weft/kernels/small/combine_nodes.cuh"
STORED = "    ptx::bar_sync(kStored, kWithOne);\n"
TELL = "    if constexpr (kConfig.has_nodes()) {\n      SmallDispatchNodes<kConfig>(s_).tell();\n"
FORWARD = (
    "    if constexpr (kConfig.has_nodes()) "
    "goes_on = SmallDispatchNodes<kConfig>(s_).forward(Receive::all_num_tokens());\n"
)
MAKE = "      if (verdict(true) == Verdict::kOk) SmallCombineNodeSums<kConfig>(b_, warp_, flight).forward();\n"
MADE = "      ptx::bar_sync_apart(kForwarded, kWithOne);\n"
HEARD = "{}    }}\n    transport::note_waited(b_.a.view, b_.lane, waited_ns);\n    Verdict worst"
PLAIN = behind(dataclasses.replace(BRIEF, seed=1), 2, hidden=600)
SIDES = COMBINES["2 x 2, masked, capacity, side values"][1]
MUTANTS = (
    (Mutant("chunks are put before rows are stored", ENTRY, STORED + TELL, TELL + "    }\n" + STORED + "    {\n"), TWO),
    (
        Mutant(
            "rows are said to be there before they are forwarded",
            ENTRY,
            FORWARD + "    end_forward();\n",
            "    end_forward();\n" + FORWARD,
        ),
        TWO,
    ),
    (
        Mutant(
            "records are taken without looking at their signals",
            ROWS,
            "return lane != 0 || rows.have_arrived(record + 1);",
            "return true;",
        ),
        TWO,
    ),
    (
        Mutant(
            "tokens that did not come are counted among the records",
            ROWS,
            "return has_come(source, nth_source, earlier) ? 1u : 0u;",
            "return 1u;",
        ),
        TWO,
    ),
    (
        Mutant(
            "picks of a message are taken for those of the first node",
            ROWS,
            "static_cast<u32>(kPlacement.expert_of(nodes_.first, 0) + experts[pick])",
            "static_cast<u32>(experts[pick])",
        ),
        TWO,
    ),
    (Mutant("weights stay behind", ROWS, "    if (kConfig.is_cached || first != 0) return;\n", "    return;\n"), TWO),
    (Mutant("chunks are put before sums are made", SUM_ENTRY, MAKE + MADE, MADE + MAKE), PLAIN),
    (
        Mutant(
            "sums are made before the contributions of mates are here",
            SUM_ENTRY,
            HEARD.format(
                "      if (mine == Verdict::kOk) "
                "mine = transport::wait(b_.a.view, Phase::kReduce, flight, b_.lane, block, waited_ns);\n"
            ),
            HEARD.format(""),
        ),
        PLAIN,
    ),
    (
        Mutant(
            "records are added without looking at their signals",
            SUMS,
            "return b_.lane != 0 || rows.have_arrived(all);",
            "return true;",
        ),
        PLAIN,
    ),
    (
        Mutant("a node that keeps no row sends no zeros", SUMS, "u32 mates = kCame;", "u32 mates = 0;"),
        COMBINES["behind a throughput dispatch, capacity"][1],
    ),
    (
        Mutant(
            "the sum of the owner's node is not rounded",
            SUMS,
            "} else if constexpr (kConfig.order.has_domains()) {",
            "} else if constexpr (false) {",
        ),
        PLAIN,
    ),
    (
        Mutant(
            "contributions for other nodes lie where those of the own tokens do",
            SUMS,
            "s.part[thread] = is_away ? 1 + nodes_.nth_brought_by(at, thread) : 0;",
            "s.part[thread] = 0;",
        ),
        PLAIN,
    ),
    (
        Mutant(
            "side values of mates are not read",
            SUMS,
            "? 0.0f + *b_.landed_side(flight_, nodes_.rank, 1 + nth_source, keeper, token, at % kTopk) : 0.0f;",
            "? 0.0f : 0.0f;",
        ),
        SIDES,
    ),
)


@pytest.mark.long
def test_side_values_that_are_read_before_they_are_stored(compiler: Compiler) -> None:
    """The mistake is found, where a rank has no mates whose headers it would wait for."""
    barrier = "      ptx::bar_sync_apart(kSideStored, kBoth);\n"
    read = "      if (worst == Verdict::kOk) sums.forward_side();\n"
    mutant = Mutant("own side values are read before they are stored", SUM_ENTRY, barrier + read, read + barrier)
    node_ranks, case = COMBINES["nodes of one rank, side values"]

    def run(seed: int) -> list[str]:
        again = dataclasses.replace(case, dispatch=dataclasses.replace(case.dispatch, seed=seed))
        found: list[str] = with_nodes(compiler, again, node_ranks, mutant, chunk_rows=8).run()
        return found

    assert is_found(run)


@pytest.mark.parametrize(("mutant", "case"), MUTANTS, ids=lambda value: getattr(value, "name", ""))
@pytest.mark.long
def test_mistakes_are_found(compiler: Compiler, mutant: Mutant, case: Case | CombineCase) -> None:
    """An emulation that finds none of these proves nothing."""

    def run(seed: int) -> list[str]:
        if isinstance(case, CombineCase):
            again: Any = dataclasses.replace(case, dispatch=dataclasses.replace(case.dispatch, seed=seed))
        else:
            again = dataclasses.replace(case, seed=seed)
        num_slots = 4 if isinstance(case, CombineCase) else 2  # as few as a call needs
        found: list[str] = with_nodes(compiler, again, 2, mutant, num_slots=num_slots, chunk_rows=8).run()
        return found

    assert is_found(run)


@pytest.mark.long
def test_places_that_are_not_counted(compiler: Compiler) -> None:
    """The mistake is found."""
    mutant = Mutant("places are not counted", SUMS, "return Block::landing().has_no_places || ", "return ")
    assert causes_with_fewer_members(compiler, MORE, mutant, chunk_rows=8) != [(MOVED, 0)] * 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "old"),
    [
        (ROWS, "return static_cast<u32>(forward_plan().members()) != flight.active.word;"),
        (SUMS, "return static_cast<u32>(forward_plan().members()) != flight_.active.word;"),
    ],
    ids=["dispatch", "combine"],
)
def test_members_that_are_not_compared(compiler: Compiler, path: str, old: str) -> None:
    """The mistake is found."""
    mutant = Mutant("the members are not compared", path, old, "return false;")
    dispatch = dataclasses.replace(BRIEF, num_rounds=1)
    seen = _run_with_others(compiler, behind(dispatch, 2, hidden=200), mutant)
    assert seen != NO_ROWS


@pytest.mark.long
@pytest.mark.parametrize("checks", [True, False], ids=["right", "mistake"])
def test_a_slot_is_filled_without_a_place(compiler: Compiler, tmp_path: Path, checks: bool) -> None:
    """A node that is late has what it has not forwarded written over, unless places are waited for."""
    wait = "const bool has_place = !goes || rows_to(lane).have_places(record + 1);"
    mutant = None if checks else Mutant("a slot is filled without a place", ROWS, wait, "const bool has_place = true;")

    def run(seed: int) -> list[str]:
        case = dataclasses.replace(TWO, tokens=(24, 24, 24, 24), is_split=True, num_rounds=2, seed=seed)
        runner = with_nodes(compiler, case, 2, mutant, num_slots=2, chunk_rows=8)  # a call fills a ring
        add_round = runner.add_round

        def add_late_round() -> Any:
            added = add_round()
            if runner.num_operations == 1:
                for rank in (2, 3):  # between its halves
                    runner.streams[rank].insert(1, sleeping(tmp_path, 1_000_000_000))
            return added

        runner.add_round = add_late_round
        found: list[str] = runner.run()
        return found

    if checks:
        assert run(0) == []
    else:
        assert is_found(run)
