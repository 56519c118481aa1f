"""Runs of dispatches and combines whose ranks are in nodes: nothing of other nodes' ranks is mapped, rails lead there.

The network carries chunks, messages and credits in any order: a block of each rank's grid, or NCCL's, for which
include/nccl_device.h stands in.
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
from machine import Launch, Streams
from world import Inputs, Received, World

BLOCK, GIN = 2, 3  # as weft::Route
HELD = 16  # bytes in front of EmulatedSwitch::is_held
NUM_CONTEXTS = 2  # the ring of messages shares that of block 0
FIRST_SEQUENCE_BYTES = 8
FORWARD_HEADER = 32  # as kGpuForwardHeader
CHUNK_ROWS = 4  # few, so that a case has several chunks
NODE_TIMEOUT_NS = 3_000_000_000  # of a mutant
DIRECT = (".route = static_cast<weft::Route>(0)", ".node_ranks = 0")


class NodeCompiler:
    """Compiles for nodes of so many ranks."""

    def __init__(self, compiler: Compiler, node_ranks: int, mutant: Mutant | None, route: int) -> None:
        self._compiler, self._node_ranks, self._mutant, self._route = compiler, node_ranks, mutant, route

    def start(self, source: str, mutant: Mutant | None = None) -> "Future[Program]":
        """See Compiler.start."""
        if DIRECT[0] in source:
            wanted = (DIRECT[0].replace("(0)", f"({self._route})"), f".node_ranks = {self._node_ranks}")
            for old, new in zip(DIRECT, wanted, strict=True):
                assert source.count(old) == 1
                source = source.replace(old, new)
            source = re.sub(r"\.reduce_rings = \d+", ".reduce_rings = 1", source)  # one warp has all cursors
            if self._route == GIN:
                source = f'#include "weft/transport/rail_gin.cuh"\n{source}'
        return self._compiler.start(source, mutant or self._mutant)


class Nodes:
    """What the host does for a runner's kernels with nodes. The network is a block of each rank's grid."""

    route = BLOCK
    num_network_blocks = 1

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
        self._zeros: list[tuple[int, int]] = []
        self._new_rail(compiler)
        self._direct_view: Callable[[int, int], dict[str, int]] = self.world.view
        self._direct_launch = runner.dispatcher.launch
        self.world.view = self._view  # type: ignore[method-assign]
        self.world.compiler = NodeCompiler(compiler, node_ranks, mutant, self.route)  # type: ignore[assignment]
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

    def _rail_shape(self) -> dict[str, int]:
        shape = self.runner.case.shape
        row_bytes = self.runner.wire.wire_bytes + self.runner.wire.scale_bytes
        if isinstance(self.runner, CombineRunner):
            row_bytes = max(row_bytes, self.runner.combine.hidden * self.runner.combine.dtype.itemsize)
        return {
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

    def _new_rail(self, compiler: Compiler) -> None:
        num_ranks = self.runner.case.shape.num_ranks
        num_bytes, lane_bytes, words_bytes, digits = compiler.tell("rail_memory.cc", self._rail_shape()).split()
        self._lane_bytes, self._words_bytes = int(lane_bytes), int(words_bytes)
        self._rails = rails = [self._zeroed(int(num_bytes)) for _ in range(num_ranks)]
        pointers = struct.pack("<16Q", *rails, *[0] * (16 - num_ranks))
        self._arguments = [self._argument(pointers + bytes.fromhex(digits)[len(pointers) :])] * num_ranks

    def _zeroed(self, num_bytes: int) -> int:
        """Memory that is zero, now and after renew()."""
        address = self.world.memory.allocate(num_bytes)
        self.world.memory.view(address, num_bytes)[:] = 0
        self._zeros.append((address, num_bytes))
        return address

    def _argument(self, data: bytes) -> int:
        """Of kernels."""
        self._first_sequence = len(data) - FIRST_SEQUENCE_BYTES  # the last field
        address = self.world.memory.allocate(len(data))
        self.world.memory.view(address, len(data))[:] = memoryview(data)
        return address

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
        self._set_first_sequence(sequence)
        for control in world.control:
            memory.set_word(control + world.layout["control.sequence"], sequence)

    def renew(self) -> None:
        """What a rebuild does: members have changed, and rails begin anew (R13)."""
        for address, num_bytes in self._zeros:
            self.world.memory.view(address, num_bytes)[:] = 0
        sequence = self.world.memory.word(self.world.control[0] + self.world.layout["control.sequence"])
        self._set_first_sequence(sequence)

    def _set_first_sequence(self, sequence: int) -> None:
        for argument in self._arguments:
            self.world.memory.set_word(argument + self._first_sequence, sequence)

    def are_mates(self, rank: int, other: int) -> bool:
        """Of one node."""
        return other // self.node_ranks == rank // self.node_ranks

    def _view(self, rank: int, num_blocks: int) -> dict[str, int]:
        fields = {**self._direct_view(rank, num_blocks + self.num_network_blocks), "rail": self._arguments[rank]}
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
        runner, shape = self.runner, self.runner.case.shape
        if runner.case.is_small_again:  # as the host, which refuses more
            assert isinstance(runner, CombineRunner)
            places = self._most_parts() * self.node_ranks * runner.call.max_tokens
            assert places <= shape.num_ranks * shape.small_tokens
        launches = self._direct_combine(rank, received, combined)
        return [self._with_plan(each, received) if "send_plan" in each.fields else each for each in launches]

    def _passes(self) -> list[tuple[int, int]]:
        """As CombineRunner: a landing has a part for the own tokens, and one for each rank that is forwarded for."""
        runner, layout = self.runner, self.world.layout
        assert isinstance(runner, CombineRunner)
        most_parts = self._most_parts()
        room = layout["landing_ids"] - layout["landing_rows"]
        each = room // (most_parts * self.node_ranks * runner.wire_row_bytes())
        if runner.combine.has_side:
            shape = runner.case.shape
            each = min(each, shape.num_ranks * shape.max_tokens // (most_parts * self.node_ranks))
        most = runner.call.max_tokens
        return [(first, min(first + each, most)) for first in range(0, max(most, 1), each)]

    def _most_parts(self) -> int:
        return max(1 + self._num_brought(rank) for rank in self.runner.case.active_ranks)

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


class GinNodes(Nodes):
    """The network is NCCL's. Connections lead along rails alone where all nodes are whole, and all ranks live."""

    route = GIN
    num_network_blocks = 0

    def _new_rail(self, compiler: Compiler) -> None:
        num_ranks = self.runner.case.shape.num_ranks
        is_whole = num_ranks % self.node_ranks == 0 and len(self.runner.case.active_ranks) == num_ranks
        fields = {**self._rail_shape(), "num_contexts": NUM_CONTEXTS, "is_rail_team": int(is_whole)}
        addresses = {f"{name}{rank}": 0 for name in ("memory", "signals") for rank in range(num_ranks)}
        told = compiler.tell("gin_memory.cc", {**fields, **addresses, "rank": 0, "network": 0})
        window_bytes, signal_bytes, network_bytes, lane_bytes, words_bytes = map(int, told.split()[:5])
        self._lane_bytes, self._words_bytes = lane_bytes, words_bytes
        self._rails = [self._zeroed(window_bytes) for _ in range(num_ranks)]
        addresses = {f"memory{rank}": address for rank, address in enumerate(self._rails)}
        addresses |= {f"signals{rank}": self._zeroed(signal_bytes) for rank in range(num_ranks)}
        addresses["network"] = self._network = self._zeroed(network_bytes)
        tells = [compiler.tell("gin_memory.cc", {**fields, **addresses, "rank": rank}) for rank in range(num_ranks)]
        self._arguments = [self._argument(bytes.fromhex(told.split()[5])) for told in tells]

    def hold(self, is_held: bool) -> None:
        """Whether nothing crosses."""
        self.world.memory.set_word(self._network + HELD, int(is_held))


def causes_with_fewer_members(
    compiler: Compiler, case: CombineCase, mutant: Mutant | None = None, **options: Any
) -> list[tuple[int, int]]:
    """What windows of 2 x 2 ranks without the last say, the cause and whether they are broken, behind a dispatch and a
    combine of a graph that was captured when there were four: rank 2 adds for two others by now, not for one.
    """
    dispatch = dataclasses.replace(case.dispatch, lost_ranks=(3,), num_rounds=1)
    runner = with_nodes(compiler, dataclasses.replace(case, dispatch=dispatch), 2, mutant, **options)
    runner.nodes._most_parts = lambda: 2
    runner.add_round()
    runner.world.set_timeout(NODE_TIMEOUT_NS)
    memory, layout = runner.memory, runner.world.layout
    try:
        Streams(memory, runner.streams, seed=1, timeout_s=60).run()
        return [
            (
                memory.word(runner.world.host[rank] + layout["host.error"], "u4"),
                memory.word(runner.world.control[rank] + layout["control.broken"]),
            )
            for rank in (0, 1, 2)
        ]
    finally:
        memory.close()


def with_nodes(
    compiler: Compiler,
    case: Case | CombineCase,
    node_ranks: int,
    mutant: Mutant | None = None,
    *,
    num_slots: int = 4,
    chunk_rows: int = CHUNK_ROWS,
    network: type[Nodes] = Nodes,
) -> Any:
    """A runner of a dispatch, or of combines behind it; its `nodes` are its Nodes."""
    runner: Any = Runner(compiler, case) if isinstance(case, Case) else CombineRunner(compiler, case)
    runner.nodes = network(compiler, runner, node_ranks, mutant, num_slots, chunk_rows)
    return runner
