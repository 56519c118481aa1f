"""Guards against a name, a parameter, an order or a default that is not DeepEP's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from weft import deep_ep

EVENTS = "previous_event=None, async_finish=False, allocate_on_comm_stream=False"
V2_EVENTS = (
    "num_sms=0, num_qps=0, previous_event=None, previous_event_before_epilogue=None, async_with_compute_stream=False, "
    "allocate_on_comm_stream=False"
)
TABLE: dict[Any, str] = {
    deep_ep.Buffer: (
        "group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24, "
        "allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=False, enable_shrink=False, "
        "comm=None, *, use_fabric=False, allow_nvlink_for_normal_mode=True, num_nvl_peers=0"
    ),
    deep_ep.Buffer.get_dispatch_layout: f"self, topk_idx, num_experts, {EVENTS}",
    deep_ep.Buffer.dispatch: (
        "self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None, "
        "num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, num_worst_tokens=0, "
        f"config=None, {EVENTS}"
    ),
    deep_ep.Buffer.combine: f"self, x, handle, topk_weights=None, bias=None, config=None, {EVENTS}",
    deep_ep.Buffer.internode_dispatch: (
        "self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None, "
        f"num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, config=None, {EVENTS}"
    ),
    deep_ep.Buffer.internode_combine: f"self, x, handle, topk_weights=None, bias=None, config=None, {EVENTS}",
    deep_ep.Buffer.low_latency_dispatch: (
        "self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, cumulative_local_expert_recv_stats=None, "
        "dispatch_wait_recv_cost_stats=None, use_fp8=True, round_scale=False, use_ue8m0=False, async_finish=False, "
        "return_recv_hook=False, *, topk_weights=None, x_global_scale=None, use_nvfp4=False, use_ue8m0_for_sf=False"
    ),
    deep_ep.Buffer.low_latency_combine: (
        "self, x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False, async_finish=False, "
        "return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None, overlap=False, src_signals=None, "
        "src_signal_expect_value=0, *, packed_recv_count=None, comp_signal=None, block_m=None, threshold=None, "
        "num_sms=None"
    ),
    deep_ep.Buffer.get_low_latency_rdma_size_hint: "num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts",
    deep_ep.Buffer.get_local_buffer_tensor: "self, dtype, size=None, offset=0, use_rdma_buffer=False",
    deep_ep.Buffer.clean_low_latency_buffer: "self, num_max_dispatch_tokens_per_rank, hidden, num_experts",
    deep_ep.Config: (
        "num_sms=20, num_max_nvl_chunked_send_tokens=6, num_max_nvl_chunked_recv_tokens=256, "
        "num_max_rdma_chunked_send_tokens=6, num_max_rdma_chunked_recv_tokens=256"
    ),
    deep_ep.EventOverlap: "event=None, extra_tensors=None",
    deep_ep.ElasticBuffer: (
        "group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0, "
        "use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, allow_multiple_reduction=True, "
        "prefer_overlap_with_compute=True, sl_idx=3, num_allocated_qps=0, num_cpu_timeout_secs=300, "
        "num_gpu_timeout_secs=100, explicitly_destroy=False"
    ),
    deep_ep.ElasticBuffer.get_buffer_size_hint: (
        "group, num_max_tokens_per_rank, hidden, num_topk=0, use_fp8_dispatch=False, allow_hybrid_mode=True, "
        "allow_multiple_reduction=True"
    ),
    deep_ep.ElasticBuffer.get_theoretical_num_sms: (
        "self, num_experts, num_topk, num_scaleout_topk=0, rdma_gbs=0, nvlink_gbs=0, sm_read_gbs=200, sm_write_gbs=50"
    ),
    deep_ep.ElasticBuffer.barrier: "self, use_comm_stream=True, with_cpu_sync=False, sequential=True",
    deep_ep.ElasticBuffer.dispatch: (
        "self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, num_experts=None, "
        f"num_max_tokens_per_rank=None, expert_alignment=None, {V2_EVENTS}, handle=None, do_handle_copy=True, "
        "do_cpu_sync=None, do_expand=False, do_zero_padding=False, use_tma_aligned_col_major_sf=False"
    ),
    deep_ep.ElasticBuffer.combine: f"self, x, handle, topk_weights=None, bias=None, {V2_EVENTS}",
    deep_ep.HybridEPBuffer: (
        "group, hidden_dim, max_num_of_tokens_per_rank, num_local_experts, use_fp8=False, num_sms_dispatch_api=None, "
        "num_sms_combine_api=None, num_sms_preprocessing_api=None, num_blocks_permute=None, num_blocks_unpermute=None, "
        "load_cached_kernels=False, use_shared_buffer=True, enable_custom_allgather=False, "
        "num_of_hybrid_ep_ranks_per_nvlink_domain=None, use_mnnvl=None"
    ),
    deep_ep.HybridEPBuffer.dispatch_with_permute: (
        "self, *, hidden, topk_idx=None, topk_weights=None, num_of_experts_per_rank=None, num_of_experts=None, "
        "use_fp8=None, routing_map=None, probs=None, scaling_factor=None, num_permuted_tokens=None, pad_multiple=None, "
        "handle=None, non_blocking=False, fuse_permute_dispatch=False, num_dispatched_tokens=None, use_host_meta=None"
    ),
    deep_ep.HybridEPBuffer.combine_with_unpermute: (
        "self, *, hidden, probs=None, handle=None, pad_multiple=None, fuse_unpermute_combine=False, "
        "num_dispatched_tokens=None"
    ),
    deep_ep.HybridEPBuffer.dispatch: (
        "self, hidden, scaling_factor=None, topk_idx=None, topk_weights=None, num_of_experts=None, probs=None, "
        "routing_map=None, num_dispatched_tokens_tensor=None, num_dispatched_tokens=None, handle=None"
    ),
    deep_ep.HybridEPBuffer.combine: "self, hidden, probs=None, handle=None",
}


@pytest.mark.parametrize("function", TABLE, ids=lambda each: each.__qualname__)
def test_parameters(function: Any) -> None:
    parts, has_star = [], False
    for each in inspect.signature(function).parameters.values():
        if each.kind is each.KEYWORD_ONLY and not has_star:
            has_star = True
            parts.append("*")
        parts.append(each.name if each.default is each.empty else f"{each.name}={each.default!r}")
    assert ", ".join(parts) == TABLE[function]


def test_classes_are_classes() -> None:
    """Callers patch constructors, ask isinstance, and compare names."""
    assert deep_ep.ElasticBuffer.__name__ == "ElasticBuffer"
    assert deep_ep.Buffer.num_sms == 20
    for each in (deep_ep.Buffer, deep_ep.ElasticBuffer, deep_ep.HybridEPBuffer):
        assert isinstance(each, type)
        assert callable(each.__init__)


def test_configs_of_every_number_of_ranks() -> None:
    for num_ranks in range(1, 200):
        for config in (deep_ep.Buffer.get_dispatch_config(num_ranks), deep_ep.Buffer.get_combine_config(num_ranks)):
            assert config.num_sms == 20
            nvl = config.get_nvl_buffer_size_hint(14336, num_ranks)
            assert nvl > 0
            assert nvl % 128 == 0
            assert (config.get_rdma_buffer_size_hint(14336, num_ranks) == 0) == (num_ranks <= 8)
    assert deep_ep.Buffer.get_dispatch_config(2).num_max_nvl_chunked_send_tokens == 24
    for wrong in ((0,), (20, 256, 256), (20, 6, 256, 100, 50)):
        with pytest.raises(ValueError, match="allowed"):
            deep_ep.Config(*wrong)
    with pytest.raises(AssertionError, match="even"):
        deep_ep.Buffer.set_num_sms(3)


def test_hints_of_what_is_refused() -> None:
    hint = deep_ep.ElasticBuffer.get_engram_storage_size_hint(1000, 4096, 24, torch.float8_e4m3fn)
    assert hint == (4 << 20, 0)
    assert deep_ep.ElasticBuffer.get_pp_buffer_size_hint(3 << 20, 2) == 24 << 20
