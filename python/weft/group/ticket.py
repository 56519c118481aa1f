"""What whoever proposes a change of the membership gets."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from weft.group.joining import positive_seconds

__all__ = ["CHANGE_TIMEOUT_S", "Ticket"]

CHANGE_TIMEOUT_S = 100.0


class _Proposer(Protocol):
    """A communicator."""

    _native: Any
    _closed: bool
    _ticket: Ticket | None

    def alone(self, what: str) -> threading.Lock: ...


class Ticket:
    """A change that was proposed on this rank. `id`: its number, `state`: "preparing" (somebody named is not ready),
    "proposed", "committed" or "withdrawn", `reason`: why it was withdrawn."""

    def __init__(self, comm: _Proposer, number: int, told: tuple[str, int, str] = ("preparing", 0, "")) -> None:
        self._comm, self.id, self._told = comm, number, told

    @property
    def state(self) -> str:
        """Now; never waits."""
        return self._look()[0]

    @property
    def reason(self) -> str:
        """Of a withdrawn one; else ""."""
        return self._look()[2]

    def wait(self, timeout_s: float = CHANGE_TIMEOUT_S) -> str:
        """Wait until it is committed or withdrawn, at most so long; its state then. Committed is not carried out yet:
        each rank does that at its own `boundary()`.

        Raises:
            InvalidArgument: a bad `timeout_s`.
        """
        seconds = positive_seconds("timeout_s", timeout_s)
        if self._comm._ticket is self and not self._comm._closed:
            self._told = self._comm._native.await_change(seconds)
        return self._told[0]

    def withdraw(self) -> str:
        """Take it back, as far as it has not happened. Local, returns at once; the state then: "withdrawn", or
        "committed" if that was earlier. Ranks that have proposed the same `id` still want it.

        Raises:
            InvalidState: inside another call of the communicator, or it is closed.
        """
        with self._comm.alone("withdraw"):
            if self._comm._ticket is self:
                self._told = self._comm._native.withdraw_change()
        return self._told[0]

    def _look(self) -> tuple[str, int, str]:
        if self._comm._ticket is self and not self._comm._closed:
            self._told = self._comm._native.wanted_change()
        return self._told

    def __repr__(self) -> str:
        state, epoch, reason = self._look()
        more = f" in epoch {epoch}" if state == "committed" else f": {reason}" if reason else ""
        return f"weft.Ticket({state}{more})"
