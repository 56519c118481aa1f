"""Counts that a call hands out on the host."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor

__all__ = ["HostCounts"]

_ROWS = 64  # of a block


class HostCounts:
    """int64 tensors of a few words in host memory, pinned beside a GPU: rows of larger blocks, which take long to
    make. Each row is given out once, so it is the caller's own."""

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._rows: dict[int, list[tuple[Tensor, Any]]] = {}  # by length, with their words

    def take(self, counts: list[int]) -> Tensor:
        """A tensor that has them."""
        rows = self._rows.get(len(counts))
        if not rows:
            rows = self._rows[len(counts)] = self._made(len(counts))
        row, words = rows.pop()
        words[:] = array("q", counts)
        return row

    def _made(self, length: int) -> list[tuple[Tensor, Any]]:
        with torch.inference_mode(False):  # of whoever asks first
            block = torch.empty((_ROWS, length), dtype=torch.int64, device="cpu", pin_memory=self._is_pinned)
            array_of_numpy: Any = block.view(-1).numpy()
            words = memoryview(array_of_numpy).cast("B").cast("q")
            return [(row, words[idx * length : (idx + 1) * length]) for idx, row in enumerate(block.unbind())]
