"""Combines, of small batches too, behind dispatches on emulated GPUs, compared word by word with weft.reference."""

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dispatch_cases import MUTANT_TIMEOUT_NS, Case, Round, Runner, compare
from kernels import Compiler, Mutant
from machine import Launch, as_bytes
from torch import Tensor
from world import DTYPES, LAYOUTS, Received

from weft import _load, reference
from weft.call.options import ORDERS


@dataclass(frozen=True, kw_only=True)
class CombineCase:
    """A dispatch, then combines of other rows along its routing; as often as the dispatch has rounds."""

    dispatch: Case
    hidden: int = 64
    dtype: torch.dtype = torch.bfloat16
    wire_is_fp8: bool = False
    sum_domain: int = 0
    order: str = "rank"  # ORDERS
    is_weighted: bool = True  # with order "pick" by the owner's weights, some of them 0
    owner_ids: torch.dtype | None = None  # beside them, some below 0
    has_side: bool = False
    adds_side: bool = False  # rank_major: lanes are summed over all ranks that hold the token
    bias: str = ""  # "row": one for all tokens, "rows"
    bias_is_fp32: bool = False
    heap_ranks: tuple[int, ...] = ()  # whose rows lie in the heap, where peers may pull them
    stage_blocks: int = 0  # rank_major: that bring rows of ordinary tensors into the landing; 0: they are pushed
    shared_bytes: int = 64 << 10
    num_combines: int = 1  # behind each dispatch; of two of small batches the second has the other parity

    @property
    def is_by_pick(self) -> bool:
        """Whether every pick's row travels."""
        return self.order == "pick"

    @property
    def contributions_are_fp8(self) -> bool:
        """With FP8 on the wire, unless it is the sums of domains that are rounded to it."""
        return self.wire_is_fp8 and self.sum_domain == 0


@dataclass
class Combined:
    """What one combine is given, and where its results are."""

    rows: list[Tensor]
    sides: list[Tensor] | None
    biases: list[Tensor] | None
    out: list[int]
    side_out: list[int]
    owner_weights: list[Tensor] | None
    owner_ids: list[Tensor] | None

    def weights_that_count(self) -> list[Tensor] | None:
        """Those of the owner, 0 where an id is below 0."""
        if self.owner_weights is None or self.owner_ids is None:
            return self.owner_weights
        return [torch.where(ids < 0, 0.0, each) for each, ids in zip(self.owner_weights, self.owner_ids, strict=True)]


class CombineRunner(Runner):
    """Runs one case."""

    def __init__(self, compiler: Compiler, case: CombineCase, mutant: Mutant | None = None) -> None:
        super().__init__(compiler, case.dispatch)
        if mutant is not None:
            self.world.set_timeout(MUTANT_TIMEOUT_NS)
        self.combine, self.combine_mutant = case, mutant
        self.combined: list[Combined] = []
        self.num_looked = 0

    def add_round(self) -> Round:
        """Append a dispatch and its combines to the streams."""
        round_ = super().add_round()
        self.add_combines(round_)
        return round_

    def add_combines(self, round_: Round) -> None:
        """Append those of a dispatch."""
        for _ in range(self.combine.num_combines):
            combined = self._new_combine(round_)
            for rank in self.case.active_ranks:
                launches = self._launches(rank, round_.received[rank], combined)
                self.streams[rank] += [*launches[:-1], self._use_again(launches[-1], combined.rows[rank].nbytes)]
            self.num_operations += 1 if self.case.is_small_again else len(self._passes())
            self.combined.append(combined)

    def _use_again(self, launch: Launch, num_bytes: int) -> Launch:
        """The caller writes into its rows as soon as the call has ended (R20)."""
        poison = self.memory.allocate(num_bytes)
        return dataclasses.replace(launch, copies=((launch.fields["rows"], poison, num_bytes),))

    def _new_combine(self, round_: Round) -> Combined:
        case, generator = self.combine, self.generator
        routing = round_.wanted[0].routing
        rows = [
            (torch.randn(*shape, case.hidden, generator=generator) * 3).to(case.dtype) for shape in routing.row_shape
        ]
        if self.case.seed % 2 and case.wire_is_fp8:  # rows of all sizes, up to the largest numbers
            most = math.log2(torch.finfo(case.dtype).max)
            rows = [_stretched(y, (0.0, -1.2 * most, 0.8 * most, most - 2)) for y in rows]
        for y in rows:
            if self.case.seed % 2 and y.numel() > 8:
                y.view(-1)[0], y.view(-1)[-1], y.view(-1)[3] = float("inf"), float("nan"), -0.0
        biases = None
        if case.bias:
            dtype = torch.float32 if case.bias_is_fp32 else case.dtype
            shapes = [(num,) if case.bias == "rows" else () for num in self.case.tokens]
            biases = [torch.randn(*shape, case.hidden, generator=generator).to(dtype) for shape in shapes]
        owner_weights = self._owner_weights()
        return Combined(
            rows=rows,
            sides=[torch.randn(w.shape, generator=generator) for w in routing.weights] if case.has_side else None,
            biases=biases,
            out=[self.memory.allocate(num * case.hidden * case.dtype.itemsize) for num in self.case.tokens],
            side_out=[self.memory.allocate(4 * num * case.dispatch.shape.top_k) for num in self.case.tokens],
            owner_weights=owner_weights,
            owner_ids=None if owner_weights is None else self._owner_ids(owner_weights),
        )

    def _owner_weights(self) -> list[Tensor] | None:
        if not self.combine.is_by_pick or not self.combine.is_weighted:
            return None
        shapes = [(num, self.case.shape.top_k) for num in self.case.tokens]
        weights = [torch.randn(*shape, generator=self.generator) for shape in shapes]
        return [each.masked_fill(torch.rand(each.shape, generator=self.generator) < 0.2, 0.0) for each in weights]

    def _owner_ids(self, weights: list[Tensor]) -> list[Tensor] | None:
        """Some picks have gone, and their weights are no numbers."""
        if self.combine.owner_ids is None:
            return None
        generator = torch.Generator().manual_seed(self.case.seed + len(self.combined))
        found = []
        for each in weights:
            ids = torch.randint(-1, 5, each.shape, generator=generator, dtype=self.combine.owner_ids)
            each[ids < 0] = torch.nan
            found.append(ids)
        return found

    def _launches(self, rank: int, received: Received, combined: Combined) -> list[Launch]:
        fields, start = self._fields(rank, received, combined), self.world.compiler.start
        if self.case.is_small_again:
            fields |= {"rows": self.memory.put(combined.rows[rank]), "max_tokens": self.call.max_tokens}
            parts = ((True, False), (False, True)) if self.case.is_split else ((True, True),)
            sources = [self._small_source(sends=sends, receives=receives) for sends, receives in parts]
            return [Launch(start(source, self.combine_mutant), fields) for source in sources]
        has_push, place = self._place_rows(rank, received, combined)
        fields |= {**place, "send_plan_tokens": self.case.tokens[rank]}
        program = start(self.source(has_push=has_push), self.combine_mutant)
        launches = [
            Launch(program, {**fields, "first_token": first, "end_token": end}) for first, end in self._passes()
        ]
        return [*self._bring(rank, fields), *launches]

    def _bring(self, rank: int, fields: dict[str, int]) -> list[Launch]:
        """As CombineCall::bring."""
        layout = self.world.layout
        if not self.combine.stage_blocks or fields["rows_offset"] != layout["landing_rows"]:
            return []
        names = ("rows", "num_rows")
        staged = {
            **{name: fields[name] for name in names},
            "num_blocks": self.combine.stage_blocks,
            "table": fields["recv_plan"],
            "table_tokens": self.case.shape.max_tokens,
            "max_tokens": self.call.max_tokens,
            "num_sources": self.case.shape.num_ranks,
            "rank": rank,
            "landing": self.world.heap[rank] + layout["landing_rows"],
            "row_bytes": self.combine.hidden * self.combine.dtype.itemsize,
        }
        return [Launch(self.world.compiler.start(_load.native().render_stage_rows(), self.combine_mutant), staged)]

    def _place_rows(self, rank: int, received: Received, combined: Combined) -> tuple[bool, dict[str, int]]:
        """Whether the rank pushes its rows, and where they lie."""
        case, memory, y = self.combine, self.memory, combined.rows[rank]
        is_in_heap = rank in case.heap_ranks and received.num_rows > 0 and self.world.has_room(rank, y.nbytes)
        offset = 0
        if is_in_heap:
            data = as_bytes(y)
            offset = self.world.reserve(rank, len(data))
            address = self.world.heap[rank] + offset
            memory.view(address, len(data))[:] = data
        else:
            address = memory.put(y)
        may_be_pulled = not self.call.is_by_expert and not case.contributions_are_fp8
        is_pulled = may_be_pulled and (received.num_rows == 0 or is_in_heap)
        if case.stage_blocks and not is_pulled:
            num_rows = min(received.num_rows, self.case.shape.num_ranks * self.call.max_tokens)
            return False, {"rows": address, "rows_offset": self.world.layout["landing_rows"], "num_rows": num_rows}
        return not is_pulled, {"rows": address, "rows_offset": offset if is_pulled else 0}

    def _fields(self, rank: int, received: Received, combined: Combined) -> dict[str, int]:
        """What both combines have."""
        case, call, memory = self.combine, self.call, self.memory
        bias = combined.biases[rank] if combined.biases else None
        bias_row_bytes = case.hidden * bias.element_size() if bias is not None and case.bias == "rows" else 0
        return {
            **self.world.view(rank, call.num_blocks),
            "num_rows": received.num_rows,
            "weights": received.weights if call.is_by_expert and case.is_weighted and not case.is_by_pick else 0,
            "owner_weights": memory.put(combined.owner_weights[rank]) if combined.owner_weights else 0,
            **self._ids_of_owner(rank, combined),
            "side": memory.put(combined.sides[rank]) if combined.sides else 0,
            "send_plan": received.send_plan,
            "recv_plan": received.recv_plan,
            "recv_plan_tokens": self.case.shape.max_tokens,
            "num_tokens": self.case.tokens[rank],
            "bias": 0 if bias is None else memory.put(bias),
            "bias_row_bytes": bias_row_bytes,
            "bias_is_fp32": int(case.bias_is_fp32),
            "out": combined.out[rank],
            "side_out": combined.side_out[rank],
        }

    def _ids_of_owner(self, rank: int, combined: Combined) -> dict[str, int]:
        """As CombineCall::kernel_arguments."""
        if combined.owner_ids is None:
            return {"owner_ids": 0, "owner_id_words": 1}
        ids = combined.owner_ids[rank]
        num_words = ids.element_size() // 4
        return {"owner_ids": self.memory.put(ids) + 4 * (num_words - 1), "owner_id_words": num_words}

    def _args(self) -> Any:
        case, args = self.combine, _load.native().CombineSpec()
        args.layout, args.num_blocks, args.hidden = LAYOUTS.index(self.case.layout), self.case.num_blocks, case.hidden
        args.dtype, args.wire_is_fp8, args.has_side = DTYPES[case.dtype], case.wire_is_fp8, case.has_side
        args.adds_side = case.adds_side
        args.sum_domain, args.order = case.sum_domain, ORDERS.index(case.order)
        return args

    def _small_source(self, *, sends: bool, receives: bool) -> str:
        args, shape = self._args(), self.case.shape
        args.sends, args.receives = sends, receives
        source: str = _load.native().render_small_combine(
            args, num_ranks=shape.num_ranks, num_experts=shape.num_experts, top_k=shape.top_k
        )
        return source

    def source(self, *, has_push: bool) -> str:
        """Of its throughput kernel."""
        case, shape = self.combine, self.case.shape
        source: str = _load.native().render_combine(
            self._args(),
            num_ranks=shape.num_ranks,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            has_push=has_push,
            shared_bytes=case.shared_bytes,
        )
        return source

    def _passes(self) -> list[tuple[int, int]]:
        """Tokens [first, end) of each launch: as many as the landing holds contributions for."""
        layout, most = self.world.layout, self.call.max_tokens
        room = layout["landing_ids"] - layout["landing_rows"]
        shape = self.case.shape
        each = room // ((shape.top_k if self.combine.is_by_pick else shape.num_ranks) * self.wire_row_bytes())
        if each < 1:
            raise ValueError("the landing of this case is too small to combine")
        return [(first, min(first + each, most)) for first in range(0, max(most, 1), each)]

    def wire_row_bytes(self) -> int:
        """As CombineKernelConfig::wire_row_bytes."""
        case = self.combine
        if not case.contributions_are_fp8:
            return case.hidden * case.dtype.itemsize
        found = re.search(r"\.chunk = (\d+)", self.source(has_push=True))
        assert found is not None
        chunk, num_bytes = int(found[1]), 0
        for first in range(0, case.hidden, chunk):
            elements = min(chunk, case.hidden - first)
            scales = -(-elements // reference.GROUP) * 4
            num_bytes += -(-elements // 16) * 16 + -(-scales // 16) * 16
        return num_bytes

    def differences(self, round_: Round) -> list[str]:
        """What differs from the reference in one round, on any rank."""
        found = super().differences(round_)
        for nth in range(self.combine.num_combines):
            combined = self.combined[self.num_looked]
            self.num_looked += 1
            found += [f"combine {nth}, {text}" for text in self._sum_differences(round_, combined)]
        return found

    def _sum_differences(self, round_: Round, combined: Combined) -> list[str]:
        case, memory = self.combine, self.memory
        routing, wire = round_.wanted[0].routing, "fp8" if case.wire_is_fp8 else None
        zeros = [torch.zeros(w.shape) for w in routing.weights]
        pairs = reference.combine(
            combined.rows,
            routing,
            weighted=case.is_weighted,
            sides=zeros if combined.sides is None else combined.sides,
            biases=combined.biases,
            wire=wire,
            order=case.order,
            side_lanes="all" if case.adds_side else "own",
            owner_weights=combined.weights_that_count(),
            sum_domain=case.sum_domain or None,
        )
        found = []
        for rank, (y, side) in enumerate(pairs):
            found += compare(f"rank {rank}: y", memory.tensor(combined.out[rank], y.shape, y.dtype), y)
            if combined.sides is not None:
                seen = memory.tensor(combined.side_out[rank], side.shape, side.dtype)
                found += compare(f"rank {rank}: side", seen, side)
        return found


def run_combine(compiler: Compiler, case: CombineCase, mutant: Mutant | None = None) -> list[str]:
    """What differs from the specification. Raises LaunchFailed."""
    return CombineRunner(compiler, case, mutant).run()


def run_silent(compiler: Compiler, case: CombineCase, mutant: Mutant) -> list[str]:
    """The same of a mutant that leaves others waiting until the deadline, which is soon."""
    runner = CombineRunner(compiler, case, mutant)
    runner.world.set_timeout(1_000_000_000)
    return runner.run()


def without_rows(case: CombineCase) -> CombineCase:
    """Two tokens, each for one expert at most: of three ranks one or more have no row, and one has no token."""
    dispatch = dataclasses.replace(case.dispatch, tokens=(1, 0, 1), num_duplicates=1, num_rounds=1)
    return dataclasses.replace(case, dispatch=dispatch, num_combines=1)


def reseeded(case: CombineCase, seed: int) -> CombineCase:
    """The same case with other values."""
    return dataclasses.replace(case, dispatch=dataclasses.replace(case.dispatch, seed=seed))


def _stretched(y: Tensor, exponents: Sequence[float]) -> Tensor:
    """The n-th row times 2 to the n-th of these, over and over."""
    largest = torch.finfo(y.dtype).max
    wanted = torch.tensor(exponents, dtype=torch.float64)[torch.arange(y.shape[:-1].numel()) % len(exponents)]
    stretched = y.double() * torch.exp2(wanted).view(*y.shape[:-1], 1)
    return stretched.clamp(-largest, largest).to(y.dtype)
