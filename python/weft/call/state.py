"""`State`: what an ExpertParallel is on the native side, on any engine: its windows, the ties of its handles, what it
counts, and what it raises later.
"""

# check: allow-in-file function-size: what its constructor is made of

from __future__ import annotations

import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.call.event import COMPLETE
from weft.call.expert_map import ExpertMap
from weft.call.experts import Experts
from weft.call.received import Counters, Results
from weft.call.spec import RANK_MAJOR
from weft.call.window import Window
from weft.errors import CapacityExceeded, InvalidArgument, InvalidState
from weft.handle import Handle

if TYPE_CHECKING:
    from weft.communicator import Communicator

__all__ = ["State", "by_key"]

_keys = itertools.count(1)
_by_key: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class _Last(threading.local):
    """Of the calls of this thread: another's may come before it is asked."""

    event = COMPLETE  # completion of the last one


class State:
    """State of one ExpertParallel on the native side: windows, its number in each, counters, what to raise later.

    `name` (float64 [3]: key, epoch, number of the expert map) finds this object from inside an operator of
    torch.library; `token`, or a copy of it, is part of every handle, the `tie`: it proves whose the handle is, of which
    epoch and of which map. All are in host memory.
    """

    MAX_UNUSED = 4  # unused results whose graphs are kept for a backward that may come (weft/autograd.py)
    plans_on_device = False  # where the plans of a handle lie, and what was sent is known

    def __init__(
        self,
        comm: Communicator,
        windows: list[Window],
        numbers: list[int],
        experts: Experts,
        top_k: int,
        hidden: int,
        dtype: torch.dtype,
        sum_domain: int = 0,
    ) -> None:
        self.comm, self.windows, self.numbers, self.device = comm, windows, numbers, comm.device
        self.experts, self.top_k, self.hidden, self.dtype = experts, top_k, hidden, dtype
        self.has_map = experts.map is not None
        self.num_ranks, self.sum_domain = comm.num_ranks, sum_domain
        self.has_domains = 1 < sum_domain < comm.num_ranks
        self.has_nodes = False  # between which rows go by rails
        self.num_local_experts = experts.num_experts // comm.num_ranks
        self.overflow = torch.zeros((), dtype=torch.int64, device="cpu")
        self.num_dropped_checked = 0
        self.bad_ids: str | None = None
        self.counters = Counters()
        self.unused: list[Any] = []
        self.results = Results()
        self.last = _Last()
        self.closed = False
        # Absent results; new_empty of these costs half of torch.empty.
        memory = self.device if self.plans_on_device else "cpu"
        self._ints = torch.empty(0, dtype=torch.int32, device=memory)
        self._no_floats = torch.empty(0, dtype=torch.float32, device=memory)
        self._no_ids = torch.empty(0, dtype=torch.int64, device=memory)
        self.key = next(_keys)
        self._epoch = comm.epoch
        self.name = self.token = self._new_token()
        _by_key[self.key] = self

    # ---- handles

    def tie(self) -> Tensor:
        """For the handle of a dispatch. Handles of one epoch share it: nobody writes to it."""
        if self._epoch != self.comm.epoch:
            self._epoch = self.comm.epoch
            self.token = self._new_token()
        return self.token

    def _new_token(self) -> Tensor:
        return torch.tensor([self.key, self._epoch, self.experts.number], dtype=torch.float64, device="cpu")

    def install_map(self, expert_map: ExpertMap) -> None:
        """From now on picks go by it. Local."""
        self.experts.install(expert_map)
        self.token = self._new_token()

    def check_tie(self, what: str, tie: Tensor) -> None:
        """InvalidState if a handle is of another ExpertParallel or another epoch."""
        if tie is self.token and self._epoch == self.comm.epoch:
            return
        key, epoch, _ = tie.tolist()
        if key != self.key:
            raise InvalidState(f"{what}: the handle is of another ExpertParallel; use the one that made it")
        if epoch != self.comm.epoch:
            raise InvalidState(
                f"{what}: the handle is of epoch {int(epoch)}, a rebuild began epoch {self.comm.epoch}; dispatch anew"
            )

    def check_map(self, tie: Tensor) -> None:
        """InvalidState if a dispatch is to repeat the routing of an earlier map."""
        number = int(tie[2])
        if tie is not self.token and number != self.experts.number:
            raise InvalidState(
                f"dispatch: the handle is of expert map number {number}, and number {self.experts.number} "
                f"({self.experts.map}) is installed: its slots may hold other experts by now; dispatch anew"
            )

    def side_of_picks(self, side: Tensor, handle: Handle) -> Tensor:
        """rank_major: side values [N, K] as combine wants them. The nvlink engine adds those of all ranks, so what
        belongs to no pick here becomes 0; the cpu engine looks for itself."""
        topk_idx = handle.idx if self.plans_on_device and handle.call.layout == RANK_MAJOR else None
        return side if topk_idx is None else side.masked_fill(topk_idx < 0, 0)

    # ---- what is refused, and raised later

    def before_call(self, what: str) -> None:
        """Refuse what can't be done now; nothing has been sent."""
        self.raise_bad_ids(f"; this {what} sent nothing and may be repeated")

    def raise_if_closed(self, what: str) -> None:
        """InvalidState if this ExpertParallel is closed."""
        if self.closed:
            raise InvalidState(f"{what}: the ExpertParallel is closed; make a new one")

    def alone(self, what: str) -> threading.Lock:
        """See Communicator.alone."""
        if self.closed:
            self.raise_if_closed(what)
        return self.comm.alone(what)

    def raise_if_staged(self, what: str, window: int) -> None:
        """InvalidState if a staged call of the window has not been received."""
        half = self.windows[window].half
        if half is not None and half.blocks(self.comm.epoch) and not self.comm.broken:
            raise InvalidState(
                f"{what}: a staged call on window {window} has not been received; call its wait() first, or use "
                "another window (num_windows=2)"
            )

    def raise_bad_ids(self, remark: str = "") -> None:
        """Raise what an earlier dispatch found in topk_idx, once."""
        if self.bad_ids is not None:
            text, self.bad_ids = self.bad_ids, None
            raise InvalidArgument(text + remark)

    def raise_dropped(self) -> None:
        """Raise if picks were dropped since the last time."""
        dropped = int(self.overflow) - self.num_dropped_checked
        self.num_dropped_checked += dropped
        if dropped > 0:  # less than none: somebody wrote to it
            raise CapacityExceeded(dropped)

    def bad_ids_text(self, num_bad: int, first_id: int, first_at: int) -> str:
        """For the user: what an earlier dispatch found."""
        token, pick = divmod(first_at, self.top_k)
        return (
            f"topk_idx of an earlier dispatch had {num_bad} ids out of range, the first {first_id} at token {token}, "
            f"pick {pick}; allowed are -1 to {self.experts.num_ids - 1}. They counted as -1"
        )

    # ---- the end

    def wait(self) -> None:
        """Block the host until the calls made so far have ended."""

    def close(self) -> None:
        """Let go of the windows. Local, may be called twice."""
        if not self.closed:
            self.closed = True
            self.unused.clear()
            for window in self.windows:
                window.release()
            self.comm.note_closed_object(self.windows[0].serial, self.numbers[0])


def by_key(key: int) -> Any:
    """The object with this key; None: it is gone."""
    return _by_key.get(key)
