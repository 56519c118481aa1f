"""Guards against kernels that read or write where a peer's words say, though nothing of theirs lies there (R19)."""

import dataclasses

import pytest
import torch
from combine_cases import CombineCase, CombineRunner
from dispatch_cases import Case, Runner
from kernels import Compiler
from machine import Streams
from test_emulated_failures import (
    BAD_PEER_WORD,
    KERNELS,
    ODD,
    TIMEOUT_NS,
    WINDOW,
    are_untouched,
    prepared,
    with_odd_place,
    words,
)

MOVED = 7  # transport::ErrorCause


@pytest.mark.parametrize("name", ["scales", "ids", "weights", "table"])
def test_a_part_outside_of_the_heap(compiler: Compiler, name: str) -> None:
    """The same if it is another part of a result."""
    runner, rounds = with_odd_place(compiler, "rank_major", **{f"place_{name}": 1 << 40})
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        for rank in runner.ranks:
            seen = words(runner, rank)
            assert (seen["cause"], seen["culprit"], seen["sequence"]) == (BAD_PEER_WORD, ODD, 0)
        assert all(are_untouched(runner, each) for each in rounds)
    finally:
        runner.memory.close()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_heap_that_has_moved(compiler: Compiler, kernel: str) -> None:
    """A graph was captured with other addresses: nothing is sent."""
    runner, _ = prepared(compiler, kernel, 1)
    memory, layout = runner.memory, runner.world.layout
    last = [[stream.pop()] for stream in runner.streams]
    try:
        Streams(memory, runner.streams, seed=1, timeout_s=60).run()
        for control in runner.world.control:
            memory.set_word(control + layout["control.heap_generation"], 1, "u4")
        Streams(memory, last, seed=1, timeout_s=60).run()
        for rank in runner.ranks:
            wanted = {"cause": MOVED, "culprit": rank, "broken": 0, "owner": 0}
            assert words(runner, rank) == wanted | {"sequence": runner.num_operations - 1}
    finally:
        memory.close()


@pytest.mark.parametrize("kernel", ["combine", "small_combine"])
def test_rows_of_a_plan_that_no_result_has(compiler: Compiler, kernel: str) -> None:
    """What peers have written into the plan of a rank makes it read nothing outside of its rows (R19)."""
    case = Case(shape=WINDOW, tokens=(16, 5, 9), is_small=kernel == "small_combine", num_rounds=1)
    runner = CombineRunner(compiler, CombineCase(dispatch=case))
    round_ = runner.add_round()
    plan_header, most = runner.world.layout["plan_header"], WINDOW.num_ranks * WINDOW.max_tokens
    bad = runner.memory.put(torch.full((most,), 0x7FFFFFFF, dtype=torch.int32))
    launch = runner.streams[ODD][0]
    copy = (round_.received[ODD].recv_plan + 4 * plan_header, bad, 4 * most)
    runner.streams[ODD][0] = dataclasses.replace(launch, copies=(*launch.copies, copy))
    runner.world.set_timeout(TIMEOUT_NS)
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()  # a read outside ends the process
        assert runner.memory.written_red_zones() == []
    finally:
        runner.memory.close()


def test_an_unload_writes_no_row_behind_the_last(compiler: Compiler) -> None:
    """Whatever the plan says that peers have written (R19)."""
    case = Case(shape=WINDOW, tokens=(16, 16, 16), num_rounds=1, layout="expert_major", staged_ranks=(ODD,))
    runner = Runner(compiler, case)
    result = runner.add_round().received[ODD]
    unload, num_rows = runner.streams[ODD][-1], result.num_rows // 2
    assert "rows" in unload.fields
    assert num_rows > 0
    runner.streams[ODD][-1] = dataclasses.replace(unload, fields={**unload.fields, "num_rows": num_rows}, copies=())
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        rows = runner.memory.tensor(result.x, (result.num_rows, runner.wire.wire_bytes), torch.uint8)
        assert bool(rows[:num_rows].any(dim=1).any())
        assert not bool(rows[num_rows:].any()), "it was zero before"
    finally:
        runner.memory.close()
