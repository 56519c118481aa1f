"""Low-latency calls of V1 `Buffer` beside Weft's reference; tensors are in host memory."""

from __future__ import annotations

import time
from typing import Any

import host_side
import torch
from torch import Tensor

import deep_ep_cases as cases
import weft
from weft import reference
from weft.limits import adds_by_pick

M = 16


FORMS: list[dict[str, Any]] = [
    {"use_fp8": False},
    {"use_fp8": True},
    {"use_fp8": True, "round_scale": True},
    {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
]


def rows_of(recv: Any, hidden: int) -> tuple[Tensor, Tensor | None]:
    """Rows and scales as fp32."""
    if isinstance(recv, Tensor):
        return recv, None
    rows, scales = recv
    if scales.dtype == torch.int32:
        exponents = (
            scales.clone(memory_format=torch.contiguous_format)
            .view(torch.uint8)[..., : -(-hidden // 128)]
            .to(torch.int32)
        )
        scales = (exponents << 23).view(torch.float32)
    return rows, scales


def against_the_reference(comm: weft.Communicator, top_k: int = 3, num_local: int = 3) -> None:
    num_ranks, hidden = comm.num_ranks, 512
    given = cases.make(num_ranks, hidden=hidden, tokens=M, top_k=top_k, num_local=num_local)
    capacity = num_ranks * M
    buffer = host_side.buffer(comm, low_latency_mode=True, explicitly_destroy=True)
    x, ids = given.xs[comm.rank], given.ids[comm.rank]
    total = torch.zeros(given.num_local, dtype=torch.int32, device="cpu")
    for number, form in enumerate(FORMS):
        quantize = None if not form["use_fp8"] else "fp8"
        if form.get("round_scale"):
            quantize = "fp8_ue8m0" if form.get("use_ue8m0") else "fp8_pow2"
        wanted = reference.dispatch(
            given.xs, given.ids, num_experts=given.num_experts, layout="masked", capacity=capacity, quantize=quantize
        )
        mine = wanted[comm.rank]
        for with_hook in (False, True):
            recv, count, handle, event, hook = buffer.low_latency_dispatch(
                x, ids, M, given.num_experts, cumulative_local_expert_recv_stats=total, async_finish=not with_hook,
                return_recv_hook=with_hook, **form,
            )  # fmt: skip
            assert (hook is None, event.event is None) == ((False, True) if with_hook else (True, False))
            if with_hook:
                hook()
                hook()
            assert torch.equal(count, mine.num_tokens_per_expert)
            assert torch.equal(total, count * (2 * number + 1 + with_hook))
            rows, scales = rows_of(recv, hidden)
            reference_rows = mine.x if isinstance(mine.x, Tensor) else mine.x.data
            for expert, num_rows in enumerate(count.tolist()):
                assert torch.equal(rows[expert, :num_rows].float(), reference_rows[expert, :num_rows].float())
                if scales is not None:
                    assert torch.equal(scales[expert, :num_rows], mine.x.scales[expert, :num_rows].to(torch.float32))
            check_handle(handle, given, comm.rank)
            check_combine(buffer, handle, given, comm.rank, wanted, with_hook=with_hook)
    buffer.destroy()


def check_handle(handle: Any, given: cases.Data, rank: int, *, hidden: int = 512, most: int = M) -> None:
    src_info, layout_range, *rest = handle
    assert (*rest,) == handle[2:] == (most, hidden, given.num_experts)
    for local in range(given.num_local):
        expert, begin = rank * given.num_local + local, 0
        for source, ids in enumerate(given.ids):
            tokens = (ids == expert).nonzero()[:, 0]
            number = int(layout_range[local, source])
            assert (number >> 32, number & 0xFFFFFFFF) == (begin, len(tokens))
            assert torch.equal(src_info[local, begin : begin + len(tokens)], tokens.to(torch.int32))
            begin += len(tokens)


def check_combine(buffer: Any, handle: Any, given: cases.Data, rank: int, wanted: Any, *, with_hook: bool) -> None:
    """With outputs whose undefined rows are NaN, and a pick that has been taken back."""
    generator = torch.Generator(device="cpu").manual_seed(5)
    outputs = [
        torch.randn((*part.x.data.shape[:2], 512), generator=generator, dtype=torch.float32, device="cpu").bfloat16()
        for part in wanted
    ]
    for part, rows in zip(wanted, outputs, strict=True):
        for expert, num_rows in enumerate(part.num_tokens_per_expert.tolist()):
            rows[expert, num_rows:] = float("nan")
    ids = [each.clone() for each in given.ids]
    for each in ids:
        each[: len(each) // 2, 1] = -1
    used = [torch.where(idx >= 0, w, 0.0) for idx, w in zip(ids, given.weights, strict=True)]
    if adds_by_pick(handle.ep, handle.dispatched.handle):
        y = reference.combine(outputs, wanted, order="pick", owner_weights=used)[rank]
    else:
        y = weighted_where_they_are(given, used, outputs)[rank]
    for zero_copy in (False, True):
        if zero_copy:
            buffer.get_next_low_latency_combine_buffer(handle)[:] = outputs[rank]
        out = torch.full_like(y, 3)
        combined, event, hook = buffer.low_latency_combine(
            torch.empty_like(outputs[rank]) if zero_copy else outputs[rank], ids[rank], given.weights[rank], handle,
            zero_copy=zero_copy, async_finish=not with_hook, return_recv_hook=with_hook, out=out,
        )  # fmt: skip
        assert (hook is None, event.event is None) == ((False, True) if with_hook else (True, False))
        if with_hook:
            hook()
        assert combined is out
        assert torch.equal(out, y)


def weighted_where_they_are(
    given: cases.Data, used: list[Tensor], outputs: list[Tensor], most: int = M
) -> list[Tensor]:
    """Each rank multiplies its rows in fp32; ranks are added one after the other."""
    parts = reference.dispatch(
        given.xs, given.ids, used, num_experts=given.num_experts, layout="masked", capacity=given.num_ranks * most
    )
    products = [
        torch.where(part.topk_weights[..., None] != 0, rows.float() * part.topk_weights[..., None], 0.0)
        for part, rows in zip(parts, outputs, strict=True)
    ]
    return [each.bfloat16() for each in reference.combine(products, parts, weighted=False)]


def with_weights(comm: weft.Communicator) -> None:
    """Seven results: the weight and the source rank of each row."""
    given = cases.make(comm.num_ranks, tokens=M, top_k=3)
    wanted = reference.dispatch(
        given.xs, given.ids, given.weights, num_experts=given.num_experts, layout="masked", capacity=comm.num_ranks * M
    )[comm.rank]
    buffer = host_side.buffer(comm)
    for with_hook in (False, True):
        recv, count, weights, ranks, handle, _, hook = buffer.low_latency_dispatch(
            given.xs[comm.rank], given.ids[comm.rank], M, given.num_experts, use_fp8=False,
            topk_weights=given.weights[comm.rank], return_recv_hook=with_hook,
        )  # fmt: skip
        if with_hook:
            hook()
        for expert, num_rows in enumerate(count.tolist()):
            assert torch.equal(recv[expert, :num_rows], wanted.x[expert, :num_rows])
            assert torch.equal(weights[expert, :num_rows], wanted.topk_weights[expert, :num_rows])
            sizes = handle[1][expert] & 0xFFFFFFFF
            sources = torch.arange(comm.num_ranks, dtype=torch.int64, device="cpu").repeat_interleave(sizes)
            assert ranks[expert, :num_rows].tolist() == sources.tolist()


def two_micro_batches(comm: weft.Communicator) -> None:
    buffer = host_side.buffer(comm, low_latency_mode=True)
    sent, results = [], []
    for seed in range(3):  # the third result is fine once the first two are received
        given = cases.make(comm.num_ranks, tokens=M, seed=seed, num_local=4)  # as many as picks: none is picked twice
        x, ids, weights = given.xs[comm.rank], given.ids[comm.rank], given.weights[comm.rank]
        recv, _, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, M, given.num_experts, use_fp8=False, return_recv_hook=True
        )
        sent.append((recv, handle, x, ids, weights))
        hook()
    for recv, handle, x, ids, weights in sent:
        combined, _, _ = buffer.low_latency_combine(recv, ids, weights, handle)
        factor = torch.where(ids >= 0, weights, 0.0).sum(1, keepdim=True)
        results.append(torch.allclose(combined.float(), x.float() * factor, rtol=0.02, atol=0.02))
    assert results == [True] * 3


def waits(comm: weft.Communicator, kind: str) -> None:
    """Nanoseconds for each rank, added; a rank that comes late is waited for."""
    given = cases.make(comm.num_ranks, tokens=M, top_k=3, even=True)
    rank, num_ranks = comm.rank, comm.num_ranks
    x, ids, weights = given.xs[rank], given.ids[rank], given.weights[rank]
    buffer = host_side.buffer(comm)
    recv, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, M, given.num_experts, use_fp8=False)
    buffer.low_latency_combine(recv, ids, weights, handle)
    table = torch.full((num_ranks, num_ranks), 7, dtype=torch.int64, device="cpu")
    stats = table if kind == "table" else table[rank]
    before = table.clone()
    buffer.low_latency_dispatch(
        x, ids, M, given.num_experts, use_fp8=False, dispatch_wait_recv_cost_stats=stats, return_recv_hook=True
    )[4]()
    after_dispatch = table.clone()
    buffer.low_latency_combine(recv, ids, weights, handle, combine_wait_recv_cost_stats=stats)
    others = [each for each in range(num_ranks) if each != rank]
    for older, newer in ((before, after_dispatch), (after_dispatch, table)):
        assert torch.equal(older[others], newer[others])  # rows of other ranks are theirs
        assert int(newer[rank, rank]) == 7
        assert bool((newer[rank] >= older[rank]).all())
    assert host_side.on_gpu(comm) or int(table[rank].sum()) > 7 * num_ranks  # GPUs count from a microsecond on


def waits_for_a_late_rank(comm: weft.Communicator, has_hook: bool) -> None:
    """It comes late to one of three steps, and nobody else is blamed. In halves its peers wait in their hooks."""
    given = cases.make(comm.num_ranks, tokens=M, top_k=3, even=True)
    rank, late, late_ns = comm.rank, comm.num_ranks - 1, 400_000_000
    x, ids, weights = given.xs[rank], given.ids[rank], given.weights[rank]
    buffer = host_side.buffer(comm)
    of_dispatch, of_combine = (torch.zeros(comm.num_ranks, dtype=torch.int64, device="cpu") for _ in range(2))
    for step in range(-1, 3):
        if step == 0:  # what was compiled or met for the first time is over
            comm.meet(100.0)
            of_dispatch.zero_()
            of_combine.zero_()
        if step == 1 and rank == late:
            time.sleep(late_ns / 1e9)
        recv, _, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, M, given.num_experts, use_fp8=False, dispatch_wait_recv_cost_stats=of_dispatch,
            return_recv_hook=has_hook,
        )  # fmt: skip
        if has_hook:
            hook()
        if step == 2 and rank == late:
            time.sleep(late_ns / 1e9)
        _, _, hook = buffer.low_latency_combine(
            recv, ids, weights, handle, combine_wait_recv_cost_stats=of_combine, return_recv_hook=has_hook
        )
        if has_hook:
            hook()
    for waited in (of_dispatch.tolist(), of_combine.tolist()):
        assert waited[rank] == 0
        assert rank == late or waited[late] > 0.8 * late_ns, waited
        assert max(each for peer, each in enumerate(waited) if peer != late or rank == late) < late_ns / 2, waited
