"""What calls give back on the way to the user, and what is counted of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from weft.errors import InternalError

__all__ = ["Counters", "Received", "Results"]


class Received(NamedTuple):
    """The tensors of a dispatch. Absent ones are empty, so that operators of torch.library can return them."""

    x: Tensor  # as the native module gives it: bytes if quantised
    scales: Tensor  # row-major fp32 or bytes, or column-major words of `Call.scale_dtype`
    topk_idx: Tensor
    topk_weights: Tensor
    sizes: Tensor  # int32: num_tokens_per_expert | offsets | num_rows
    send_plan: Tensor
    recv_plan: Tensor
    tie: Tensor


@dataclass
class Counters:
    """What `stats()` tells; forward and backward together."""

    num_dispatches: int = 0
    num_combines: int = 0
    rows_sent: int = 0
    bytes_sent: int = 0
    dispatch_s: float = 0.0
    combine_s: float = 0.0

    def add_rest(self, what: str, seconds: float) -> None:
        """Of the other half of a staged call, which has been counted."""
        if what == "dispatch":
            self.dispatch_s += seconds
        else:
            self.combine_s += seconds


class Results:
    """What dispatches have given and nobody has fetched yet, by ticket; compiled graphs only.

    A graph fetches every ticket unless it has no use for the results: of those a few are kept, then they go.
    """

    MAX = 16

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, Received] = {}
        self.keep = False  # for torch.library.opcheck, which compares several runs with the same arguments

    def put(self, received: Received) -> int:
        """Store a result; returns its ticket."""
        if not self.keep:
            self._next += 1
        # An operator's own outputs: the tie and empty tensors are shared between calls.
        own = (part.clone() if part.numel() == 0 else part for part in received._replace(tie=received.tie.clone()))
        self._waiting[self._next] = Received(*own)
        while len(self._waiting) > self.MAX:
            del self._waiting[next(iter(self._waiting))]
        return self._next

    def take(self, ticket: int) -> Received:
        """The result of a ticket, which is then forgotten.

        Raises:
            InternalError: no such ticket.
        """
        received = self._waiting.get(ticket) if self.keep else self._waiting.pop(ticket, None)
        if received is None:
            raise InternalError(f"the result of dispatch {ticket} was fetched before, or {self.MAX} others since")
        return Received(*(part.clone() for part in received)) if self.keep else received
