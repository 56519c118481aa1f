"""Dispatches on emulated GPUs, compared word by word with the specification in weft.reference."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from kernels import Compiler, Mutant
from machine import Launch, Streams
from torch import Tensor
from world import (
    DTYPES,
    FIRST_OVERFLOW,
    NO_CAPACITY,
    Call,
    Dispatcher,
    Inputs,
    Received,
    Rows,
    Shape,
    World,
    put_inputs,
)

from weft import reference
from weft.quantized import Quantized

DROPPED, NOWHERE = -2, -1
RUN_TIMEOUT_S = 300.0
MUTANT_TIMEOUT_NS = 5_000_000_000


@dataclass(frozen=True, kw_only=True)
class Case:
    """A few dispatches in a row on one window."""

    shape: Shape
    seed: int = 0
    num_blocks: int = 2
    tokens: tuple[int, ...] = (9, 5)  # of each rank
    hidden: int = 64
    dtype: torch.dtype = torch.bfloat16
    rows: str = "plain"  # "fp8", "fp8_ue8m0", "fp8_pow2", "bytes": with `scale_bytes` that travel along
    scale_bytes: int = 0
    columns_given: bool = False  # rows of bytes: their scales are column-major; rank_major or small
    scale_word_bytes: int = 0  # small batches: of column-major scales; bytes in words of 4
    layout: str = "rank_major"
    capacity: int = NO_CAPACITY
    alignment: int = 1
    zeroes_holes: bool = True
    spread_blocks: int = 0  # by expert: of the kernel that places rows; 0: one kernel does all
    num_straight: int = 0  # of 16 tokens, whose own rows the first kernel stores to all places
    int32_ranks: tuple[int, ...] = ()  # whose ids are
    has_weights: bool = True
    num_rounds: int = 3  # new routings
    is_repeated: bool = False  # each is followed by a dispatch by its handle
    staged_ranks: tuple[int, ...] = ()  # whose heap has no room
    num_duplicates: int = 0  # tokens with the same expert in all picks
    num_bad_ids: int = 0
    lost_ranks: tuple[int, ...] = ()  # which are not members any more
    is_small: bool = False
    is_small_behind: bool = False  # what repeats or combines the routing of a throughput dispatch is small
    is_split: bool = False  # small: two launches
    shared_bytes: int = 48 << 10

    @property
    def active_ranks(self) -> tuple[int, ...]:
        """The members."""
        return tuple(rank for rank in range(self.shape.num_ranks) if rank not in self.lost_ranks)

    @property
    def is_small_again(self) -> bool:
        """Of what follows a dispatch."""
        return self.is_small or self.is_small_behind

    def call(self) -> Call:
        """What is equal on all ranks."""
        most = self.shape.small_tokens if self.is_small_again else self.shape.max_tokens
        return Call(
            layout=self.layout,
            num_blocks=self.num_blocks,
            max_tokens=min(max(*self.tokens, 1), most),
            capacity=self.capacity,
            alignment=self.alignment,
            zeroes_holes=self.zeroes_holes,
            spread_blocks=0 if self.is_small else self.spread_blocks,
            num_straight=self.num_straight,
            int32_ranks=self.int32_ranks,
            shared_bytes=self.shared_bytes,
        )

    def wire(self) -> Rows:
        """The form of a row."""
        item, groups = self.dtype.itemsize, -(-self.hidden // reference.GROUP)
        if self.rows == "bytes":
            out, scale = torch.uint8, torch.uint8
            return Rows(
                row_bytes=self.hidden,
                hidden=self.hidden,
                dtype_code=0,
                quantize=0,
                scale_bytes=self.scale_bytes,
                scale_word_bytes=self.scale_word_bytes,
                out_dtype=out,
                scale_dtype=scale,
            )
        quantize = {"plain": 0, "fp8": 1, "fp8_ue8m0": 2, "fp8_pow2": 3}[self.rows]
        return Rows(
            row_bytes=self.hidden * item,
            hidden=self.hidden,
            dtype_code=DTYPES[self.dtype],
            quantize=quantize,
            scale_bytes=(0, groups * 4, groups, groups * 4)[quantize],
            scale_word_bytes=self.scale_word_bytes,
            out_dtype=torch.float8_e4m3fn if quantize else self.dtype,
            scale_dtype=torch.float8_e8m0fnu if quantize == 2 else torch.float32,
        )


@dataclass(frozen=True)
class Given:
    """The tensors of one rank in one round."""

    x: Tensor
    scales: Tensor | None
    ids: Tensor
    weights: Tensor | None

    def rows(self) -> Tensor | Quantized:
        """As weft.reference takes them."""
        return self.x if self.scales is None else Quantized(self.x, self.scales)


@dataclass
class Round:
    """One dispatch: what went in, what must come out, and where it came out."""

    given: list[Given]
    wanted: list[reference.Dispatched]
    received: list[Received]
    repeated_rows: list[Tensor | Quantized] | None = None
    repeated: list[Received] | None = None


def random_rows(case: Case, num_tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """x and, for rows of bytes, scales."""
    if case.rows == "bytes":
        shape = (num_tokens, case.hidden + case.scale_bytes)
        data = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scales = data[:, case.hidden :].contiguous() if case.scale_bytes else None
        return data[:, : case.hidden].contiguous(), scales
    x = torch.randn(num_tokens, case.hidden, generator=generator) * 3
    if num_tokens > 1:
        x[1] = 0
        x[0, :4] = torch.tensor([float("inf"), float("nan"), -0.0, 1e-30])
    return x.to(case.dtype), None


def random_given(case: Case, rank: int, generator: torch.Generator) -> Given:
    """Inputs with the faults and repetitions that the case asks for."""
    shape, num_tokens = case.shape, case.tokens[rank]
    ids = torch.randint(-1, shape.num_experts, (num_tokens, shape.top_k), generator=generator)
    for token in range(min(case.num_duplicates, num_tokens)):
        ids[token] = ids[token, 0]
    for idx in range(case.num_bad_ids):
        if num_tokens:
            at = int(torch.randint(0, ids.numel(), (), generator=generator))
            ids.view(-1)[at] = (shape.num_experts, -2, shape.num_experts + 1000000)[idx % 3]
    weights = torch.rand(ids.shape, generator=generator) - 0.3 if case.has_weights else None
    x, scales = random_rows(case, num_tokens, generator)
    return Given(x, scales, ids.to(torch.int32 if rank in case.int32_ranks else torch.int64), weights)


class Runner:
    """Runs one case."""

    def __init__(self, compiler: Compiler, case: Case, mutant: Mutant | None = None) -> None:
        tokens = tuple(0 if rank in case.lost_ranks else num for rank, num in enumerate(case.tokens))
        case = dataclasses.replace(case, tokens=tokens)
        self.case, self.call, self.wire = case, case.call(), case.wire()
        self.generator = torch.Generator().manual_seed(case.seed)
        poison = (0x5B, 0xFF, 0x7E)[case.seed % 3]
        most = self._most_rows() * (self.wire.wire_bytes + self.wire.scale_bytes + 12 * case.shape.top_k + 64)
        self.world = World(
            compiler,
            case.shape,
            poison=poison,
            heap_bytes=0 if case.is_small else 8 * most + (1 << 18),
            more_bytes=64 << 20,
        )
        self.memory = self.world.memory
        self.dispatcher = Dispatcher(self.world, self.call, self.wire, mutant)
        self.ranks = range(case.shape.num_ranks)
        self.world.set_members(case.active_ranks)
        if mutant is not None:  # some never end
            self.world.set_timeout(MUTANT_TIMEOUT_NS)
        self.streams: list[list[Launch]] = [[] for _ in self.ranks]
        self.num_operations = 0

    def _most_rows(self) -> int:
        shape, call = self.case.shape, self.call
        if call.capacity >= 0:
            return call.capacity * (shape.num_local if call.layout == "masked" else 1)
        if call.is_by_expert:
            return shape.num_ranks * call.max_tokens * shape.top_k + shape.num_local * (call.alignment - 1)
        return shape.num_ranks * call.max_tokens

    def run(self) -> list[str]:
        """What differs from the specification. Raises LaunchFailed."""
        rounds = [self.add_round() for _ in range(self.case.num_rounds)]
        try:
            Streams(self.memory, self.streams, seed=self.case.seed, timeout_s=RUN_TIMEOUT_S).run()
            found = self.world.problems(self.num_operations)
            for idx, each in enumerate(rounds):
                found += [f"round {idx}, {text}" for text in self.differences(each)]
            return found + self._bad_ids(rounds)
        finally:
            self.memory.close()

    def start_compiling(self) -> None:
        """Begin with what a run of this case needs, so that both cores have work; the case is not run."""
        self.add_round()
        self.memory.close()

    def add_round(self) -> Round:
        """Append a dispatch, and maybe its repetition, to the streams."""
        case, dispatcher = self.case, self.dispatcher
        given = [random_given(case, rank, self.generator) for rank in self.ranks]
        wanted = reference.dispatch(
            [g.rows() for g in given],
            [g.ids for g in given],
            None if not case.has_weights else [g.weights for g in given if g.weights is not None],
            num_experts=case.shape.num_experts,
            layout=case.layout,
            alignment=case.alignment,
            quantize=case.rows if case.rows.startswith("fp8") else None,
            capacity=None if case.capacity < 0 else case.capacity,
            active_ranks=case.active_ranks,
        )
        received = []
        self.num_operations += 1
        for rank in self.ranks:
            g, num_rows = given[rank], _num_rows(wanted[rank])
            inputs = put_inputs(self.memory, g.x, g.scales, g.ids, g.weights, by_column=case.columns_given)
            result = dispatcher.new_result(rank, len(g.ids), num_rows)
            if rank in case.lost_ranks:
                pass
            elif case.is_small:
                self._add_small(rank, inputs, result)
            else:
                room = 0 if rank in case.staged_ranks else max(self._most_rows(), 1)
                self.streams[rank] += dispatcher.launch(rank, inputs, result, room=room)
            received.append(result)
        round_ = Round(given, wanted, received)
        if case.is_repeated:
            self.add_repetition(round_)
        return round_

    def _add_small(
        self, rank: int, inputs: Inputs, result: Received, room: int = -1, *, is_cached: bool = False
    ) -> None:
        room = self._most_rows() if room < 0 else room
        small_launch = functools.partial(self.dispatcher.small_launch, is_cached=is_cached)
        if not self.case.is_split:
            self.streams[rank] += small_launch(rank, inputs, result, room=room)
            return
        self.streams[rank] += small_launch(rank, inputs, result, room=room, receives=False)
        # The half that receives must take nothing from the caller's tensors but the number of tokens.
        nothing = dataclasses.replace(inputs, x=0, scales=0, ids=0, weights=0)
        self.streams[rank] += small_launch(rank, nothing, result, room=room, sends=False)

    def add_repetition(self, round_: Round) -> None:
        """Append a dispatch by the handle of a round."""
        case = self.case
        rows = [random_rows(case, num_tokens, self.generator) for num_tokens in case.tokens]
        given = [Given(*rows[rank], round_.given[rank].ids, None) for rank in self.ranks]
        quantize = case.rows if case.rows.startswith("fp8") else None
        routing = round_.wanted[0].routing
        round_.repeated_rows = reference.repeat_dispatch([g.rows() for g in given], routing, quantize=quantize)
        round_.repeated = []
        self.num_operations += 1
        for rank in self.ranks:
            g = given[rank]
            inputs = put_inputs(self.memory, g.x, g.scales, g.ids, None, by_column=case.columns_given)
            result = dataclasses.replace(round_.received[rank])
            room = 0 if rank in case.staged_ranks else max(result.num_rows, 1)
            if rank in case.lost_ranks:
                pass
            elif case.is_small_again:
                self._add_small(rank, inputs, result, result.num_rows, is_cached=True)
            else:
                self.streams[rank] += self.dispatcher.launch(rank, inputs, result, room=room, is_cached=True)
            round_.repeated.append(result)

    def knows_kept(self, rank: int, to: int) -> bool:
        """Whether a rank's plan leaves out what the capacity of another drops."""
        del rank, to
        return not self.case.is_small

    # ---- what came out

    def differences(self, round_: Round) -> list[str]:
        """What differs from the reference in one round, on any rank."""
        found = []
        num_repeated = 0 if round_.repeated is None else 1
        for rank in self.case.active_ranks:
            wanted, received = round_.wanted[rank], round_.received[rank]
            found += [f"rank {rank}: {text}" for text in self._rows(wanted, received, wanted.x)]
            found += [f"rank {rank}: {text}" for text in self._sums(wanted, received, 1 + num_repeated)]
            found += [f"rank {rank}: {text}" for text in self._plans(round_, rank)]
            if round_.repeated is not None and round_.repeated_rows is not None:
                rows = self._rows(wanted, round_.repeated[rank], round_.repeated_rows[rank])
                found += [f"rank {rank}, repeated: {text}" for text in rows]
        return found

    def _rows(self, wanted: reference.Dispatched, received: Received, x: Tensor | Quantized) -> list[str]:
        wire, memory = self.wire, self.memory
        data, scales = (x, None) if isinstance(x, Tensor) else (x.data, x.scales)
        is_defined = _defined_rows(self.case.layout, wanted)
        seen = memory.tensor(received.seen_x, (received.num_rows, data.shape[-1]), wire.out_dtype)
        found = []
        if self.case.layout == "expert_major" and not self.case.zeroes_holes:
            is_hole = is_defined & ~_picked_rows(wanted)
            is_defined &= ~is_hole
            holes = seen[is_hole].contiguous().view(torch.uint8)
            found = compare("holes", holes, torch.full_like(holes, memory.poison))
        found += compare("x", seen[is_defined], data.reshape(seen.shape)[is_defined])
        if scales is not None and received.has_columns:
            found += compare("scales", self._columns(received, scales)[is_defined], _words(scales, wire)[is_defined])
        elif scales is not None:
            seen = memory.tensor(received.scales, (received.num_rows, scales.shape[-1]), wire.scale_dtype)
            found += compare("scales", seen[is_defined], scales.reshape(seen.shape)[is_defined])
        return found

    def _columns(self, received: Received, scales: Tensor) -> Tensor:
        """The column-major scales of a result: [rows, words]."""
        num_groups = self.case.shape.num_local if self.case.layout == "masked" else 1
        num_rows, words = received.num_rows // num_groups, _words(scales, self.wire)
        step = 16 // words.element_size()
        shape = (num_groups, words.shape[-1], -(-num_rows // step) * step)
        seen = self.memory.tensor(received.scales, shape, words.dtype)
        return seen.mT[:, :num_rows].reshape(words.shape)

    def _sums(self, wanted: reference.Dispatched, received: Received, num_calls: int) -> list[str]:
        shape, memory, call = self.case.shape, self.memory, self.call
        num_rows = received.num_rows
        per_row = (num_rows,) if call.is_by_expert else (num_rows, shape.top_k)
        found = compare(
            "weights", memory.tensor(received.weights, per_row, torch.float32), wanted.topk_weights.reshape(per_row)
        )
        if wanted.topk_idx is not None:
            found += compare("ids", memory.tensor(received.ids, per_row, wanted.topk_idx.dtype), wanted.topk_idx)
        for name, address, tensor in (
            ("counts", received.counts, wanted.num_tokens_per_expert),
            ("offsets", received.offsets, wanted.offsets),
            ("num_rows", received.num_rows_out, wanted.num_rows),
            ("overflow", received.overflow, wanted.overflow * num_calls + FIRST_OVERFLOW),
        ):
            found += compare(name, memory.tensor(address, tensor.shape, tensor.dtype), tensor)
        return found

    def _plans(self, round_: Round, rank: int) -> list[str]:
        """Both plans of a rank."""
        case, shape, memory = self.case, self.case.shape, self.memory
        routing, received = round_.wanted[0].routing, round_.received[rank]
        header, width = self.world.layout["plan_header"], shape.width(case.layout)
        plan = memory.tensor(received.recv_plan, (shape.recv_plan_len(case.layout, header),), torch.int32)
        entries = plan[header:].reshape(shape.num_ranks, shape.max_tokens, width)
        found = compare("plan.num_tokens", plan[: shape.num_ranks], torch.tensor(case.tokens, dtype=torch.int32))
        begin = 0
        local_ids = [g.ids.to(torch.int64) - rank * shape.num_local for g in round_.given]
        for source, num_tokens in enumerate(case.tokens):
            rows = routing.rows[rank][begin : begin + num_tokens]
            begin += num_tokens
            is_here = (local_ids[source] >= 0) & (local_ids[source] < shape.num_local)
            if case.layout == "rank_major":
                rows, is_here = rows.amax(dim=1, keepdim=True), is_here.any(dim=1, keepdim=True)
            if case.is_small:
                rows = torch.where(is_here & (rows < 0), DROPPED, rows)
            found += compare(f"plan of source {source}", entries[source, :num_tokens], rows.to(torch.int32))
        return found + self._send_plan(round_, rank)

    def _send_plan(self, round_: Round, rank: int) -> list[str]:
        """Mask and destinations. What a capacity drops, a small batch's sender does not know."""
        case, shape = self.case, self.case.shape
        begin, num_tokens = sum(case.tokens[:rank]), case.tokens[rank]
        ids = round_.given[rank].ids.to(torch.int64)[:num_tokens]
        destination = torch.full(ids.shape, -1, dtype=torch.int32)
        for to in case.active_ranks:
            kept = round_.wanted[0].routing.rows[to][begin : begin + num_tokens] >= 0
            wants = (ids >= 0) & (ids < shape.num_experts) & (ids // shape.num_local == to)
            destination[kept if self.knows_kept(rank, to) else wants] = to
        mask = torch.zeros(num_tokens, dtype=torch.int32)
        for to in case.active_ranks:
            mask |= (destination == to).any(dim=1).to(torch.int32) << to
        length = shape.send_plan_len(num_tokens, case.layout)
        plan = self.memory.tensor(round_.received[rank].send_plan, (length,), torch.int32)
        seen = plan[length - destination.numel() :].reshape(destination.shape)
        return compare("mask", plan[:num_tokens], mask) + compare("destination", seen, destination)

    def _bad_ids(self, rounds: Sequence[Round]) -> list[str]:
        """The host hears of the ids out of range of the last call that has any, and of the first of them."""
        found = []
        for rank in self.case.active_ranks:
            bad_at = [_is_bad(r.given[rank].ids, self.case.shape).flatten().nonzero().flatten() for r in rounds]
            wanted = next(((len(at), int(at[0])) for at in reversed(bad_at) if len(at) > 0), (0, 0))
            told = divmod(self.memory.word(self.world.host[rank] + self.world.layout["host.bad_ids"]), 1 << 32)
            if told != wanted:
                found.append(f"rank {rank}: the host was told of {told} for bad ids and the first, not {wanted}")
        return found


def _is_bad(ids: Tensor, shape: Shape) -> Tensor:
    return (ids < -1) | (ids >= shape.num_experts)


def _num_rows(wanted: reference.Dispatched) -> int:
    """Rows that the result has, defined or not."""
    return int(torch.tensor(wanted.routing.row_shape[_rank_of(wanted)]).prod())


def _rank_of(wanted: reference.Dispatched) -> int:
    for rank, weights in enumerate(wanted.routing.weights):
        if weights is wanted.topk_weights:
            return rank
    raise ValueError("not a result of this routing")


def _defined_rows(layout: str, wanted: reference.Dispatched) -> Tensor:
    """Which rows of x an engine must have written."""
    if layout != "masked":
        return torch.arange(_num_rows(wanted)) < wanted.num_rows
    num_local, capacity = wanted.routing.row_shape[_rank_of(wanted)]
    return (torch.arange(capacity)[None] < wanted.num_tokens_per_expert[:, None]).reshape(num_local * capacity)


def _words(scales: Tensor, wire: Rows) -> Tensor:
    """Scales as words: [rows, words]."""
    rows = scales.reshape(-1, scales.shape[-1]).contiguous().view(torch.uint8)
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % wire.scale_word_bytes))
    return rows.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[wire.scale_word_bytes])


def _picked_rows(wanted: reference.Dispatched) -> Tensor:
    """expert_major: which rows hold a pick."""
    is_picked = torch.zeros(_num_rows(wanted), dtype=torch.bool)
    for begin, count in zip(wanted.offsets.tolist(), wanted.num_tokens_per_expert.tolist(), strict=False):
        is_picked[begin : begin + count] = True
    return is_picked


def compare(name: str, seen: Tensor, wanted: Tensor) -> list[str]:
    """Bit by bit."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[wanted.dtype.itemsize]
    left, right = seen.contiguous().view(bits), wanted.contiguous().view(bits)
    is_wrong = left != right
    if wanted.is_floating_point():
        is_wrong &= ~(_is_nan(seen) & _is_nan(wanted))
    if not bool(is_wrong.any()):
        return []
    at = is_wrong.nonzero()[:3].tolist()
    values = f"{seen[is_wrong][:3]} for {wanted[is_wrong][:3]}"
    return [f"{name}: {int(is_wrong.sum())} of {is_wrong.numel()} wrong, at {at}: {values}"]


def _is_nan(values: Tensor) -> Tensor:
    return values.to(torch.float32).isnan()


def run_case(compiler: Compiler, case: Case, mutant: Mutant | None = None) -> list[str]:
    """What differs from the specification. Raises LaunchFailed."""
    return Runner(compiler, case, mutant).run()
