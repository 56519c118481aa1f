"""Statistics of waits: nanoseconds that a call has waited for each rank, added to a tensor of the caller."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.deep_ep.errors import refused
from weft.errors import InvalidArgument

if TYPE_CHECKING:
    from weft.deep_ep.ranks import Ranks
    from weft.expert_parallel import ExpertParallel

__all__ = ["counting_waits", "row_of_waits"]


def row_of_waits(name: str, stats: Any, ranks: Ranks) -> Tensor | None:
    """int64 [R] of this rank: `stats` itself, or its row of [R, R]; None if none is given.

    Raises:
        InvalidArgument: it is something else. NotSupported: on a GPU.
    """
    if stats is None:
        return None
    if ranks.device.type == "cuda":
        raise refused(name, "waits counted in the call", "weft.ExpertParallel.stats has wait_us")
    num_ranks = ranks.num_ranks
    is_right = isinstance(stats, Tensor) and tuple(stats.shape) in ((num_ranks,), (num_ranks, num_ranks))
    if not is_right or stats.dtype != torch.int64 or stats.device != ranks.device:
        given = f"{list(stats.shape)} {stats.dtype}" if isinstance(stats, Tensor) else repr(type(stats))
        raise InvalidArgument(f"{name} is {given}; allowed is int64 [{num_ranks}] or [{num_ranks}, {num_ranks}]")
    row: Tensor = stats if stats.dim() == 1 else stats[ranks.rank]
    return row


@contextlib.contextmanager
def counting_waits(ep: ExpertParallel, window: int, row: Tensor | None) -> Iterator[None]:
    """Around calls of one window on the cpu engine, which end in here."""
    if row is None:
        yield
        return
    before = _waited_ns(ep, window)
    yield
    row += _waited_ns(ep, window) - before


def _waited_ns(ep: ExpertParallel, window: int) -> Tensor:
    waited_us = ep.calls.windows[window].native.stats()["wait_us"]
    return torch.tensor([round(1000 * each) for each in waited_us], dtype=torch.int64, device="cpu")
