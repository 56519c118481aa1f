"""Statistics of waits: nanoseconds that a call has waited for each rank, added to a tensor of the caller, on a GPU in
the order of the current stream."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.errors import InvalidArgument

if TYPE_CHECKING:
    from weft.deep_ep.ranks import Ranks
    from weft.expert_parallel import ExpertParallel

__all__ = ["counted", "counting_waits", "row_of_waits"]

_NOTHING = contextlib.nullcontext()


def row_of_waits(name: str, stats: Any, ranks: Ranks) -> Tensor | None:
    """int64 [R] of this rank: `stats` itself, or its row of [R, R]; None if none is given.

    Raises:
        InvalidArgument: it is something else.
    """
    if stats is None:
        return None
    num_ranks = ranks.num_ranks
    is_right = isinstance(stats, Tensor) and tuple(stats.shape) in ((num_ranks,), (num_ranks, num_ranks))
    if not is_right or stats.dtype != torch.int64 or stats.device != ranks.device:
        given = f"{list(stats.shape)} {stats.dtype}" if isinstance(stats, Tensor) else repr(type(stats))
        raise InvalidArgument(f"{name} is {given}; allowed is int64 [{num_ranks}] or [{num_ranks}, {num_ranks}]")
    row: Tensor = stats if stats.dim() == 1 else stats[ranks.rank]
    return row


def counting_waits(ep: ExpertParallel, window: int, row: Tensor | None) -> contextlib.AbstractContextManager[None]:
    """Around calls, or halves of calls, of one window, and of no other caller's."""
    return _NOTHING if row is None else _counting(ep, window, row)


@contextlib.contextmanager
def _counting(ep: ExpertParallel, window: int, row: Tensor) -> Iterator[None]:
    before = _waited_ns(ep, window)
    yield
    row += _waited_ns(ep, window) - before


def counted(ep: ExpertParallel, window: int, row: Tensor | None, call: Callable[[], Any]) -> Any:
    """`call()`, with its waits counted."""
    with counting_waits(ep, window, row):
        return call()


def _waited_ns(ep: ExpertParallel, window: int) -> Tensor:
    native = ep.calls.windows[window].native
    if ep.comm.engine == "nvlink":
        words = torch.empty(ep.num_ranks, dtype=torch.int64, device=ep.device)
        native.copy_waited_ns(words.data_ptr(), torch.cuda.current_stream(ep.device).cuda_stream)
        return words
    waited_us = native.stats()["wait_us"]
    return torch.tensor([round(1000 * each) for each in waited_us], dtype=torch.int64, device="cpu")
