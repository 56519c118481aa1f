"""Calls of V1 `Buffer` beside Weft's reference; tensors are in host memory."""

from __future__ import annotations

from typing import Any

import host_side
import torch
from torch import Tensor

import deep_ep_cases as cases
import weft
from weft import reference


def layout_and_dispatch(buffer: Any, x: Any, ids: Tensor, weights: Tensor | None, num_experts: int, **more: Any) -> Any:
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(ids, num_experts)
    assert per_node is None
    assert event.event is None
    return buffer.dispatch(
        x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        topk_idx=None if weights is None else ids, topk_weights=weights, **more,
    )  # fmt: skip


def against_the_reference(comm: weft.Communicator, dtype: torch.dtype, duplicates: bool) -> None:
    given = cases.make(comm.num_ranks, dtype=dtype, duplicates=duplicates)
    wanted = reference.dispatch(given.xs, given.ids, given.weights, num_experts=given.num_experts)
    mine = wanted[comm.rank]
    x, ids, weights = given.xs[comm.rank], given.ids[comm.rank], given.weights[comm.rank]
    buffer = host_side.buffer(comm, explicitly_destroy=True)
    found = layout_and_dispatch(buffer, x, ids, weights, given.num_experts, expert_alignment=8)
    assert len(found) == 6
    recv_x, recv_idx, recv_weights, counts, handle, event = found
    assert event.event is None
    assert torch.equal(recv_x, mine.x)
    assert torch.equal(recv_idx, mine.topk_idx)
    assert torch.equal(recv_weights, mine.topk_weights)
    assert counts == [-(-each // 8) * 8 for each in mine.num_tokens_per_expert.tolist()]
    assert all(type(each) is int for each in counts)
    assert handle[0][:, comm.rank].tolist() == mine.offsets[1:].tolist()
    recv_idx.fill_(7)  # the caller's own, as all results are
    recv_weights.zero_()

    num_rows, room = len(mine.x), comm.num_ranks * max(map(len, given.xs)) + 3
    worst = layout_and_dispatch(buffer, x, ids, weights, given.num_experts, num_worst_tokens=room)
    assert (len(worst[0]), worst[3]) == (room, [])
    assert torch.equal(worst[1][:num_rows], mine.topk_idx)
    assert bool((worst[1][num_rows:] == -1).all())
    assert not bool(worst[2][num_rows:].any())

    again = buffer.dispatch(x, handle=handle)
    assert again[1:5] == (None, None, None, None)
    assert torch.equal(again[0], mine.x)

    biases = [torch.full_like(each, 0.5) for each in given.xs]
    outputs = [part.x for part in wanted]
    for bias, twice in ((None, None), (biases, None), (biases, biases)):
        more = (
            None
            if bias is None
            else [a.float() + b.float() for a, b in zip(bias, twice or [0 * b for b in bias], strict=True)]
        )
        y = reference.combine(outputs, wanted, weighted=False, biases=more)[comm.rank]
        own = None if bias is None else bias[comm.rank] if twice is None else (bias[comm.rank], twice[comm.rank])
        combined, no_weights, _ = buffer.combine(mine.x.clone(), handle, bias=own)
        assert no_weights is None
        assert torch.equal(combined, y)

    lanes = [torch.rand(part.topk_weights.shape, dtype=torch.float32, device="cpu") for part in wanted]
    lanes = [torch.full_like(each, rank + 1.0) for rank, each in enumerate(lanes)]
    counters = handle.ep.calls.counters
    before = counters.num_combines
    _, summed, _ = buffer.combine(mine.x.clone(), handle, topk_weights=lanes[comm.rank])
    assert counters.num_combines == before + 1
    owners = torch.where(ids >= 0, ids // given.num_local, -1)
    held = torch.stack([(owners == rank).any(1) * (rank + 1.0) for rank in range(comm.num_ranks)]).sum(0)
    assert torch.equal(summed, held[:, None].expand(-1, ids.shape[1]).to(torch.float32))
    buffer.destroy()
