"""Guards against kernels that hang, or break the window, when a peer does not come or calls something else."""

import dataclasses
from concurrent.futures import Future
from pathlib import Path

import pytest
from combine_cases import CombineCase, CombineRunner
from dispatch_cases import Case, Round, Runner
from kernels import Compiler, Mutant, Program
from machine import Launch, Streams
from world import PRINT, Shape

KERNELS = ("dispatch", "small_dispatch", "combine", "small_combine")
DEADLINE, ABORTED, MISMATCH = 1, 2, 3  # transport::ErrorCause
TIMEOUT_NS = 3_000_000_000  # long for a busy machine
LATE_NS = 2_000_000_000
LATE, ODD = 2, 1  # ranks: that does not come, that calls something else


def prepared(compiler: Compiler, kernel: str, num_rounds: int) -> tuple[Runner, list[Round]]:
    """Streams of so many rounds; the last launch of each is that of the kernel."""
    window = Shape(num_ranks=3, num_experts=6, top_k=2, max_tokens=16, small_tokens=16)
    case = Case(shape=window, tokens=(16, 5, 9), is_small=kernel.startswith("small_"), num_rounds=num_rounds)
    if kernel.endswith("combine"):
        runner: Runner = CombineRunner(compiler, CombineCase(dispatch=case))
    else:
        runner = Runner(compiler, case)
    return runner, [runner.add_round() for _ in range(num_rounds)]


def words(runner: Runner, rank: int) -> dict[str, int]:
    """What a rank's window says about an error."""
    world, layout = runner.world, runner.world.layout
    return {
        "cause": world.memory.word(world.host[rank] + layout["host.error"], "u4"),
        "culprit": world.memory.word(world.host[rank] + layout["host.error.culprit"], "i4"),
        "broken": world.memory.word(world.control[rank] + layout["control.broken"]),
        "owner": world.memory.word(world.control[rank] + layout["control.owner"]),
        "sequence": world.memory.word(world.control[rank] + layout["control.sequence"]),
    }


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_peer_that_does_not_come(compiler: Compiler, kernel: str) -> None:
    """The kernels end at the deadline, say who was late, and leave the window broken."""
    runner, _ = prepared(compiler, kernel, 1)
    runner.streams[LATE].pop()
    runner.world.set_timeout(TIMEOUT_NS)
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        for rank in (0, ODD):
            wanted = {"cause": DEADLINE, "culprit": LATE, "broken": DEADLINE, "owner": 1}
            assert words(runner, rank) == wanted | {"sequence": runner.num_operations - 1}
    finally:
        runner.memory.close()


BEGIN = "    if (flight.is_dead) return;\n    init_shared();\n"
SILENT = Mutant(
    "a block says nothing", "weft/kernels/dispatch.cuh", BEGIN, f"    if (blockIdx.x == 1) return;\n{BEGIN}"
)
BROKEN = Mutant(
    "a block finds its window broken",
    SILENT.path,
    BEGIN,
    "    if (blockIdx.x == 1) {\n      if (threadIdx.x == 0) ptx::st_relaxed_sys(&a.view.words()->broken, u64{2});\n"
    f"      return;\n    }}\n{BEGIN}",
)


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
@pytest.mark.parametrize("mutant", [SILENT, BROKEN], ids=lambda mutant: mutant.name)
def test_a_block_that_does_not_count(compiler: Compiler, layout: str, mutant: Mutant) -> None:
    """The other blocks of its GPU end, at once if it has said why, else at the deadline, and send nothing."""
    case = Case(shape=Shape(max_tokens=40), tokens=(40, 40), layout=layout, num_rounds=1)
    runner = Runner(compiler, case, mutant)
    runner.add_round()
    runner.world.set_timeout(TIMEOUT_NS if mutant is SILENT else 10 * TIMEOUT_NS)
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=20).run()
        for rank in runner.ranks:
            seen = words(runner, rank)
            wanted = {"cause": DEADLINE, "culprit": rank, "broken": DEADLINE, "owner": 1}
            if mutant is BROKEN:  # block 0 may have begun before that or not
                wanted = {"cause": 0, "culprit": seen["culprit"], "broken": ABORTED, "owner": seen["owner"]}
            assert seen == wanted | {"sequence": 0}
    finally:
        runner.memory.close()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_peer_that_calls_something_else(compiler: Compiler, kernel: str) -> None:
    """All ranks give up the call, and the next one is right."""
    runner, rounds = prepared(compiler, kernel, 2)
    at = len(runner.streams[ODD]) // 2 - 1
    launch = runner.streams[ODD][at]
    runner.streams[ODD][at] = dataclasses.replace(launch, fields={**launch.fields, "print": PRINT + 1})
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        for rank in runner.ranks:
            seen = words(runner, rank)
            assert (seen.pop("culprit") == ODD) == (rank != ODD)
            assert seen == {"cause": MISMATCH, "broken": 0, "owner": 0, "sequence": runner.num_operations}
        if isinstance(runner, CombineRunner):
            runner.num_looked = 1
        assert runner.differences(rounds[1]) == []
    finally:
        runner.memory.close()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_late_peer_is_noted(compiler: Compiler, kernel: str, tmp_path: Path) -> None:
    """The others have waited for its headers as long as it was late, in all launches together."""
    runner, _ = prepared(compiler, kernel, 2)
    sleep = tmp_path / "sleep"
    sleep.write_text(f"#!/bin/sh\nexec sleep {LATE_NS / 1e9}\n")
    sleep.chmod(0o700)
    program: Future[Program] = Future()
    program.set_result(Program(sleep, sleep))
    runner.streams[LATE].insert(len(runner.streams[LATE]) // 2, Launch(program, {}))
    memory, layout = runner.memory, runner.world.layout
    try:
        Streams(memory, runner.streams, seed=1, timeout_s=60).run()
        for rank in runner.ranks:
            words = runner.world.control[rank] + layout["control.waited_ns"]
            waited = [memory.word(words + 8 * peer) for peer in runner.ranks]
            assert waited[rank] == 0
            assert rank == LATE or waited[LATE] == max(waited) > LATE_NS / 2
    finally:
        memory.close()
