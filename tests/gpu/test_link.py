"""The kernel that measures links, between two buffers of one GPU: every row of a peer's part, and nothing beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weft.bench import link

DEVICE = torch.device("cuda", 0)
BESIDE = 1 << 20  # bytes behind the part


@pytest.mark.parametrize("num_sms", [1, 7])
@pytest.mark.parametrize("row_bytes", [7168, 14336])
@pytest.mark.parametrize("kind", ["push", "pull"])
def test_rows_and_no_others(kind: str, row_bytes: int, num_sms: int) -> None:
    rows_each = link._PAIR_BYTES // row_bytes // num_sms * num_sms
    kernels = link._kernels([DEVICE, DEVICE], kind, row_bytes)

    def written(before: int) -> tuple[Tensor, bool]:
        buffers = [torch.full((link._PAIR_BYTES + BESIDE,), before, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
        torch.cuda.synchronize()
        assert link._rate(kernels, buffers, link.LinkPoint(kind, row_bytes, num_sms)) > 0
        torch.cuda.synchronize()
        end = rows_each * row_bytes
        changed = [(buffer[:end].view(-1, row_bytes) != before).any(1) for buffer in buffers]
        return torch.stack(changed), all(bool((buffer[end:] == before).all()) for buffer in buffers)

    # What a push writes is what its shared memory held, which may be one of the two by chance.
    (first, first_beside), (second, second_beside) = written(0x5A), written(0xA5)
    assert first_beside
    assert second_beside
    assert bool((first | second).all()) if kind == "push" else not bool((first | second).any())
