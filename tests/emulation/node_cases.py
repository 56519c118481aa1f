"""Runs of dispatches and combines whose ranks are in nodes: nothing of other nodes' ranks is mapped, rails lead there.

The network is a block of each rank's grid, which carries chunks, messages and credits in any order.
"""

import dataclasses
import re
import struct
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from combine_cases import CombineCase, Combined, CombineRunner
from dispatch_cases import Case, Runner
from kernels import Compiler, Mutant, Program
from machine import Launch
from world import Inputs, Received, World

NETWORK = 1  # blocks of the rail
FORWARD_HEADER = 32  # as kGpuForwardHeader
CHUNK_ROWS = 4  # few, so that a case has several chunks
NODE_TIMEOUT_NS = 3_000_000_000  # of a mutant
DIRECT = (".route = static_cast<weft::Route>(0)", ".node_ranks = 0")


class NodeCompiler:
    """Compiles for nodes of so many ranks."""

    def __init__(self, compiler: Compiler, node_ranks: int, mutant: Mutant | None) -> None:
        self._compiler, self._node_ranks, self._mutant = compiler, node_ranks, mutant

    def start(self, source: str, mutant: Mutant | None = None) -> "Future[Program]":
        """See Compiler.start."""
        if DIRECT[0] in source:
            wanted = (DIRECT[0].replace("(0)", "(2)"), f".node_ranks = {self._node_ranks}")
            for old, new in zip(DIRECT, wanted, strict=True):
                assert source.count(old) == 1
                source = source.replace(old, new)
            source = re.sub(r"\.reduce_rings = \d+", ".reduce_rings = 1", source)  # one warp has all cursors
        return self._compiler.start(source, mutant or self._mutant)


class Nodes:
    """What the host does for a runner's kernels with nodes."""

    def __init__(
        self,
        compiler: Compiler,
        runner: Runner,
        node_ranks: int,
        mutant: Mutant | None,
        num_slots: int,
        chunk_rows: int,
    ) -> None:
        self.runner, self.node_ranks, self.num_slots, self.chunk_rows = runner, node_ranks, num_slots, chunk_rows
        self.world: World = runner.world
        self._forward_plans: dict[int, int] = {}
        self._rail = self._new_rail(compiler)
        self._direct_view: Callable[[int, int], dict[str, int]] = self.world.view
        self._direct_launch = runner.dispatcher.launch
        self.world.view = self._view  # type: ignore[method-assign]
        self.world.compiler = NodeCompiler(compiler, node_ranks, mutant)  # type: ignore[assignment]
        self._direct_small_launch = runner.dispatcher.small_launch
        runner.dispatcher.launch = self._launch  # type: ignore[method-assign]
        runner.dispatcher.small_launch = self._small_launch  # type: ignore[method-assign]
        if not runner.case.is_small:
            runner.knows_kept = self.are_mates  # type: ignore[method-assign]
        if mutant is not None:
            self.world.set_timeout(NODE_TIMEOUT_NS)
        if isinstance(runner, CombineRunner):
            self._direct_combine = runner._launches
            runner._launches = self._combine  # type: ignore[method-assign]
            runner._passes = self._passes  # type: ignore[method-assign]

    def _new_rail(self, compiler: Compiler) -> int:
        memory, shape = self.world.memory, self.runner.case.shape
        row_bytes = self.runner.wire.wire_bytes + self.runner.wire.scale_bytes
        if isinstance(self.runner, CombineRunner):
            row_bytes = max(row_bytes, self.runner.combine.hidden * self.runner.combine.dtype.itemsize)
        fields = {
            "num_lanes": shape.num_ranks,
            "num_blocks": shape.num_blocks,
            "node_ranks": self.node_ranks,
            "num_local_experts": shape.num_local,
            "top_k": shape.top_k,
            "max_tokens": shape.max_tokens,
            "max_row_bytes": row_bytes,
            "chunk_rows": self.chunk_rows,
            "num_slots": self.num_slots,
        }
        num_bytes, lane_bytes, words_bytes, digits = compiler.tell("rail_memory.cc", fields).split()
        self._lane_bytes, self._words_bytes, self._rail_bytes = int(lane_bytes), int(words_bytes), int(num_bytes)
        self._rails = rails = [memory.allocate(int(num_bytes)) for _ in range(shape.num_ranks)]
        for address in rails:
            memory.view(address, int(num_bytes))[:] = 0
        pointers = struct.pack("<16Q", *rails, *[0] * (16 - shape.num_ranks))
        data = pointers + bytes.fromhex(digits)[len(pointers) :]
        self._first_sequence = len(data) - 8  # the last field
        rail = memory.allocate(len(data))
        memory.view(rail, len(data))[:] = memoryview(data)
        return rail

    def chunks(self, rank: int) -> tuple[int, int]:
        """How many a rank has put, and of how many it has given the credit."""
        shape, memory = self.runner.case.shape, self.world.memory
        rings = [
            self._rails[rank] + lane * self._lane_bytes + block * self._words_bytes
            for lane in range(shape.num_ranks)
            for block in range(shape.num_blocks)
        ]
        return sum(memory.word(ring) for ring in rings), sum(memory.word(ring + 8) for ring in rings)

    def begin_at(self, sequence: int) -> None:
        """Windows and rails have had so many operations."""
        memory, world = self.world.memory, self.world
        memory.set_word(self._rail + self._first_sequence, sequence)
        for control in world.control:
            memory.set_word(control + world.layout["control.sequence"], sequence)

    def renew(self) -> None:
        """What a rebuild does: members have changed, and rails begin anew (R13)."""
        for address in self._rails:
            self.world.memory.view(address, self._rail_bytes)[:] = 0
        sequence = self.world.memory.word(self.world.control[0] + self.world.layout["control.sequence"])
        self.world.memory.set_word(self._rail + self._first_sequence, sequence)

    def are_mates(self, rank: int, other: int) -> bool:
        """Of one node."""
        return other // self.node_ranks == rank // self.node_ranks

    def _view(self, rank: int, num_blocks: int) -> dict[str, int]:
        fields = {**self._direct_view(rank, num_blocks + NETWORK), "rail": self._rail}
        for other in range(self.runner.case.shape.num_ranks):
            if not self.are_mates(rank, other):
                fields |= {f"control{other}": 0, f"heap{other}": 0}
        return fields

    def _launch(
        self, rank: int, inputs: Inputs, result: Received, *, room: int, is_cached: bool = False
    ) -> list[Launch]:
        return self._with_plans(rank, result, self._direct_launch(rank, inputs, result, room=room, is_cached=is_cached))

    def _small_launch(self, rank: int, inputs: Inputs, result: Received, **options: Any) -> list[Launch]:
        return self._with_plans(rank, result, self._direct_small_launch(rank, inputs, result, **options))

    def _with_plans(self, rank: int, result: Received, launches: list[Launch]) -> list[Launch]:
        if result.send_plan not in self._forward_plans:
            self._forward_plans[result.send_plan] = self.world.memory.allocate(self._plan_bytes(rank))
        return [self._with_plan(launches[0], result), *launches[1:]]

    def _plan_bytes(self, rank: int) -> int:
        """As gpu_forward_plan_len."""
        max_tokens = self.runner.case.shape.max_tokens
        each = max_tokens * self.node_ranks + -(-max_tokens // 32) + -(-max_tokens * self.runner.case.shape.top_k // 4)
        return 4 * (FORWARD_HEADER + self._num_brought(rank) * each)

    def _combine(self, rank: int, received: Received, combined: Combined) -> list[Launch]:
        launches = self._direct_combine(rank, received, combined)
        return [self._with_plan(each, received) if "send_plan" in each.fields else each for each in launches]

    def _passes(self) -> list[tuple[int, int]]:
        """As CombineRunner: a landing has a part for the own tokens, and one for each rank that is forwarded for."""
        runner, layout = self.runner, self.world.layout
        assert isinstance(runner, CombineRunner)
        most_parts = max(1 + self._num_brought(rank) for rank in runner.case.active_ranks)
        room = layout["landing_ids"] - layout["landing_rows"]
        each = room // (most_parts * self.node_ranks * runner.wire_row_bytes())
        if runner.combine.has_side:
            shape = runner.case.shape
            each = min(each, shape.num_ranks * shape.max_tokens // (most_parts * self.node_ranks))
        most = runner.call.max_tokens
        return [(first, min(first + each, most)) for first in range(0, max(most, 1), each)]

    def _num_brought(self, rank: int) -> int:
        """As Nodes::brings."""
        case = self.runner.case
        first = rank // self.node_ranks * self.node_ranks
        size = min(self.node_ranks, case.shape.num_ranks - first)
        num_brought = 0
        for source in set(case.active_ranks) - set(range(first, first + size)):
            stands = [first + (source % self.node_ranks + step) % size for step in range(size)]
            num_brought += next((each for each in stands if each in case.active_ranks), -1) == rank
        return num_brought

    def _with_plan(self, launch: Launch, received: Received) -> Launch:
        fields = {**launch.fields, "forward_plan": self._forward_plans[received.send_plan]}
        return dataclasses.replace(launch, fields=fields)


def with_nodes(
    compiler: Compiler,
    case: Case | CombineCase,
    node_ranks: int,
    mutant: Mutant | None = None,
    *,
    num_slots: int = 4,
    chunk_rows: int = CHUNK_ROWS,
) -> Any:
    """A runner of a dispatch, or of combines behind it; its `nodes` are its Nodes."""
    runner: Any = Runner(compiler, case) if isinstance(case, Case) else CombineRunner(compiler, case)
    runner.nodes = Nodes(compiler, runner, node_ranks, mutant, num_slots, chunk_rows)
    return runner
