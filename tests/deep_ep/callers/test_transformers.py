"""Guards against experts of transformers that give something else, or other gradients, over Weft than unsharded."""

from __future__ import annotations

import copy
import importlib
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

SIZES = {"hidden_size": 64, "moe_intermediate_size": 48, "intermediate_size": 48, "num_hidden_layers": 1}
MODELS = {
    "mixtral": ("MixtralConfig", "MixtralExperts", {"num_local_experts": 8, "num_experts_per_tok": 3}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeExperts", {"num_experts": 8, "num_experts_per_tok": 3}),
    "deepseek_v3": (
        "DeepseekV3Config", "DeepseekV3NaiveMoe|DeepseekV3Experts", {"n_routed_experts": 8, "num_experts_per_tok": 3},
    ),
}  # fmt: skip


def make_experts(model: str) -> torch.nn.Module:
    config_name, names, more = MODELS[model]
    package = f"transformers.models.{model}"
    config = getattr(importlib.import_module(f"{package}.configuration_{model}"), config_name)(**SIZES, **more)
    config._experts_implementation = "eager"
    home = importlib.import_module(f"{package}.modeling_{model}")
    kind = next(getattr(home, name) for name in names.split("|") if hasattr(home, name))
    experts: torch.nn.Module = kind(config)
    generator = torch.Generator(device="cpu").manual_seed(0)
    with torch.no_grad():
        for each in experts.parameters():
            each.copy_(torch.randn(each.shape, generator=generator, dtype=torch.float32, device="cpu") * 0.1)
    return experts


def against_unsharded(comm: weft.Communicator, model: str, store: str) -> None:
    num_ranks, rank = comm.num_ranks, comm.rank
    dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
    from transformers.distributed.expert_parallel import EPImplementationInterface

    import weft.integrations.transformers as integration

    assert EPImplementationInterface()["weft"] is integration.WeftEP
    mesh = dist.init_device_mesh("cpu", (num_ranks, 1), mesh_dim_names=("ep", "tp"))
    whole = make_experts(model)
    mine: Any = copy.deepcopy(whole)
    num_local = mine.num_experts // num_ranks
    here = slice(rank * num_local, (rank + 1) * num_local)
    for name, each in list(mine.named_parameters()):
        setattr(mine, name, torch.nn.Parameter(each.detach()[here].clone()))
    mine.num_experts, mine._is_expert_parallel = num_local, True
    ep = integration.WeftEP(mine, mesh["ep"], mesh["tp"])
    for tokens in (9 - 4 * rank, 0 if rank else 3, 600 * rank + 1):  # one rank has none; the window grows
        generator = torch.Generator(device="cpu").manual_seed(10 + rank)
        x = torch.randn((tokens, 64), generator=generator, dtype=torch.float32, device="cpu", requires_grad=True)
        logits = torch.randn((tokens, 8), generator=generator, dtype=torch.float32, device="cpu", requires_grad=True)
        results = []
        for experts, parameters in ((ep, mine), (whole, whole)):
            for each in (x, logits, *parameters.parameters()):
                each.grad = None
            weights, ids = logits.softmax(1).topk(3, dim=1)
            y = experts(x, ids, weights)
            if parameters is mine or y.requires_grad:  # the unsharded ones do nothing without tokens
                (y * y).sum().backward()
            results.append([y, x.grad, logits.grad, *(each.grad for each in parameters.parameters())])
        for number, (found, wanted) in enumerate(zip(*results, strict=True)):
            if wanted is None:
                full = (found.shape[0] * num_ranks, *found.shape[1:]) if number > 2 else found.shape
                wanted = torch.zeros(full, dtype=torch.float32, device="cpu")
            if number > 2:  # of the experts: all ranks' tokens
                dist.all_reduce(wanted)
                wanted = wanted[here]
            assert found is not None
            assert torch.allclose(found, wanted, rtol=1e-4, atol=2e-5), (number, (found - wanted).abs().max())


@pytest.mark.parametrize("model", MODELS)
def test_experts(model: str, tmp_path: Path) -> None:
    """Outputs and gradients of x, of the router's logits and of the experts; T differs by rank."""
    weft.spawn(against_unsharded, 2, (model, str(tmp_path / "store")), device="cpu")
