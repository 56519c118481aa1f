"""Guards against a repeated dispatch that quantises otherwise than a first one."""

from typing import Any

import pytest
import torch

import weft
from weft import reference

NUM_EXPERTS, TOP_K, HIDDEN = 8, 3, 144


def _ranks(comm: Any, quantize: str, layout: str) -> tuple[Any, Any, Any]:
    gen = torch.Generator().manual_seed(comm.rank)
    first, second = torch.randn(2, 20 + comm.rank, HIDDEN, generator=gen).bfloat16()
    ids = torch.randint(-1, NUM_EXPERTS, (len(first), TOP_K), generator=gen)
    with weft.ExpertParallel(comm, num_experts=NUM_EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=32) as ep:
        sent = ep.dispatch(first, ids, layout=layout)
        again = ep.dispatch(second, handle=sent.handle, quantize=quantize)
        return second.float(), ids, (again.x.data.view(torch.uint8).clone(), again.x.scales.view(torch.uint8).clone())


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
@pytest.mark.parametrize("quantize", ["fp8", "fp8_ue8m0", "fp8_pow2"])
def test_a_handle_serves_quantised_rows(quantize: str, layout: str) -> None:
    """Bit for bit what a first dispatch of the same rows would have given."""
    results = weft.spawn(_ranks, num_ranks=2, args=(quantize, layout), device="cpu")
    xs = [x.bfloat16() for x, _, _ in results]
    want = reference.dispatch(
        xs, [ids for _, ids, _ in results], None, num_experts=NUM_EXPERTS, layout=layout, quantize=quantize
    )
    for (_, _, (data, scales)), expected in zip(results, want, strict=True):
        assert torch.equal(data, expected.x.data.view(torch.uint8))
        assert torch.equal(scales, expected.x.scales.contiguous().view(torch.uint8))
