"""Guards against handles over nodes that bring rows elsewhere than their dispatch did, or that hold for other members.

docs/protocols/nodes.md, "Handles".
"""

import dataclasses

import pytest
from combine_cases import CombineCase, CombineRunner
from dispatch_cases import Case, Runner
from kernels import Compiler, Mutant
from machine import Streams, is_found
from node_cases import NODE_TIMEOUT_NS, with_nodes
from test_emulated_failures import BAD_PEER_WORD, words
from test_emulated_node_sums import DROPPED, PULLED, UNEVEN
from test_emulated_nodes import TWO

MOVED = 7
REPEATED = dataclasses.replace(TWO, is_repeated=True, num_rounds=2)
# Each with the ranks of a node; the last node may have fewer.
CASES = {
    "2 x 2": (2, REPEATED),
    "2 x 2, capacity, bad ids": (2, dataclasses.replace(REPEATED, capacity=50, num_bad_ids=3, seed=1)),
    "2 x 2, no room in the heap of some": (2, dataclasses.replace(REPEATED, staged_ranks=(1, 2), seed=2)),
    "2 x 2, made FP8": (2, dataclasses.replace(REPEATED, rows="fp8", hidden=400, num_rounds=1, seed=7)),
    "2 x 2, bytes and scales": (
        2,
        dataclasses.replace(REPEATED, rows="bytes", hidden=160, scale_bytes=48, num_rounds=1, seed=8),
    ),
    "4 + 2": (4, dataclasses.replace(UNEVEN, is_repeated=True)),
    "4 + 2, two have left": (4, dataclasses.replace(UNEVEN, is_repeated=True, lost_ranks=(1, 4), seed=6)),
}


@pytest.mark.parametrize("name", CASES)
def test_repeated_rows_are_those_of_the_reference(compiler: Compiler, name: str) -> None:
    """In every word; and the plans and sums of the dispatch are as it left them."""
    node_ranks, case = CASES[name]
    assert with_nodes(compiler, case, node_ranks).run() == []


def _run_kept(compiler: Compiler, case: CombineCase, node_ranks: int, mutant: Mutant | None = None) -> list[str]:
    """Two dispatches, then of the first and of the second: repeated, combined."""
    runner: CombineRunner = with_nodes(compiler, case, node_ranks, mutant, num_slots=2)
    rounds = [Runner.add_round(runner) for _ in range(2)]
    for each in rounds:
        runner.add_repetition(each)
        runner.add_combines(each)
    try:
        Streams(runner.memory, runner.streams, seed=case.dispatch.seed, timeout_s=60).run()
        found = runner.world.problems(runner.num_operations)
        return found + [text for each in rounds for text in runner.differences(each)]
    finally:
        runner.memory.close()


KEPT = {
    "2 x 2, pulled and pushed, rows without room": (2, DROPPED),
    "4 + 2, pulled and pushed": (4, CombineCase(dispatch=UNEVEN, sum_domain=4, hidden=600, heap_ranks=(1, 4))),
}


@pytest.mark.parametrize("name", KEPT)
def test_handles_that_were_kept(compiler: Compiler, name: str) -> None:
    """Nothing of a later dispatch gets into them."""
    node_ranks, case = KEPT[name]
    assert _run_kept(compiler, case, node_ranks) == []


ITEMS = "weft/kernels/dispatch/nodes.cuh"
SMALL_ROOM = dataclasses.replace(REPEATED, capacity=20, num_rounds=1)
MUTANTS = (
    (
        Mutant(
            "the bits of a word that a run does not end are left to nobody",
            ITEMS,
            "for (i32 group = (begin + 31) / 32 + lane; group * 32 < end; group += 32) {",
            "for (i32 group = (begin + 31) / 32 + lane; group * 32 + 31 < end; group += 32) {",
        ),
        REPEATED,
    ),
    (
        Mutant(
            "a token whose rows have no room does not go",
            ITEMS,
            "return (GpuSendPlan<const i32>{a.send_plan, a.num_tokens, kRanks}.ranks(token).word & of_node) != 0;",
            "for (i32 to = nodes_.map.first(node); to < nodes_.map.first(node) + nodes_.map.size(node); ++to) {\n"
            "  const i32 row = GpuSendPlan<const i32>{a.send_plan, a.num_tokens, kRanks}.row()[token * kRanks + to];\n"
            "  if (row > 0) return true;\n}\nreturn false;",
        ),
        REPEATED,
    ),
    (
        Mutant(
            "tokens that go to a node are not counted",
            ITEMS,
            "num_here += goes_to(node, token) ? 1 : 0;",
            "num_here += goes_to(node, token) && token > begin ? 1 : 0;",
        ),
        REPEATED,
    ),
    (
        Mutant(
            "a row without room is stored",
            ITEMS,
            "return row < num_places ? max(row, -1) : -1;",
            "return row == kForwardNoRow ? 0 : row;",
        ),
        SMALL_ROOM,
    ),
    (
        Mutant(
            "a repeated dispatch sends no message",
            "weft/kernels/dispatch/messages.cuh",
            "if (node < kNodes && s.forwarder[node] >= 0) nodes_.put_message",
            "if (node < kNodes && s.forwarder[node] >= 0 && !kConfig.is_cached) nodes_.put_message",
        ),
        REPEATED,
    ),
)


@pytest.mark.parametrize(("mutant", "case"), MUTANTS, ids=lambda value: getattr(value, "name", ""))
@pytest.mark.long
def test_mistakes_are_found(compiler: Compiler, mutant: Mutant, case: Case) -> None:
    """An emulation that finds none of these proves nothing."""

    def run(seed: int) -> list[str]:
        found: list[str] = with_nodes(compiler, dataclasses.replace(case, seed=seed), 2, mutant, num_slots=2).run()
        return found

    assert is_found(run)


def _run_with_others(
    compiler: Compiler, members: tuple[int, ...], mutant: Mutant | None = None
) -> list[dict[str, int]]:
    """A dispatch; then, with fewer members, one by its handle and a combine. What those members' windows say."""
    case = dataclasses.replace(PULLED, dispatch=dataclasses.replace(TWO, num_rounds=1))
    runner: CombineRunner = with_nodes(compiler, case, 2, mutant)
    round_ = Runner.add_round(runner)
    runner.world.set_timeout(NODE_TIMEOUT_NS)
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        for stream in runner.streams:
            stream.clear()
        runner.add_repetition(round_)
        runner.add_combines(round_)
        runner.world.set_members(members)
        runner.nodes.renew()
        for rank in set(runner.ranks) - set(members):
            runner.streams[rank].clear()
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        return [words(runner, rank) for rank in members]
    finally:
        runner.memory.close()


def test_a_handle_of_other_members(compiler: Compiler) -> None:
    """Who forwards is another: no row goes on its way, and the window goes on behind each operation."""
    seen = _run_with_others(compiler, (0, 1, 2))
    num_operations = seen[0]["sequence"]
    assert num_operations > 2
    assert seen == [
        {"cause": MOVED, "culprit": rank, "broken": 0, "owner": 0, "sequence": num_operations} for rank in (0, 1, 2)
    ]


@pytest.mark.long
def test_members_that_are_not_compared(compiler: Compiler) -> None:
    """The mistake is found."""
    old = "if (static_cast<u32>(plan.members()) == flight_.active.word) return true;"
    mutant = Mutant("the members are not compared", "weft/kernels/nodes.cuh", old, "return true;")
    assert any(each["cause"] != MOVED for each in _run_with_others(compiler, (0, 1, 2), mutant))


def _tell_fewer(compiler: Compiler, mutant: Mutant | None = None) -> list[dict[str, int]]:
    """A rank has a token less than its handle."""
    runner: Runner = with_nodes(compiler, dataclasses.replace(REPEATED, num_rounds=1), 2, mutant)
    runner.add_round()
    launch = runner.streams[1][-1]
    runner.streams[1][-1] = dataclasses.replace(launch, fields={**launch.fields, "num_tokens": 20})
    runner.world.set_timeout(NODE_TIMEOUT_NS)
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        return [words(runner, rank) for rank in (0, 2, 3)]
    finally:
        runner.memory.close()


def test_a_source_with_fewer_tokens_than_its_handle(compiler: Compiler) -> None:
    """All others say so, and take no row of it."""
    wanted = {"cause": BAD_PEER_WORD, "culprit": 1, "broken": BAD_PEER_WORD, "owner": 1, "sequence": 1}
    assert _tell_fewer(compiler) == [wanted] * 3


@pytest.mark.long
def test_a_number_of_tokens_that_is_believed(compiler: Compiler) -> None:
    """The mistake is found."""
    old = "if (to < kRanks && num_tokens != a.recv_plan[to]) s.bad_source = static_cast<u32>(to) + 1;"
    mutant = Mutant("a number of tokens is believed", "weft/kernels/dispatch/count.cuh", old, "")
    assert any(each["cause"] != BAD_PEER_WORD for each in _tell_fewer(compiler, mutant))
