"""Calls that are refused; tensors are in host memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import host_side
import pytest
import torch

import deep_ep_cases as cases
import weft
from weft import deep_ep


class Rank:
    """A buffer of each kind, and right arguments."""

    def __init__(self, comm: weft.Communicator) -> None:
        given = cases.make(comm.num_ranks, even=True)
        self.num_experts = given.num_experts
        self.x, self.ids, self.weights = (each[comm.rank] for each in (given.xs, given.ids, given.weights))
        self.v1 = host_side.buffer(comm, low_latency_mode=True)
        self.v2 = host_side.elastic(comm, num_max_tokens_per_rank=16)
        self.hybrid = host_side.hybrid(comm, 64, 16, 3)
        per_rank, _, per_expert, in_rank, _ = self.v1.get_dispatch_layout(self.ids, self.num_experts)
        self.layout = {
            "num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert,
        }  # fmt: skip

    def normal(self, **more: Any) -> Any:
        arguments = {"x": self.x, **self.layout, "topk_idx": self.ids, "topk_weights": self.weights, **more}
        return self.v1.dispatch(**arguments)

    def low(self, **more: Any) -> Any:
        arguments = {
            "x": self.x, "topk_idx": self.ids, "num_max_dispatch_tokens_per_rank": 16, "num_experts": self.num_experts,
            "use_fp8": False, **more,
        }  # fmt: skip
        return self.v1.low_latency_dispatch(**arguments)

    def permuted(self) -> Any:
        return self.hybrid.dispatch_with_permute(hidden=self.x, topk_idx=self.ids)[4]

    def elastic(self, **more: Any) -> Any:
        arguments = {"x": self.x, "topk_idx": self.ids, "num_experts": self.num_experts, **more}
        return self.v2.dispatch(**arguments)


WRONG: dict[str, tuple[Callable[[Rank], Any], str]] = {
    "layout ids": (lambda r: r.v1.get_dispatch_layout(r.ids.float(), r.num_experts), "topk_idx"),
    "layout experts": (lambda r: r.v1.get_dispatch_layout(r.ids, r.num_experts + 1), "num_experts"),
    "x of one dimension": (lambda r: r.normal(x=r.x[0]), "x is"),
    "x strided": (lambda r: r.normal(x=r.x[:, ::2]), "contiguous"),
    "scales of two bytes": (lambda r: r.normal(x=(r.x.view(torch.uint8), r.x)), "scales"),
    "scales beside bf16": (lambda r: r.normal(x=(r.x, r.x.float())), "one byte"),
    "rows of 15 bytes": (lambda r: r.normal(x=r.x.view(torch.uint8)[:, :15].contiguous()), "16"),
    "weights alone": (lambda r: r.normal(topk_idx=None), "both or neither"),
    "no layout": (lambda r: r.normal(num_tokens_per_expert=None), "get_dispatch_layout"),
    "worst case of a mask": (
        lambda r: r.normal(topk_idx=None, topk_weights=None, num_worst_tokens=9),
        "num_worst_tokens",
    ),
    "ids beside a handle": (lambda r: r.normal(handle=r.normal()[4]), "handle"),
    "no handle": (lambda r: r.v1.combine(r.x, 7), "handle"),
    "comm of another kind": (lambda r: host_side.buffer(None, comm=object()), "Get_rank"),
    "rows of another number": (lambda r: r.v1.combine(torch.cat([r.x] * 9), r.normal()[4]), "expert_output"),
    "three biases": (lambda r: r.v1.combine(r.x, r.normal()[4], bias=(r.x,) * 3), "bias"),
    "experts of a count": (lambda r: r.normal(num_tokens_per_expert=r.ids[0, :1]), "num_tokens_per_expert"),
    "too many tokens": (lambda r: r.low(num_max_dispatch_tokens_per_rank=2), "tokens"),
    "not bf16": (lambda r: r.low(x=r.x.float()), "bf16"),
    "ue8m0 alone": (lambda r: r.low(use_fp8=True, use_ue8m0=True), "round_scale"),
    "event and hook": (lambda r: r.low(async_finish=True, return_recv_hook=True), "async_finish"),
    "other ids in combine": (
        lambda r: r.v1.low_latency_combine(r.low()[0], r.ids[1:], r.weights, r.low()[2]),
        "topk_idx",
    ),
    "logfmt and zero copy": (
        lambda r: r.v1.low_latency_combine(r.x, r.ids, r.weights, r.low()[2], use_logfmt=True, zero_copy=True),
        "use_logfmt",
    ),
    "waits of a dispatch": (lambda r: r.low(dispatch_wait_recv_cost_stats=r.ids), "dispatch_wait_recv_cost_stats"),
    "waits of a combine": (
        lambda r: r.v1.low_latency_combine(
            r.x, r.ids, r.weights, None, combine_wait_recv_cost_stats=r.ids[0].to(torch.int32)
        ),
        "combine_wait_recv_cost_stats",
    ),
    "no experts": (lambda r: r.elastic(num_experts=None), "num_experts"),
    "too many for V2": (lambda r: r.elastic(num_max_tokens_per_rank=4), "topk_idx"),
    "sync with a handle": (lambda r: r.elastic(topk_idx=None, handle=r.elastic()[3], do_cpu_sync=True), "do_cpu_sync"),
    "handle of V1 to V2": (lambda r: r.v2.combine(r.x, r.normal()[4]), "EPHandle"),
    "FP8 without scales": (lambda r: r.hybrid.dispatch(r.x.view(torch.uint8), topk_idx=r.ids), "scaling_factor"),
    "no routing": (lambda r: r.hybrid.dispatch(r.x), "routing_map"),
    "map of numbers": (lambda r: r.hybrid.dispatch(r.x, routing_map=r.ids), "routing_map"),
    "handle of the other call": (lambda r: r.hybrid.combine(r.x, handle=r.permuted()), "handle"),
}


REFUSED: dict[str, Callable[[Rank], Any]] = {
    "shrink": lambda r: host_side.buffer(r.v1.group, enable_shrink=True),
    "memory on the host": lambda r: host_side.elastic(r.v1.group, num_cpu_bytes=1),
    "NVFP4": lambda r: r.low(use_nvfp4=True),
    "signals": lambda r: r.v1.low_latency_combine(r.x, r.ids, r.weights, None, overlap=True),
    "masks": lambda r: r.v1.low_latency_update_mask_buffer(0, True),
    "PCIe": lambda r: r.v1.dispatch_pcie(r.x, anything=1),
    "engram": lambda r: r.v2.engram_write(r.x, anything=1),
    "stages": lambda r: r.v2.pp_send(r.x, 1),
    "gathers": lambda r: r.v2.all_gather(r.x),
}


def wrong_input(comm: weft.Communicator) -> None:
    rank = Rank(comm)
    for name, (call, word) in WRONG.items():
        with pytest.raises(weft.InvalidArgument) as caught:
            call(rank)
        assert word in str(caught.value), (name, str(caught.value))
        assert isinstance(caught.value, ValueError | RuntimeError)
    for name, call in REFUSED.items():
        with pytest.raises(deep_ep.NotSupported) as refused:
            call(rank)
        assert isinstance(refused.value, weft.Unsupported), name
        assert ";" in str(refused.value)
    with pytest.raises(ValueError, match="group"):
        host_side.buffer(None)
    other = host_side.buffer(comm)
    with pytest.raises(weft.InvalidState, match="another buffer"):
        other.combine(rank.x, rank.normal()[4])
    lost = torch.ones(comm.num_ranks, dtype=torch.int32, device="cpu")
    rank.v1.low_latency_query_mask_buffer(lost)
    assert lost.tolist() == [0] * comm.num_ranks
    recv, _, _, _, handle, _ = rank.normal()  # and all goes on
    rank.v1.combine(recv, handle)


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1].contiguous()


# Each: what every rank does first, then the wrong call of one rank alone, and a word of its text.
ALONE: dict[str, tuple[Callable[[Rank], Any], Callable[[Rank, Any], Any], str]] = {
    "V1 weights": (lambda r: None, lambda r, _: r.normal(topk_weights=_cut(r.weights)), "topk_weights"),
    "V1 ids": (lambda r: None, lambda r, _: r.normal(topk_idx=r.ids.short()), "topk_idx"),
    "V1 experts": (
        lambda r: None,
        lambda r, _: r.normal(num_tokens_per_expert=r.ids.new_zeros(1 << 21)),
        "num_experts",
    ),
    "V1 weights back": (
        lambda r: r.normal(),
        lambda r, had: r.v1.combine(had[0], had[4], topk_weights=r.weights[:1]),
        "topk_weights",
    ),
    "V1 wide rows": (lambda r: r.normal(), lambda r, had: v1_combine(r, had, torch.cat([had[0]] * 2, dim=1)), "64"),
    "V1 narrow rows": (lambda r: r.normal(), lambda r, had: v1_combine(r, had, had[0][:, :32].contiguous()), "64"),
    "V1 rows without a dimension": (lambda r: r.normal(), lambda r, had: v1_combine(r, had, had[0][0]), "x is"),
    "V2 wide rows": (
        lambda r: r.elastic(),
        lambda r, had: r.v2.combine(torch.cat([had[0]] * 2, dim=1), had[3]),
        "64",
    ),
    "hybrid wide rows": (
        lambda r: r.hybrid.dispatch_with_permute(hidden=r.x, topk_idx=r.ids),
        lambda r, had: r.hybrid.combine_with_unpermute(hidden=torch.cat([had[0]] * 2, dim=1), handle=had[4]),
        "64",
    ),
    "hybrid wide rows by token": (
        lambda r: r.hybrid.dispatch(r.x, topk_idx=r.ids),
        lambda r, had: r.hybrid.combine(torch.cat([had[0]] * 2, dim=1), handle=had[3]),
        "64",
    ),
    "low counts": (
        lambda r: None,
        lambda r, _: r.low(cumulative_local_expert_recv_stats=torch.zeros(2, dtype=torch.int32, device="cpu")),
        "cumulative_local_expert_recv_stats",
    ),
    "low float counts": (
        lambda r: None,
        lambda r, _: r.low(cumulative_local_expert_recv_stats=torch.zeros(3, dtype=torch.float32, device="cpu")),
        "cumulative_local_expert_recv_stats",
    ),
    "V2 counts": (
        lambda r: None,
        lambda r, _: r.elastic(cumulative_local_expert_recv_stats=torch.zeros((1, 3), dtype=torch.int32, device="cpu")),
        "cumulative_local_expert_recv_stats",
    ),
    "V2 counts again": (
        lambda r: r.elastic(),
        lambda r, had: r.elastic(
            topk_idx=None, num_experts=None, handle=had[3], cumulative_local_expert_recv_stats=r.ids[0, :1]
        ),
        "cumulative_local_expert_recv_stats",
    ),
    "low tokens": (lambda r: None, lambda r, _: r.low(num_max_dispatch_tokens_per_rank=9), "tokens"),
    "low ids": (lambda r: None, lambda r, _: r.low(topk_idx=_cut(r.ids)), "topk_idx"),
    "low weights": (lambda r: None, lambda r, _: r.low(topk_weights=_cut(r.weights)), "topk_weights"),
    "low one row": (lambda r: r.low(), lambda r, had: low_combine(r, had, x=had[0][:1, :1]), "x is"),
    "low out": (
        lambda r: r.low(),
        lambda r, had: low_combine(r, had, out=torch.zeros((2, *r.x.shape), dtype=torch.bfloat16, device="cpu")),
        "out is",
    ),
    "low fp32 out": (
        lambda r: r.low(),
        lambda r, had: low_combine(r, had, out=torch.zeros_like(r.x.float())),
        "out is",
    ),
    "V2 weights": (lambda r: None, lambda r, _: r.elastic(topk_weights=_cut(r.weights)), "topk_weights"),
    "V2 weights again": (
        lambda r: r.elastic(),
        lambda r, had: r.elastic(topk_idx=None, num_experts=None, handle=had[3], topk_weights=_cut(r.weights)),
        "topk_weights",
    ),
    "hybrid weights": (
        lambda r: None,
        lambda r, _: r.hybrid.dispatch_with_permute(hidden=r.x, topk_idx=r.ids, topk_weights=_cut(r.weights)),
        "topk_weights",
    ),
    "hybrid ids": (lambda r: None, lambda r, _: r.hybrid.dispatch(r.x, topk_idx=_cut(r.ids)), "topk_idx"),
    "hybrid map": (
        lambda r: None,
        lambda r, _: r.hybrid.dispatch(r.x, routing_map=r.ids.new_zeros((2, 6), dtype=torch.bool)),
        "routing_map",
    ),
    "hybrid padding": (
        lambda r: None,
        lambda r, _: r.hybrid.dispatch_with_permute(hidden=r.x, topk_idx=r.ids, pad_multiple=-4),
        "pad_multiple",
    ),
    "hybrid weights again": (
        lambda r: r.hybrid.dispatch_with_permute(hidden=r.x, topk_idx=r.ids),
        lambda r, had: r.hybrid.dispatch_with_permute(hidden=r.x, handle=had[4], topk_weights=_cut(r.weights)),
        "topk_weights",
    ),
}  # fmt: skip


def low_combine(r: Rank, had: Any, **more: Any) -> Any:
    arguments = {"x": had[0], "topk_idx": r.ids, "topk_weights": r.weights, "handle": had[2], **more}
    return r.v1.low_latency_combine(**arguments)


def v1_combine(r: Rank, had: Any, x: torch.Tensor) -> Any:
    return r.v1.combine(x, had[4])


def wrong_on_one_rank(comm: weft.Communicator) -> None:
    rank = Rank(comm)
    for name, (first, call, word) in ALONE.items():
        had = first(rank)
        if comm.rank == 0:
            with pytest.raises(weft.InvalidArgument) as caught:
                call(rank, had)
            assert word in str(caught.value), (name, str(caught.value))
        for each in (rank.normal, rank.low, rank.elastic, rank.permuted):  # corrected: with the other rank, which waits
            each()


def ids_out_of_range(comm: weft.Communicator) -> None:
    rank = Rank(comm)
    wrong = rank.ids.clone()
    wrong[0, 0], wrong[1, 0] = rank.num_experts + 5, -7
    recv = rank.normal(topk_idx=wrong)
    assert len(recv[0]) > 0  # the row of the bad id is not there, the others are
    with pytest.raises(weft.InvalidArgument, match="out of range"):
        rank.normal()


def with_a_lost_rank(comm: weft.Communicator, kind: str) -> str:
    rank = Rank(comm)
    call = {
        "v1": rank.normal, "low": rank.low, "v2": rank.elastic,
        "hybrid": lambda: rank.hybrid.dispatch_with_permute(hidden=rank.x, topk_idx=rank.ids),
    }[kind]  # fmt: skip
    try:
        call()  # the others may still be in it when rank 1 has done with it
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            call()
    except weft.PeerLost as error:
        assert error.ranks == (1,)
        buffer = {"v2": rank.v2, "hybrid": rank.hybrid}.get(kind, rank.v1)
        buffer.comm.rebuild([each for each in range(comm.num_ranks) if each != 1])
        call()
        rank.v1._end()
        return "named"
