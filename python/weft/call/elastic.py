"""What an ExpertParallel changes between two calls, together with the other ranks."""

from __future__ import annotations

from weft.call.expert_map import ExpertMap
from weft.call.runner import Runner
from weft.call.shared import Shared
from weft.communicator import Communicator
from weft.errors import InvalidArgument, InvalidState, Unsupported
from weft.group.turns import positive_seconds

__all__ = ["Elastic"]


class Elastic(Shared):
    """The part of an ExpertParallel that changes."""

    calls: Runner
    comm: Communicator
    deadline_s: float
    num_windows: int
    _most_heap_bytes: int

    @property
    def expert_map(self) -> ExpertMap | None:
        """The map that is installed; None without num_logical_experts."""
        return self.calls.experts.map

    @property
    def uncovered(self) -> tuple[int, ...]:
        """Experts that no active rank has, ascending: logical ids with num_logical_experts, else physical ones. Their
        picks are absent. Local, never waits."""
        return self.calls.experts.uncovered(self.comm.active_ranks)

    def set_expert_map(self, expert_map: ExpertMap, *, deadline_s: float | None = None) -> None:
        """Go by another map from the next dispatch on. Collective, between two calls of this object, with equal maps.

        Handles of earlier maps serve combine and backward, but no dispatch any more. Weights of experts are the
        caller's business: put them in place before. A rank that joins later is handed the map. `deadline_s`: None: that
        of the object.

        Raises:
            InvalidArgument: no map of N logical experts on num_experts physical ones (on this rank), or maps differ: on
                every rank, naming which ranks have which; the old map stays.
            InvalidState: closed, busy in another thread, forked, or a staged call has not been received.
            PeerTimeout, PeerLost: a rank did not take part.
        """
        with self.comm.telling_peers():
            given = self.calls.experts.check(expert_map)
            seconds = self.deadline_s if deadline_s is None else positive_seconds("deadline_s", deadline_s)
            turn = self.calls.alone("set_expert_map")
            for number in range(self.num_windows):
                self.calls.raise_if_staged("set_expert_map", number)
        with turn:
            self.comm.compare("set_expert_map", {"object": self.calls.numbers, "expert_map": str(given)}, seconds)
            self.calls.install_map(given)
            self.comm.note_map(self.calls, is_set=True)

    @property
    def heap_bytes(self) -> int:
        """Of each window of this object now: what it was made with, or what `resize` made of it.

        Raises:
            InvalidState: closed.
        """
        found = [int(window.native.stats()["heap_bytes"]) for window in self.calls.windows if not window.closed]
        if not found:
            raise InvalidState("heap_bytes: the ExpertParallel is closed; make a new one")
        return min(found)

    @property
    def max_heap_bytes(self) -> int:
        """Up to which `resize` may let the heap grow."""
        return max(self._most_heap_bytes, self.heap_bytes)

    def resize(self, *, heap_bytes: int, deadline_s: float | None = None) -> None:
        """Give each window of this object a heap of `heap_bytes`; objects that share a window share that. Collective,
        between two calls, with equal arguments. Tensors in the heap stay where they are, and so do handles. Heaps only
        grow. `deadline_s`: None: that of the object.

        Raises:
            InvalidArgument: no int (on this rank); on every rank: less than a rank has, more than max_heap_bytes, or
                ranks differ.
            InvalidState: closed, busy in another thread, forked, or asleep; this rank has joined and was not taken in
                yet, or is suspended; on every rank: a change of the membership is under way, which the next boundaries
                carry out.
            Unsupported: the nvlink engine.
            CapacityExceeded: the system refused it on a rank; raised on all. Windows before the one have grown.
            PeerTimeout, PeerLost: a rank did not take part.
        """
        calls = self.calls
        with self.comm.telling_peers():
            if self.comm.engine != "cpu":
                raise Unsupported("resize", f"the {self.comm.engine} engine", "the cpu engine")
            turn = calls.alone("resize")
            self.comm._raise_if_outside("resize", "Its heaps take the size of theirs")
            if type(heap_bytes) is not int:
                raise InvalidArgument(f"heap_bytes is {heap_bytes!r}; an int is expected")
            least = max(int(window.native.stats()["heap_bytes"]) for window in calls.windows)
            seconds = self.deadline_s if deadline_s is None else positive_seconds("deadline_s", deadline_s)
        with turn:
            given = {"object": calls.numbers, "heap_bytes": heap_bytes}
            bounds = self.comm._told("resize", [least, self.max_heap_bytes], seconds, given).values()
            least, most = max(each[0] for each in bounds), min(each[1] for each in bounds)
            if not least <= heap_bytes <= most:
                raise InvalidArgument(
                    f"heap_bytes is {heap_bytes}; allowed are {least}, what there is, to max_heap_bytes = {most}"
                )
            for window in calls.windows:
                window.native.resize(heap_bytes, seconds)
