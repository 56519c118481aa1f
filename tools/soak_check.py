"""What dispatch and combine must give, computed where the ranks compute, without any exchange: for tools/soak.py.

Rows are a function of who sends them and of a seed: a hash of (token or place, column), so a rank knows the rows of all
others. The row numbers are worked out anew here, vectorised; tests/tools/test_soak_check.py compares them with
weft.reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import weft
from weft import reference
from weft.limits import MAX_RANKS

POISON = 0xFB
MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}
ONE = {torch.bfloat16: 0x3F80, torch.float16: 0x3C00, torch.float32: 0x3F800000}  # the bits of 1.0


def mixed(names: Tensor, seed: int) -> Tensor:
    """int32 hash of an int tensor; the same bits on every device."""
    word = names.to(torch.int32) * -1640531535 + (seed * 668265263 & 0x7FFFFFFF)
    for shift, factor in ((15, 739982445), (12, 695872825)):
        word = (word ^ (word >> shift & (1 << 32 - shift) - 1)) * factor
    return word ^ (word >> 15 & 0x1FFFF)


def values(rows: Tensor, num_columns: int, seed: int, dtype: torch.dtype) -> Tensor:
    """[N] row names -> [N, columns], in [1, 2) or (-4, -2]: leading bits of the product of a hash of the row and one of
    the column, both odd. Quick, so that every call can have its own.
    """
    columns = torch.arange(-num_columns, 0, device=rows.device)
    hashes = mixed(torch.cat([rows, columns]), seed) | 1
    words = hashes[: len(rows), None] * hashes[len(rows) :]
    words >>= 31 - MANTISSA_BITS[dtype]  # sign and mantissa
    words ^= ONE[dtype]
    return words.to(torch.int16 if dtype.itemsize == 2 else torch.int32).view(dtype)


def num_different(got: Tensor, want: Tensor, where: Tensor | None = None) -> Tensor:
    """int64 []: words that differ, `where` that is true; nothing waits."""
    if got.shape != want.shape or got.element_size() != want.element_size():
        raise AssertionError(f"{list(got.shape)} {got.dtype}, expected {list(want.shape)} {want.dtype}")
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    different = got.contiguous().view(words) != want.contiguous().view(words)
    return (different if where is None else different & where).sum()


@dataclass(frozen=True)
class Shape:
    """What is equal on all ranks."""

    tokens: tuple[int, ...]  # of each rank
    num_local: int  # experts of a rank
    top_k: int
    layout: str
    alignment: int
    capacity: int | None

    @property
    def num_ranks(self) -> int:
        """Of the group."""
        return len(self.tokens)

    def tokens_of(self, rank: int) -> slice:
        """Those of a rank among all, which are numbered by rank, then as given."""
        return slice(sum(self.tokens[:rank]), sum(self.tokens[: rank + 1]))


def drawn_routing(shape: Shape, absent: float, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids int64 and weights [T, K] of all ranks' tokens: the same random numbers on every rank."""
    generator = torch.Generator(device).manual_seed(seed)
    size, num_experts = (sum(shape.tokens), shape.top_k), shape.num_local * shape.num_ranks
    skew = torch.rand(size, generator=generator, device=device) ** (1 + seed % 3)
    ids = (skew * num_experts).to(torch.int64).clamp(max=num_experts - 1)
    chance = torch.rand(size, generator=generator, device=device)
    ids = torch.where(chance < absent, -1, ids)
    weights = 0.25 + 0.75 * torch.rand(size, generator=generator, device=device)
    return ids, weights


@dataclass(frozen=True)
class Places:
    """Where the picks of all tokens lie on one rank."""

    row_token: Tensor  # [rows] token whose row lies there, -1: none (a hole)
    row_weight: Tensor  # rank_major [rows, K], else [rows]; 0 where there is none
    row_ids: Tensor | None  # rank_major [rows, K] local ids, -1 elsewhere
    pick_row: Tensor  # [tokens, K] row of each pick, -1: not here or dropped
    counts: Tensor  # [L] picks kept
    offsets: Tensor  # [R + 1] by source rank, else [L + 1]
    num_rows: int  # rows that hold data


def places(ids: Tensor, weights: Tensor, rank: int, shape: Shape) -> Places:
    """The picks [tokens, K] of all ranks' tokens that lie on `rank`."""
    local = ids - rank * shape.num_local
    here = (local >= 0) & (local < shape.num_local)
    if shape.layout == "rank_major":
        return _rank_major(local, here, weights, shape)
    return _by_expert(local, here, weights, shape)


def _rank_major(local: Tensor, here: Tensor, weights: Tensor, shape: Shape) -> Places:
    present = here.any(1)
    from_each = torch.stack([part.sum() for part in present.split(list(shape.tokens))])
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
class Picks:
    """Where that lies what one rank's tokens get back: J = K rows a token, rank_major one of each rank."""

    owner: Tensor  # [T, K] rank on which the pick lies, -1: dropped, or there is none
    rank: Tensor  # [T, J] of the row, -1: there is none
    row: Tensor  # [T, J] on that rank, 0 where there is none
    weight: Tensor  # [T, J] that the row is multiplied by, if any


def picks_of(tokens: slice, everywhere: list[Places], weights: Tensor, *, is_rank_major: bool) -> Picks:
    """Of these tokens; `weights` [tokens, K] of all."""
    rows = torch.stack([there.pick_row[tokens] for there in everywhere])
    ranks = torch.arange(len(everywhere), device=rows.device)
    row, owner = rows.max(0)  # there is one rank at most
    owner = torch.where(row < 0, -1, owner)
    if not is_rank_major:
        return Picks(owner, owner, row.clamp(min=0), weights[tokens])
    row = rows.max(2).values.T
    rank = torch.where(row < 0, -1, ranks)
    return Picks(owner, rank, row.clamp(min=0), torch.ones_like(row, dtype=torch.float32))


@dataclass(frozen=True)
class Routing:
    """The routing of a call, and what follows from it on one rank."""

    shape: Shape
    ids: Tensor  # [T, K] of its own tokens
    weights: Tensor
    here: Places
    picks: Picks
    filled: Tensor  # numbers of the rows that hold a token
    sizes: Tensor  # int32, as `Handle.sizes`

    def promised(self, *, holes: bool) -> Tensor | slice:
        """Rows whose content is: up to num_rows, of masked those that hold a token; without `holes` only these."""
        if self.shape.layout == "masked" or (self.shape.layout == "expert_major" and not holes):
            return self.filled
        return slice(self.here.num_rows)


def routed(shape: Shape, absent: float, seed: int, rank: int, device: torch.device) -> Routing:
    """The routing of a seed."""
    ids, weights = drawn_routing(shape, absent, seed, device)
    everywhere = [places(ids, weights, each, shape) for each in range(shape.num_ranks)]
    mine, here = shape.tokens_of(rank), everywhere[rank]
    picks = picks_of(mine, everywhere, weights, is_rank_major=shape.layout == "rank_major")
    sizes = torch.cat([here.counts, here.offsets, here.counts.new_tensor([here.num_rows])]).to(torch.int32)
    return Routing(shape, ids[mine], weights[mine], here, picks, (here.row_token >= 0).nonzero()[:, 0], sizes)


def row_names(rows: Tensor, rank: Tensor | int) -> Tensor:
    """For `values` of expert outputs."""
    return rows * MAX_RANKS + rank


def rows_back(picks: Picks, num_columns: int, seed: int, dtype: torch.dtype) -> Tensor:
    """[T, J, H]: what tokens get back where expert outputs are `values` of their `row_names`."""
    names = row_names(picks.row, picks.rank)
    return values(names.flatten(), num_columns, seed, dtype).view(*names.shape, num_columns)


@dataclass(frozen=True)
class Sum:
    """How combine adds."""

    num_ranks: int
    is_rank_major: bool
    weighted: bool
    wire: str | None = None


def sums(rows: Tensor, picks: Picks, how: Sum, bias: Tensor | None = None) -> Tensor:
    """y of the tokens that get `rows` [T, J, H] back: products rounded, k in order, each rank's sum rounded to the
    wire, ranks ascending, then the bias.
    """
    wide, dtype = rows.to(torch.float32), rows.dtype
    if how.weighted and not how.is_rank_major:
        wide = wide * picks.weight[..., None]
    total = torch.zeros_like(wide[:, 0])
    for rank in range(how.num_ranks):
        here = (picks.rank == rank).to(torch.float32)[..., None]
        partial = torch.zeros_like(total)
        for j in [rank] if how.is_rank_major else range(wide.shape[1]):
            partial.addcmul_(wide[:, j], here[:, j])  # by 0 or 1: the same bits whether it is fused or not
        total += partial.to(dtype) if how.wire is None else reference.through_fp8(partial)
    return (total if bias is None else total + bias.to(torch.float32)).to(dtype)


def side_of(rows: Tensor, top_k: int, layout: str) -> Tensor:
    """The side values that go with expert outputs [N, H], or [L, C, H]: their first columns."""
    return rows[..., :top_k].to(torch.float32) if layout == "rank_major" else rows[..., 0].to(torch.float32)


def side_sums(rows: Tensor, picks: Picks, *, is_rank_major: bool) -> Tensor:
    """[T, K]: what `side_of` says of each pick's row; `rows` [T, J, H] as for `sums`."""
    num_tokens, top_k = picks.owner.shape
    if is_rank_major:
        tokens = torch.arange(num_tokens, device=rows.device)[:, None]
        side = rows[tokens, picks.owner.clamp(min=0), torch.arange(top_k, device=rows.device)]
    else:
        side = rows[..., 0]
    return torch.where(picks.owner < 0, 0, side.to(torch.float32))


@dataclass(frozen=True)
class Form:
    """How rows are dispatched."""

    quantize: str | None
    zero_holes: bool


class Compared:
    """Counts words that differ from what is expected; nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.num_words = 0

    def count(self, got: Tensor, want: Tensor) -> None:
        """Of two tensors of one shape."""
        self.wrong += num_different(got, want)
        self.num_words += got.numel()

    def routing(self, received: weft.Dispatched, routing: Routing) -> None:
        """Counts, offsets, weights and ids."""
        here, where = routing.here, routing.promised(holes=True)
        given = (received.num_tokens_per_expert, received.offsets, received.num_rows.view(1))
        self.count(torch.cat(given), routing.sizes)  # the caller's copy
        self.count(received.handle.sizes, routing.sizes)  # what later calls read
        self.count(received.topk_weights.reshape(here.row_weight.shape)[where], here.row_weight[where])
        if received.topk_idx is not None and here.row_ids is not None:
            self.count(received.topk_idx[where], here.row_ids[where].to(received.topk_idx.dtype))

    def rows(self, x: Tensor | weft.Quantized, routing: Routing, sent: Tensor, form: Form) -> None:
        """What came of the rows `sent` by all ranks."""
        row_token = routing.here.row_token
        if isinstance(x, Tensor):
            where = routing.promised(holes=form.zero_holes)
            named = row_token[where]
            want = sent[named.clamp(min=0)]
            if routing.shape.alignment > 1:
                want.masked_fill_((named < 0)[:, None], 0)
            self.count(x.reshape(len(row_token), x.shape[-1])[where], want)
            return
        where = routing.filled  # what data and scales say in holes is not promised
        data, scales = reference.quantize_fp8(
            sent, ue8m0=form.quantize == "fp8_ue8m0", pow2=form.quantize == "fp8_pow2"
        )
        for got, want in ((x.data, data), (x.scales, scales)):
            if got is None:
                raise AssertionError("no scales")
            # What is promised alone is read: masked columns have no place to be reshaped to.
            at = (where,) if got.dim() == 2 else (where // got.shape[1], where % got.shape[1])
            got = got[at]
            if want.element_size() == 1:  # column-major UE8M0 comes in words of four
                got, want = got.view(torch.uint8), want.view(torch.uint8)
            self.count(got[:, : want.shape[-1]], want[row_token[where]])


def planted_in(received: weft.Dispatched, row: int) -> list[Tensor]:
    """A word of each part of a result of plain rows, as an int that a test may change; `row`: that holds a token."""
    handle, parts = received.handle, [received.x, received.topk_weights, received.topk_idx]
    num_rows = handle.topk_weights.shape[: len(handle.rows_shape)].numel()
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = [
        part.view(ints[part.element_size()]).view(num_rows, -1)[row, -1:] for part in parts if isinstance(part, Tensor)
    ]
    return [*words, received.num_tokens_per_expert[-1:], received.offsets[-1:], received.num_rows.view(1)]


def poison(*parts: Tensor | weft.Quantized | None) -> None:
    """Overwrite every byte, so that a word nobody writes is seen."""
    for part in parts:
        if isinstance(part, weft.Quantized):
            poison(part.data, part.scales)
        elif part is not None and part.numel():
            (part if part.stride(-1) == 1 else part.mT).detach().view(torch.uint8).fill_(POISON)


def poison_handle(handle: weft.Handle) -> None:
    """Before it is dropped: of the next result that lies there ids, weights, counts and plans must be written anew."""
    poison(handle.topk_weights, handle.topk_idx)  # the caller's copies
    poison(handle.weights, handle.idx, handle.sizes, handle.send_plan, handle.recv_plan)
