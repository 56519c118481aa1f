"""Guards against a reference whose bits depend on where its tensors are: torch divides otherwise on GPUs."""

from __future__ import annotations

import pytest
import torch

from weft import reference


@pytest.mark.parametrize("form", [{}, {"ue8m0": True}, {"pow2": True}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fp8_is_the_same_on_a_gpu(form: dict[str, bool], dtype: torch.dtype) -> None:
    """Many scales, since a quotient is off by one bit in some of them only."""
    x = (torch.randn(512, 1024, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    here, there = reference.quantize_fp8(x, **form), reference.quantize_fp8(x.cuda(), **form)
    for mine, other in zip(here, there, strict=True):
        assert torch.equal(mine.view(torch.uint8), other.cpu().view(torch.uint8))
    back, other_back = reference.dequantize_fp8(*here), reference.dequantize_fp8(*there)
    assert torch.equal(back.view(torch.int32), other_back.cpu().view(torch.int32))
