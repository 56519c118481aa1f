"""Ranks with windows in emulated memory, and the launches of dispatch, combine and unload on them.

What the host part of the library does around a kernel is done here again, in Python: places, plain numbers, and after
the run the words of the window that must be as before.
"""

# check: allow file-size: the host part of all kernels

import dataclasses
from dataclasses import dataclass

import torch
from kernels import Compiler, Mutant
from machine import Launch, Memory
from torch import Tensor

from weft import _load

LAYOUTS = ("rank_major", "expert_major", "masked")
DTYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
NO_CAPACITY = -1
CACHE_LINE = 64
TIMEOUT_NS = 30_000_000_000
FIRST_OVERFLOW = 1000  # what stands in the overflow counter before a call
PRINT, OBJECT = 77, 5  # of every call: its fingerprint, and which ExpertParallel makes it


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A window, as GpuWindowShape."""

    num_ranks: int = 2
    num_experts: int = 8
    top_k: int = 2
    num_blocks: int = 2
    max_tokens: int = 32
    landing_row_bytes: int = 1024
    small_tokens: int = 0

    @property
    def num_local(self) -> int:
        """Experts of a rank."""
        return self.num_experts // self.num_ranks

    def fields(self) -> dict[str, int]:
        """The names of driver.h."""
        return {
            "num_ranks": self.num_ranks,
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "window_blocks": self.num_blocks,
            "window_tokens": self.max_tokens,
            "landing_row_bytes": self.landing_row_bytes,
            "small_tokens": self.small_tokens,
        }

    def send_plan_len(self, num_tokens: int, layout: str) -> int:
        """As gpu_send_plan_len."""
        return num_tokens * (1 + (self.num_ranks if layout == "rank_major" else self.top_k) + self.top_k)

    def width(self, layout: str) -> int:
        """Entries of a token in a receive plan."""
        return 1 if layout == "rank_major" else self.top_k

    def recv_plan_len(self, layout: str, header: int) -> int:
        """As gpu_recv_plan_len."""
        return header + self.num_ranks * self.max_tokens * self.width(layout)


class World:
    """The windows of all ranks, in one memory."""

    def __init__(self, compiler: Compiler, shape: Shape, *, poison: int, heap_bytes: int, more_bytes: int) -> None:
        self.compiler, self.shape = compiler, shape
        self.layout = compiler.layout(shape.fields())
        self.heap_bytes = self.layout["landing_bytes"] + heap_bytes
        ranks = range(shape.num_ranks)
        each = self.layout["control_bytes"] + self.heap_bytes + self.layout["host_bytes"] + 4096
        self.memory = Memory(len(ranks) * each + more_bytes, poison)
        self.control = [self.memory.put(torch.zeros(self.layout["control_bytes"], dtype=torch.uint8)) for _ in ranks]
        self.host = [self.memory.put(torch.zeros(self.layout["host_bytes"], dtype=torch.uint8)) for _ in ranks]
        self.heap = [self.memory.allocate(self.heap_bytes) for _ in ranks]
        self._next = [self.layout["landing_bytes"]] * len(ranks)
        self.members: tuple[int, ...] = ()
        self.set_members(tuple(ranks))
        self.set_timeout(TIMEOUT_NS)

    def set_members(self, ranks: tuple[int, ...]) -> None:
        """Who takes part from now on, in epoch 1."""
        self.members = ranks
        for control in self.control:
            words = (1 << 32) | sum(1 << rank for rank in ranks)
            self.memory.set_word(control + self.layout["control.membership"], words)

    def set_timeout(self, num_ns: int) -> None:
        """Most that a kernel waits for a peer."""
        for host in self.host:
            self.memory.set_word(host + self.layout["host.timeout_ns"], num_ns)

    def has_room(self, rank: int, num_bytes: int) -> bool:
        """Whether reserve() finds so many bytes."""
        return self._next[rank] + num_bytes + 511 <= self.heap_bytes

    def reserve(self, rank: int, num_bytes: int) -> int:
        """An offset in the rank's heap, as a receive tensor has."""
        offset = self._next[rank]
        self._next[rank] = (offset + max(num_bytes, 1) + 511) // 256 * 256
        if self._next[rank] > self.heap_bytes:
            raise MemoryError(f"the heap of rank {rank} is too small for a test")
        return offset

    def view(self, rank: int, num_blocks: int) -> dict[str, int]:
        """What every kernel of a window gets."""
        fields = {**self.shape.fields(), "rank": rank, "host": self.host[rank]}
        fields |= {"print": PRINT, "object": OBJECT, "num_blocks": num_blocks, "rail": 0}
        for other in range(self.shape.num_ranks):
            fields[f"control{other}"], fields[f"heap{other}"] = self.control[other], self.heap[other]
            fields[f"heap_bytes{other}"] = self.heap_bytes
        return fields

    def problems(self, num_operations: int) -> list[str]:
        """What is not as it should be in the words of the windows when all streams have ended."""
        found = [f"somebody wrote behind the end of memory, at {at:#x}" for at in self.memory.written_red_zones()]
        for rank in self.members:
            words = {
                "control.sequence": (num_operations, "u8"),
                "control.owner": (0, "u8"),
                "control.broken": (0, "u8"),
                "control.num_ended": (0, "u4"),
                "control.next_chunk": (0, "u4"),
            }
            for name, (wanted, dtype) in words.items():
                seen = self.memory.word(self.control[rank] + self.layout[name], dtype)
                if seen != wanted:
                    found.append(f"rank {rank}: {name} is {seen}, not {wanted}")
            for block in range(self.shape.num_blocks):
                seen = self.memory.word(self.control[rank] + self.layout["control.queues"] + CACHE_LINE * block)
                if seen != 0:
                    found.append(f"rank {rank}: the queue of block {block} is {seen:#x}, not 0")
            host = {"host.finished_sequence": (num_operations, "u8"), "host.error": (0, "u4")}
            for name, (wanted, dtype) in host.items():
                seen = self.memory.word(self.host[rank] + self.layout[name], dtype)
                if seen != wanted:
                    phase = self.memory.word(self.host[rank] + self.layout["host.error.phase"], "u4")
                    found.append(f"rank {rank}: {name} is {seen}, not {wanted} (phase of an error: {phase})")
        return found


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a dispatch on the wire."""

    row_bytes: int  # of x
    hidden: int
    dtype_code: int  # 0: bytes
    quantize: int  # 0: no, 1: fp8, 2: fp8_ue8m0, 3: fp8_pow2
    scale_bytes: int  # on the wire
    out_dtype: torch.dtype
    scale_dtype: torch.dtype
    scale_word_bytes: int = 0  # small batches: column-major scales come out

    @property
    def wire_bytes(self) -> int:
        """Of a row that arrives."""
        return self.hidden if self.quantize else self.row_bytes


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a dispatch and a combine have in common on all ranks."""

    layout: str
    num_blocks: int
    max_tokens: int  # of any rank in this call
    capacity: int = NO_CAPACITY
    alignment: int = 1
    zeroes_holes: bool = True
    spread_blocks: int = 0  # by expert: of the kernel that places rows; 0: one kernel does all
    num_straight: int = 0  # of 16 tokens, whose own rows the first kernel stores to all places
    int32_ranks: tuple[int, ...] = ()  # whose ids are
    shared_bytes: int = 48 << 10

    @property
    def is_by_expert(self) -> bool:
        """Whether a row is a pick."""
        return self.layout != "rank_major"

    def id_bytes(self, rank: int) -> int:
        """Of an id that the rank gives and gets."""
        return 4 if rank in self.int32_ranks else 8


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Addresses of what a rank gives to a dispatch."""

    num_tokens: int
    x: int
    scales: int
    scale_stride: int  # of column-major scales; 0: row by row
    ids: int
    weights: int


@dataclass(kw_only=True)
class Received:
    """Addresses of what a rank has after a dispatch; 0: not there."""

    num_rows: int  # of the result
    x: int = 0
    scales: int = 0
    has_columns: bool = False  # scales are column-major
    ids: int = 0
    weights: int = 0
    send_plan: int = 0
    recv_plan: int = 0
    counts: int = 0
    offsets: int = 0
    num_rows_out: int = 0
    overflow: int = 0
    seen_x: int = 0  # a copy of x when the stream had come so far: what a peer stores later comes too late


def dispatch_args(
    call: Call, rows: Rows, *, is_int64: bool = True, is_cached: bool = False, is_small: bool = False
) -> object:
    """What the native functions render a dispatch from."""
    args = _load.native().DispatchSpec()
    args.layout, args.num_blocks, args.hidden = LAYOUTS.index(call.layout), call.num_blocks, rows.hidden
    args.dtype, args.row_bytes, args.quantize = rows.dtype_code, rows.row_bytes, rows.quantize
    args.scale_row_bytes = 0 if rows.quantize else rows.scale_bytes
    args.topk_is_int64, args.cached, args.is_small = is_int64, is_cached, is_small
    args.spread_blocks = call.spread_blocks
    return args


def dispatch_source(shape: Shape, call: Call, rows: Rows, *, is_int64: bool, is_cached: bool) -> str:
    """The kernel of a dispatch."""
    source: str = _load.native().render_dispatch(
        dispatch_args(call, rows, is_int64=is_int64, is_cached=is_cached),
        **_window(shape, shape.max_tokens),
        shared_bytes=call.shared_bytes,
    )
    return source


def small_dispatch_source(
    shape: Shape, call: Call, rows: Rows, *, sends: bool, receives: bool, is_int64: bool = True, is_cached: bool = False
) -> str:
    """The kernel of a dispatch of a small batch, or a half of it."""
    args = dispatch_args(call, rows, is_int64=is_int64, is_cached=is_cached, is_small=True)
    args.sends, args.receives = sends, receives  # type: ignore[attr-defined]
    args.scale_word_bytes = rows.scale_word_bytes  # type: ignore[attr-defined]
    source: str = _load.native().render_small_dispatch(
        args, **_window(shape, shape.small_tokens), shared_bytes=call.shared_bytes
    )
    return source


def _window(shape: Shape, max_tokens: int) -> dict[str, int]:
    return {
        "num_ranks": shape.num_ranks,
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "max_tokens": max_tokens,
    }


class Dispatcher:
    """Launches of dispatches that share a call and the form of their rows."""

    def __init__(self, world: World, call: Call, rows: Rows, mutant: Mutant | None = None) -> None:
        self.world, self.call, self.rows, self.mutant = world, call, rows, mutant
        self.ticket = 0

    def new_result(self, rank: int, num_tokens: int, num_rows: int) -> Received:
        """Memory for what does not lie in the heap."""
        world, shape = self.world, self.world.shape
        memory = world.memory
        num_offsets = shape.num_local if self.call.is_by_expert else shape.num_ranks
        return Received(
            num_rows=num_rows,
            send_plan=memory.allocate(4 * max(shape.send_plan_len(num_tokens, self.call.layout), 1)),
            counts=memory.allocate(4 * shape.num_local),
            offsets=memory.allocate(4 * (num_offsets + 1)),
            num_rows_out=memory.allocate(4),
            overflow=memory.put(torch.tensor([FIRST_OVERFLOW])),
        )

    def launch(
        self, rank: int, inputs: Inputs, result: Received, *, room: int, is_cached: bool = False
    ) -> list[Launch]:
        """A throughput dispatch; `room` 0: its rows go to the landing, and then to ordinary memory."""
        world, call, rows = self.world, self.call, self.rows
        shape, layout = world.shape, world.layout
        place, result.has_columns = self._place(rank, result, room, is_cached), False
        slots = shape.num_ranks * shape.max_tokens
        scales_landing = (layout["landing_rows"] + slots * rows.wire_bytes + 255) // 256 * 256
        self.ticket += 1
        fields = {
            **world.view(rank, call.num_blocks),
            **place,
            **_given(inputs),
            **_written(result),
            "fits_landing": int(scales_landing + slots * rows.scale_bytes <= layout["landing_ids"]),
            "ticket": self.ticket if call.capacity < 0 and not is_cached else 0,
            "max_tokens": call.max_tokens,
            "alignment": call.alignment,
            "zeroes_holes": int(call.zeroes_holes),
            "capacity": call.capacity,
            "recv_plan": result.recv_plan,
            "num_straight": call.num_straight,
        }
        source = dispatch_source(shape, call, rows, is_int64=call.id_bytes(rank) == 8, is_cached=is_cached)
        launches = [Launch(world.compiler.start(source, self.mutant), fields)]
        if room == 0 or (not is_cached and result.num_rows > room):
            launches = self._unload(launches[0], rank, result, scales_landing, is_cached)
        elif call.is_by_expert and call.spread_blocks > 0:
            launches.append(self._place_rows(rank, result, is_cached))
        return self._look(launches, result)

    def _place_rows(self, rank: int, result: Received, is_cached: bool) -> Launch:
        """As DispatchCall::place_rows."""
        world, rows, call, shape = self.world, self.rows, self.call, self.world.shape
        fields = {
            "num_blocks": call.spread_blocks,
            "broken": world.control[rank] + world.layout["control.broken"],
            "table": result.recv_plan,
            "table_tokens": shape.max_tokens,
            "max_tokens": call.max_tokens,
            "num_sources": shape.num_ranks,
            "top_k": shape.top_k,
            "rank": rank,
            "num_straight": call.num_straight,
            "num_rows": result.num_rows,
            "x": result.x,
            "scales": result.scales,
            "row_bytes": rows.wire_bytes,
            "scale_row_bytes": rows.scale_bytes,
            "landed_weights": 0 if is_cached else world.heap[rank] + world.layout["landing_weights"],
            "weights": 0 if is_cached else result.weights,
            "counts": result.counts,
            "offsets": result.offsets,
            "num_groups": shape.num_local,
            "is_masked": int(call.layout == "masked"),
            "capacity": call.capacity,
            "zeroes_rows": int(call.layout == "expert_major" and call.zeroes_holes),
        }
        return Launch(world.compiler.start(_load.native().render_place_rows(), self.mutant), fields)

    def _look(self, launches: list[Launch], result: Received) -> list[Launch]:
        last, num_bytes = launches[-1], result.num_rows * self.rows.wire_bytes
        result.seen_x = self.world.memory.allocate(num_bytes)
        copies = (*last.copies, (result.seen_x, result.x, num_bytes))
        return [*launches[:-1], dataclasses.replace(last, copies=copies)]

    def _place(self, rank: int, result: Received, room: int, is_cached: bool) -> dict[str, int]:
        world, rows, top_k = self.world, self.rows, self.world.shape.top_k
        names = ("x", "scales", "ids", "weights", "table")
        place = dict.fromkeys((f"place_{name}" for name in names), 0)
        place |= {"place_rows": room, "place_id_bytes": self.call.id_bytes(rank)}
        if room == 0:
            return place
        per_row = 1 if self.call.is_by_expert else top_k
        sizes = {"x": room * rows.wire_bytes, "scales": room * rows.scale_bytes}
        if not is_cached:
            plan = 4 * world.shape.recv_plan_len(self.call.layout, world.layout["plan_header"])
            sizes |= {"weights": 4 * room * per_row, "table": plan}
            if not self.call.is_by_expert:
                sizes["ids"] = room * top_k * self.call.id_bytes(rank)
        place |= {f"place_{name}": world.reserve(rank, size) for name, size in sizes.items()}
        heap = world.heap[rank]
        result.x, result.scales = heap + place["place_x"], heap + place["place_scales"]
        if not is_cached:
            result.ids, result.weights = heap + place["place_ids"], heap + place["place_weights"]
            result.recv_plan = heap + place["place_table"]
        return place

    def _unload(
        self, dispatch: Launch, rank: int, result: Received, scales_landing: int, is_cached: bool
    ) -> list[Launch]:
        """As Window::unload."""
        world, rows, call, shape = self.world, self.rows, self.call, self.world.shape
        memory, layout, heap = world.memory, world.layout, world.heap[rank]
        num_rows, slots = result.num_rows, shape.num_ranks * shape.max_tokens
        num_here = num_rows if call.is_by_expert else min(num_rows, slots)
        plan_bytes = 4 * shape.recv_plan_len(call.layout, layout["plan_header"])
        zeros = torch.zeros(max(num_rows * max(rows.wire_bytes, rows.scale_bytes, 4), 1), dtype=torch.uint8)
        is_zeroed = call.layout == "expert_major" and call.zeroes_holes
        result.x = memory.put(zeros) if is_zeroed else memory.allocate(num_rows * rows.wire_bytes)
        result.scales = memory.put(zeros) if is_zeroed else memory.allocate(num_rows * rows.scale_bytes)
        id_bytes = call.id_bytes(rank)
        if not is_cached:
            result.recv_plan = memory.allocate(plan_bytes)
            per_row = 1 if call.is_by_expert else shape.top_k
            result.weights = memory.put(torch.zeros(num_rows * per_row))
            no_ids = torch.full((num_rows * shape.top_k * id_bytes,), 0xFF, dtype=torch.uint8)
            result.ids = 0 if call.is_by_expert else memory.put(no_ids)

        pieces = [(result.recv_plan, heap + layout["landing_table"], plan_bytes)]
        if not call.is_by_expert:
            pieces += [
                (result.ids, heap + layout["landing_ids"], num_here * shape.top_k * id_bytes),
                (result.weights, heap + layout["landing_weights"], num_here * shape.top_k * 4),
            ]
        if not is_cached:
            dispatch = dataclasses.replace(dispatch, copies=tuple(pieces))
        table = 0
        if call.is_by_expert:
            table = result.recv_plan if is_cached else heap + layout["landing_table"]
        fields = {
            "num_blocks": 2,
            "rows": heap + layout["landing_rows"],
            "row_stride": rows.wire_bytes,
            "scales": heap + scales_landing,
            "scale_stride": rows.scale_bytes,
            "weights": heap + layout["landing_weights"],
            "table": table,
            "max_tokens": shape.max_tokens,
            "num_sources": shape.num_ranks,
            "top_k": shape.top_k,
            "num_rows": num_here,
            "x": result.x,
            "x_scales": result.scales,
            "x_weights": 0 if is_cached else result.weights,
            "row_bytes": rows.wire_bytes,
            "scale_row_bytes": rows.scale_bytes,
        }
        if not num_here:
            return [dispatch]
        return [dispatch, Launch(world.compiler.start(_load.native().render_unload()), fields)]

    def _scale_bytes(self, room: int) -> int:
        """Of the result of a small batch."""
        rows, call = self.rows, self.call
        if rows.scale_word_bytes == 0:
            return room * rows.scale_bytes
        num_groups = self.world.shape.num_local if call.layout == "masked" else 1
        column_bytes = (room // num_groups * rows.scale_word_bytes + 15) // 16 * 16
        return num_groups * -(-rows.scale_bytes // rows.scale_word_bytes) * column_bytes

    def small_launch(
        self,
        rank: int,
        inputs: Inputs,
        result: Received,
        *,
        room: int,
        sends: bool = True,
        receives: bool = True,
        is_cached: bool = False,
    ) -> list[Launch]:
        """A dispatch of a small batch, or a half of it, into ordinary memory for `room` rows."""
        world, call, rows, shape = self.world, self.call, self.rows, self.world.shape
        memory = world.memory
        if receives:
            per_row = 1 if call.is_by_expert else shape.top_k
            result.x, result.scales = memory.allocate(room * rows.wire_bytes), memory.allocate(self._scale_bytes(room))
            result.has_columns = rows.scale_word_bytes > 0
        if receives and not is_cached:
            result.weights = memory.allocate(4 * room * per_row)
            if not call.is_by_expert:
                result.ids = memory.allocate(room * shape.top_k * call.id_bytes(rank))
            result.recv_plan = memory.allocate(4 * shape.recv_plan_len(call.layout, world.layout["plan_header"]))
            self.ticket += 1
        fields = {
            **world.view(rank, call.num_blocks),
            **_given(inputs),
            **_written(result),
            "ticket": self.ticket if call.capacity < 0 and not is_cached else 0,
            "max_tokens": call.max_tokens,
            "num_parts": 1 if rows.quantize else max(call.num_blocks // max(call.max_tokens, 1), 1),
            "alignment": call.alignment,
            "zeroes_holes": int(call.zeroes_holes),
            "capacity": call.capacity,
            "room": room,
            "recv_plan": result.recv_plan,
        }
        fields |= {f"out_{name}": getattr(result, name) for name in ("x", "scales", "ids", "weights")}
        source = small_dispatch_source(
            shape,
            call,
            rows,
            sends=sends,
            receives=receives,
            is_int64=call.id_bytes(rank) == 8,
            is_cached=is_cached,
        )
        launch = Launch(world.compiler.start(source, self.mutant), fields)
        return self._look([launch], result) if receives else [launch]


def _given(inputs: Inputs) -> dict[str, int]:
    return {
        "num_tokens": inputs.num_tokens,
        "x": inputs.x,
        "scales": inputs.scales,
        "scale_stride": inputs.scale_stride,
        "topk_idx": inputs.ids,
        "topk_weights": inputs.weights,
    }


def _written(result: Received) -> dict[str, int]:
    return {
        "send_plan": result.send_plan,
        "counts": result.counts,
        "offsets": result.offsets,
        "num_rows": result.num_rows_out,
        "overflow": result.overflow,
    }


def put_inputs(
    memory: Memory, x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor | None, *, by_column: bool = False
) -> Inputs:
    """The input of a rank, in its memory; `by_column`: scales, in words of 4 bytes."""
    by_column = by_column and scales is not None and len(ids) > 0
    if by_column and scales is not None:
        scales = torch.nn.functional.pad(scales.view(torch.int32).t(), (0, 3)).contiguous()
    return Inputs(
        num_tokens=len(ids),
        x=memory.put(x),
        scales=0 if scales is None else memory.put(scales),
        scale_stride=(len(ids) + 3) * 4 if by_column else 0,
        ids=memory.put(ids),
        weights=0 if weights is None else memory.put(weights),
    )
