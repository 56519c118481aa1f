"""Data of the suite's cases, and their results against weft.reference: every row, in some groups of 128 columns.

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
from weft.bench.cases import EXPERTS, TOP_K, Case
from weft.verify.check import Mismatch, expect_equal

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
    """Inputs of this rank and expected results, for one T and routing at a time."""

    def __init__(self, comm: weft.Communicator, hidden: int, seed: int) -> None:
        self.rank, self.num_ranks, self.device = comm.rank, comm.num_ranks, comm.device
        self.hidden, self.seed = hidden, seed
        self._workload: Any = None
        self._sums: dict[Any, Tensor] = {}  # of all workloads: the reference takes seconds for them
        num_groups = hidden // _GROUP
        groups = sorted({0, num_groups - 1, (seed * 7919 + 1) % num_groups}) if num_groups else []
        self.groups = torch.tensor(groups[:_NUM_SAMPLED], dtype=torch.int64, device="cpu")
        self.columns = (self.groups[:, None] * _GROUP + torch.arange(_GROUP, dtype=torch.int64, device="cpu")).flatten()

    def use(self, case: Case) -> None:
        """Make the routing of the case, if it is not that of the case before."""
        key = (case.tokens, case.routing, tuple(sorted((name, str(v)) for name, v in case.routing_options.items())))
        if key == self._workload:
            return
        self._workload = key
        pairs = [
            routing.make(
                case.routing,
                case.tokens,
                EXPERTS,
                TOP_K,
                rank=rank,
                num_ranks=self.num_ranks,
                seed=self.seed,
                **case.routing_options,
            )
            for rank in range(self.num_ranks)
        ]
        self.ids, self.weights = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        self.topk_idx, self.topk_weights = self.ids[self.rank].to(self.device), self.weights[self.rank].to(self.device)
        self._inputs: dict[str, tuple[_Rows, list[_Rows]]] = {}
        self._expected: dict[Any, list[reference.Dispatched]] = {}

    def traffic(self) -> Traffic:
        """Who sends how many rows to whom."""
        num_local = EXPERTS // self.num_ranks
        owners = [torch.where(ids >= 0, ids // num_local, -1) for ids in self.ids]
        return Traffic([[int((own == d).any(dim=1).sum()) for d in range(self.num_ranks)] for own in owners])

    def x(self, rows: str) -> _Rows:
        """This rank's x: "bf16" [T, H], or "fp8": quantised, with a scale per 128."""
        return self._input(rows)[0]

    def _input(self, rows: str) -> tuple[_Rows, list[_Rows]]:
        if rows not in self._inputs:
            parts = [self._make_input(rows, rank) for rank in range(self.num_ranks)]
            self._inputs[rows] = self._make_input(rows, self.rank, whole=True), parts
        return self._inputs[rows]

    def _make_input(self, rows: str, rank: int, *, whole: bool = False) -> _Rows:
        x = self._random((len(self.ids[rank]), self.hidden), rank)
        x = x if whole else self.cut(x)
        if rows == "bf16":
            return x if whole else x.cpu()
        data, scales = reference.quantize_fp8(x)
        return weft.Quantized(data, scales) if whole else weft.Quantized(data.cpu(), scales.cpu())

    def _random(self, shape: tuple[int, ...], number: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(self.seed * 1009 + number)
        return torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16)

    def expected(self, case: Case) -> list[reference.Dispatched]:
        """What every rank receives, in the sampled columns."""
        key = (case.rows, case.layout, case.alignment, case.quantize)
        capacity = self.capacity(case) if case.layout == "masked" else None
        if key not in self._expected:
            self._expected[key] = reference.dispatch(
                self._input(case.rows)[1],
                self.ids,
                self.weights,
                num_experts=EXPERTS,
                layout=case.layout,
                alignment=case.alignment,
                quantize=None if case.quantize == "none" else case.quantize,
                capacity=capacity,
            )
        return self._expected[key]

    def capacity(self, case: Case) -> int | None:
        """A tenth more rows than the fullest rank gets, if the case has a capacity; masked: what an expert can get."""
        if case.sizes != "capacity":
            return None
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
            part = expected[rank]
            lead = part.topk_weights.shape if case.layout == "masked" else (int(part.num_rows),)
            return self._random((*lead, self.hidden), 500 + rank)

        key = (self._workload, case.layout, case.alignment, case.wire)
        if key not in self._sums:
            sampled = [self.cut(whole(rank)).cpu() for rank in range(self.num_ranks)]
            self._sums[key] = reference.combine(sampled, expected, wire=case.wire)[self.rank]
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
        expect_equal("topk_weights", got.topk_weights[:num_rows], want.topk_weights)
        if want.topk_idx is not None and got.topk_idx is not None:
            expect_equal("topk_idx", got.topk_idx[:num_rows], want.topk_idx)
        self.check_rows(got.x, want.x, num_rows)

    def check_rows(self, got: _Rows, want: _Rows, num_rows: int) -> None:
        """Rows, with their scales if they have any."""
        if isinstance(got, Tensor) or isinstance(want, Tensor):
            if not (isinstance(got, Tensor) and isinstance(want, Tensor)):
                raise Mismatch(f"x: a {type(got).__name__}, expected a {type(want).__name__}")
            expect_equal("x", self.cut(got[:num_rows]), want)
            return
        expect_equal("x.data", self.cut(got.data[:num_rows]), want.data)
        if got.scales is None or want.scales is None:
            raise Mismatch("x: no scales")
        expect_equal("x.scales", got.scales[:num_rows, self.groups.to(got.scales.device)], want.scales)

    def _check_masked(self, got: weft.Dispatched, want: reference.Dispatched) -> None:
        """Rows and weights of picks; the tails of the experts hold nothing."""
        index = torch.arange(want.topk_weights.shape[1], dtype=torch.int64, device="cpu")
        filled = index < want.num_tokens_per_expert[:, None]

        def of_picks(part: Tensor) -> Tensor:
            words = part.view(torch.uint8) if part.element_size() == 1 else part
            return words[filled.to(part.device)].view(part.dtype)

        def rows(x: _Rows) -> _Rows:
            if isinstance(x, Tensor):
                return of_picks(x)
            return weft.Quantized(of_picks(x.data), None if x.scales is None else of_picks(x.scales))

        expect_equal("topk_weights", of_picks(got.topk_weights), of_picks(want.topk_weights))
        self.check_rows(rows(got.x), rows(want.x), int(filled.sum()))

    def check_y(self, y: Tensor, want: Tensor) -> None:
        """Sums."""
        expect_equal("y", self.cut(y), want)

    def cut(self, rows: Tensor) -> Tensor:
        """The sampled columns."""
        words = rows.view(torch.uint8) if rows.element_size() == 1 else rows
        return words.index_select(-1, self.columns.to(rows.device)).view(rows.dtype)
