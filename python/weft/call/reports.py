"""What an ExpertParallel reports of calls made so far: errors that they could not raise themselves, and counts."""

from __future__ import annotations

from typing import Any

import torch

from weft.call.runner import Runner
from weft.communicator import Communicator

__all__ = ["Reports"]


class Reports:
    """The part of an ExpertParallel that reports."""

    calls: Runner
    comm: Communicator
    num_ranks: int
    _overflow: torch.Tensor

    def check(self) -> None:
        """Raise what calls on this rank, replayed ones too, could not raise themselves. Local; on a GPU it waits for
        the calls made so far and for the current stream.

        Raises:
            InvalidArgument: a dispatch had ids out of range. CapacityExceeded: picks were dropped on this rank since
            the last check; ranks may differ. PeerLost, PeerTimeout: the communicator is broken. InvalidState: closed,
            or busy in another thread.
        """
        self.calls.raise_if_closed("check")
        self.calls.wait()
        with self.comm.alone("check"):
            self.comm.raise_if_broken()
            self.calls.raise_bad_ids()
            self.calls.raise_dropped()

    def stats(self) -> dict[str, Any]:
        """Counts of this object on this rank, forward and backward together. Local.

        Returns:
            num_dispatches, num_combines; rows_sent and bytes_sent to other ranks by dispatch (cpu engine; else 0);
            dispatch_s and combine_s, seconds that the host spent in these calls; num_dropped picks (on a GPU this waits
            for the calls made so far); windows: a list with what each native window counts, over all objects that share
            it (heap_used, heap_peak in bytes, num_staged results that found no room, wait_us); wait_us: the sum of
            theirs, a list by rank: microseconds that this rank has waited for headers of that rank (own: 0). A call
            waits for a peer's header before it can place rows and again before it returns; what was there at the
            first look counts as 0, a wait that ended in an error not at all. On a GPU the first block of each kernel
            measures it. A late rank has large numbers at all others, and small ones itself. A replayed graph adds to
            wait_us; the calls in it were counted once, when they were captured.
        """
        num_dropped = int(self._overflow)  # first: on a GPU it waits
        windows = [window.native.stats() for window in self.calls.windows if not window.closed]
        return {
            **vars(self.calls.counters),
            "num_dropped": num_dropped,
            "wait_us": [sum(window["wait_us"][rank] for window in windows) for rank in range(self.num_ranks)],
            "windows": windows,
        }
