"""Calls as serving frameworks make them; tensors are in host memory."""

from __future__ import annotations

from typing import Any

import host_side
import torch

import deep_ep_cases as cases
import weft
from weft import deep_ep
from weft.deep_ep.utils.math import per_token_cast_back, per_token_cast_to_fp8

M = 16


class Batch:
    """What a rank has, and what identity experts must give back."""

    def __init__(self, comm: weft.Communicator, seed: int) -> None:
        given = cases.make(comm.num_ranks, tokens=M, hidden=256, top_k=3, seed=seed)
        self.num_experts, self.num_local = given.num_experts, given.num_local
        self.x, self.ids, self.weights = (each[comm.rank] for each in (given.xs, given.ids, given.weights))
        kept = torch.where(self.ids >= 0, self.weights, 0.0)
        self.wanted = self.x.float() * kept.sum(1, keepdim=True)

    def check(self, y: torch.Tensor) -> None:
        assert torch.allclose(y.float(), self.wanted, rtol=0.15, atol=0.05)


def weighted(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Identity experts, their weights applied."""
    return (rows.float() * torch.where(ids >= 0, weights, 0.0).sum(1, keepdim=True)).bfloat16()


def throughput(comm: weft.Communicator) -> None:
    """Layout, FP8 rows with an event handed on, combine; config by position, everything else by name."""
    buffer = host_side.buffer(comm, 1 << 20, 0, False, 1)
    for seed in range(2):
        batch = Batch(comm, seed)
        previous = deep_ep.Buffer.capture()
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
            topk_idx=batch.ids, num_experts=batch.num_experts, previous_event=previous, async_finish=False,
            allocate_on_comm_stream=False,
        )  # fmt: skip
        recv, ids, weights, counts, handle, event = buffer.dispatch(
            x=per_token_cast_to_fp8(batch.x), handle=None, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
            topk_idx=batch.ids, topk_weights=batch.weights, expert_alignment=128,
            config=deep_ep.Buffer.get_dispatch_config(comm.num_ranks), previous_event=event, async_finish=True,
            allocate_on_comm_stream=True,
        )  # fmt: skip
        event.current_stream_wait()
        assert all(each % 128 == 0 for each in counts)
        rows = per_token_cast_back(*recv)
        ids += torch.where(ids >= 0, comm.rank * batch.num_local, 0)  # into global ids, in place
        y, no_weights, event = buffer.combine(
            x=weighted(rows, ids, weights), handle=handle, topk_weights=None, previous_event=event, async_finish=False,
            config=deep_ep.Buffer.get_combine_config(comm.num_ranks), allocate_on_comm_stream=False,
        )  # fmt: skip
        assert no_weights is None
        assert event.event is None
        batch.check(y)


def two_micro_batches(comm: weft.Communicator) -> None:
    """Send A, send B, receive A, receive B, and the same back; the first four arguments by position."""
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(M, 256, comm.num_ranks, 3 * comm.num_ranks)
    assert size > 0
    buffer = host_side.buffer(
        group=comm, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=3, allow_mnnvl=False
    )
    buffer.get_local_buffer_tensor(torch.uint8, torch.Size([64])).zero_()
    for step in range(2):
        batches = [Batch(comm, 2 * step + each) for each in range(2)]
        sent: list[Any] = [
            buffer.low_latency_dispatch(
                batch.x, batch.ids, M, batch.num_experts, use_fp8=True, round_scale=True, use_ue8m0=False,
                async_finish=False, return_recv_hook=True,
            )
            for batch in batches
        ]  # fmt: skip
        outputs = []
        for (rows, scales), _, _, _, hook in sent:
            hook()
            flat = per_token_cast_back(rows.view(-1, 256), scales.contiguous().view(-1, 2))
            outputs.append(flat.view(rows.shape))
        back = [
            buffer.low_latency_combine(
                output, batch.ids, batch.weights, parts[2], async_finish=False, zero_copy=False, return_recv_hook=True,
                out=torch.empty_like(batch.x),
            )
            for output, batch, parts in zip(outputs, batches, sent, strict=True)
        ]  # fmt: skip
        for (y, _, hook), batch in zip(back, batches, strict=True):
            hook()
            batch.check(y)
    buffer.clean_low_latency_buffer(M, 256, 3 * comm.num_ranks)


def elastic(comm: weft.Communicator) -> None:
    """Prefill with exact sizes, decode without: the worst case, and rows that the counts do not name are not read."""
    num_bytes = deep_ep.ElasticBuffer.get_buffer_size_hint(comm, M, 256, num_topk=3)
    assert num_bytes % (2 << 20) == 0
    assert num_bytes <= deep_ep.ElasticBuffer.get_buffer_size_hint(comm, 2 * M, 256, num_topk=3)
    buffer = host_side.elastic(comm, num_bytes=num_bytes, num_max_tokens_per_rank=M, hidden=256, num_topk=3)
    assert buffer.num_bytes == num_bytes
    assert buffer.get_theoretical_num_sms(None, 3) >= 4
    for seed, sync in enumerate((True, False)):
        batch = Batch(comm, seed)
        recv, _, weights, handle, event = buffer.dispatch(
            batch.x, topk_idx=batch.ids, topk_weights=batch.weights, num_experts=batch.num_experts,
            num_max_tokens_per_rank=M, expert_alignment=8, do_expand=True, do_cpu_sync=sync,
            async_with_compute_stream=True,
        )  # fmt: skip
        event.current_stream_wait()
        is_row = torch.zeros(len(recv), dtype=torch.bool, device="cpu")
        counts = handle.num_unaligned_recv_tokens_per_expert.tolist()
        for end, count in zip(handle.psum_num_recv_tokens_per_expert.tolist(), counts, strict=True):
            is_row[end - count : end] = True
        rows = torch.where(is_row[:, None], recv.float() * weights[:, None], float("nan")).bfloat16()
        y, _, _ = buffer.combine(rows, handle=handle)
        batch.check(y)
