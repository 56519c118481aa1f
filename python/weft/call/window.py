"""Windows of a communicator: their shape, and the native window that objects of equal shape share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from weft.call.streams import WindowStreams

__all__ = ["Window", "WindowSpec", "released_on_error"]


@dataclass(frozen=True)
class WindowSpec:
    """The shape of a window; equal specs share one."""

    num_experts: int
    top_k: int
    max_tokens: int
    max_row_bytes: int
    heap_bytes: int
    idx: int = 0
    landing_row_bytes: int = 0  # nvlink engine: room for one row that finds none in the heap, or in a small batch
    small_tokens: int = 0  # nvlink engine: most tokens of a rank in a small-batch call
    most_heap_bytes: int = 0  # cpu engine: up to which the heap may grow
    node_ranks: int = 0  # 0: all are one node
    traffic_class: int | None = None  # nvlink engine with nodes: of what crosses NCCL's network; None: NCCL's own


class Window:
    """A native window and how many ExpertParallel objects of this rank use it. `serial` is equal on all ranks, and so
    are the numbers of its objects, of which `next_object` is the next.

    `native` is a `_native.CpuWindow`, or on the nvlink engine a `_native.GpuWindow`, and then there are `streams`.
    """

    def __init__(self, native: Any, serial: int, max_tokens: int, streams: WindowStreams | None = None) -> None:
        self.native, self.serial, self.max_tokens, self.streams = native, serial, max_tokens, streams
        self.num_users = self.next_object = 0
        self.closed = False
        self.half: Any = None  # the Half: what a staged call has still to do

    def release(self) -> None:
        """The last user gives its memory back. Local: peers keep their own mapping."""
        self.num_users -= 1
        if self.num_users <= 0:
            self.close()

    def close(self) -> None:
        """Free the memory. Local, may be called twice."""
        if not self.closed:
            self.closed = True
            self.native.close()
            if self.streams is not None:
                self.streams.close()


@contextlib.contextmanager
def released_on_error(windows: list[Window]) -> Iterator[None]:
    """A block that fails gives the windows back. Local, as all closing is: the next constructor compares what the ranks
    have left."""
    try:
        yield
    except BaseException:
        for window in windows:
            window.release()
        raise
