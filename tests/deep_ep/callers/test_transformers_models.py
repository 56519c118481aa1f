"""Guards against whole models of transformers that give something else over Weft than unsharded, or other gradients."""

from __future__ import annotations

import importlib
import os
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
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers comes by .ci/long.d/deep_ep_callers"),
]

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 3, "max_position_embeddings": 64,
    "attn_implementation": "eager",
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 8}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "head_dim": 16}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 8, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4,
            "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
        },
    ),
}  # fmt: skip


def classes(model: str) -> tuple[Any, Any]:
    name, more = MODELS[model]
    package = f"transformers.models.{model}"
    config = getattr(importlib.import_module(f"{package}.configuration_{model}"), f"{name}Config")
    kind = getattr(importlib.import_module(f"{package}.modeling_{model}"), f"{name}ForCausalLM")
    return config(**{**SIZES, **more}), kind


def against_unsharded(comm: weft.Communicator, model: str, folder: str) -> None:
    num_ranks, rank = comm.num_ranks, comm.rank
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    from transformers.distributed import DistributedConfig

    from weft.integrations.transformers import WeftEP  # which registers it

    calls, call = [], WeftEP.__call__
    WeftEP.__call__ = lambda self, *tensors: calls.append(len(tensors[0])) or call(self, *tensors)
    config, kind = classes(model)
    torch.manual_seed(0)
    whole = kind(config)
    if rank == 0:
        whole.save_pretrained(f"{folder}/model")
    dist.barrier()
    sizes = {"fsdp_size": num_ranks, "ep_size": num_ranks}
    sharded, other = (
        kind.from_pretrained(
            f"{folder}/model",
            distributed_config=DistributedConfig(**sizes, ep_implementation=name),
            dtype=torch.float32,
        )
        for name in ("weft", "all_to_all")
    )
    for length in (12 - 5 * rank, 3 + 9 * rank):
        generator = torch.Generator(device="cpu").manual_seed(rank)
        ids = torch.randint(96, (2, length), generator=generator, dtype=torch.int64, device="cpu")
        calls.clear()
        results = [each(input_ids=ids, labels=ids) for each in (sharded, other, whole)]
        assert torch.allclose(results[0].logits, results[2].logits, rtol=1e-3, atol=1e-4)
        num_layers = sum("experts" in name and "down_proj" in name for name, _ in whole.named_parameters())
        num_layers -= sum("shared_experts.down_proj" in name for name, _ in whole.named_parameters())
        assert calls == [2 * length] * num_layers
        for each, result in zip((sharded, other), results, strict=False):
            each.zero_grad()
            result.loss.backward()
        for (name, mine), (_, theirs) in zip(sharded.named_parameters(), other.named_parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            if mine.grad is not None:
                found, wanted = (local(each.grad) for each in (mine, theirs))
                assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-5), (name, (found - wanted).abs().max())


def local(grad: Any) -> torch.Tensor:
    """This rank's part."""
    part: torch.Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    return part


@pytest.mark.parametrize("model", MODELS)
def test_a_whole_model(model: str, tmp_path: Path) -> None:
    """Logits as unsharded, gradients as with transformers' own all-to-all; T differs by rank."""
    weft.spawn(against_unsharded, 2, (model, str(tmp_path)), device="cpu")
