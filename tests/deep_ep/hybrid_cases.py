"""Calls of `HybridEPBuffer` beside Weft's reference; tensors are in host memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import host_side
import pytest
import torch
from torch import Tensor

import deep_ep_cases as cases
import weft
from weft import reference
from weft.deep_ep.hybrid_ep_buffer import indices_to_map
from weft.deep_ep.utils.math import align, per_token_cast_to_fp8

M = 16


def make_buffer(comm: weft.Communicator, num_local: int = 3) -> Any:
    return host_side.hybrid(comm, 64, M, num_local)


def maps_of(given: cases.Data) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Maps and dense probs; and ids, ascending, with their weights."""
    made = [indices_to_map(i, w, len(i), given.num_experts) for i, w in zip(given.ids, given.weights, strict=True)]
    maps, probs = [each[0] for each in made], [each[1] for each in made]
    most = max(1, *(int(each.sum(1).max()) for each in maps if len(each)))
    ids, weights = [], []
    for chosen, dense in zip(maps, probs, strict=True):
        idx = torch.full((len(chosen), most), -1, dtype=torch.int64, device="cpu")
        for token, row in enumerate(chosen):
            experts = row.nonzero()[:, 0]
            idx[token, : len(experts)] = experts
        ids.append(idx)
        weights.append(torch.where(idx >= 0, dense.gather(1, idx.clamp(min=0)), 0.0))
    return maps, probs, ids, weights


def outputs_of(wanted: Any) -> list[Tensor]:
    generator = torch.Generator(device="cpu").manual_seed(3)
    shapes = [(*part.topk_weights.shape[:1], 64) for part in wanted]
    return [torch.randn(each, generator=generator, dtype=torch.float32, device="cpu").bfloat16() for each in shapes]


def permuted(comm: weft.Communicator, node_ranks: int | None = None) -> None:
    given = cases.make(comm.num_ranks)
    rank, num_experts = comm.rank, given.num_experts
    maps, probs, ids, weights = maps_of(given)
    buffer = make_buffer(comm)
    for is_fp8 in (False, True):
        xs: list[Any] = [per_token_cast_to_fp8(x) if is_fp8 else x for x in given.xs]
        wanted = reference.dispatch(
            [weft.Quantized(*x) if is_fp8 else x for x in xs], ids, weights, num_experts=num_experts,
            layout="expert_major", alignment=8,
        )  # fmt: skip
        mine = wanted[rank]
        hidden, scales = (xs[rank][0].view(torch.uint8), xs[rank][1]) if is_fp8 else (xs[rank], None)
        num_rows = int(mine.num_rows)
        counts = [align(each, 8) for each in mine.num_tokens_per_expert.tolist()]
        for rows_asked in (None, num_rows_of(wanted) + 8):
            rows, got, got_scales, padded, handle = buffer.dispatch_with_permute(
                hidden=hidden, routing_map=maps[rank], probs=probs[rank], scaling_factor=scales, pad_multiple=8,
                num_permuted_tokens=rows_asked, non_blocking=rows_asked is not None,
            )  # fmt: skip
            assert len(rows) == (rows_asked or num_rows)
            assert padded.dtype == torch.int64
            assert padded.tolist() == counts == handle[7].tolist()
            data = mine.x.data if is_fp8 else mine.x
            assert torch.equal(rows[:num_rows].view(torch.uint8), data.view(torch.uint8))
            assert torch.equal(got[:num_rows], mine.topk_weights)
            assert (got_scales is None) == (not is_fp8)
            assert got_scales is None or torch.equal(got_scales[:num_rows], mine.x.scales)
            assert len(handle) == 11
            assert handle[-1].tolist() == [0]
            assert handle[8] == len(hidden)
            received = [((each >= rank * 3) & (each < rank * 3 + 3)).any(1).sum().item() for each in ids]
            assert handle[3].tolist() == [sum(received)]
            assert handle[4].sum().item() == int(mine.num_tokens_per_expert.sum())

            again, no_probs, _, _, same = buffer.dispatch_with_permute(
                hidden=hidden, scaling_factor=scales, handle=handle, num_permuted_tokens=padded.sum()
            )
            assert same is handle
            assert no_probs is None
            assert torch.equal(again[:num_rows].view(torch.uint8), data.view(torch.uint8))
            _, twice, _, _, _ = buffer.dispatch_with_permute(
                hidden=hidden, scaling_factor=scales, handle=handle, probs=probs[rank] * 2
            )
            assert torch.equal(twice[:num_rows], mine.topk_weights * 2)

            outputs = outputs_of(wanted)
            y = reference.combine(outputs, wanted, weighted=False, sum_domain=node_ranks)[rank]
            full = torch.zeros((len(rows), 64), dtype=torch.bfloat16, device="cpu")
            full[:num_rows] = outputs[rank]
            token, dense = buffer.combine_with_unpermute(hidden=full, probs=got, handle=handle)
            assert torch.equal(token, y)
            assert torch.equal(dense, torch.where(maps[rank], probs[rank], 0.0))
            assert buffer.combine_with_unpermute(hidden=full, handle=handle)[1] is None


def num_rows_of(wanted: Any) -> int:
    return max(int(part.num_rows) for part in wanted)


def by_token(comm: weft.Communicator, node_ranks: int | None = None) -> None:
    """probs have columns for the experts of the node."""
    size = node_ranks or comm.num_ranks
    given = cases.make(comm.num_ranks)
    rank, num_experts = comm.rank, given.num_experts
    wanted = reference.dispatch(given.xs, given.ids, given.weights, num_experts=num_experts)
    mine = wanted[rank]
    buffer = make_buffer(comm)
    chosen, probs = indices_to_map(given.ids[rank], given.weights[rank], len(given.ids[rank]), num_experts)
    rows, dense, no_scales, handle = buffer.dispatch(
        given.xs[rank], topk_idx=given.ids[rank], topk_weights=given.weights[rank], num_of_experts=num_experts
    )
    assert no_scales is None
    assert torch.equal(rows, mine.x)
    assert dense.shape == (len(rows), size * given.num_local)
    local_rank = rank % size
    assert (buffer.num_of_nodes, buffer.node_rank, buffer.local_rank) == (
        comm.num_ranks // size,
        rank // size,
        local_rank,
    )
    assert buffer.num_of_hybrid_ep_ranks_per_nvlink_domain == size
    config = buffer.configurer.buffer_config
    assert (config.num_of_nodes, config.num_of_ranks_per_node) == (comm.num_ranks // size, size)
    assert buffer.update_template_config(hidden_dim=8) == replace(config, hidden_dim=8)
    _, _, _, number, lines, num_tokens, _ = handle
    assert number.cpu().item() == len(rows)
    assert num_tokens == len(given.ids[rank])
    local = mine.topk_idx
    for expert in range(given.num_local):
        assert torch.equal(lines[:, expert], (local == expert).any(1))
        column = dense[:, local_rank * given.num_local + expert]
        assert torch.allclose(column, torch.where(local == expert, mine.topk_weights, 0.0).sum(1))
    assert dense.count_nonzero() == dense[:, local_rank * 3 : local_rank * 3 + 3].count_nonzero()
    again, dense_again, _, same = buffer.dispatch(
        given.xs[rank], topk_idx=given.ids[rank], topk_weights=given.weights[rank], handle=handle
    )
    assert same is handle
    assert torch.equal(again, rows)
    assert torch.equal(dense_again, dense)
    outputs = outputs_of(wanted)
    token, back = buffer.combine(outputs[rank], dense, handle)
    assert torch.equal(token, reference.combine(outputs, wanted, weighted=False, sum_domain=node_ranks)[rank])
    ids, weights = given.ids[rank], given.weights[rank]  # an expert that is picked twice has the sum
    sums = torch.zeros_like(probs).scatter_add_(1, ids.clamp(min=0), torch.where(ids >= 0, weights, 0.0))
    assert torch.allclose(back, torch.where(chosen, sums, 0.0))
    assert buffer.combine(outputs[rank], None, handle)[1] is None


def too_many(comm: weft.Communicator) -> None:
    given = cases.make(comm.num_ranks, even=True)
    buffer = make_buffer(comm)
    x, ids = given.xs[comm.rank], given.ids[comm.rank]
    flags = []
    for rows in (8, 8 * M):
        out, _, _, padded, handle = buffer.dispatch_with_permute(
            hidden=x, topk_idx=ids, num_of_experts=given.num_experts, num_permuted_tokens=rows, pad_multiple=4,
            non_blocking=True,
        )  # fmt: skip
        assert len(out) == rows
        assert int(padded.sum()) <= rows
        flags.append(int(handle[-1]) != 0)
        buffer.dispatch_with_permute(hidden=x, handle=handle)  # drops again what the first has dropped
    assert flags == [True, False]  # of each call, not of all so far
    with pytest.raises(AssertionError, match="num_permuted_tokens"):
        buffer.dispatch_with_permute(hidden=x, topk_idx=ids, num_permuted_tokens=10, pad_multiple=4, non_blocking=True)


def grows(comm: weft.Communicator) -> None:
    """More tokens than the constructor said, and longer rows of the map."""
    buffer = make_buffer(comm)
    for tokens, per_token in ((8, 1), (40, 2), (10, 5)):
        x = torch.full((tokens, 64), comm.rank + 1.0, dtype=torch.bfloat16, device="cpu")
        chosen = torch.zeros((tokens, 6), dtype=torch.bool, device="cpu")
        chosen[:, :per_token] = True
        rows, _, _, padded, handle = buffer.dispatch_with_permute(hidden=x, routing_map=chosen)
        assert padded.tolist() == [2 * tokens * (comm.rank * 3 + each < per_token) for each in range(3)]
        token, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
        assert torch.equal(token, x * per_token)
