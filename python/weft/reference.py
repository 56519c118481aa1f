"""The specification of dispatch, combine, FP8 quantisation and their gradients, in plain torch.

One process, all ranks at once: every list has one entry per rank. Nothing here is shared with an engine, nothing is
fast, and every engine must give the same bits. Sums are explicit loops (over k, then over ranks) of a product, then an
addition, on separate fp32 tensors, because ``sum``, ``index_add_`` and ``addcmul`` may reorder or fuse.

All functions run on the CPU, never synchronise with anything, and expect correct arguments (ids out of range excepted,
they count as -1): this module explains results, ``weft.ExpertParallel`` explains mistakes.
"""
# check: allow file-size: the specification in one place

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from weft.call.expert_map import ExpertMap
from weft.quantized import Quantized

__all__ = [
    "CombineGradients",
    "Dispatched",
    "Routing",
    "combine",
    "combine_backward",
    "covered_experts",
    "dequantize_fp8",
    "dispatch",
    "dispatch_backward",
    "physical_ids",
    "picks_of_map",
    "quantize_fp8",
    "renormalized",
    "repeat_dispatch",
    "repeat_side",
    "sources",
    "through_fp8",
]

GROUP = 128  # elements of a row that share one FP8 scale
FP8_MAX = 448.0  # largest finite value of e4m3
FP8_MIN_AMAX = 1e-4  # a group of zeros gets the scale of this amax, not 0


@dataclass(frozen=True)
class Routing:
    """Where every pick of every rank went; what ``combine`` and ``repeat_dispatch`` need.

    Tokens of all ranks are numbered in one sequence: by rank, then as given. ``rows[d]`` is int64 [sum of T, K]: the
    row of pick (token, k) on rank d, -1 where the pick is not there (another rank's, -1, out of range, rank lost, or
    dropped). ``row_shape[d]`` is the shape of d's x without its last dimension: (N,), masked (L, C).
    """

    layout: str
    num_tokens: tuple[int, ...]  # per rank
    active_ranks: tuple[int, ...]
    rows: tuple[Tensor, ...]
    row_shape: tuple[tuple[int, ...], ...]
    weights: tuple[Tensor, ...]  # fp32, as received on each rank


@dataclass(frozen=True)
class Dispatched:
    """What one rank receives; fields as in ``weft.Dispatched``.

    Where an engine leaves rows undefined (behind ``num_rows`` under capacity, tails of masked) they are zero here.
    """

    x: Tensor | Quantized  # [N, H], masked [L, C, H]
    topk_idx: Tensor | None  # rank_major only: [N, K] local ids, -1 elsewhere
    topk_weights: Tensor  # fp32: rank_major [N, K], expert_major [N], masked [L, C]
    num_tokens_per_expert: Tensor  # int32 [L]: picks kept
    offsets: Tensor  # int32: rank_major [R+1], else [L+1]
    num_rows: Tensor  # int32 []
    overflow: Tensor  # int64 []: picks dropped here by this call
    routing: Routing  # the same object on every rank


@dataclass(frozen=True)
class CombineGradients:
    """Gradients of ``combine``'s inputs, one entry per rank."""

    outputs: list[Tensor]  # like the expert outputs, zero where no pick is
    weights: list[Tensor]  # like the weights received, fp32; zeros in rank_major or with weighted=False
    sides: list[Tensor] | None  # like the weights received; None if no gradient of side was given


def dispatch(
    xs: Sequence[Tensor | Quantized],
    topk_idxs: Sequence[Tensor],
    topk_weights: Sequence[Tensor] | None = None,
    *,
    num_experts: int,
    layout: str = "rank_major",
    alignment: int = 1,
    quantize: str | None = None,
    scale_layout: str = "row_major",
    capacity: int | None = None,
    active_ranks: Iterable[int] | None = None,
    expert_map: ExpertMap | None = None,
    absent: str = "drop",
) -> list[Dispatched]:
    """Send every token to the ranks that hold its experts.

    xs: per rank [T, H] bf16, fp16 or fp32, or ``Quantized`` with data [T, B] and scales [T, S] or None. topk_idxs: [T,
    K] int32 or int64; topk_weights: [T, K] fp32 (None: ones). Expert e lives on rank ``e // L`` with L = num_experts /
    number of ranks. quantize: None, "fp8", "fp8_ue8m0" or "fp8_pow2". scale_layout: "row_major" or "column_major"
    (``weft.Quantized``). Ranks not in ``active_ranks`` (None: all) send and receive nothing: the entries given for them
    are ignored but their K, and picks of their experts are absent. Capacity: rows in all, masked: rows an expert.
    expert_map: ids are logical (``physical_ids``). absent: "drop", or "renormalize" (``renormalized``).
    """
    num_ranks = len(xs)
    num_local = num_experts // num_ranks
    active = tuple(range(num_ranks)) if active_ranks is None else tuple(sorted(active_ranks))
    if topk_weights is None:
        topk_weights = [torch.ones(idx.shape, dtype=torch.float32, device="cpu") for idx in topk_idxs]
    if absent == "renormalize":
        covered = covered_experts(num_experts, num_ranks, active, expert_map)
        topk_weights = [renormalized(*each, covered) for each in zip(topk_weights, topk_idxs, strict=True)]
    if expert_map is not None:
        topk_idxs = [
            physical_ids(idx, expert_map, rank, active, num_local).to(idx.dtype) for rank, idx in enumerate(topk_idxs)
        ]
    num_tokens = tuple(len(idx) if rank in active else 0 for rank, idx in enumerate(topk_idxs))
    source = torch.repeat_interleave(
        torch.arange(num_ranks, dtype=torch.int64, device="cpu"),
        torch.tensor(num_tokens, dtype=torch.int64, device="cpu"),
    )
    picks = torch.cat([idx[:n].to(torch.int64) for idx, n in zip(topk_idxs, num_tokens, strict=True)])
    pick_weights = torch.cat([w[:n].detach() for w, n in zip(topk_weights, num_tokens, strict=True)])

    shape = _Shape(layout, num_ranks, num_local, alignment, capacity)
    places = []
    for rank in range(num_ranks):
        local = picks - rank * num_local
        here = (local >= 0) & (local < num_local) & (rank in active)
        places.append(_place(torch.where(here, local, -1), source, shape))
    received = [_received_weights(place, pick_weights, layout) for place in places]
    routing = Routing(
        layout=layout,
        num_tokens=num_tokens,
        active_ranks=active,
        rows=tuple(place.rows for place in places),
        row_shape=tuple(place.row_shape for place in places),
        weights=tuple(received),
    )
    tensors = repeat_dispatch(xs, routing, quantize=quantize, scale_layout=scale_layout)
    return [
        Dispatched(
            x=tensors[rank],
            topk_idx=_received_ids(places[rank]).to(topk_idxs[rank].dtype) if layout == "rank_major" else None,
            topk_weights=received[rank],
            num_tokens_per_expert=places[rank].counts.to(torch.int32),
            offsets=places[rank].offsets.to(torch.int32),
            num_rows=torch.tensor(places[rank].num_rows, dtype=torch.int32, device="cpu"),
            overflow=torch.tensor(places[rank].num_dropped, dtype=torch.int64, device="cpu"),
            routing=routing,
        )
        for rank in range(num_ranks)
    ]


def physical_ids(
    topk_idx: Tensor, expert_map: ExpertMap, rank: int, active_ranks: Sequence[int], num_local: int
) -> Tensor:
    """Ids of logical experts [T, K] of one rank as physical ones, int64; -1: none.

    Of the replicas on active ranks, in the order of the map, those on this rank if there are any, else all; of n pick
    (token, k) takes number (token + rank) mod n.
    """
    choices = []
    for row in expert_map.replicas.tolist():
        there = [slot for slot in row if slot >= 0 and slot // num_local in active_ranks]
        mine = [slot for slot in there if slot // num_local == rank]
        choices.append(mine or there)
    found = torch.full(topk_idx.shape, -1, dtype=torch.int64, device="cpu")
    for token, row in enumerate(topk_idx.tolist()):
        for k, logical in enumerate(row):
            of_it = choices[logical] if 0 <= logical < len(choices) else []
            if of_it:
                found[token, k] = of_it[(token + rank) % len(of_it)]
    return found


def covered_experts(
    num_experts: int, num_ranks: int, active_ranks: Sequence[int], expert_map: ExpertMap | None = None
) -> Tensor:
    """bool, by id (logical with a map): whether an active rank has the expert."""
    rows = [[slot] for slot in range(num_experts)] if expert_map is None else expert_map.replicas.tolist()
    num_local = num_experts // num_ranks
    found = [any(slot >= 0 and slot // num_local in active_ranks for slot in row) for row in rows]
    return torch.tensor(found, dtype=torch.bool, device="cpu")


def renormalized(topk_weights: Tensor, topk_idx: Tensor, covered: Tensor) -> Tensor:
    """Weights [T, K] fp32 of one rank: where picks of a token are absent the others are scaled by S / P, S the sum of
    the weights of all its picks, P of those left, by ascending k; P = 0: as they are. Gradients flow."""
    rows = []
    for weights, ids in zip(topk_weights, topk_idx.tolist(), strict=True):
        picks = [k for k, expert in enumerate(ids) if 0 <= expert < len(covered)]
        left = [k for k in picks if covered[ids[k]]]
        whole, part = weights.new_zeros(()), weights.new_zeros(())
        for k in picks:
            whole = whole + weights[k]
        for k in left:
            part = part + weights[k]
        is_scaled = len(left) < len(picks) and bool(part != 0)
        scale = whole / part if is_scaled else whole
        of_token = [weights[k] * scale if is_scaled and k in left else weights[k] for k in range(len(ids))]
        rows.append(torch.stack(of_token))
    return torch.stack(rows) if rows else topk_weights


@dataclass(frozen=True)
class _Place:
    """One rank's rows: ``local`` ids [tokens, K] (-1: not here or dropped) and the ``rows`` these picks have."""

    local: Tensor
    rows: Tensor
    row_shape: tuple[int, ...]
    counts: Tensor
    offsets: Tensor
    num_rows: int
    num_dropped: int


@dataclass(frozen=True)
class _Shape:
    """What is equal on all ranks."""

    layout: str
    num_ranks: int
    num_local: int
    alignment: int
    capacity: int | None


def _place(local: Tensor, source: Tensor, shape: _Shape) -> _Place:
    """Number one rank's rows; local: int64 [tokens, K] ids here, -1 elsewhere; source: int64 [tokens] owning rank."""
    layout, num_local, capacity = shape.layout, shape.num_local, shape.capacity
    here = local >= 0
    if layout == "rank_major":  # one row per token that has a pick here, by source rank, then token
        present = here.any(dim=1)
        rows = torch.where(here, (present.cumsum(0) - 1)[:, None], -1)
        offsets = _starts(torch.bincount(source[present], minlength=shape.num_ranks))
        limit = int(offsets[-1]) if capacity is None else capacity
        row_shape: tuple[int, ...] = (limit,)
        kept = here & (rows < limit)
    else:  # one row per pick, by expert, then source rank, token, k: nonzero() lists (token, k) in that order
        index = torch.full_like(local, -1)  # of the pick within its expert
        counts = torch.zeros(num_local, dtype=torch.int64, device="cpu")
        for expert in range(num_local):
            chosen = (local == expert).nonzero(as_tuple=True)
            counts[expert] = len(chosen[0])
            index[chosen] = torch.arange(len(chosen[0]), dtype=torch.int64, device="cpu")
        if layout == "expert_major":
            offsets = _starts((counts + shape.alignment - 1) // shape.alignment * shape.alignment)
            limit = int(offsets[-1]) if capacity is None else capacity
            row_shape = (limit,)
            rows = torch.where(here, offsets[local.clamp(min=0)] + index, -1)
            kept = here & (rows < limit)
        elif layout == "masked" and capacity is not None:
            offsets = torch.arange(num_local + 1, dtype=torch.int64, device="cpu") * capacity
            limit = num_local * capacity
            row_shape = (num_local, capacity)
            rows = torch.where(here, local * capacity + index, -1)
            kept = here & (index < capacity)
        else:
            raise ValueError(f"layout={layout!r}, capacity={capacity}: no such layout")
    offsets = offsets.clamp(max=limit)
    return _Place(
        local=torch.where(kept, local, -1),
        rows=torch.where(kept, rows, -1),
        row_shape=row_shape,
        counts=torch.bincount(local[kept], minlength=num_local),
        offsets=offsets,
        num_rows=int(kept.sum()) if layout == "masked" else int(offsets[-1]),
        num_dropped=int(here.sum() - kept.sum()),
    )


def _starts(sizes: Tensor) -> Tensor:
    """[n] sizes -> [n + 1] starts, the last is the end."""
    return torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), sizes.cumsum(0)])


def picks_of_map(
    routing_map: Tensor, probs: Tensor | None, num_experts: int, top_k: int
) -> tuple[Tensor, Tensor | None]:
    """A map bool [T, E] and weights [T, E] as ids and weights [T, K]: ascending, -1 and 0 behind them; E in the first
    place of a row with more than K."""
    ids = torch.full((len(routing_map), top_k), -1, dtype=torch.int64, device="cpu")
    weights = torch.zeros((len(routing_map), top_k), dtype=torch.float32, device="cpu")
    for token, row in enumerate(routing_map.tolist()):
        chosen = [expert for expert in range(num_experts) if row[expert]]
        for k, expert in enumerate(chosen[:top_k]):
            ids[token, k] = num_experts if k == 0 and len(chosen) > top_k else expert
            if probs is not None:
                weights[token, k] = probs[token, expert]
    return ids, None if probs is None else weights


def sources(routing: Routing | Sequence[Dispatched]) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Per rank source rank, token and k (rank_major: None) of each of its rows, int32; -1 where none is."""
    routing = _routing(routing)
    found = []
    for rows, shape in zip(routing.rows, routing.row_shape, strict=True):
        tables = [torch.full(shape, -1, dtype=torch.int32, device="cpu") for _ in range(3)]
        first = 0
        for rank, count in enumerate(routing.num_tokens):
            for token, of_token in enumerate(rows[first : first + count].tolist()):
                for k, row in enumerate(of_token):
                    for table, value in zip(tables, (rank, token, k), strict=True):
                        if row >= 0:
                            table.view(-1)[row] = value
            first += count
        found.append((tables[0], tables[1], None if routing.layout == "rank_major" else tables[2]))
    return found


def _received_ids(place: _Place) -> Tensor:
    """rank_major: [N, K] local ids of the rows, -1 elsewhere."""
    ids = torch.full((*place.row_shape, place.local.shape[1]), -1, dtype=torch.int64, device="cpu")
    token, k = (place.rows >= 0).nonzero(as_tuple=True)
    ids[place.rows[token, k], k] = place.local[token, k]
    return ids


def _received_weights(place: _Place, pick_weights: Tensor, layout: str) -> Tensor:
    """Weights as they arrive on one rank: rank_major [N, K], expert_major [N], masked [L, C]; 0 where no pick is."""
    return _scatter_picks(pick_weights, place.rows, place.row_shape, layout)


def _scatter_picks(values: Tensor, rows: Tensor, row_shape: tuple[int, ...], layout: str) -> Tensor:
    """A value per pick [tokens, K] -> its place beside the rows: rank_major [N, K], else one per row."""
    token, k = (rows >= 0).nonzero(as_tuple=True)
    if layout == "rank_major":
        received = values.new_zeros((*row_shape, values.shape[1]))
        received[rows[token, k], k] = values[token, k]
        return received
    received = values.new_zeros(row_shape)
    received.view(-1)[rows[token, k]] = values[token, k]
    return received


def repeat_side(sides: Sequence[Tensor], routing: Routing | Sequence[Dispatched]) -> list[Tensor]:
    """Floats of the tokens' owners along the same routing (``dispatch(x, handle=h, side=s).side``): per rank [T, K] ->
    fp32 in the places of topk_weights, 0 where there is no pick."""
    routing = _routing(routing)
    values = torch.cat([each[:n].detach().to(torch.float32) for each, n in zip(sides, routing.num_tokens, strict=True)])
    return [
        _scatter_picks(values, rows, shape, routing.layout)
        for rows, shape in zip(routing.rows, routing.row_shape, strict=True)
    ]


def repeat_dispatch(
    xs: Sequence[Tensor | Quantized],
    routing: Routing,
    *,
    quantize: str | None = None,
    scale_layout: str = "row_major",
) -> list[Tensor | Quantized]:
    """Send other rows the same way (``dispatch(x, handle=h)``): per rank [T, ...] -> rows in the routing's layout."""
    if quantize is not None:
        form = {"ue8m0": quantize == "fp8_ue8m0", "pow2": quantize == "fp8_pow2"}
        xs = [Quantized(*quantize_fp8(x, **form)) for x in xs if isinstance(x, Tensor)]

    def moved(part: Callable[[Tensor | Quantized], Tensor]) -> list[Tensor]:
        tokens = torch.cat([_as_bytes(part(x)[:n]) for x, n in zip(xs, routing.num_tokens, strict=True)])
        received = []
        for rank, x in enumerate(xs):
            out = torch.zeros((*routing.row_shape[rank], tokens.shape[1]), dtype=torch.uint8, device="cpu")
            token, k = (routing.rows[rank] >= 0).nonzero(as_tuple=True)
            out.view(-1, tokens.shape[1])[routing.rows[rank][token, k]] = tokens[token]
            received.append(out.view(part(x).dtype))
        return received

    if all(isinstance(x, Tensor) for x in xs):
        return list(moved(_data))
    data = moved(_data)
    no_scales = all(isinstance(x, Quantized) and x.scales is None for x in xs)
    scales = [None] * len(xs) if no_scales else moved(_scales)
    if scale_layout == "column_major":
        scales = [_column_major(each) for each in moved(_scales)]
    return [Quantized(d, s) for d, s in zip(data, scales, strict=True)]


def _data(x: Tensor | Quantized) -> Tensor:
    return x.data if isinstance(x, Quantized) else x


def _scales(x: Tensor | Quantized) -> Tensor:
    if isinstance(x, Tensor) or x.scales is None:
        raise ValueError("scales given on some ranks only")
    return x.scales


def _column_major(scales: Tensor) -> Tensor:
    """[..., N, S] -> the same in memory by columns of a multiple of 16 bytes; bytes as int32 words of four."""
    if scales.element_size() == 1:
        packed = torch.nn.functional.pad(scales.view(torch.uint8), (0, -scales.shape[-1] % 4))
        scales = packed.view(torch.int32)
    num_rows = scales.shape[-2]
    padding = -num_rows % (16 // scales.element_size())
    columns = scales.new_zeros((*scales.shape[:-2], scales.shape[-1], num_rows + padding))
    columns[..., :num_rows] = scales.mT
    return columns.mT[..., :num_rows, :]


def _as_bytes(rows: Tensor) -> Tensor:
    if rows.element_size() == 1:  # torch has no copies of some such types
        rows = rows.view(torch.uint8)
    return rows.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8)


@overload
def combine(
    outputs: Sequence[Tensor],
    routing: Routing | Sequence[Dispatched],
    *,
    weighted: bool = ...,
    sides: None = ...,
    biases: Sequence[Tensor | None] | None = ...,
    wire: str | None = ...,
    order: str = ...,
    side_lanes: str = ...,
    owner_weights: Sequence[Tensor] | None = ...,
    sum_domain: int | None = ...,
) -> list[Tensor]: ...
@overload
def combine(
    outputs: Sequence[Tensor],
    routing: Routing | Sequence[Dispatched],
    *,
    weighted: bool = ...,
    sides: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = ...,
    wire: str | None = ...,
    order: str = ...,
    side_lanes: str = ...,
    owner_weights: Sequence[Tensor] | None = ...,
    sum_domain: int | None = ...,
) -> list[tuple[Tensor, Tensor]]: ...
def combine(
    outputs: Sequence[Tensor],
    routing: Routing | Sequence[Dispatched],
    *,
    weighted: bool = True,
    sides: Sequence[Tensor] | None = None,
    biases: Sequence[Tensor | None] | None = None,
    wire: str | None = None,
    order: str = "rank",
    side_lanes: str = "own",
    owner_weights: Sequence[Tensor] | None = None,
    sum_domain: int | None = None,
) -> list[Tensor] | list[tuple[Tensor, Tensor]]:
    """Bring expert outputs back to the tokens' owners and sum them.

    outputs: per rank [N, H] (masked [L, C, H]), one dtype of bf16, fp16, fp32: it is y's, and the wire type. wire
    "fp8": what a rank contributes to a token is quantised from its fp32 sum (``through_fp8``). sides: fp32, rank_major
    [N, K] or [N] (the same for every pick), expert_major [N], masked [L, C]. biases: [T, H] or [H].
    Returns per rank y [T, H], with sides (y, side [T, K] fp32). ``weighted`` is ignored in rank_major, whose rows are a
    rank's partial sums already.

    side_lanes: "own": of each pick the value at its rank. "all" (rank_major): every lane is summed over the ranks that
    hold the token, ascending.

    order: "rank": contributions of ranks ascending, then the bias. "last_pick": the bias, then contributions by the
    last k that the rank has a pick of. "pick" (not rank_major, no wire): the bias, then rows by k, nothing rounded
    between. owner_weights, with "pick" alone: per rank [T, K] fp32 in place of the weights received; a pick of weight 0
    is absent.

    sum_domain: d, neither 1 nor the number of ranks (None): ranks 0 to d - 1, d to 2 d - 1 and so on are domains.
    Contributions have the outputs' type. Those of a domain are added in the said order, rounded once to the wire type,
    and domains are added ascending in their stead. "pick" has none.
    """
    routing = _routing(routing)
    hidden, dtype = outputs[0].shape[-1], outputs[0].dtype
    num_tokens, top_k = routing.rows[0].shape
    total = torch.zeros((num_tokens, hidden), dtype=torch.float32, device="cpu")
    if order != "rank" and biases is not None:
        total = total + _by_token(biases, routing.num_tokens, hidden)
    weights = [None if not weighted or routing.layout == "rank_major" else each for each in routing.weights]
    if order == "pick":
        owner = (
            None
            if owner_weights is None
            else torch.cat([each[:n].detach() for each, n in zip(owner_weights, routing.num_tokens, strict=True)])
        )
        for k in range(top_k):
            for rank in routing.active_ranks:
                token, product = _products(outputs[rank], routing.rows[rank][:, k], weights[rank], owner, k)
                total[token] = total[token] + product
    else:
        by_last_pick = order == "last_pick"
        for present, contribution in _by_domain(outputs, routing, weights, wire, sum_domain, by_last_pick=by_last_pick):
            total[present] = total[present] + contribution
    ys = list(torch.split(total, list(routing.num_tokens)))
    if order == "rank" and biases is not None:
        ys = [y if bias is None else y + bias.detach().to(torch.float32) for y, bias in zip(ys, biases, strict=True)]
    ys = [y.to(dtype) for y in ys]
    if sides is None:
        return ys
    side_total = torch.zeros((num_tokens, top_k), dtype=torch.float32, device="cpu")
    for rank in routing.active_ranks:
        rows = routing.rows[rank]
        if side_lanes == "all":
            rows = rows.amax(dim=1, keepdim=True).expand(-1, top_k)
        for k in range(top_k):
            (token,) = (rows[:, k] >= 0).nonzero(as_tuple=True)
            values = _side(sides[rank].detach(), rows[token, k], k, routing.layout)
            side_total[token, k] = side_total[token, k] + values
    return list(zip(ys, torch.split(side_total, list(routing.num_tokens)), strict=True))


def _by_token(biases: Sequence[Tensor | None], num_tokens: Sequence[int], hidden: int) -> Tensor:
    """fp32 [sum of T, H], 0 where no bias is."""
    rows = []
    for bias, count in zip(biases, num_tokens, strict=True):
        given = torch.zeros(hidden, dtype=torch.float32, device="cpu") if bias is None else bias.detach()
        rows.append((given[:count] if given.dim() == 2 else given).to(torch.float32).expand(count, hidden))
    return torch.cat(rows)


def _products(
    output: Tensor, rows: Tensor, weights: Tensor | None, owner_weights: Tensor | None, k: int
) -> tuple[Tensor, Tensor]:
    """Of pick k: tokens whose pick has a row here (rows [tokens], -1: none), and the weighted rows in fp32."""
    is_here = rows >= 0
    if owner_weights is not None:
        is_here = is_here & (owner_weights[:, k] != 0)
    (token,) = is_here.nonzero(as_tuple=True)
    y = output.detach().reshape(-1, output.shape[-1]).to(torch.float32)[rows[token]]
    if owner_weights is not None:
        return token, owner_weights[token, k, None] * y
    return token, y if weights is None else weights.detach().reshape(-1)[rows[token], None] * y


def _by_domain(
    outputs: Sequence[Tensor],
    routing: Routing,
    weights: Sequence[Tensor | None],
    wire: str | None,
    sum_domain: int | None,
    *,
    by_last_pick: bool,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens, and what a domain adds to each, fp32 as it arrives; without domains what a rank does."""
    num_ranks, dtype = len(routing.rows), outputs[0].dtype
    if sum_domain is None or sum_domain in (1, num_ranks):
        yield from _contributions(outputs, routing, weights, wire, routing.active_ranks, by_last_pick=by_last_pick)
        return
    for first in range(0, num_ranks, sum_domain):
        ranks = [rank for rank in routing.active_ranks if first <= rank < first + sum_domain]
        total = torch.zeros((len(routing.rows[0]), outputs[0].shape[-1]), dtype=torch.float32, device="cpu")
        is_present = torch.zeros(len(total), dtype=torch.bool, device="cpu")
        for present, contribution in _contributions(outputs, routing, weights, None, ranks, by_last_pick=by_last_pick):
            total[present] = total[present] + contribution
            is_present[present] = True
        arrived = through_fp8(total) if wire == "fp8" else total.to(dtype).to(torch.float32)
        (present,) = is_present.nonzero(as_tuple=True)
        yield present, arrived[present]


def _contributions(
    outputs: Sequence[Tensor],
    routing: Routing,
    weights: Sequence[Tensor | None],
    wire: str | None,
    ranks: Sequence[int],
    *,
    by_last_pick: bool,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens, and what each of `ranks` adds to them, fp32 as it arrives: rank by rank, or by the last k of each in the
    token."""
    num_tokens, top_k = routing.rows[0].shape
    hidden, dtype = outputs[0].shape[-1], outputs[0].dtype
    of_ranks = []
    for rank in ranks:
        rows = routing.rows[rank]
        partial = torch.zeros((num_tokens, hidden), dtype=torch.float32, device="cpu")
        for k in range(top_k):
            token, product = _products(outputs[rank], rows[:, k], weights[rank], None, k)
            partial[token] = product if routing.layout == "rank_major" else partial[token] + product
        arrived = through_fp8(partial) if wire == "fp8" else partial.to(dtype).to(torch.float32)
        last = torch.where(rows >= 0, torch.arange(top_k, dtype=torch.int64, device="cpu"), -1).amax(dim=1)
        if by_last_pick:
            of_ranks.append((arrived, last))
        else:
            (present,) = (last >= 0).nonzero(as_tuple=True)
            yield present, arrived[present]
    for k in range(top_k):
        for arrived, last in of_ranks:
            (present,) = (last == k).nonzero(as_tuple=True)
            yield present, arrived[present]


def _routing(routing: Routing | Sequence[Dispatched]) -> Routing:
    return routing if isinstance(routing, Routing) else routing[0].routing


def _side(side: Tensor, row: Tensor, k: int, layout: str) -> Tensor:
    """The side values of pick k of the given rows."""
    if layout == "rank_major" and side.ndim == 2:
        return side[row, k]
    return side.reshape(-1)[row]


def dispatch_backward(
    grad_xs: Sequence[Tensor],
    routing: Routing | Sequence[Dispatched],
    grad_weights: Sequence[Tensor] | None = None,
    *,
    sum_domain: int | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of dispatch: from those of its rows and of the weights received.

    A combine without weights, whose side carries the weight gradients (None: zeros). Returns per rank grad x [T, H] and
    grad topk_weights [T, K] fp32. Same bits on every engine.
    """
    routing = _routing(routing)
    sides = [torch.zeros_like(w) for w in routing.weights] if grad_weights is None else grad_weights
    back = combine(grad_xs, routing, weighted=False, sides=sides, sum_domain=sum_domain)
    return [pair[0] for pair in back], [pair[1] for pair in back]


def combine_backward(
    grad_ys: Sequence[Tensor],
    outputs: Sequence[Tensor],
    routing: Routing | Sequence[Dispatched],
    *,
    weighted: bool = True,
    grad_sides: Sequence[Tensor] | None = None,
) -> CombineGradients:
    """Gradients of combine: from those of y, per rank [T, H], and of the side returned, [T, K] (None: not asked for).

    A dispatch of grad y along the same routing. Where weights are applied: grad output = w * grad y, rounded once; grad
    w = the dot product of grad y and output (here in fp64; engines to 1e-5 relative). Bias's gradient is grad y ([H]:
    its sum over tokens).
    """
    routing = _routing(routing)
    arrived = [_data(x) for x in repeat_dispatch(grad_ys, routing)]
    grad_weights = [torch.zeros_like(w) for w in routing.weights]
    if weighted and routing.layout != "rank_major":
        grad_weights = [
            torch.where(holds_pick, (g.double() * y.detach().double()).sum(-1), 0.0).to(torch.float32)
            for g, y, holds_pick in zip(arrived, outputs, _holds_pick(routing), strict=True)
        ]
        arrived = [
            (w[..., None] * g.to(torch.float32)).to(g.dtype) for w, g in zip(routing.weights, arrived, strict=True)
        ]
    side_gradients = None
    if grad_sides is not None:
        values = torch.cat(list(grad_sides))
        side_gradients = [
            _scatter_picks(values, rows, shape, routing.layout)
            for rows, shape in zip(routing.rows, routing.row_shape, strict=True)
        ]
    return CombineGradients(outputs=arrived, weights=grad_weights, sides=side_gradients)


def _holds_pick(routing: Routing) -> list[Tensor]:
    """Per rank a mask over its rows: True where a pick lies."""
    masks = []
    for rows, shape in zip(routing.rows, routing.row_shape, strict=True):
        mask = torch.zeros(shape, dtype=torch.bool, device="cpu")
        mask.view(-1)[rows[rows >= 0]] = True
        masks.append(mask)
    return masks


def quantize_fp8(x: Tensor, *, ue8m0: bool = False, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """[..., H] bf16, fp16 or fp32 -> (data [..., H] float8_e4m3fn, scales [..., ceil(H / 128)]).

    a = max(amax |x| over a group of 128, 1e-4). scale = a / 448 (fp32), q = x * (448 / a); ue8m0: scale = 2^e >= a /
    448, stored as the biased exponent (float8_e8m0fnu), q = x * 2^-e; pow2: the same, 2^e as fp32. q is rounded to
    nearest even and saturates at 448. A NaN in a group makes its scale and every q NaN; an infinity gives scale inf and
    q = x * 0, ue8m0 and pow2: scale and every q NaN. OCP MX and FP8 formats.
    """
    hidden = x.shape[-1]
    num_groups = (hidden + GROUP - 1) // GROUP
    groups = torch.nn.functional.pad(x.detach().to(torch.float32), (0, num_groups * GROUP - hidden))
    groups = groups.reshape(*x.shape[:-1], num_groups, GROUP)
    amax = groups.abs().amax(dim=-1, keepdim=True).clamp(min=FP8_MIN_AMAX)
    most = torch.full_like(amax, FP8_MAX)  # torch on GPUs divides by one number through its rounded reciprocal
    scales = amax / most
    if ue8m0 or pow2:
        bits = scales.view(torch.int32)
        exponent = ((bits >> 23) & 255) + (bits & 0x7FFFFF != 0)
        is_finite = scales.isfinite()
        inverse = torch.where(is_finite, ((254 - exponent) << 23).view(torch.float32), torch.nan)
        if pow2:
            scales = torch.where(is_finite, (exponent << 23).view(torch.float32), torch.nan)
        else:
            scales = torch.where(is_finite, exponent, 255).to(torch.uint8).view(torch.float8_e8m0fnu)  # 255: a NaN
    else:
        inverse = most / amax
    data = (groups * inverse).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return data.reshape(*x.shape[:-1], num_groups * GROUP)[..., :hidden].contiguous(), scales.squeeze(-1)


def through_fp8(x: Tensor) -> Tensor:
    """What an owner adds of contributions x [..., H] fp32 that travel as FP8 in combine: q * 2^e, fp32 [..., H].

    As by ``quantize_fp8`` with ``ue8m0``, but e <= 119, so that each q * 2^e is exact and finite.
    """
    most = FP8_MAX * 2.0**119
    finite = torch.where(x.isinf(), x, x.clamp(-most, most))
    return dequantize_fp8(*quantize_fp8(finite, ue8m0=True))


def dequantize_fp8(data: Tensor, scales: Tensor) -> Tensor:
    """Data [..., H] float8_e4m3fn, scales [..., ceil(H / 128)] fp32 or float8_e8m0fnu (four of these in an int32 too)
    -> fp32 [..., H]: q * scale."""
    if scales.dtype == torch.int32:
        scales = _as_bytes(scales).view(torch.float8_e8m0fnu)
    wide = scales.to(torch.float32).repeat_interleave(GROUP, dim=-1)[..., : data.shape[-1]]
    return data.to(torch.float32) * wide
