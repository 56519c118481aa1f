"""Data of a case, and its results against weft.reference: of suites every row in some groups of 128 columns, of one
shape every word.

Everything that dispatch and combine do is done column by column, or in groups of 128 columns (FP8 scales). So the
reference, run on a few such groups cut out of every rank's rows, says what these columns of the whole result must be,
bit for bit, in a fraction of the time. Any rank can make the data of any other: random numbers on equal GPUs are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import weft
from weft import reference, routing
from weft.bench.cases import ONE_SHAPE, Case
from weft.engine import to_host
from weft.verify.cases import loaded_trace
from weft.verify.check import DTYPES, Mismatch, expect_equal

_GROUP = reference.GROUP
_NUM_SAMPLED = 3  # groups: the first, the last, one between
_Rows = Tensor | weft.Quantized


@dataclass(frozen=True)
class Traffic:
    """Rows (one per token and destination rank) by source and destination."""

    matrix: list[list[int]]

    def out_rows(self) -> list[int]:
        """To other ranks, of each rank."""
        return [sum(row) - row[rank] for rank, row in enumerate(self.matrix)]

    def in_rows(self) -> list[int]:
        """From other ranks, of each rank."""
        size = range(len(self.matrix))
        return [sum(self.matrix[source][rank] for source in size if source != rank) for rank in size]

    def logical_rows(self) -> list[int]:
        """To all ranks, of each rank."""
        return [sum(row) for row in self.matrix]


class Samples:
    """Inputs of this rank and expected results, for one shape, T and routing at a time."""

    def __init__(self, comm: weft.Communicator, seed: int, node_ranks: int | None = None) -> None:
        self.rank, self.num_ranks, self.device, self.seed = comm.rank, comm.num_ranks, comm.device, seed
        self.node_ranks = node_ranks  # sums are of nodes, one by one
        self._workload: Any = None
        self._sums: dict[Any, Tensor] = {}  # of all workloads: the reference takes seconds for them

    def _choose_columns(self, case: Case) -> None:
        num_groups = -(-case.hidden // _GROUP)
        groups = list(range(num_groups))
        if case.suite != ONE_SHAPE:
            groups = sorted({0, num_groups - 1, (self.seed * 7919 + 1) % num_groups})[:_NUM_SAMPLED]
        self.groups = torch.tensor(groups, dtype=torch.int64, device="cpu")
        columns = (self.groups[:, None] * _GROUP + torch.arange(_GROUP, dtype=torch.int64, device="cpu")).flatten()
        self.columns = columns[columns < case.hidden]

    def use(self, case: Case) -> None:
        """Make the routing of the case, if it is not that of the case before."""
        shape = (case.hidden, case.experts, case.top_k, case.dtype, case.tokens)
        options = tuple(sorted((name, str(v)) for name, v in case.routing_options.items()))
        key = (case.suite == ONE_SHAPE, *shape, case.routing, options)
        if key == self._workload:
            return
        self._workload, self.shape, self.num_local = key, case, case.experts // self.num_ranks
        self._choose_columns(case)
        num_tokens: Any = case.tokens
        given = dict(case.routing_options)
        if case.routing == "trace" and case.suite == ONE_SHAPE:  # as many as were recorded
            num_tokens, given["trace"] = None, loaded_trace(given["trace"])
        pairs = [
            routing.make(
                case.routing,
                num_tokens,
                case.experts,
                case.top_k,
                rank=rank,
                num_ranks=self.num_ranks,
                seed=self.seed,
                **given,
            )
            for rank in range(self.num_ranks)
        ]
        self.ids, self.weights = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        self.topk_idx, self.topk_weights = self.ids[self.rank].to(self.device), self.weights[self.rank].to(self.device)
        self._inputs: dict[str, tuple[_Rows, list[_Rows]]] = {}
        self._expected: dict[Any, list[reference.Dispatched]] = {}

    def traffic(self) -> Traffic:
        """Who sends how many rows to whom."""
        owners = [torch.where(ids >= 0, ids // self.num_local, -1) for ids in self.ids]
        return Traffic([[int((own == d).any(dim=1).sum()) for d in range(self.num_ranks)] for own in owners])

    def network_rows(self) -> list[int] | None:
        """To other nodes, of each rank: a row crosses once a node. None without nodes."""
        if self.node_ranks is None:
            return None
        rows = []
        for rank, ids in enumerate(self.ids):
            nodes = torch.where(ids >= 0, ids // (self.num_local * self.node_ranks), -1)
            others = set(range(self.num_ranks // self.node_ranks)) - {rank // self.node_ranks}
            rows.append(sum(int((nodes == node).any(dim=1).sum()) for node in others))
        return rows

    def row_counts(self, case: Case) -> dict[str, Any]:
        """What the bytes of a case are counted from: tokens and received rows of this rank, rows of every rank."""
        traffic = self.traffic()
        return {
            "num_tokens": len(self.topk_idx),
            "received_rows": int(self.expected(case)[self.rank].num_rows),
            "out_rows": traffic.out_rows(),
            "in_rows": traffic.in_rows(),
            "logical_rows": traffic.logical_rows(),
            "network_rows": self.network_rows(),
        }

    def x(self, rows: str) -> _Rows:
        """This rank's x [T, H]: "bf16", of the case's dtype, or "fp8": quantised, with a scale per 128."""
        return self._input(rows)[0]

    def _input(self, rows: str) -> tuple[_Rows, list[_Rows]]:
        if rows not in self._inputs:
            parts = [self._make_input(rows, rank) for rank in range(self.num_ranks)]
            self._inputs[rows] = self._make_input(rows, self.rank, whole=True), parts
        return self._inputs[rows]

    def _make_input(self, rows: str, rank: int, *, whole: bool = False) -> _Rows:
        x = self._random((len(self.ids[rank]), self.shape.hidden), rank)
        x = x if whole else self.cut(x)
        if rows == "bf16":
            return x if whole else to_host(x)
        data, scales = reference.quantize_fp8(x)
        return weft.Quantized(data, scales) if whole else weft.Quantized(to_host(data), to_host(scales))

    def _random(self, shape: tuple[int, ...], number: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(self.seed * 1009 + number)
        return torch.randn(shape, generator=generator, device=self.device, dtype=DTYPES[self.shape.dtype])

    def expected(self, case: Case) -> list[reference.Dispatched]:
        """What every rank receives, in the sampled columns."""
        key = (case.rows, case.layout, case.alignment, case.quantize, case.capacity)
        capacity = self.capacity(case) if case.layout == "masked" else case.capacity
        if key not in self._expected:
            self._expected[key] = reference.dispatch(
                self._input(case.rows)[1],
                self.ids,
                self.weights,
                num_experts=case.experts,
                layout=case.layout,
                alignment=case.alignment,
                quantize=None if case.quantize == "none" else case.quantize,
                capacity=capacity,
            )
        return self._expected[key]

    def capacity(self, case: Case) -> int | None:
        """The case's own; else a tenth more rows than the fullest rank gets, if it has one; masked: what an expert
        can get.
        """
        if case.sizes != "capacity" or case.capacity is not None:
            return case.capacity
        if case.layout == "masked":
            return self.num_ranks * case.tokens
        fullest = max(int(part.num_rows) for part in self.expected(case))
        return (fullest * 11 // 10 + 127) // 128 * 128

    def outputs(self, case: Case) -> tuple[Tensor, Tensor]:
        """What this rank's experts are said to have computed [N, H] (masked [L, C, H]), and y [T, columns] that must
        come of it.
        """
        expected = self.expected(case)

        def whole(rank: int) -> Tensor:
            x = expected[rank].x
            lead = (x if isinstance(x, Tensor) else x.data).shape[:-1]
            return self._random((*lead, case.hidden), 500 + rank)

        key = (self._workload, case.layout, case.alignment, case.wire, case.capacity)
        if key not in self._sums:
            sampled = [to_host(self.cut(whole(rank))) for rank in range(self.num_ranks)]
            sums = reference.combine(sampled, expected, wire=case.wire, sum_domain=self.node_ranks)
            self._sums[key] = sums[self.rank]
        return whole(self.rank), self._sums[key]

    # ---- checks; all raise weft.verify.check.Mismatch

    def check_dispatched(self, case: Case, got: weft.Dispatched) -> None:
        """Every row of the sampled columns, and every count, id and weight."""
        want = self.expected(case)[self.rank]
        num_rows = int(want.num_rows)
        expect_equal("num_tokens_per_expert", got.num_tokens_per_expert, want.num_tokens_per_expert)
        expect_equal("offsets", got.offsets, want.offsets)
        if case.layout == "masked":
            self._check_masked(got, want)
            return
        expect_equal("topk_weights", got.topk_weights[:num_rows], want.topk_weights[:num_rows])
        if want.topk_idx is not None and got.topk_idx is not None:
            expect_equal("topk_idx", got.topk_idx[:num_rows], want.topk_idx[:num_rows])
        self.check_rows(got.x, want.x, num_rows)

    def check_rows(self, got: _Rows, want: _Rows, num_rows: int) -> None:
        """Rows, with their scales if they have any."""
        if isinstance(got, Tensor) or isinstance(want, Tensor):
            if not (isinstance(got, Tensor) and isinstance(want, Tensor)):
                raise Mismatch(f"x: a {type(got).__name__}, expected a {type(want).__name__}")
            expect_equal("x", self.cut(got[:num_rows]), _bytes(want)[:num_rows].view(want.dtype))
            return
        expect_equal("x.data", self.cut(got.data[:num_rows]), _bytes(want.data)[:num_rows].view(want.data.dtype))
        if got.scales is None or want.scales is None:
            raise Mismatch("x: no scales")
        columns = self.groups.to(got.scales.device)
        scales = _bytes(got.scales)[:num_rows, columns].view(got.scales.dtype)
        expect_equal("x.scales", scales, _bytes(want.scales)[:num_rows].view(want.scales.dtype))

    def _check_masked(self, got: weft.Dispatched, want: reference.Dispatched) -> None:
        """Rows and weights of picks; the tails of the experts hold nothing."""

        def of_picks(part: Tensor) -> Tensor:
            return self.picks_of(want, part)

        def rows(x: _Rows) -> _Rows:
            if isinstance(x, Tensor):
                return of_picks(x)
            return weft.Quantized(of_picks(x.data), None if x.scales is None else of_picks(x.scales))

        expect_equal("topk_weights", of_picks(got.topk_weights), of_picks(want.topk_weights))
        self.check_rows(rows(got.x), rows(want.x), int(want.num_tokens_per_expert.sum()))

    def picks_of(self, want: reference.Dispatched, part: Tensor) -> Tensor:
        """Of a masked result [L, C, ...] what holds a pick."""
        index = torch.arange(want.topk_weights.shape[1], dtype=torch.int64, device="cpu")
        filled = index < want.num_tokens_per_expert[:, None]
        return _bytes(part)[filled.to(part.device)].view(part.dtype)

    def check_y(self, y: Tensor, want: Tensor) -> None:
        """Sums."""
        expect_equal("y of combine", self.cut(y), want)

    def cut(self, rows: Tensor) -> Tensor:
        """The sampled columns."""
        return _bytes(rows).index_select(-1, self.columns.to(rows.device)).view(rows.dtype)


def parts_of(x: _Rows) -> list[Tensor]:
    """Rows, with their scales if they have any."""
    return [x] if isinstance(x, Tensor) else [part for part in (x.data, x.scales) if part is not None]


def result_bytes(received: weft.Dispatched | None) -> int:
    """Of the tensors that a dispatch returned."""
    if received is None:
        return 0
    parts = (*parts_of(received.x), received.topk_idx, received.topk_weights, received.num_tokens_per_expert)
    return sum(part.nbytes for part in (*parts, received.offsets) if part is not None)


def _bytes(part: Tensor) -> Tensor:
    """Types of one byte as bytes: torch indexes few of the others."""
    return part.view(torch.uint8) if part.element_size() == 1 else part
