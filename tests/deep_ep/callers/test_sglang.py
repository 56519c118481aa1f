"""Guards against SGLang's own dispatcher giving something else over Weft than experts applied one by one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("sglang") is None, reason="sglang comes by .ci/long.d/deep_ep_serving"),
]

HIDDEN, NUM_LOCAL, TOP_K, MOST = 256, 3, 4, 16

KEPT: list[torch.library.Library] = []  # what they define goes with them


def sglang_module() -> Any:
    """Its dispatcher, with what it asks a running server and a GPU for."""
    import weft.deep_ep

    library = torch.library.Library("torchvision", "FRAGMENT")  # asked for by name, not used
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    KEPT.append(library)
    weft.deep_ep.install()
    from sglang.srt.layers.moe.token_dispatcher import deepep

    buffers: dict[str, Any] = {}
    deepep.get_resources = lambda: SimpleNamespace(buffers=buffers)
    deepep.get_deepep_config = lambda: ""
    deepep.get_deepep_output_dtype = lambda _: deepep.DispatcherOutputDtype.BF16
    deepep.get_is_extend_in_batch = deepep.is_tbo_enabled = lambda: False
    deepep.get_cuda_version = lambda: (12, 8)
    deepep._is_mnnvl_fabric_supported = lambda: False
    deepep._deepep_precompile_tp_barrier = lambda: None
    deepep.get_global_expert_distribution_recorder = lambda: SimpleNamespace(
        on_deepep_dispatch_normal=lambda *given, **named: None, on_deepep_dispatch_low_latency=lambda *given: None
    )
    deepep.deep_gemm_wrapper = SimpleNamespace(
        ENABLE_JIT_DEEPGEMM=True, DEEPGEMM_SCALE_UE8M0=False, DEEPGEMM_BLACKWELL=False
    )
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)
    torch.get_device_module = lambda device=None: torch.cuda
    return deepep


def against_experts(comm: weft.Communicator, mode: str, later: bool, store: str) -> None:
    num_ranks, rank, num_experts = comm.num_ranks, comm.rank, NUM_LOCAL * comm.num_ranks
    dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
    from cuda_as_cpu import CudaAsCpu

    with CudaAsCpu():
        deepep = sglang_module()
        made = deepep.DeepEPDispatcher(
            dist.group.WORLD, TOP_K, num_experts=num_experts, num_local_experts=NUM_LOCAL, hidden_size=HIDDEN,
            params_dtype=torch.bfloat16, deepep_mode=deepep.DeepEPMode[mode], async_finish=later,
            return_recv_hook=later,
        )  # fmt: skip
        scales = torch.arange(1, num_experts + 1, dtype=torch.float32, device="cpu")  # what each expert does
        mine = scales[rank * NUM_LOCAL : (rank + 1) * NUM_LOCAL]
        for turn in range(3):
            generator = torch.Generator(device="cpu").manual_seed(10 * turn + rank)
            tokens = MOST - 5 * rank - turn
            x = torch.randn((tokens, HIDDEN), generator=generator, dtype=torch.float32, device="cpu").bfloat16()
            scores = torch.rand((tokens, num_experts), generator=generator, dtype=torch.float32, device="cpu")
            weights, ids = scores.topk(TOP_K, dim=1)
            got = made.dispatch(x, SimpleNamespace(topk_weights=weights, topk_ids=ids.to(torch.int32)))
            if mode == "NORMAL":
                local = got.topk_ids
                factor = torch.where(local >= 0, got.topk_weights * mine[local.clamp(min=0)], 0.0).sum(1, keepdim=True)
                assert sum(got.num_recv_tokens_per_expert) >= int((local >= 0).sum())
                done = (got.hidden_states.float() * factor).bfloat16()
            else:
                done = (got.hidden_states.float() * mine[:, None, None]).bfloat16()
            y = made.combine((done, got.topk_ids, got.topk_weights))
            wanted = x.float() * (weights * scales[ids]).sum(1, keepdim=True)
            assert torch.allclose(y.float(), wanted, rtol=0.02, atol=0.05), (y - wanted).abs().max()


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("mode", ["NORMAL", "LOW_LATENCY"])
def test_dispatch_and_combine(mode: str, later: bool, tmp_path: Path) -> None:
    """`later`: with events, or with hooks that receive. T differs by rank."""
    weft.spawn(against_experts, 2, (mode, later, str(tmp_path / "store")), device="cpu")
