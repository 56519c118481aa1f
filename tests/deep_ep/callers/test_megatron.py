"""Guards against a Megatron-Core layer that gives something else over Weft than its experts applied one by one."""

from __future__ import annotations

import functools
import sys
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
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core comes by .ci/long.d/deep_ep_callers"),
]

HIDDEN, NUM_LOCAL, TOP_K = 64, 4, 3


def make_layer(backend: str, num_ranks: int) -> Any:
    import weft.deep_ep

    weft.deep_ep.install()
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    assert sys.modules["deep_ep"] is weft.deep_ep
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    moe_utils.te_general_gemm = None
    parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, num_moe_experts=NUM_LOCAL * num_ranks,
        moe_router_topk=TOP_K, moe_ffn_hidden_size=32, ffn_hidden_size=32, add_bias_linear=False,
        moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=backend, expert_model_parallel_size=num_ranks,
        use_cpu_initialization=True, moe_router_dtype="fp32", moe_router_load_balancing_type="none",
        params_dtype=torch.float32, moe_permute_fusion=False,
    )  # fmt: skip
    spec = get_moe_module_spec(use_te=False, num_experts=NUM_LOCAL * num_ranks, moe_grouped_gemm=False)
    # Since 0.17 the spec is a partial of the layer.
    submodules = spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules
    return MoELayer(config, submodules)


def dense(layer: Any, x: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """The same router, and every rank's experts on every token."""
    probs = layer.router(x)[0].view(-1, NUM_LOCAL * num_ranks)
    tokens, parts = x.view(-1, HIDDEN), []
    for rank in range(num_ranks):
        for expert in layer.experts.local_experts:
            weights = [expert.linear_fc1.weight.detach().clone(), expert.linear_fc2.weight.detach().clone()]
            for each in weights:
                dist.broadcast(each, rank)
            parts.append(torch.nn.functional.gelu(tokens @ weights[0].T) @ weights[1].T)
    return (torch.stack(parts, 1) * probs[..., None]).sum(1).view_as(x)


def against_its_experts(comm: weft.Communicator, backend: str, store: str) -> None:
    num_ranks = comm.num_ranks
    dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=comm.rank, world_size=num_ranks)
    from cuda_as_cpu import CudaAsCpu

    torch.manual_seed(3)
    with CudaAsCpu():
        layer = make_layer(backend, num_ranks)
        with torch.no_grad():
            for each in layer.experts.parameters():
                each.copy_(torch.randn_like(each) * 0.2 + comm.rank * 0.05)
            dist.broadcast(layer.router.weight, 0)
        length = 5 + (3 * comm.rank if backend == "deepep" else 0)  # hybridep asks for equal T
        x = torch.randn((length, 2, HIDDEN), dtype=torch.float32, device="cpu", requires_grad=True)
        for _ in range(2):  # the second step uses what the first has made
            x.grad = None
            y, _ = layer(x)
            (y * y).sum().backward()
        found, x.grad = x.grad, None
        wanted = dense(layer, x, num_ranks)
        assert torch.allclose(y, wanted, rtol=1e-5, atol=2e-6), (y - wanted).abs().max()
        (wanted * wanted).sum().backward()
        assert x.grad is not None
        assert found is not None
        assert torch.allclose(found, x.grad, rtol=1e-5, atol=1e-5), (found - x.grad).abs().max()


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_forward_and_backward(backend: str, tmp_path: Path) -> None:
    weft.spawn(against_its_experts, 2, (backend, str(tmp_path / "store")), device="cpu")
