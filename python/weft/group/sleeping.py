"""A communicator that sleeps: its windows give their memory back until it wakes up. docs/protocols/heap.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.errors import CapacityExceeded, Error, InvalidState, Unsupported, rank_list
from weft.group.sharing import Sharing
from weft.group.turns import positive_seconds

if TYPE_CHECKING:
    from weft.call.window import Window

__all__ = ["Sleeping"]


class Sleeping(Sharing):
    """The part of a communicator that sleeps and wakes up."""

    @property
    def is_asleep(self) -> bool:
        """Between `sleep` and `wake`. Local, never waits."""
        return self._is_asleep

    def sleep(self, *, deadline_s: float = 100.0) -> None:
        """Give the physical memory of all heaps and staging areas back, until `wake`. Collective among the active
        ranks, between two calls; when it returns it has happened on all of them.

        Addresses, connections, plans, ExpertParallel objects and handles stay. Calls raise `InvalidState` meanwhile,
        but `gather`, `share`, `fetch`, `recover`, `rebuild`, `wake`, `close` and what only looks. cpu engine.

        Raises:
            InvalidState: on every rank, naming ranks and bytes: results of calls, tensors of `empty_output` or what
                autograd keeps for a backward still lie in a heap. Nothing was given back; drop them and call again. Or
                closed, forked, busy, asleep already.
            Unsupported: the nvlink engine.
            CapacityExceeded: the system refused it on a rank; raised on all, the communicator is awake.
            PeerTimeout, PeerLost: a rank did not take part. Some ranks may be asleep: `recover`, and `wake` on all.
        """
        with self.telling_peers():
            if self._choice.engine != "cpu":
                raise Unsupported("sleep", f"the {self._choice.engine} engine", "the cpu engine")
            seconds = positive_seconds("deadline_s", deadline_s)
            turn = self.alone("sleep")
        with turn:
            windows = [window for window in self._all_windows if not window.closed]
            held = self._told("sleep", sum(window.native.stats()["heap_used"] for window in windows), seconds)
            holding = {rank: held_bytes for rank, held_bytes in held.items() if held_bytes}
            if holding:
                said = ", ".join(f"{held_bytes} bytes on rank {rank}" for rank, held_bytes in holding.items())
                raise InvalidState(
                    f"sleep: results of calls lie in a heap: {said}. Drop the tensors, handles and autograd graphs "
                    "that hold them, or copy them; nothing was given back"
                )
            failed = self._told("sleep", _released(windows), seconds)
            texts = {rank: text for rank, text in failed.items() if text}
            if texts:
                first = next(iter(texts.values()))
                raise CapacityExceeded(0, f"sleep: {rank_list(list(texts))} could not give memory back: {first}")
            self._is_asleep = True

    def wake(self, *, deadline_s: float = 100.0) -> None:
        """End a `sleep`: calls may be made again. Collective among the active ranks, also those that are awake: a
        `sleep` or `wake` that ended in an error may have happened on some ranks alone, and `recover` may have taken a
        rank in meanwhile. Memory comes back as calls touch it.

        Raises:
            InvalidState: no rank is asleep (on every rank); closed, forked or busy.
            PeerTimeout, PeerLost: a rank did not take part.
        """
        with self.telling_peers():
            seconds = positive_seconds("deadline_s", deadline_s)
            turn = self.alone("wake")
        with turn:
            is_any_asleep = any(self._told("wake", self._is_asleep, seconds).values())
            self._is_asleep = False
        if not is_any_asleep:
            raise InvalidState("wake: the communicator is not asleep")


def _released(windows: list[Window]) -> str:
    """Why not, or ""."""
    try:
        for window in windows:
            window.native.release_memory()
    except Error as error:
        return str(error)
    return ""
