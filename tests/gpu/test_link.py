"""The kernel that measures links, between two buffers of one GPU: every row of a peer's part, and nothing beside it."""

from __future__ import annotations

import pytest
import torch

from weft.bench import link

DEVICE = torch.device("cuda", 0)
BESIDE = 1 << 20  # bytes behind the part


@pytest.mark.parametrize("num_sms", [1, 7])
@pytest.mark.parametrize("row_bytes", [7168, 14336])
@pytest.mark.parametrize("kind", ["push", "pull"])
def test_rows_and_no_others(kind: str, row_bytes: int, num_sms: int) -> None:
    rows_each = link._PAIR_BYTES // row_bytes // num_sms * num_sms
    kernels = link._kernels([DEVICE, DEVICE], kind, row_bytes)

    # Random, since a push writes what its shared memory held: with one value everywhere that was the value each time.
    before = [torch.randint(256, (link._PAIR_BYTES + BESIDE,), dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    buffers = [each.clone() for each in before]
    torch.cuda.synchronize()
    assert link._rate(kernels, buffers, link.LinkPoint(kind, row_bytes, num_sms)) > 0
    torch.cuda.synchronize()
    end = rows_each * row_bytes
    for old, new in zip(before, buffers, strict=True):
        assert torch.equal(old[end:], new[end:])
        is_changed = (old[:end] != new[:end]).view(-1, row_bytes).any(1)
        assert bool(is_changed.all()) if kind == "push" else not bool(is_changed.any())
