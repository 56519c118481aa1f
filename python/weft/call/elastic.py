"""What an ExpertParallel changes between two calls, together with the other ranks."""

from __future__ import annotations

from weft.call.expert_map import ExpertMap
from weft.call.runner import Runner
from weft.call.shared import Shared
from weft.communicator import Communicator
from weft.group.joining import positive_seconds

__all__ = ["Elastic"]


class Elastic(Shared):
    """The part of an ExpertParallel that changes."""

    calls: Runner
    comm: Communicator
    deadline_s: float
    num_windows: int

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
        caller's business: put them in place before. `deadline_s`: None: that of the object.

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
