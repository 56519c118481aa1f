"""Calls with nodes on GPUs, emulated ones or real ones: all is compared bit for bit with weft.reference."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
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


def around(state: RankState, size: Size) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows and sums: with a bias and a given result, and where the heap has no room."""
    x, ids, weights = inputs_here(state, size, 8)
    seen = []
    for heap_bytes in (None, 4096):
        with opened(state, size, heap_bytes=heap_bytes) as ep:
            r = ep.dispatch(x, ids, weights)
            assert (r.sources().rank >= 0).all()
            out = torch.empty_like(x)
            ep.combine(r.x.clone(), r.handle, weighted=False, bias=x.float(), out=out)
            seen.append((r.x.clone(), out))
    return seen


def check_around(ranks: Any, size: Size, num_ranks: int) -> None:
    """Rows beside the heap lie in the landing first."""
    outcomes = ranks.run(num_ranks, around, [size] * num_ranks)
    xs, ids, weights = inputs_of_all(size, num_ranks, 8)
    wanted = reference.dispatch(xs, ids, weights, num_experts=LOCAL * num_ranks)
    sums = reference.combine(
        [each.x for each in wanted], wanted[0].routing, weighted=False, biases=[x.float() for x in xs], sum_domain=NODE
    )
    for rank, seen in enumerate(outcomes):
        for x, y in seen:
            assert torch.equal(x, wanted[rank].x)
            assert torch.equal(y, sums[rank])


def replayed(state: RankState, case: tuple[Size, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows and sums of each replay of a dispatch and a combine, of inputs that change; the third is no replay."""
    size, make_graph = case
    seen = []
    with opened(state, size) as ep:
        ep.warmup(capacity=size.room)
        # Before any call: a copy from the host that lies behind a waiting kernel holds up all ranks that share the GPU.
        given = [inputs_here(state, size, seed) for seed in range(4)]
        places = [each.clone() for each in given[0]]
        graph = make_graph()
        with graph.record():
            r = ep.dispatch(*places, capacity=size.room)
            y = ep.combine(r.x, r.handle, weighted=False)
        for seed, new in enumerate(given):
            if seed == 2:
                other = ep.dispatch(*new, capacity=size.room)
                seen.append((other.x.clone(), ep.combine(other.x, other.handle, weighted=False).clone()))
                continue
            for place, values in zip(places, new, strict=True):
                place.copy_(values)
            y.fill_(float("nan"))
            graph.replay()
            seen.append((r.x.clone(), y.clone()))
        state.comm.meet(60)
        graph.destroy()
    return seen


def check_graphs(ranks: Any, size: Size, make_graph: Any) -> None:
    """`make_graph()` has `record`, `replay` and `destroy`."""
    num_ranks = 4
    outcomes = ranks.run(num_ranks, replayed, [(size, make_graph)] * num_ranks)
    for seed in range(4):
        wanted = reference.dispatch(
            *inputs_of_all(size, num_ranks, seed), num_experts=LOCAL * num_ranks, capacity=size.room
        )
        sums = reference.combine([each.x for each in wanted], wanted[0].routing, weighted=False, sum_domain=NODE)
        for rank in range(num_ranks):
            x, y = outcomes[rank][seed]
            keep = is_kept("rank_major", wanted[rank])
            assert torch.equal(x[keep], wanted[rank].x[keep])
            assert torch.equal(y, sums[rank]), f"replay {seed}"


LATE = 3  # the rank that does not come; rank 2, its mate, hears of rank 1 through it


def without_one(state: RankState, size: Size) -> tuple[tuple[int, ...], torch.Tensor, torch.Tensor] | None:
    """Who was late, and rows and sums of those who went on."""
    comm = state.comm
    with opened(state, size) as ep:
        kept = ep.dispatch(*inputs_here(state, size, 9))
        comm.meet(300)
        if state.rank == LATE:
            while not comm.broken:
                time.sleep(0.01)
            return None
        with pytest.raises(weft.PeerTimeout) as late:
            ep.dispatch(*inputs_here(state, size, 9), deadline_s=6.0 if state.rank == 2 else 300.0)
        comm.rebuild([rank for rank in range(state.num_ranks) if rank != LATE])
        with pytest.raises(weft.InvalidState, match="epoch"):
            ep.dispatch(inputs_here(state, size, 9)[0], handle=kept.handle)
        r = ep.dispatch(*inputs_here(state, size, 10))
        return late.value.peers, r.x.clone(), ep.combine(r.x.clone(), r.handle, weighted=False).clone()


def check_late_rank(ranks: Any, size: Size) -> None:
    """It alone is named, and the others go on as nodes of two and of one."""
    num_ranks = 4
    outcomes = ranks.run(num_ranks, without_one, [size] * num_ranks)
    wanted = reference.dispatch(
        *inputs_of_all(size, num_ranks, 10), num_experts=LOCAL * num_ranks, active_ranks=(0, 1, 2)
    )
    sums = reference.combine([each.x for each in wanted], wanted[0].routing, weighted=False, sum_domain=NODE)
    for rank in range(LATE):
        peers, x, y = outcomes[rank]
        assert peers == (LATE,)
        assert torch.equal(x, wanted[rank].x)
        assert torch.equal(y, sums[rank])


def after_refusals(state: RankState, size: Size) -> list[torch.Tensor]:
    """Rows of calls that follow one that a rank alone has refused, and one of which ranks think otherwise."""
    x, ids, weights = inputs_here(state, size, 11)
    seen, most = [], max(size.num_tokens)
    with opened(state, size, max_tokens_per_rank=most + 1) as ep:
        if state.rank == LATE:
            with pytest.raises(weft.InvalidArgument, match="topk_idx"):
                ep.dispatch(x, ids.float(), weights)
        seen.append(ep.dispatch(x, ids, weights).x.clone())
        with pytest.raises(weft.InvalidArgument, match="different things"):
            ep.dispatch(x, ids, weights, max_tokens=most if state.rank == LATE else most + 1)
        seen.append(ep.dispatch(x, ids, weights).x.clone())
    return seen


def check_refused_calls(ranks: Any, size: Size) -> None:
    """Nothing has been sent, also to other nodes."""
    num_ranks = 4
    outcomes = ranks.run(num_ranks, after_refusals, [size] * num_ranks)
    wanted = reference.dispatch(*inputs_of_all(size, num_ranks, 11), num_experts=LOCAL * num_ranks)
    for seen, expected in zip(outcomes, wanted, strict=True):
        assert all(torch.equal(x, expected.x) for x in seen)


def in_flight(state: RankState, size: Size) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows and sums of two windows, whose calls run at once."""
    with opened(state, size, num_windows=2, node_ranks=1) as ep:
        received = [
            ep.dispatch(*inputs_here(state, size, 12 + idx), window=idx, async_op=True, capacity=size.room)
            for idx in (0, 1)
        ]
        seen = []
        for r in received:
            r.event.wait()
            y, event = ep.combine(r.x.clone(), r.handle, weighted=False, async_op=True, window=r.handle.call.window)
            event.wait()
            seen.append((r.x.clone(), y.clone()))
        return seen


def check_windows(ranks: Any, size: Size, num_ranks: int) -> None:
    """Nodes of one rank."""
    outcomes = ranks.run(num_ranks, in_flight, [size] * num_ranks)
    for idx in (0, 1):
        given = inputs_of_all(size, num_ranks, 12 + idx)
        wanted = reference.dispatch(*given, num_experts=LOCAL * num_ranks, capacity=size.room)
        sums = reference.combine([each.x for each in wanted], wanted[0].routing, weighted=False)
        for rank in range(num_ranks):
            x, y = outcomes[rank][idx]
            keep = is_kept("rank_major", wanted[rank])
            assert torch.equal(x[keep], wanted[rank].x[keep])
            assert torch.equal(y, sums[rank])


def refusals(state: RankState, size: Size) -> dict[str, str]:
    """What windows with nodes do not have, and what is said of it."""
    x, ids, weights = inputs_here(state, size, 0)
    room: dict[str, Any] = {"capacity": size.room}
    with opened(state, size) as ep, opened(state, size, top_k=33) as of_many:
        r = ep.dispatch(x, ids, weights, **room)
        by_expert = ep.dispatch(x, ids, weights, layout="expert_major", **room)
        odd = weft.Quantized(x.view(torch.uint8), torch.zeros(len(x), 3, device=x.device))
        many = (ids.repeat(1, 11), weights.repeat(1, 11))
        side = torch.zeros_like(r.topk_weights)
        refused = {
            "scales of 12 bytes": lambda: ep.dispatch(odd, ids, weights, **room),
            "side_lanes='all'": lambda: ep.combine(r.x, r.handle, weighted=False, side=side, side_lanes="all"),
            "order='last_pick'": lambda: ep.combine(r.x, r.handle, weighted=False, order="last_pick"),
            "order='pick'": lambda: ep.combine(by_expert.x, by_expert.handle, weighted=False, order="pick"),
            "more than 32 picks by expert": lambda: of_many.dispatch(x, *many, layout="expert_major", **room),
        }
        said = {}
        for name, make in refused.items():
            with pytest.raises(weft.Unsupported) as found:
                make()
            said[name] = str(found.value)
    share = state.comm._choice.rank_sms
    for name, number in (("num_windows", share // 2 + 1), ("num_sms", share)):
        with pytest.raises(weft.InvalidArgument) as too_many:
            opened(state, size, **{name: number})
        said[f"{name} is {number}"] = str(too_many.value)
    return said


def check_refusals(ranks: Any, size: Size) -> None:
    """Alike on all ranks; the network takes an SM of each window."""
    said = ranks.run(4, refusals, [size] * 4)
    assert all(each == said[0] for each in said)
    for name, text in said[0].items():
        assert name in text
        assert name.startswith("num_") or ("between nodes" in text and " need" in text)


def at_the_edge(state: RankState, size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls at the edges of what a window has room for: sums of wider rows than its own, and of one token."""
    x, ids, weights = inputs_here(state, size, 15)
    with opened(state, size, hidden=max(size.hidden, 512)) as ep:  # of narrower rows the landing has places for fp32
        r = ep.dispatch(widened(x), ids, weights, capacity=size.room)
        wide = ep.combine(r.x.float(), r.handle, weighted=False)
        ep.dispatch(widened(x)[:0], ids[:0], weights[:0], max_tokens=0, capacity=1)
    with opened(state, size, max_tokens_per_rank=1) as ep:  # the last node's rank adds for all
        r = ep.dispatch(x[:1], ids[:1], weights[:1], capacity=3)
        few, _ = ep.combine(r.x, r.handle, weighted=False, side=r.topk_weights)
        return wide.clone(), few.clone()


def widened(x: torch.Tensor) -> torch.Tensor:
    """To 512 columns at least."""
    return x if x.shape[1] >= 512 else x.repeat(1, -(-512 // x.shape[1]))[:, :512].contiguous()


def check_edges(ranks: Any, size: Size, *, compares: bool) -> None:
    """They are not refused; with kernels that do something also right."""
    outcomes = ranks.run(3, at_the_edge, [size] * 3)
    if not compares:
        return
    xs, ids, weights = inputs_of_all(size, 3, 15)
    for idx, (few, capacity) in enumerate(((None, size.room), (1, 3))):
        given = [widened(x)[:few] if idx == 0 else x[:few] for x in xs], [each[:few] for each in ids]
        wanted = reference.dispatch(*given, [each[:few] for each in weights], num_experts=3 * LOCAL, capacity=capacity)
        outputs = [each.x.float() if idx == 0 else each.x for each in wanted]
        sums = reference.combine(outputs, wanted[0].routing, weighted=False, sum_domain=NODE)
        assert all(torch.equal(found[idx], expected) for found, expected in zip(outcomes, sums, strict=True))
