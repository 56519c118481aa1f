"""What dispatch and combine must give, computed where the ranks compute, without any exchange: for tools/soak.py.

Rows are a function of who sends them: a hash of (source rank, token, column), so a rank knows the rows of all others.
The row numbers are worked out anew here, vectorised; tests/tools/test_soak_check.py compares them with weft.reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import weft
from weft import reference

POISON = 0xFB
MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}


def mixed(first: Tensor, second: Tensor, seed: int) -> Tensor:
    """int32 hash of two int tensors, broadcast; the same bits on every device."""
    word = first.to(torch.int32) * -1640531535 + second.to(torch.int32) * -2048144789 + (seed * 668265263 & 0x7FFFFFFF)
    for shift, factor in ((15, 739982445), (12, 695872825)):
        word = (word ^ (word >> shift & (1 << 32 - shift) - 1)) * factor
    return word ^ (word >> 15 & 0x1FFFF)


def num_different(got: Tensor, want: Tensor) -> Tensor:
    """int64 []: words that differ; nothing waits."""
    if got.shape != want.shape or got.element_size() != want.element_size():
        raise AssertionError(f"{list(got.shape)} {got.dtype}, expected {list(want.shape)} {want.dtype}")
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    return (got.contiguous().view(words) != want.contiguous().view(words)).sum()


def drawn_routing(
    num_tokens: int, num_experts: int, top_k: int, absent: float, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Ids int64 and weights [T, K] of all ranks' tokens: the same random numbers on every rank."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (num_tokens, top_k)
    skew = torch.rand(size, generator=generator, device=device) ** (1 + seed % 3)
    ids = (skew * num_experts).to(torch.int64).clamp(max=num_experts - 1)
    chance = torch.rand(size, generator=generator, device=device)
    ids = torch.where(chance < absent, -1, ids)
    weights = 0.25 + 0.75 * torch.rand(size, generator=generator, device=device)
    return ids, weights


def values(rows: Tensor, num_columns: int, seed: int, dtype: torch.dtype) -> Tensor:
    """[N] row names -> [N, columns] in [1, 2), exact in `dtype`: sums of them scale with powers of two, bit for bit."""
    columns = torch.arange(num_columns, device=rows.device)
    bits = MANTISSA_BITS[dtype]
    words = mixed(rows[:, None], columns[None, :], seed) & (1 << bits) - 1
    return (1 + words.to(torch.float32) / (1 << bits)).to(dtype)


@dataclass(frozen=True)
class Places:
    """Where the picks of all tokens (numbered by rank, then as given) lie on one rank."""

    row_token: Tensor  # [rows] token whose row lies there, -1: none (a hole)
    row_weight: Tensor  # rank_major [rows, K], else [rows]; 0 where there is none
    row_ids: Tensor | None  # rank_major [rows, K] local ids, -1 elsewhere
    pick_row: Tensor  # [tokens, K] row of each pick, -1: not here or dropped
    counts: Tensor  # [L] picks kept
    offsets: Tensor  # [R + 1] by source rank, else [L + 1]
    num_rows: int  # rows that hold data


@dataclass(frozen=True)
class Shape:
    """What is equal on all ranks."""

    num_ranks: int
    num_local: int
    layout: str
    alignment: int
    capacity: int | None


def places(ids: Tensor, weights: Tensor, rank: int, shape: Shape, tokens: tuple[int, ...]) -> Places:
    """The picks [tokens, K] of all ranks' tokens (`tokens`: how many each has) that lie on `rank`."""
    local = ids - rank * shape.num_local
    here = (local >= 0) & (local < shape.num_local)
    if shape.layout == "rank_major":
        return _rank_major(local, here, weights, shape, tokens)
    return _by_expert(local, here, weights, shape)


def _rank_major(local: Tensor, here: Tensor, weights: Tensor, shape: Shape, tokens: tuple[int, ...]) -> Places:
    present = here.any(1)
    from_each = torch.stack([part.sum() for part in present.split(list(tokens))])
    row = torch.where(present, present.cumsum(0) - 1, -1)
    total = int(present.sum())
    limit = total if shape.capacity is None else shape.capacity
    num_rows = min(total, limit)
    kept = here & (row < limit)[:, None]
    row_token = torch.full((limit,), -1, device=local.device)
    row_token[:num_rows] = present.nonzero()[:num_rows, 0]
    named = row_token[:num_rows]
    ids = torch.full((limit, local.shape[1]), -1, device=local.device)
    ids[:num_rows] = torch.where(here[named], local[named], -1)
    row_weight = torch.zeros((limit, local.shape[1]), device=local.device)
    row_weight[:num_rows] = torch.where(here[named], weights[named], 0.0)
    counts = torch.bincount(local[kept], minlength=shape.num_local)
    pick_row = torch.where(kept, row[:, None], -1)
    return Places(row_token, row_weight, ids, pick_row, counts, _offsets(from_each, limit), num_rows)


def _by_expert(local: Tensor, here: Tensor, weights: Tensor, shape: Shape) -> Places:
    token, k = here.nonzero(as_tuple=True)
    expert = local[token, k]
    by_expert, order = expert.sort(stable=True)
    counts = torch.bincount(expert, minlength=shape.num_local)
    starts = counts.cumsum(0) - counts
    index = torch.arange(len(order), device=local.device) - starts[by_expert]
    token, k = token[order], k[order]
    if shape.layout == "masked":
        place, limit = by_expert * shape.capacity + index, shape.num_local * shape.capacity
        kept = index < shape.capacity
        num_rows = int(kept.sum())
        padded = torch.full_like(counts, shape.capacity)
    else:
        padded = (counts + shape.alignment - 1) // shape.alignment * shape.alignment
        place = (padded.cumsum(0) - padded)[by_expert] + index
        total = int(padded.sum())
        limit = total if shape.capacity is None else shape.capacity
        kept = place < limit
        num_rows = min(total, limit)
    token, k, place = token[kept], k[kept], place[kept]
    row_token = torch.full((limit,), -1, device=local.device)
    row_token[place] = token
    row_weight = torch.zeros(limit, device=local.device)
    row_weight[place] = weights[token, k]
    pick_row = torch.full_like(local, -1)
    pick_row[token, k] = place
    kept_counts = torch.bincount(by_expert[kept], minlength=shape.num_local)
    return Places(row_token, row_weight, None, pick_row, kept_counts, _offsets(padded, limit), num_rows)


def _offsets(sizes: Tensor, limit: int) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).clamp(max=limit)


@dataclass(frozen=True)
class Sum:
    """How combine adds."""

    is_rank_major: bool
    weighted: bool
    wire: str | None = None


def sums(tokens: slice, everywhere: list[Places], ys: list[Tensor], how: Sum, bias: Tensor | None = None) -> Tensor:
    """y of these tokens from the expert outputs of all ranks: products rounded, k in order, each rank's sum rounded to
    the wire, ranks ascending, then the bias.
    """
    dtype = ys[0].dtype
    total = torch.zeros((tokens.stop - tokens.start, ys[0].shape[1]), device=ys[0].device)
    for there, y in zip(everywhere, ys, strict=True):
        rows = there.pick_row[tokens]
        partial = _partial(rows, there, y, how, total)
        has = (rows >= 0).any(1)[:, None]
        if how.wire is None:
            carried = partial.to(dtype).to(torch.float32)
        else:
            carried = reference.through_fp8(partial)
        total = torch.where(has, total + carried, total)
    return (total if bias is None else total + bias.to(torch.float32)).to(dtype)


def side_sums(tokens: slice, everywhere: list[Places], sides: list[Tensor]) -> Tensor:
    """[T, K]: what each pick's row says on the rank where it lies; `sides`: [rows], rank_major [rows, K]."""
    total = torch.zeros(everywhere[0].pick_row[tokens].shape, device=sides[0].device)
    for there, side in zip(everywhere, sides, strict=True):
        rows = there.pick_row[tokens]
        if len(side):
            named = rows.clamp(min=0)
            values = side.gather(0, named) if side.dim() == 2 else side[named]
            total = torch.where(rows >= 0, values, total)
    return total


def _partial(rows: Tensor, there: Places, y: Tensor, how: Sum, zero: Tensor) -> Tensor:
    """What one rank adds to each token, in fp32."""
    partial = torch.zeros_like(zero)
    for k in range(rows.shape[1] if len(y) else 0):
        row = rows[:, k]
        mine = (row >= 0)[:, None]
        part = y[row.clamp(min=0)].to(torch.float32)
        if how.is_rank_major:
            partial = torch.where(mine, part, partial)
            continue
        product = there.row_weight[row.clamp(min=0)][:, None] * part if how.weighted else part
        partial = torch.where(mine, partial + product, partial)
    return partial


def poison(rows: Tensor | weft.Quantized | None) -> None:
    """Overwrite every byte, so that a word nobody writes is seen."""
    parts = (rows.data, rows.scales) if isinstance(rows, weft.Quantized) else (rows,)
    for part in parts:
        if part is not None and part.numel():
            (part if part.stride(-1) == 1 else part.mT).detach().view(torch.uint8).fill_(POISON)
