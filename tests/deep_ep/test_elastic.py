"""Guards against a V2 `ElasticBuffer` whose rows, tables or sums differ from Weft's reference."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from elastic_cases import by_expert, by_token, in_fp32, make_buffer, other_calls, outputs_of

import deep_ep_cases as cases
import weft
from weft import deep_ep, reference

RANKS = (1, 3, 4, *(pytest.param(number, marks=pytest.mark.long) for number in (2, 8)))


@pytest.mark.parametrize("num_ranks", RANKS)
def test_by_token(num_ranks: int) -> None:
    weft.spawn(by_token, num_ranks, device="cpu")


@pytest.mark.parametrize("num_ranks", RANKS)
def test_by_expert(num_ranks: int) -> None:
    weft.spawn(by_expert, num_ranks, device="cpu")


@pytest.mark.parametrize("work", [by_token, by_expert])
@pytest.mark.parametrize(("num_ranks", "node_ranks"), [(4, 2), (8, 2)])
def test_several_nodes(monkeypatch: pytest.MonkeyPatch, num_ranks: int, node_ranks: int, work: Any) -> None:
    monkeypatch.setenv("WEFT_DEEP_EP_NODE_RANKS", str(node_ranks))
    weft.spawn(work, num_ranks, (node_ranks,), device="cpu")


def nodes_once(comm: weft.Communicator) -> None:
    """Without hybrid mode rows go from rank to rank; without several reductions sums of nodes are not rounded."""
    given = cases.make(comm.num_ranks)
    rank, num_ranks = comm.rank, comm.num_ranks
    wanted = reference.dispatch(given.xs, given.ids, num_experts=given.num_experts)
    outputs = outputs_of(wanted)
    flat = reference.combine(outputs, wanted, weighted=False, order="last_pick")
    rounded = reference.combine(outputs, wanted, weighted=False, order="last_pick", sum_domain=2)
    wide = in_fp32(outputs, wanted, 2)
    assert not torch.equal(torch.cat(rounded), torch.cat(wide))  # else this would show nothing
    assert not torch.equal(torch.cat(rounded), torch.cat(flat))
    for options, domains, y in (
        ({"allow_hybrid_mode": False}, (1, num_ranks), flat),
        ({}, (num_ranks // 2, 2), rounded),
        ({"allow_multiple_reduction": False}, (num_ranks // 2, 2), wide),
    ):
        buffer = make_buffer(comm, **options)
        assert buffer.get_logical_domain_size() == domains
        assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == domains
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (rank // domains[1], rank % domains[1])
        assert buffer.get_physical_domain_size() == (num_ranks // 2, 2)
        assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == (num_ranks // 2, 2)
        assert deep_ep.get_physical_domain_size(comm) == (num_ranks // 2, 2)
        assert deep_ep.get_logical_domain_size(comm, options.get("allow_hybrid_mode", True)) == domains
        _, _, _, handle, _ = buffer.dispatch(given.xs[rank], given.ids[rank], num_experts=given.num_experts)
        bias = torch.zeros_like(given.xs[rank])
        assert torch.equal(buffer.combine(outputs[rank], handle)[0], y[rank])
        assert torch.equal(buffer.combine(outputs[rank], handle, bias=bias)[0], y[rank])
        side = torch.ones((len(outputs[rank]), 4), dtype=torch.float32, device="cpu")
        combined, lanes, _ = buffer.combine(outputs[rank], handle, side)
        assert torch.equal(combined, y[rank])
        assert torch.equal(lanes, (given.ids[rank] >= 0).float())
        buffer.destroy()


def test_what_is_summed_in_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DEEP_EP_NODE_RANKS", "2")
    weft.spawn(nodes_once, 6, device="cpu")


def asked_of_the_network(comm: weft.Communicator) -> None:
    assert make_buffer(comm).network == (3, 65)
    assert make_buffer(comm, sl_idx=7, allow_hybrid_mode=False).network == (7, 17)
    buffer = make_buffer(comm, num_allocated_qps=5)
    assert (buffer.network, buffer.num_allocated_qps, buffer.get_theoretical_num_qps(24)) == ((3, 5), 5, 5)
    given = cases.make(1)
    for wrong in (-1, 6, None):
        with pytest.raises(weft.InvalidArgument, match="allowed are 0 to num_allocated_qps, 5"):
            buffer.dispatch(given.xs[0], given.ids[0], num_experts=given.num_experts, num_qps=wrong)
    recv, _, _, handle, _ = buffer.dispatch(given.xs[0], given.ids[0], num_experts=given.num_experts, num_qps=5)
    with pytest.raises(weft.InvalidArgument, match="num_qps is 6"):
        buffer.combine(recv, handle, num_qps=6)
    for wrong_options, said in (
        ({"sl_idx": 16}, "sl_idx is 16; allowed are 0 to 15"), ({"num_allocated_qps": -1}, "num_allocated_qps is -1"),
    ):  # fmt: skip
        with pytest.raises(weft.InvalidArgument, match=said):
            make_buffer(comm, **wrong_options)
    os.environ["EP_OVERRIDE_RDMA_SL"] = "2"
    assert make_buffer(comm, sl_idx=7).network == (2, 65)
    os.environ["EP_OVERRIDE_RDMA_SL"] = "two"
    with pytest.raises(weft.InvalidArgument, match="EP_OVERRIDE_RDMA_SL"):
        make_buffer(comm)


def test_service_level_and_queue_pairs() -> None:
    weft.spawn(asked_of_the_network, 1, device="cpu")


def test_bounds_of_the_call() -> None:
    weft.spawn(other_calls, 2, device="cpu")
