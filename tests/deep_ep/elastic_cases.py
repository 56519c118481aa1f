"""Calls of V2 `ElasticBuffer` beside Weft's reference; tensors are in host memory."""

from __future__ import annotations

from typing import Any

import host_side
import pytest
import torch
from torch import Tensor

import deep_ep_cases as cases
import weft
from weft import reference
from weft.deep_ep.utils.math import align, per_token_cast_to_fp8

M = 16


def make_buffer(comm: weft.Communicator, **more: Any) -> Any:
    return host_side.elastic(comm, num_max_tokens_per_rank=M, hidden=64, explicitly_destroy=True, **more)


def forms(given: cases.Data) -> list[list[Any]]:
    """bf16, and FP8 with scales, a column of which is not an FP8 scale."""
    pairs = []
    for x in given.xs:
        rows, scales = per_token_cast_to_fp8(x)
        pairs.append((rows, torch.cat([scales, scales * 3], dim=1)))
    return [list(given.xs), pairs]


def as_weft(x: Any) -> Any:
    return weft.Quantized(*x) if isinstance(x, tuple) else x


def same(found: Any, wanted: Any, num_rows: int) -> None:
    if isinstance(found, tuple):
        same(found[0], wanted.data, num_rows)
        same(found[1], wanted.scales, num_rows)
    else:
        assert torch.equal(found[:num_rows].float(), wanted[:num_rows].float())


def by_token(comm: weft.Communicator, node_ranks: int | None = None) -> None:
    given = cases.make(comm.num_ranks)
    rank, num_experts = comm.rank, given.num_experts
    ids, weights = given.ids[rank], given.weights[rank]
    buffer = make_buffer(comm)
    buffer.dispatch(given.xs[rank], ids, num_experts=num_experts, num_max_tokens_per_rank=3 * M)  # a larger window
    for xs in forms(given):
        wanted = reference.dispatch([as_weft(x) for x in xs], given.ids, given.weights, num_experts=num_experts)
        mine = wanted[rank]
        num_rows = int(mine.num_rows)
        for sync in (1, 0):
            total = torch.zeros(given.num_local, dtype=torch.int32, device="cpu")
            recv, recv_ids, recv_weights, handle, event = buffer.dispatch(
                xs[rank], ids, weights, total, num_experts, expert_alignment=4, do_cpu_sync=sync
            )
            assert event.event is None
            assert torch.equal(total, mine.num_tokens_per_expert)
            assert len(recv_ids) == (num_rows if sync else comm.num_ranks * M) == handle.num_recv_tokens
            same(recv, mine.x, num_rows)
            assert torch.equal(recv_ids[:num_rows], mine.topk_idx)
            assert torch.equal(recv_weights[:num_rows], mine.topk_weights)
            recv_ids.fill_(9)  # the caller's own
            check_tables(handle, given, rank, node_ranks, sync=sync)
            again, ids_again, weights_again, same_handle, _ = buffer.dispatch(
                xs[rank], topk_weights=weights * 2, handle=handle
            )
            assert same_handle is handle
            same(again, mine.x, num_rows)
            assert torch.equal(ids_again[:num_rows], mine.topk_idx)
            assert torch.equal(weights_again[:num_rows], mine.topk_weights * 2)

            rows = torch.randn(
                (len(again[0] if isinstance(again, tuple) else again), 64), dtype=torch.float32, device="cpu"
            )
            outputs = [many_magnitudes(part.topk_weights.shape[:1], seed=r) for r, part in enumerate(wanted)]
            rows[:num_rows] = outputs[rank].float()
            sides = [part.topk_weights for part in wanted]
            for number in range(3):
                bias = [many_magnitudes(x.shape[:1], seed=9) for x in given.xs] if number else None
                more = None if bias is None else [each.float() * number for each in bias]
                y, lanes = reference.combine(
                    outputs, wanted, weighted=False, sides=sides, biases=more, order="last_pick", sum_domain=node_ranks
                )[rank]
                own = None if bias is None else bias[rank] if number == 1 else (bias[rank], bias[rank])
                side = torch.zeros((len(rows), ids.shape[1]), dtype=torch.float32, device="cpu")
                side[:num_rows] = sides[rank]
                combined, combined_weights, _ = buffer.combine(rows.bfloat16(), handle, side, bias=own)
                assert torch.equal(combined, y)
                assert torch.equal(combined_weights, lanes)
    buffer.destroy()


def many_magnitudes(lead: Any, seed: int) -> Tensor:
    """bf16 [..., 64]: sums of them show their order."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    exponents = torch.randint(-12, 12, (*lead, 64), generator=generator, dtype=torch.int32, device="cpu")
    return torch.ldexp(
        torch.randn((*lead, 64), generator=generator, dtype=torch.float32, device="cpu"), exponents
    ).bfloat16()


def check_tables(handle: Any, given: cases.Data, rank: int, node_ranks: int | None, *, sync: bool) -> None:
    """Of a dispatch by token with alignment 4."""
    received, counts = [], [0] * given.num_local
    per_source = []
    for source, ids in enumerate(given.ids):
        local = ids - rank * given.num_local
        here = (local >= 0) & (local < given.num_local)
        tokens = here.any(1).nonzero()[:, 0].tolist()
        received += [source * M + token for token in tokens]
        per_source.append(len(tokens))
        for expert in local[here].tolist():
            counts[expert] += 1
    by_idx = [sum(per_source[idx :: node_ranks or given.num_ranks]) for idx in range(node_ranks or given.num_ranks)]
    ends = torch.tensor(by_idx, dtype=torch.int32, device="cpu").cumsum(0)
    aligned = torch.tensor([align(each, 4) for each in counts], dtype=torch.int32, device="cpu")
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == ends.tolist()
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
    assert handle.recv_src_metadata[: len(received), 0].tolist() == received
    assert len(handle.recv_src_metadata) == handle.num_recv_tokens
    assert handle.num_recv_tokens_per_expert_list == (aligned.tolist() if sync else [])
    if not handle.do_expand:
        assert handle.psum_num_recv_tokens_per_expert.tolist() == aligned.cumsum(0).tolist()
        return
    starts = aligned.cumsum(0) - aligned
    assert handle.psum_num_recv_tokens_per_expert.tolist() == (starts + torch.tensor(counts)).tolist()
    places = iter_places(given, rank, starts.tolist())
    assert handle.recv_src_metadata[: len(received), 2:].tolist() == [places[each] for each in received]


def iter_places(given: cases.Data, rank: int, starts: list[int]) -> dict[int, list[int]]:
    """By source * M + token: of each pick its row in the expanded result."""
    nexts = list(starts)
    places = {
        source * M + token: [-1] * given.ids[0].shape[1]
        for source, ids in enumerate(given.ids)
        for token in range(len(ids))
    }
    for local in range(given.num_local):
        for source, ids in enumerate(given.ids):
            for token, k in (ids == rank * given.num_local + local).nonzero().tolist():
                places[source * M + token][k] = nexts[local]
                nexts[local] += 1
    return places


def by_expert(comm: weft.Communicator, node_ranks: int | None = None) -> None:
    given = cases.make(comm.num_ranks)
    rank, num_experts = comm.rank, given.num_experts
    ids, weights = given.ids[rank], given.weights[rank]
    for several in (True, False):
        buffer = make_buffer(comm, allow_multiple_reduction=several)
        for xs in forms(given):
            wanted = reference.dispatch(
                [as_weft(x) for x in xs],
                given.ids,
                given.weights,
                num_experts=num_experts,
                layout="expert_major",
                alignment=4,
            )
            mine = wanted[rank]
            num_rows = int(mine.num_rows)
            for sync in (True, False):
                recv, recv_ids, recv_weights, handle, _ = buffer.dispatch(
                    xs[rank], ids, weights, num_experts=num_experts, expert_alignment=4, do_cpu_sync=sync,
                    do_expand=True, do_zero_padding=True, use_tma_aligned_col_major_sf=True,
                )  # fmt: skip
                assert recv_ids is None
                same(recv, mine.x, num_rows)
                if isinstance(recv, tuple):
                    assert recv[1].stride() == (1, align(len(recv[1]), 4))
                assert torch.equal(recv_weights[:num_rows], mine.topk_weights)
                check_tables(handle, given, rank, node_ranks, sync=sync)
                again, _, weights_again, _, _ = buffer.dispatch(
                    xs[rank], topk_weights=weights * 2, handle=handle, do_expand=True, do_zero_padding=True
                )
                same(again, mine.x, num_rows)
                assert torch.equal(weights_again[:num_rows], mine.topk_weights * 2)
                outputs = outputs_of(wanted)
                rows = torch.zeros((len(recv_weights), 64), dtype=torch.bfloat16, device="cpu")
                rows[:num_rows] = outputs[rank]
                if several:
                    y, lanes = reference.combine(
                        outputs, wanted, weighted=False, sides=[part.topk_weights for part in wanted],
                        order="last_pick", sum_domain=node_ranks,
                    )[rank]  # fmt: skip
                    combined, combined_weights, _ = buffer.combine(rows, handle, recv_weights)
                    assert torch.equal(combined_weights, lanes)
                else:
                    if node_ranks is None:
                        y = reference.combine(outputs, wanted, weighted=False, order="pick")[rank]
                    else:
                        y = in_fp32(outputs, wanted, node_ranks)[rank]
                    combined, _, _ = buffer.combine(rows, handle)
                    with pytest.raises(weft.InvalidArgument, match="allow_multiple_reduction"):
                        buffer.combine(rows, handle, recv_weights)
                assert torch.equal(combined, y)
        buffer.destroy()


def in_fp32(outputs: list[Tensor], wanted: Any, node_ranks: int) -> list[Tensor]:
    """Sums of ranks and of nodes stay in fp32, the last one is rounded."""
    wide = [each.float() for each in outputs]
    sums = reference.combine(wide, wanted, weighted=False, order="last_pick", sum_domain=node_ranks)
    return [each.bfloat16() for each in sums]


def outputs_of(wanted: Any) -> list[Tensor]:
    """Values of many magnitudes, so that the order of sums and each rounding are seen."""
    generator = torch.Generator(device="cpu").manual_seed(3)
    outputs = []
    for part in wanted:
        shape = (*part.topk_weights.shape[:1], 64)
        values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        powers = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int32, device="cpu")
        outputs.append((values * 2.0**powers).bfloat16())
    return outputs


def other_calls(comm: weft.Communicator) -> None:
    buffer = host_side.elastic(comm, num_bytes=1 << 20)
    for _ in range(5):
        buffer.barrier()
    given = cases.make(comm.num_ranks)
    x, ids = given.xs[comm.rank], given.ids[comm.rank]
    with pytest.raises(weft.InvalidArgument, match="num_max_tokens_per_rank"):
        buffer.dispatch(x, ids, num_experts=given.num_experts)
    for most in (16, 64, 32):  # another bound every step
        recv, _, no_weights, handle, _ = buffer.dispatch(
            x, ids, num_experts=given.num_experts, num_max_tokens_per_rank=most
        )
        assert no_weights is None
        assert handle.num_max_tokens_per_rank == most
        combined, _, _ = buffer.combine(recv, handle)
        ranks = torch.where(ids >= 0, ids // given.num_local, -1)
        copies = torch.stack([(ranks == each).any(1) for each in range(comm.num_ranks)]).sum(0)
        assert torch.equal(combined, (x.float() * copies[:, None]).bfloat16())
    assert handle.dst_buffer_slot_idx.shape == ids.shape
    assert ((handle.dst_buffer_slot_idx >= 0) == (ids >= 0)).all()
