"""Guards against kernels that need more of a link than a network gives: dispatch and combine of two ranks, each a
domain of its own, over the loop-back network of transport/rail_loop.cuh. Rows, ids, counts and signals go through
rings, and the network carries them in any order. They are the kernels of the direct route, with another value of a
field.
"""

import struct
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from combine_cases import CombineCase, CombineRunner
from dispatch_cases import Case
from kernels import Compiler, Mutant, Program
from machine import LaunchFailed
from world import Shape

NUM_SLOTS, SLOT_BYTES, LINE = 3, 96, 64  # few and short: credits run out, rows go in pieces
SERVICES = 2  # blocks of the route: the network, and who receives
RAIL = "weft/transport/rail_loop.cuh"
CASE = Case(shape=Shape(num_ranks=2, num_experts=8, top_k=2, max_tokens=32), tokens=(32, 21), num_rounds=2)


class LoopCompiler:
    """Compiles for the other route."""

    def __init__(self, compiler: Compiler, mutant: Mutant | None) -> None:
        self._compiler, self._mutant = compiler, mutant

    def start(self, source: str, mutant: Mutant | None = None) -> "Future[Program]":
        """See Compiler.start."""
        direct = ".route = static_cast<weft::Route>(0)"
        assert source.count(direct) == 1
        return self._compiler.start(source.replace(direct, direct.replace("(0)", "(1)")), mutant or self._mutant)


def over_the_loop(compiler: Compiler, case: CombineCase, mutant: Mutant | None = None) -> CombineRunner:
    """A runner whose windows are linked by the loop-back network alone."""
    runner = CombineRunner(compiler, case)
    world, num_ranks, num_blocks = runner.world, runner.case.shape.num_ranks, runner.case.num_blocks
    ring = LINE + 2 * 8 * NUM_SLOTS + NUM_SLOTS * SLOT_BYTES  # as LoopRail
    rail_bytes = LINE + 2 * num_ranks * num_blocks * -(-ring // LINE) * LINE
    rails = [world.memory.allocate(rail_bytes) for _ in range(num_ranks)]
    for address in rails:
        world.memory.view(address, rail_bytes)[:] = 0
    pointers = rails + [0] * (16 - num_ranks)
    data = struct.pack("<16QiiiiQ", *pointers, num_ranks, num_blocks, NUM_SLOTS, 0, SLOT_BYTES)
    rail = world.memory.allocate(len(data))
    world.memory.view(rail, len(data))[:] = memoryview(data)
    direct: Callable[[int, int], dict[str, int]] = world.view

    def view(rank: int, num_blocks: int) -> dict[str, int]:
        fields = {**direct(rank, num_blocks + SERVICES), "rail": rail}
        for other in range(num_ranks):  # nothing of a peer is mapped
            if other != rank:
                fields |= {f"control{other}": 0, f"heap{other}": 0}
        return fields

    world.view = view  # type: ignore[method-assign]
    world.compiler = LoopCompiler(compiler, mutant)  # type: ignore[assignment]
    return runner


CASES = {
    "two domains": CombineCase(dispatch=CASE),
    "repeated, int32 ids on a rank": CombineCase(
        dispatch=Case(
            shape=Shape(num_ranks=2, num_experts=8, top_k=2, max_tokens=32),
            tokens=(20, 32),
            num_rounds=1,
            is_repeated=True,
            int32_ranks=(1,),
            seed=1,
        )
    ),
    "capacity, three ranks": CombineCase(
        dispatch=Case(
            shape=Shape(num_ranks=3, num_experts=12, top_k=3, max_tokens=16),
            tokens=(16, 3, 9),
            num_rounds=1,
            capacity=20,
            num_bad_ids=2,
            seed=2,
        )
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_the_reference(compiler: Compiler, name: str) -> None:
    """Of the dispatch, and of the combine behind it."""
    assert over_the_loop(compiler, CASES[name]).run() == []


MUTANTS = [
    Mutant(
        "a message is signalled before it is carried",
        RAIL,
        "      const u32 num_bytes = reinterpret_cast",
        "      ptx::st_release_sys(to.signal(slot), signal);\n      ptx::nanosleep(20000);\n"
        "      const u32 num_bytes = reinterpret_cast",
    ),
    Mutant(
        "messages are taken as they come",
        RAIL,
        "if (ptx::ld_acquire_sys(ring.signal(slot)) != n + 1) return;",
        "if (ptx::ld_acquire_sys(ring.signal(slot)) < n + 1) { bool any = false;"
        " for (i32 ahead = 1; ahead < rail_.num_slots; ++ahead) { const i32 other = ring.slot_of(n + ahead);"
        " if (ptx::ld_acquire_sys(ring.signal(other)) == n + 1 + ahead)"
        " deliver(*reinterpret_cast<const LoopMessage*>(ring.slot(other)), ring.slot(other) + sizeof(LoopMessage)); }"
        " return; }",
    ),
    Mutant(
        "a slot is filled without a credit",
        RAIL,
        "return n < ptx::ld_acquire_sys(ring.read()) + static_cast<u64>(rail_.num_slots);",
        "return true;",
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.long
def test_mutants_of_the_route_are_caught(compiler: Compiler, mutant: Mutant) -> None:
    """In one run of some."""
    for seed in range(4):
        case = Case(shape=CASE.shape, tokens=CASE.tokens, num_rounds=2, seed=seed)
        runner = over_the_loop(compiler, CombineCase(dispatch=case), mutant)
        runner.world.set_timeout(3_000_000_000)
        try:
            if runner.run():
                return
        except LaunchFailed:
            return
    pytest.fail("nobody has noticed")
