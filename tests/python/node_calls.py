"""Calls with nodes on GPUs, emulated ones or real ones: all is compared bit for bit with weft.reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import weft
from pool import RankState
from weft import reference

LOCAL, TOPK, NODE = 2, 3, 2  # experts of a rank, picks of a token, ranks of a node
LAYOUTS = ("rank_major", "expert_major", "masked")


@dataclasses.dataclass(frozen=True)
class Size:
    """Of calls. Of three ranks the last is a node of its own."""

    hidden: int
    num_tokens: tuple[int, ...]  # of each rank
    room: int  # rows of a rank: some are dropped
    expert_room: int  # rows of an expert: some are dropped
    num_sms: int

    def capacity(self, layout: str) -> int | None:
        """Of a layout: it drops some rows."""
        return {"rank_major": self.room, "masked": self.expert_room}.get(layout)


SMALL = Size(hidden=48, num_tokens=(40, 21, 0, 33), room=40, expert_room=12, num_sms=1)


def opened(state: RankState, size: Size, **changed: Any) -> weft.ExpertParallel:
    """With nodes of two ranks."""
    shape = {
        "num_experts": LOCAL * state.num_ranks,
        "top_k": TOPK,
        "hidden": size.hidden,
        "max_tokens_per_rank": max(size.num_tokens),
        "num_sms": size.num_sms,
        "node_ranks": NODE,
    }
    return weft.ExpertParallel(state.comm, **(shape | changed))


def inputs(size: Size, rank: int, num_ranks: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a rank: x, ids, weights."""
    generator, num = torch.Generator().manual_seed(16 * seed + rank), size.num_tokens[rank]
    x = torch.randn(num, size.hidden, generator=generator).bfloat16()
    return (
        x,
        torch.randint(-1, LOCAL * num_ranks, (num, TOPK), generator=generator),
        torch.rand(num, TOPK, generator=generator),
    )


def inputs_of_all(size: Size, num_ranks: int, seed: int) -> tuple[list[torch.Tensor], ...]:
    """-> those of each rank: x, ids, weights."""
    return tuple(map(list, zip(*(inputs(size, rank, num_ranks, seed) for rank in range(num_ranks)), strict=True)))


def inputs_here(state: RankState, size: Size, seed: int) -> list[torch.Tensor]:
    """Of this rank, on its device."""
    return [each.to(state.comm.device) for each in inputs(size, state.rank, state.num_ranks, seed)]


def call(state: RankState, case: tuple[Size, str]) -> list[tuple[torch.Tensor, ...]]:
    """Of two rounds: rows, the rows of a repetition, sums of both, along handles that were kept."""
    size, layout = case
    capacity = size.expert_room if layout == "masked" else None
    with opened(state, size) as ep:
        received = [ep.dispatch(*inputs_here(state, size, seed), layout=layout, capacity=capacity) for seed in (0, 1)]
        seen = []
        for seed, r in enumerate(received):
            again = ep.dispatch(inputs_here(state, size, 7 + seed)[0], handle=r.handle)
            ys = [ep.combine(rows.clone(), r.handle, weighted=layout != "rank_major") for rows in (r.x, again.x)]
            seen.append((r.x.clone(), r.topk_weights.clone(), again.x.clone(), *ys))
        return seen


def check_calls(ranks: Any, size: Size, num_ranks: int, layout: str) -> None:
    """First dispatches, repeated ones and combines."""
    outcomes = ranks.run(num_ranks, call, [(size, layout)] * num_ranks)
    for seed in (0, 1):
        capacity = size.expert_room if layout == "masked" else None
        wanted = reference.dispatch(
            *inputs_of_all(size, num_ranks, seed), num_experts=LOCAL * num_ranks, layout=layout, capacity=capacity
        )
        others = reference.repeat_dispatch(inputs_of_all(size, num_ranks, 7 + seed)[0], wanted[0].routing)
        sums = [
            reference.combine(rows, wanted[0].routing, weighted=layout != "rank_major", sum_domain=NODE)
            for rows in ([each.x for each in wanted], others)
        ]
        for rank in range(num_ranks):
            x, row_weights, again, y, again_y = outcomes[rank][seed]
            keep = is_kept(layout, wanted[rank])
            assert torch.equal(rows_of(x)[keep], rows_of(wanted[rank].x)[keep])
            assert torch.equal(row_weights, wanted[rank].topk_weights)
            assert torch.equal(rows_of(again)[keep], rows_of(others[rank])[keep])
            assert torch.equal(y, sums[0][rank])
            assert torch.equal(again_y, sums[1][rank])


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Without their experts."""
    return x.reshape(-1, x.shape[-1])


def is_kept(layout: str, wanted: Any) -> torch.Tensor:
    """Rows that hold something."""
    shape = (wanted.x.data if isinstance(wanted.x, weft.Quantized) else wanted.x).shape
    if layout != "masked":
        return torch.arange(shape[:-1].numel()) < wanted.num_rows
    return (torch.arange(shape[1])[None] < wanted.num_tokens_per_expert[:, None]).reshape(-1)


def by_column(state: RankState, case: tuple[Size, str]) -> tuple[torch.Tensor, ...]:
    """Codes and scales, of a first dispatch and along its handle; scales lie by column here, and are asked for so."""
    size, layout = case
    x, ids, weights = inputs_here(state, size, 2)
    given = weft.Quantized(*(part.to(x.device) for part in codes_of(x.cpu())))
    given = weft.Quantized(given.data, given.scales.t().contiguous().t())
    options = {"layout": layout, "capacity": size.capacity(layout)}
    with opened(state, size) as ep:
        r = ep.dispatch(given, ids, weights, scale_layout="column_major", **options)
        again = ep.dispatch(given, handle=r.handle)
        return tuple(part.clone() for each in (r.x, again.x) for part in (each.data, each.scales))


def codes_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows: bytes, and four words a token beside them."""
    return x.view(torch.uint8), torch.arange(4 * len(x), dtype=torch.float32).view(-1, 4) + x[:, :1].float()


def check_scales_by_column(ranks: Any, size: Size, layout: str) -> None:
    """They travel row by row."""
    num_ranks = 4
    outcomes = ranks.run(num_ranks, by_column, [(size, layout)] * num_ranks)
    xs, ids, weights = inputs_of_all(size, num_ranks, 2)
    given = [weft.Quantized(*codes_of(x)) for x in xs]
    capacity = size.capacity(layout)
    wanted = reference.dispatch(given, ids, weights, num_experts=LOCAL * num_ranks, layout=layout, capacity=capacity)
    for found, expected in zip(outcomes, wanted, strict=True):
        keep = is_kept(layout, expected)
        for part, other in zip(found, 2 * (expected.x.data, expected.x.scales), strict=True):
            bits, wanted_bits = (rows_of(each).contiguous().view(torch.uint8) for each in (part, other))
            assert torch.equal(bits[keep], wanted_bits[keep])


def sides(state: RankState, case: tuple[Size, str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums and side values."""
    size, layout = case
    with opened(state, size) as ep:
        r = ep.dispatch(*inputs_here(state, size, 5), layout=layout, capacity=size.capacity(layout))
        y, side = ep.combine(r.x.clone(), r.handle, weighted=False, side=r.topk_weights * 3)
        return y.clone(), side.clone()


def check_side_values(ranks: Any, size: Size, layout: str) -> None:
    """What a capacity drops has none."""
    num_ranks, capacity = 4, size.capacity(layout)
    outcomes = ranks.run(num_ranks, sides, [(size, layout)] * num_ranks)
    wanted = reference.dispatch(
        *inputs_of_all(size, num_ranks, 5), num_experts=LOCAL * num_ranks, layout=layout, capacity=capacity
    )
    pairs = reference.combine(
        [each.x for each in wanted],
        wanted[0].routing,
        weighted=False,
        sides=[each.topk_weights * 3 for each in wanted],
        sum_domain=NODE,
    )
    for found, expected in zip(outcomes, pairs, strict=True):
        assert all(torch.equal(*each) for each in zip(found, expected, strict=True))


def in_fp8(state: RankState, case: tuple[Size, str]) -> torch.Tensor:
    """Sums that travel so."""
    size, layout = case
    with opened(state, size) as ep:
        r = ep.dispatch(*inputs_here(state, size, 6), layout=layout)
        return ep.combine(r.x.clone(), r.handle, weighted=layout != "rank_major", wire="fp8").clone()


def check_sums_in_fp8(ranks: Any, size: Size, num_ranks: int, layout: str) -> None:
    """Once a node: contributions are not rounded to FP8."""
    outcomes = ranks.run(num_ranks, in_fp8, [(size, layout)] * num_ranks)
    wanted = reference.dispatch(*inputs_of_all(size, num_ranks, 6), num_experts=LOCAL * num_ranks, layout=layout)
    sums = reference.combine(
        [each.x for each in wanted],
        wanted[0].routing,
        weighted=layout != "rank_major",
        wire="fp8",
        sum_domain=NODE,
    )
    assert all(torch.equal(*each) for each in zip(outcomes, sums, strict=True))


def trained(state: RankState, case: tuple[Size, str]) -> tuple[torch.Tensor, ...]:
    """Rows, and the gradients of x and of the weights, from given ones of what was received."""
    size, layout = case
    x, ids, weights = inputs_here(state, size, 4)
    x.requires_grad_(), weights.requires_grad_()
    with opened(state, size) as ep:
        r = ep.dispatch(x, ids, weights, layout=layout)
        grads = of_received(r.x, r.topk_weights)
        torch.autograd.backward([r.x, r.topk_weights], list(grads))
        assert x.grad is not None
        assert weights.grad is not None
        return x.grad.clone(), weights.grad.clone()


def of_received(x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients that differ from row to row."""
    column = torch.arange(x.shape[-1], device=x.device) % 7 - 3
    row = torch.arange(x.shape[:-1].numel(), device=x.device).reshape(*x.shape[:-1], 1) % 5 + 0.5
    number = torch.arange(weights.numel(), dtype=torch.float32, device=x.device)
    return (row * column).to(x.dtype), number.reshape(weights.shape) - 9.5


def check_gradients(ranks: Any, size: Size, layout: str) -> None:
    """Of x and of the weights: one combine with side values."""
    num_ranks = 4
    outcomes = ranks.run(num_ranks, trained, [(size, layout)] * num_ranks)
    received = reference.dispatch(*inputs_of_all(size, 4, 4), num_experts=LOCAL * num_ranks, layout=layout)
    grads = [of_received(each.x, each.topk_weights) for each in received]
    wanted = reference.dispatch_backward(
        [rows for rows, _ in grads], received[0].routing, [each for _, each in grads], sum_domain=NODE
    )
    for found, expected in zip(outcomes, zip(*wanted, strict=True), strict=True):
        assert all(torch.equal(*each) for each in zip(found, expected, strict=True))
