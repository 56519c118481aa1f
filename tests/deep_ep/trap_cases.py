"""What programs written for DeepEP rely on; tensors are in host memory."""

from __future__ import annotations

from typing import Any

import host_side
import torch

import deep_ep_cases as cases
import weft
from weft import reference


def dispatched(buffer: Any, x: Any, ids: torch.Tensor, weights: Any, num_experts: int, **more: Any) -> Any:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, num_experts)
    return buffer.dispatch(
        x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=ids,
        topk_weights=weights, **more,
    )  # fmt: skip


def forms(comm: weft.Communicator) -> None:
    """Other dtypes as bytes; FP8 with column-major scales of both types; the worst case; routing by a mask."""
    given = cases.make(comm.num_ranks, hidden=128)
    rank, ids, weights = comm.rank, given.ids[comm.rank], given.weights[comm.rank]
    wanted = reference.dispatch(given.xs, given.ids, given.weights, num_experts=given.num_experts)
    mine, num_rows = wanted[rank], int(wanted[rank].num_rows)
    rows = [(place >= 0).any(1).nonzero()[:, 0] for place in mine.routing.rows][rank]
    buffer = host_side.buffer(comm)
    for dtype in (torch.int64, torch.int16, torch.float16):
        xs = [(x.float() * 8).to(dtype) for x in given.xs]
        recv = dispatched(buffer, xs[rank], ids, weights, given.num_experts)[0]
        assert torch.equal(recv, torch.cat(xs)[rows])
    for dtype in (torch.float32, torch.int32):
        pairs = [
            (x.to(torch.float8_e4m3fn), torch.arange(3 * len(x), device="cpu").view(3, -1).T.to(dtype))
            for x in given.xs
        ]
        recv, scales = dispatched(buffer, pairs[rank], ids, weights, given.num_experts)[0]
        assert torch.equal(recv.view(torch.uint8), torch.cat([each[0] for each in pairs])[rows].view(torch.uint8))
        assert scales.dtype == dtype
        assert scales.is_contiguous()
        assert torch.equal(scales, torch.cat([each[1] for each in pairs])[rows])
    numbers = torch.Generator(device="cpu").manual_seed(1)
    packed = [
        tuple(
            torch.randint(-99, 99, (len(x), width), generator=numbers, dtype=torch.int64, device="cpu").to(kind)
            for width, kind in ((16, torch.int32), (2, torch.int32), (1, torch.float32))
        )
        for x in given.xs
    ]
    recv, _, _, _, handle, _ = dispatched(buffer, packed[rank], ids, weights, given.num_experts)
    for mine_part, parts in zip(recv, zip(*packed, strict=True), strict=True):
        assert torch.equal(mine_part, torch.cat(parts)[rows])
    assert buffer.combine(mine.x.clone(), handle)[0].shape == given.xs[rank].shape

    worst = num_rows + 7 if comm.num_ranks == 1 else 64
    recv, recv_ids, recv_weights, counts, handle, event = dispatched(
        buffer, given.xs[rank], ids, weights, given.num_experts, num_worst_tokens=worst, async_finish=True
    )
    assert event.event is not None
    assert counts == []
    assert len(recv) == len(recv_ids) == len(recv_weights) == worst
    assert torch.equal(recv[:num_rows], mine.x)
    assert torch.equal(recv_ids[:num_rows], mine.topk_idx)
    assert (recv_ids[num_rows:] == -1).all()
    combined, _, _ = buffer.combine(recv, handle)
    assert torch.equal(combined, reference.combine([part.x for part in wanted], wanted, weighted=False)[rank])

    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids.to(torch.int32), given.num_experts)
    recv, no_ids, no_weights, counts, handle, _ = buffer.dispatch(
        given.xs[rank], num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert
    )
    assert no_ids is None
    assert no_weights is None
    assert torch.equal(recv, mine.x)
    assert counts == mine.num_tokens_per_expert.tolist()
    assert torch.equal(handle[4], in_rank)
    assert [len(each) for each in handle[1:3]] == [comm.num_ranks] * 2


def nobody_has_tokens(comm: weft.Communicator) -> None:
    num_experts = 3 * comm.num_ranks
    for empty in (range(comm.num_ranks), range(1)):
        count = 0 if comm.rank in empty else 4
        x = torch.ones((count, 64), dtype=torch.bfloat16, device="cpu")
        ids = torch.zeros((count, 2), dtype=torch.int64, device="cpu")
        weights = torch.ones((count, 2), dtype=torch.float32, device="cpu")
        buffer = host_side.buffer(comm)
        recv, _, _, counts, handle, _ = dispatched(buffer, x, ids, weights, num_experts)
        total = 4 * (comm.num_ranks - len(empty))
        assert len(recv) == (total if comm.rank == 0 else 0)
        assert sum(counts) == 2 * len(recv)  # picked twice, counted twice
        assert torch.equal(buffer.combine(recv, handle)[0], x)
        packed, count_here, handle, _, _ = buffer.low_latency_dispatch(x, ids, 8, num_experts, use_fp8=False)
        assert int(count_here.sum()) == 2 * len(recv)
        y, _, _ = buffer.low_latency_combine(packed, ids, weights, handle)
        assert torch.equal(y, 2 * x)
        elastic = host_side.elastic(comm, num_max_tokens_per_rank=8)
        recv, _, got, handle, _ = elastic.dispatch(x, ids, weights, num_experts=num_experts, do_expand=True)
        assert got.sum() == len(got) == 2 * handle.num_recv_tokens
        assert torch.equal(elastic.combine(recv, handle)[0], 2 * x)


def more_tokens(comm: weft.Communicator) -> None:
    """Windows grow where a rank has more tokens; handles of before go on."""
    buffer = host_side.buffer(comm)
    kept = []
    for tokens in (8, 700, 40, 1500):
        count = tokens if comm.rank == 1 else 3
        x = torch.full((count, 64), comm.rank + 1.0, dtype=torch.float32, device="cpu")
        ids = torch.arange(count * 2, dtype=torch.int64, device="cpu").view(count, 2) % (2 * comm.num_ranks)
        recv, _, _, _, handle, _ = dispatched(
            buffer, x, ids, torch.ones_like(ids, dtype=torch.float32), 2 * comm.num_ranks
        )
        kept.append((x, recv, handle))
    assert len({id(handle.ep) for _, _, handle in kept}) == 3
    for x, recv, handle in kept:
        assert torch.equal(buffer.dispatch(x, handle=handle)[0], recv)
        assert torch.equal(buffer.combine(recv, handle)[0], x)


def other_widths(comm: weft.Communicator) -> None:
    """What goes along a handle may be wider or narrower than the rows of its dispatch; K may be 128."""
    buffer = host_side.buffer(comm)
    num_experts = 64 * comm.num_ranks
    ids = torch.arange(128, dtype=torch.int64, device="cpu").repeat(5, 1) % num_experts
    x = torch.randn((5, 8), dtype=torch.float32, device="cpu").bfloat16()
    weights = torch.rand((5, 128), dtype=torch.float32, device="cpu")
    recv, _, recv_weights, _, handle, _ = dispatched(buffer, x, ids, weights, num_experts)
    for hidden, dtype in ((8, torch.float32), (24, torch.bfloat16), (200, torch.float32)):
        wide = torch.randn((5, hidden), dtype=torch.float32, device="cpu").to(dtype)
        rows = buffer.dispatch(wide, handle=handle)[0]
        assert torch.equal(rows[5 * comm.rank : 5 * comm.rank + 5], wide)
        bias = torch.ones_like(wide)
        combined = buffer.combine(rows, handle, bias=bias)[0]
        assert torch.equal(combined, (wide.float() * comm.num_ranks + 1).to(dtype))
    _, summed, _ = buffer.combine(recv, handle, recv_weights)
    assert torch.allclose(summed, weights)
    elastic = host_side.elastic(comm, num_max_tokens_per_rank=8)
    rows, _, got, expanded, _ = elastic.dispatch(x, ids, weights, num_experts=num_experts, do_expand=True)
    combined, lanes, _ = elastic.combine(rows, expanded, got)
    assert torch.equal(lanes, weights)
    packed, _, ll, _, _ = buffer.low_latency_dispatch(x, ids, 8, num_experts, use_fp8=False)
    y, _, _ = buffer.low_latency_combine(packed, ids, weights, ll)
    assert torch.allclose(y.float(), x.float() * weights.sum(1, keepdim=True), rtol=0.01)
