"""One rank's part of a verify trial: make data, run the engine with poisoned outputs, compare with weft.reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import weft
from weft import reference, routing
from weft.engine import to_host
from weft.verify.cases import Case, loaded_trace

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POISON_BYTE = 0xFB  # as bf16, fp16, fp32: large numbers no test data holds


class Mismatch(Exception):
    """The engine's result differs from the reference's; the text says where and how."""


@dataclass(frozen=True)
class Inputs:
    """One rank's inputs of a case."""

    x: Tensor  # [T, H]
    second_x: Tensor  # [T, H], sent with the handle of the first dispatch
    topk_idx: Tensor  # [T, K]
    topk_weights: Tensor  # fp32 [T, K]
    bias: Tensor | None


def make_inputs(case: Case, rank: int) -> Inputs:
    """Rank `rank`'s inputs; any rank can make any other's."""
    generator = torch.Generator().manual_seed(case.seed * 1009 + rank)
    options = {} if case.trace is None else {"trace": loaded_trace(case.trace), "step": case.seed}
    topk_idx, topk_weights = routing.make(
        case.routing,
        case.tokens[rank],
        case.experts,
        case.top_k,
        rank=rank,
        num_ranks=case.ranks,
        seed=case.seed,
        **options,
    )
    num_tokens = len(topk_idx)  # the empty rank has none, whatever was asked for
    if case.odd_ids:
        topk_idx = _with_odd_ids(topk_idx, generator)
    dtype = DTYPES[case.dtype]
    bias_shape = {"none": None, "row": (case.hidden,), "full": (num_tokens, case.hidden)}[case.bias]
    return Inputs(
        x=_rows((num_tokens, case.hidden), dtype, generator, special_values=case.special_values),
        second_x=_rows((num_tokens, case.hidden), dtype, generator, special_values=False),
        topk_idx=topk_idx.to(torch.int32 if case.id_bits == 32 else torch.int64),
        topk_weights=topk_weights,
        bias=None
        if bias_shape is None
        else torch.randn(bias_shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype),
    )


def _with_odd_ids(topk_idx: Tensor, generator: torch.Generator) -> Tensor:
    """A tenth of the ids -1, a tenth equal to the first of their row."""
    chance = torch.rand(topk_idx.shape, generator=generator, dtype=torch.float32, device="cpu")
    topk_idx = torch.where(chance < 0.1, topk_idx[:, :1], topk_idx)
    odd: Tensor = topk_idx.masked_fill(chance > 0.9, -1)
    return odd


def _rows(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, *, special_values: bool) -> Tensor:
    rows: Tensor = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * 2.0 ** float(
        torch.randint(-4, 5, (), generator=generator, dtype=torch.int64, device="cpu")
    )
    if special_values and rows.numel():
        values = torch.tensor(
            [float("nan"), float("inf"), -float("inf"), -0.0, 1e-41, 3e38], dtype=torch.float32, device="cpu"
        )
        drawn = torch.randint(
            0, rows.numel(), (max(1, rows.numel() // 97),), generator=generator, dtype=torch.int64, device="cpu"
        )
        where: Tensor = drawn.unique()  # which of two values for one place wins is not defined
        which = torch.randint(0, len(values), where.shape, generator=generator, dtype=torch.int64, device="cpu")
        rows.view(-1)[where] = values[which]
    return rows.to(dtype)


def make_outputs(case: Case, rank: int, shape: tuple[int, ...]) -> Tensor:
    """What the experts of `rank` are said to compute: any rows will do, and any rank can make them again."""
    generator = torch.Generator().manual_seed(case.seed * 1009 + 500 + rank)
    return _rows((*shape, case.hidden), DTYPES[case.dtype], generator, special_values=case.special_values)


def make_side(case: Case, rank: int, shape: tuple[int, ...]) -> Tensor:
    """The side values `rank` gives to combine, one per row or pick; fp32."""
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(case.seed * 1009 + 250 + rank), dtype=torch.float32, device="cpu"
    )


def expect_equal(name: str, got: Tensor, want: Tensor) -> int:
    """Compare bit for bit (any NaN equals any NaN); returns the number of words compared, raises Mismatch."""
    got = to_host(got.detach())
    if got.shape != want.shape or got.dtype != want.dtype:
        raise Mismatch(f"{name}: {list(got.shape)} {got.dtype}, expected {list(want.shape)} {want.dtype}")
    if not got.numel():
        return 0
    words = _WORDS[got.element_size()]
    got_words, want_words = got.contiguous().view(words), want.contiguous().view(words)
    differs = got_words != want_words
    if got.dtype.is_floating_point and differs.any():
        differs &= ~(got.to(torch.float32).isnan() & want.to(torch.float32).isnan())
    if differs.any():
        where = tuple(int(i) for i in differs.nonzero()[0])
        raise Mismatch(
            f"{name}{list(where)}: {got_words[where].item():#x} ({_number(got[where])}), "
            f"expected {want_words[where].item():#x} ({_number(want[where])}); "
            f"{int(differs.sum())} of {got.numel()} words differ"
        )
    return got.numel()


def _number(value: Tensor) -> float:
    return float(value.to(torch.float32))


def poison(tensor: Tensor | None) -> None:
    """Overwrite every byte, so that a word nobody writes is seen."""
    if tensor is not None and tensor.numel():
        rows = tensor.detach()
        (rows if rows.stride(-1) == 1 else rows.mT).view(torch.uint8).fill_(_POISON_BYTE)  # column-major scales


def check_dispatched(case: Case, got: weft.Dispatched, want: reference.Dispatched, overflow_before: int) -> int:
    """Compare everything a rank received. Rows that no pick fills are undefined under `capacity` and not compared."""
    words = expect_equal("num_tokens_per_expert", got.num_tokens_per_expert, want.num_tokens_per_expert)
    words += expect_equal("offsets", got.offsets, want.offsets)
    num_rows = int(want.num_rows)
    if int(got.num_rows) != num_rows:
        raise Mismatch(f"num_rows: {int(got.num_rows)}, expected {num_rows}")
    dropped = int(got.overflow) - overflow_before
    if dropped != int(want.overflow):
        raise Mismatch(f"overflow: grew by {dropped}, expected {int(want.overflow)}")
    filled = _filled_rows(case, want)
    words += expect_equal("topk_weights", filled(got.topk_weights), filled(want.topk_weights))
    if want.topk_idx is not None:
        if got.topk_idx is None:
            raise Mismatch("topk_idx: None, expected a tensor")
        words += expect_equal("topk_idx", filled(got.topk_idx), filled(want.topk_idx))
    return words + check_rows("x", got.x, want.x, filled)


def check_rows(
    name: str, got: Tensor | weft.Quantized, want: Tensor | weft.Quantized, filled: Callable[[Tensor], Tensor]
) -> int:
    """Compare received rows, with their scales if they are quantised."""
    if isinstance(got, Tensor) != isinstance(want, Tensor):
        raise Mismatch(f"{name}: a {type(got).__name__}, expected a {type(want).__name__}")
    if isinstance(got, Tensor) and isinstance(want, Tensor):
        return expect_equal(name, filled(got), filled(want))
    if isinstance(got, Tensor) or isinstance(want, Tensor) or got.scales is None or want.scales is None:
        raise Mismatch(f"{name}: no scales")
    words = expect_equal(f"{name}.data", filled(got.data), filled(want.data))
    return words + expect_equal(f"{name}.scales", filled(got.scales), filled(want.scales))


def _filled_rows(case: Case, want: reference.Dispatched) -> Callable[[Tensor], Tensor]:
    """A function that takes from [N, ...] or [L, C, ...] the rows whose content is promised."""
    if case.layout != "masked":
        num_rows = int(want.num_rows)
        return lambda rows: rows[:num_rows]
    counts = want.num_tokens_per_expert
    index = torch.arange(case.capacity or 0, dtype=torch.int64, device="cpu")
    mask = index[None, :] < counts[:, None]
    return lambda rows: to_host(rows.detach())[mask]


class Tally:
    """Counts the words compared and keeps the mismatches: after one a rank goes on, to stay in step with the others."""

    def __init__(self) -> None:
        self.num_words = 0
        self.problems: list[str] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run one comparison; a Mismatch is noted under `name`."""
        try:
            yield
        except Mismatch as mismatch:
            self.problems.append(f"{name}: {mismatch}")


def check_case(comm: weft.Communicator, case: Case, active_ranks: tuple[int, ...] | None = None) -> Tally:
    """Run one case on this rank. Collective: every rank of `comm` calls it with the same cases in the same order.

    Differences are in the result; errors of the engine are raised. `active_ranks`: those left after a rebuild, None:
    all.
    """
    inputs = [make_inputs(case, rank) for rank in range(case.ranks)]
    with weft.ExpertParallel(
        comm,
        num_experts=case.experts,
        top_k=case.top_k,
        hidden=case.hidden,
        max_tokens_per_rank=max(1, *(len(part.x) for part in inputs)),
        dtype=DTYPES[case.dtype],
        heap_bytes=case.heap_bytes,
    ) as ep:
        trial = _Trial(ep, comm, case, inputs, active_ranks)
        trial.run()
    return trial.tally


class _Trial:
    """One case on one rank: dispatch, combine and a repeated dispatch, twice."""

    def __init__(
        self,
        ep: weft.ExpertParallel,
        comm: weft.Communicator,
        case: Case,
        inputs: list[Inputs],
        active_ranks: tuple[int, ...] | None,
    ) -> None:
        self.ep, self.case, self.inputs = ep, case, inputs
        self.rank, self.device = comm.rank, comm.device
        self.active_ranks = tuple(range(case.ranks)) if active_ranks is None else active_ranks
        self.quantize = None if case.quantize == "none" else case.quantize
        self.tally = Tally()
        self.expected = reference.dispatch(
            [part.x for part in inputs],
            [part.topk_idx for part in inputs],
            [part.topk_weights for part in inputs],
            num_experts=case.experts,
            layout=case.layout,
            alignment=case.alignment,
            quantize=self.quantize,
            scale_layout=case.scale_layout,
            capacity=case.capacity,
            active_ranks=self.active_ranks,
        )

    def run(self) -> None:
        overflow, tally = 0, self.tally
        for turn in ("first", "second"):  # the second one into memory that holds the first one's poison
            got = self._dispatch()
            with tally.part(f"{turn} dispatch"):
                tally.num_words += check_dispatched(self.case, got, self.expected[self.rank], overflow)
            with tally.part(f"{turn} combine"):
                self._check_combine(got)
            overflow = int(got.overflow)
            with tally.part(f"{turn} dispatch with a handle"):
                self._check_repeat(got, overflow)
            overflow = int(got.overflow)
            _poison_received(got)
            del got

    def _dispatch(self) -> weft.Dispatched:
        """Dispatch copies of the inputs and overwrite these at once: a complete call no longer reads them."""
        mine, case = self.inputs[self.rank], self.case
        x, topk_idx, topk_weights = (
            part.clone().to(self.device) for part in (mine.x, mine.topk_idx, mine.topk_weights)
        )
        got = self.ep.dispatch(
            x,
            topk_idx,
            topk_weights,
            layout=case.layout,
            alignment=case.alignment,
            quantize=self.quantize,
            scale_layout=case.scale_layout,
            capacity=case.capacity,
            **case.dispatch_mode,
        )
        for used in (x, topk_idx, topk_weights):
            poison(used)
        return got.wait()

    def _check_combine(self, got: weft.Dispatched) -> None:
        case, rank = self.case, self.rank
        shapes = [part.topk_weights.shape for part in self.expected]
        num_row_dims = 2 if case.layout == "masked" else 1
        outputs = [make_outputs(case, r, shapes[r][:num_row_dims]) for r in range(case.ranks)]
        sides = [make_side(case, r, shapes[r]) for r in range(case.ranks)]
        want = reference.combine(
            outputs,
            self.expected,
            weighted=case.weighted,
            sides=sides if case.side else None,
            biases=[part.bias if r in self.active_ranks else None for r, part in enumerate(self.inputs)],
        )[rank]
        output = self.ep.empty_output(got) if case.heap_output else torch.empty_like(outputs[rank], device=self.device)
        output.copy_(outputs[rank])
        bias = self.inputs[rank].bias
        out = torch.empty_like(self.inputs[rank].x, device=self.device)
        poison(out)
        combined = self.ep.combine(
            output,
            got.handle,
            weighted=case.weighted,
            side=sides[rank].to(self.device) if case.side else None,
            bias=None if bias is None else bias.to(self.device),
            out=out,
            **case.later_mode,
        )
        poison(output)
        combined = combined.wait() if isinstance(combined, weft.Staged) else combined
        got_parts = combined if isinstance(combined, tuple) else (combined,)
        want_parts = want if isinstance(want, tuple) else (want,)
        if len(got_parts) != len(want_parts):
            raise Mismatch(f"{len(got_parts)} tensors came back, expected {len(want_parts)}")
        for name, got_part, want_part in zip(("y", "side"), got_parts, want_parts, strict=False):
            self.tally.num_words += expect_equal(name, got_part, want_part)

    def _check_repeat(self, got: weft.Dispatched, overflow_before: int) -> None:
        """Send other rows with the handle of the first dispatch; what it drops is counted again."""
        second_x = self.inputs[self.rank].second_x.to(self.device)
        again = self.ep.dispatch(second_x, handle=got.handle, **self.case.later_mode).wait()
        want = self.expected[self.rank]
        dropped = int(again.overflow) - overflow_before
        if dropped != int(want.overflow):
            raise Mismatch(f"overflow: grew by {dropped}, expected {int(want.overflow)}")
        rows = reference.repeat_dispatch([part.second_x for part in self.inputs], want.routing)
        self.tally.num_words += check_rows("x", again.x, rows[self.rank], _filled_rows(self.case, want))
        poison(again.x if isinstance(again.x, Tensor) else again.x.data)


def _poison_received(got: weft.Dispatched) -> None:
    parts = (got.x,) if isinstance(got.x, Tensor) else (got.x.data, got.x.scales)
    for part in (*parts, got.topk_idx):
        poison(part)
