"""Windows that grow; tensors are in host memory."""

from __future__ import annotations

from typing import Any

import host_side
import pytest
import torch

import weft


def dispatched(buffer: Any, x: torch.Tensor, ids: torch.Tensor, num_experts: int, **more: Any) -> Any:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, num_experts)
    return buffer.dispatch(
        x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=ids,
        topk_weights=torch.ones(ids.shape, dtype=torch.float32, device="cpu"), **more,
    )  # fmt: skip


def grows(comm: weft.Communicator, worst: int) -> None:
    """In turn each rank has more than the windows hold, and then all have, each another number."""
    if worst and comm.device.type == "cuda":
        refuses(comm, worst)
        return
    buffer, num_experts = host_side.buffer(comm), 2 * comm.num_ranks
    asked = []
    ranks = buffer._ranks
    gather = ranks.gather
    ranks.gather = lambda *given: asked.append(given) or gather(*given)
    sizes = [{0: 8}, {0: 600}, {1: 1300}, {0: 9, 1: 9, 2: 2100}, {0: 5000, 1: 4200, 2: 4100}, {}]
    made = []
    for of_ranks in sizes:
        count = of_ranks.get(comm.rank, 3)
        x = torch.full((count, 32), comm.rank + 1.0, dtype=torch.float32, device="cpu")
        ids = (torch.arange(2 * count, dtype=torch.int64, device="cpu") % num_experts).view(count, 2)
        more = {"num_worst_tokens": worst} if worst else {}
        recv, _, _, _, handle, _ = dispatched(buffer, x, ids, num_experts, **more)
        made.append(handle.ep)
        held = torch.zeros((count, comm.num_ranks), dtype=torch.bool, device="cpu").scatter_(1, ids // 2, True).sum(1)
        assert torch.equal(buffer.combine(recv, handle)[0], x * held[:, None])
    assert len(asked) == (len(sizes) if worst and host_side.on_gpu(comm) else 1)  # the first call of all
    rooms = [each.max_tokens_per_rank for each in made]
    assert rooms == [512, 1024, 2048, 4096, 8192, 8192]


def refuses(comm: weft.Communicator, worst: int) -> None:
    """On a GPU the host waits for nobody once there are windows: ranks are told of too many tokens, and go on."""
    buffer, num_experts = host_side.buffer(comm), 2 * comm.num_ranks
    for most in (8, 600, 8):
        count = most if comm.rank == 0 else 3
        x = torch.full((count, 32), comm.rank + 1.0, dtype=torch.float32, device="cpu")
        ids = torch.zeros((count, 2), dtype=torch.int64, device="cpu")
        if most > 512:
            with pytest.raises(weft.InvalidArgument, match=f"a rank has {most} tokens"):
                dispatched(buffer, x, ids, num_experts, num_worst_tokens=worst)[4].ep.check()
        else:
            recv, _, _, _, handle, _ = dispatched(buffer, x, ids, num_experts, num_worst_tokens=worst)
            assert torch.equal(buffer.combine(recv, handle)[0], x)
            handle.ep.check()
