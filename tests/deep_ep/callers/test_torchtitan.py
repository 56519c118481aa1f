"""Guards against TorchTitan's DeepEP dispatcher giving something else over Weft than its experts applied one by one."""

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
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan comes by .ci/long.d/deep_ep_callers"),
]

HIDDEN, NUM_LOCAL, TOP_K, MOST = 64, 3, 2, 16


def titan() -> Any:
    import weft.deep_ep

    weft.deep_ep.install()
    from torchtitan.distributed.deepep import deepep

    torch.library.impl(deepep._lib, "dispatch", "CPU")(deepep._dispatch_op_impl)  # there for CUDA alone
    torch.library.impl(deepep._lib, "combine", "CPU")(deepep._combine_op_impl)
    return deepep


def against_its_experts(comm: weft.Communicator, store: str, expanded: bool) -> None:
    num_ranks, num_experts = comm.num_ranks, NUM_LOCAL * comm.num_ranks
    dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=comm.rank, world_size=num_ranks)
    deepep = titan()
    generator = torch.Generator(device="cpu").manual_seed(0)
    experts = torch.randn((num_experts, HIDDEN, HIDDEN), generator=generator, dtype=torch.float32, device="cpu") / 8
    generator.manual_seed(comm.rank + 1)
    num_tokens = MOST - 3 * comm.rank
    x = torch.randn((num_tokens, HIDDEN), generator=generator, dtype=torch.float32, device="cpu", requires_grad=True)
    scores = torch.rand((num_tokens, num_experts), generator=generator, dtype=torch.float32, device="cpu")
    scores.requires_grad_(True)
    top, ids = scores.topk(TOP_K, dim=1)
    deepep.get_buffer(dist.group.WORLD, hidden=HIDDEN, num_max_tokens_per_rank=MOST, num_topk=TOP_K)
    with torch.set_grad_enabled(not expanded):
        rows, counts, state = deepep.dispatch_tokens(
            x, ids, top, NUM_LOCAL, num_experts, num_tokens_per_rank=MOST, cudagraphable=expanded
        )
        parts, start = [], 0
        for local, count in enumerate(counts.tolist()):
            parts.append(rows[start : start + count] @ experts[comm.rank * NUM_LOCAL + local])
            start += count
        parts.append(torch.zeros((len(rows) - start, HIDDEN), dtype=torch.float32, device="cpu"))
        y = deepep.combine_tokens(torch.cat(parts), state)
        deepep.sync_combine()
    again = scores.gather(1, ids)
    wanted = sum(again[:, k, None] * torch.einsum("th,tho->to", x, experts[ids[:, k]]) for k in range(TOP_K))
    assert isinstance(wanted, torch.Tensor)
    assert torch.allclose(y, wanted, rtol=1e-5, atol=1e-5), (y - wanted).abs().max()
    if expanded:
        return
    (y * y).sum().backward()
    found = [x.grad, scores.grad]
    x.grad = scores.grad = None
    (wanted * wanted).sum().backward()
    for mine, theirs in zip(found, (x.grad, scores.grad), strict=True):
        assert mine is not None
        assert theirs is not None
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4), (mine - theirs).abs().max()


@pytest.mark.parametrize("expanded", [False, True])
def test_forward_and_backward(expanded: bool, tmp_path: Path) -> None:
    """Rows once a rank with gradients; and, without gradients, a row a pick."""
    weft.spawn(against_its_experts, 2, (str(tmp_path / "store"), expanded), device="cpu")
