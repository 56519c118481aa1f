"""Guards against vLLM's own dispatcher classes giving something else over Weft than experts applied one by one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm comes by .ci/long.d/deep_ep_serving"),
]

HIDDEN, NUM_LOCAL, TOP_K, MOST = 2048, 3, 4, 16  # vLLM's low-latency class takes few widths
HOME = "vllm.model_executor.layers.fused_moe"

KEPT: list[torch.library.Library] = []  # what they define goes with them


def vllm_module(name: str) -> Any:
    import importlib

    return importlib.import_module(f"{HOME}.{name}")


def prepare_import() -> None:
    """The wheel asks for a torchvision with operators, which nothing here uses; beside torch for CPUs it has none."""
    import weft.deep_ep

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    KEPT.append(library)
    weft.deep_ep.install()


def inputs(rank: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device="cpu").manual_seed(rank)
    tokens = MOST - 5 * rank
    x = torch.randn((tokens, HIDDEN), generator=generator, dtype=torch.float32, device="cpu").bfloat16()
    scores = torch.rand((tokens, num_experts), generator=generator, dtype=torch.float32, device="cpu")
    weights, ids = scores.topk(TOP_K, dim=1)
    return x, ids, weights


def against_experts(comm: weft.Communicator, kind: str, store: str) -> None:
    num_ranks, rank, num_experts = comm.num_ranks, comm.rank, NUM_LOCAL * comm.num_ranks
    dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
    prepare_import()
    import deep_ep
    from cuda_as_cpu import CudaAsCpu

    with CudaAsCpu():
        config = vllm_module("config").FUSED_MOE_UNQUANTIZED_CONFIG
        x, ids, weights = inputs(rank, num_experts)
        scales = torch.arange(1, num_experts + 1, dtype=torch.float32, device="cpu")  # what each expert does
        wanted = x.float() * (weights * scales[ids]).sum(1, keepdim=True)
        output = torch.empty_like(x)
        for _ in range(2):
            if kind == "low_latency":
                buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
                made = vllm_module("prepare_finalize.deepep_ll").DeepEPLLPrepareAndFinalize(buffer, MOST, num_ranks)
                rows, _, meta, _, _ = made.prepare(x, weights, ids, num_experts, None, False, config)
                mine = scales[rank * NUM_LOCAL : (rank + 1) * NUM_LOCAL]
                done = (rows.float() * mine[:, None, None]).bfloat16()
                reduce = vllm_module("topk_weight_and_reduce").TopKWeightAndReduceDelegate()
                for local, count in enumerate(meta.expert_num_tokens.tolist()):
                    done[local, count:] = float("nan")
            else:
                buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 26)
                made = vllm_module("prepare_finalize.deepep_ht").DeepEPHTPrepareAndFinalize(
                    buffer, num_ranks, num_ranks, rank * NUM_LOCAL
                )
                rows, _, _, got_ids, got_weights = made.prepare(x, weights, ids, num_experts, None, False, config)
                done = (rows.float() * (got_weights * scales[got_ids]).sum(1, keepdim=True)).bfloat16()
                reduce = vllm_module("topk_weight_and_reduce").TopKWeightAndReduceNoOP()
            made.finalize(output, done, weights, ids, False, reduce)
            assert torch.allclose(output.float(), wanted, rtol=0.02, atol=0.05), (output - wanted).abs().max()


@pytest.mark.parametrize("kind", ["low_latency", "high_throughput"])
def test_prepare_and_finalize(kind: str, tmp_path: Path) -> None:
    """T differs by rank; rows behind the counts are NaN."""
    weft.spawn(against_experts, 2, (kind, str(tmp_path / "store")), device="cpu")
