"""What both engines have in common between tensors and native calls; call/cpu_calls.py and call/gpu_calls.py hand the
pointers to the native module.

Nothing here knows autograd or torch.library.
"""

# check: allow-in-file function-size: the flat arguments of the operators pass through
# check: allow file-size: what both engines share, in one class

from __future__ import annotations

import itertools
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.call.event import Event
from weft.call.received import Counters, Received, Results
from weft.call.spec import RANK_MAJOR, Call
from weft.call.window import Window
from weft.errors import CapacityExceeded, InvalidArgument, InvalidState
from weft.limits import LAYOUTS

if TYPE_CHECKING:
    from weft.communicator import Communicator

__all__ = ["Calling", "NativeCalls", "by_token"]

_keys = itertools.count(1)
_by_key: weakref.WeakValueDictionary[int, NativeCalls] = weakref.WeakValueDictionary()


class NativeCalls(ABC):
    """State of one ExpertParallel on the native side: windows, its number in each, counters, what to raise later.

    `token` (float64 [2]: key, epoch) finds this object from inside an operator of torch.library; a copy of it, the
    `tie`, is part of every handle: it proves whose the handle is, and of which epoch. Both are in host memory.
    """

    MAX_UNUSED = 4  # unused results whose graphs are kept for a backward that may come (weft/autograd.py)
    plans_on_device = False  # where the plans of a handle lie

    def __init__(
        self,
        comm: Communicator,
        windows: list[Window],
        numbers: list[int],
        num_experts: int,
        top_k: int,
        hidden: int,
        dtype: torch.dtype,
    ) -> None:
        self.comm, self.windows, self.numbers, self.device = comm, windows, numbers, comm.device
        self.num_experts, self.top_k, self.hidden = num_experts, top_k, hidden
        self.num_ranks = comm.num_ranks
        self.num_local_experts = num_experts // comm.num_ranks
        self.overflow = torch.zeros((), dtype=torch.int64, device="cpu")
        self.num_dropped_checked = 0
        self.bad_ids: str | None = None
        self.counters = Counters()
        self.unused: list[Any] = []
        self.results = Results()
        self.closed = False
        self.key = next(_keys)
        self._epoch = comm.epoch
        self.token = torch.tensor([self.key, self._epoch], dtype=torch.float64, device="cpu")
        _by_key[self.key] = self

    # ---- the three calls

    @abstractmethod
    def dispatch(
        self,
        call: Call,
        x: Tensor,
        scales: Tensor | None,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        quantize: int,
        clear_tail: bool,
    ) -> Received:
        """Send rows where topk_idx says. `clear_tail`: zero what lies beyond num_rows (capacity)."""

    @abstractmethod
    def dispatch_again(
        self,
        call: Call,
        x: Tensor,
        scales: Tensor | None,
        send_plan: Tensor,
        recv_plan: Tensor,
        tie: Tensor,
        sizes: Tensor,
        rows_shape: tuple[int, ...],
        num_tokens: int,
        clear_tail: bool,
        quantize: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """The routing of a handle with other rows: (x, scales). `sizes`: of the first dispatch."""

    @abstractmethod
    def combine(
        self,
        call: Call,
        y: Tensor,
        weights: Tensor | None,
        send_plan: Tensor,
        recv_plan: Tensor,
        tie: Tensor,
        bias: Tensor | None,
        side: Tensor | None,
        num_tokens: int,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Bring rows back and sum them: (y [T, H], side [T, K] or empty). `weights` None: plain sums."""

    def gradients(
        self, rows: Tensor, y: Tensor | None, weights: Tensor, *, in_place: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """From the gradients of a weighted combine's result at this rank's rows to those of its inputs, in one pass.

        Local; nothing is sent. The bits are the same on both engines.

        Args:
            rows: [N, H] or [L, C, H], gradient of the token that each row belongs to; `in_place`: the result is
                written there if they are contiguous.
            y: the expert outputs, of the same shape and dtype; None: weights need no gradient.
            weights: fp32 [N] or [L, C].

        Returns:
            Gradients of y (product in fp32, rounded once) and of weights (dot product in fp32).
        """
        rows = rows.contiguous()
        out = rows if in_place else torch.empty_like(rows)
        grad_weights = None if y is None else torch.empty_like(weights, memory_format=torch.contiguous_format)
        self._gradients(rows, y, weights, out, grad_weights)
        return out, grad_weights

    @abstractmethod
    def _gradients(
        self, rows: Tensor, y: Tensor | None, weights: Tensor, out: Tensor, grad_weights: Tensor | None
    ) -> None:
        """Write `out` and `grad_weights`."""

    # ---- around them

    @abstractmethod
    def empty(self, window: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised, in the heap of the window if there is room."""

    @abstractmethod
    def event(self) -> Event:
        """Completion of the last call."""

    def before_call(self, what: str, call: Call, tie: Tensor | None) -> None:
        """Refuse what can't be done now; nothing has been sent."""
        self.raise_bad_ids(f"; this {what} sent nothing and may be repeated")

    def wait(self) -> None:  # noqa: B027  the cpu engine has nothing to wait for
        """Block the host until the calls made so far have ended."""

    def window_stats(self, window: Window) -> dict[str, Any]:
        """What a native window counts."""
        return dict(window.native.stats())

    @abstractmethod
    def barrier(self, window: Window, deadline_s: float) -> None:
        """Wait for all ranks. Collective."""

    @abstractmethod
    def record_stream(self, tensors: Sequence[Tensor], stream: Any) -> None:
        """The memory of these results is in use on `stream`."""

    def note_handle(self, handle: Any) -> None:
        """What copies of a new handle's tensors for the user have to follow (weft/handle.py)."""
        if handle.call.is_staged:
            handle.__dict__["pending"] = self.windows[handle.window].half

    def tie(self) -> Tensor:
        """For the handle of a dispatch. Handles of one epoch share it: nobody writes to it."""
        if self._epoch != self.comm.epoch:
            self._epoch = self.comm.epoch
            self.token = torch.tensor([self.key, self._epoch], dtype=torch.float64, device="cpu")
        return self.token

    def side_of_picks(self, side: Tensor, topk_idx: Tensor | None) -> Tensor:
        """rank_major: side values [N, K] as combine wants them. The nvlink engine adds those of all ranks, so what
        belongs to no pick here becomes 0; the cpu engine looks for itself."""
        if not self.plans_on_device or topk_idx is None:
            return side
        return side.masked_fill(topk_idx < 0, 0)

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
            error = InvalidArgument(text + remark)
            if remark:
                self.comm.note_refusal(error)
            raise error

    def raise_dropped(self) -> None:
        """Raise if picks were dropped since the last time."""
        dropped = int(self.overflow) - self.num_dropped_checked
        self.num_dropped_checked += dropped
        if dropped:
            raise CapacityExceeded(dropped)

    def close(self) -> None:
        """Let go of the windows. Local, may be called twice."""
        if not self.closed:
            self.closed = True
            self.unused.clear()
            for window in self.windows:
                window.release()

    def check_tie(self, what: str, tie: Tensor) -> None:
        """InvalidState if a handle is of another ExpertParallel or another epoch."""
        if tie is self.token and self._epoch == self.comm.epoch:
            return
        key, epoch = tie.tolist()
        if key != self.key:
            raise InvalidState(f"{what}: the handle is of another ExpertParallel; use the one that made it")
        if epoch != self.comm.epoch:
            raise InvalidState(
                f"{what}: the handle is of epoch {int(epoch)}, a rebuild began epoch {self.comm.epoch}; dispatch anew"
            )

    def split_sizes(self, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """num_tokens_per_expert [L], offsets, num_rows []: views."""
        last = sizes.shape[0] - 1
        return sizes[: self.num_local_experts], sizes[self.num_local_experts : last], sizes[last]

    def new_sizes(self, layout: int, device: torch.device | str) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Uninitialised, and its parts."""
        num_groups = self.num_ranks if layout == RANK_MAJOR else self.num_local_experts
        sizes = torch.empty(self.num_local_experts + num_groups + 2, dtype=torch.int32, device=device)
        return sizes, self.split_sizes(sizes)

    def bad_ids_text(self, num_bad: int, first_id: int, first_at: int) -> str:
        """For the user: what an earlier dispatch found."""
        token, pick = divmod(first_at, self.top_k)
        return (
            f"topk_idx of an earlier dispatch had {num_bad} ids out of range, the first {first_id} at token {token}, "
            f"pick {pick}; allowed are -1 to {self.num_experts - 1}. They counted as -1"
        )


class Calling:
    """Around a native call: refuse what can't be done now, count, time, and name the range for profilers. `inputs`:
    tensors that it reads or writes; `is_rest`: the call has begun before, staged."""

    _range: Any = None

    def __init__(
        self,
        calls: Any,
        what: str,
        call: Call,
        tie: Tensor | None = None,
        inputs: Iterable[Tensor | None] = (),
        *,
        is_rest: bool = False,
    ) -> None:
        self._calls, self._what, self._call, self._tie, self._is_rest = calls, what, call, tie, is_rest
        self._inputs = inputs
        if torch.autograd._profiler_enabled():
            self._range = torch.profiler.record_function(f"weft::{what} {LAYOUTS[call.layout]}")

    def __enter__(self) -> Any:
        calls = self._calls
        if self._tie is not None:
            calls.check_tie(self._what, self._tie)
        if not self._is_rest:
            if calls.windows[self._call.window].half is not None:
                calls.raise_if_staged(self._what, self._call.window)
            calls.before_call(self._what, self._call, self._tie)
        if self._range is not None:
            self._range.__enter__()
        self._begin = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        seconds = time.perf_counter() - self._begin
        counters = self._calls.counters
        if error[0] is not None:  # calls that failed do not count
            self._calls.comm.note_refusal(error[1])
        elif self._what == "dispatch":
            counters.num_dispatches += not self._is_rest
            counters.dispatch_s += seconds
        else:
            counters.num_combines += not self._is_rest
            counters.combine_s += seconds
        if self._range is not None:
            self._range.__exit__(*error)


def by_token(token: Tensor) -> NativeCalls:
    """The object whose `token` or `tie` this is.

    Raises:
        InvalidState: its ExpertParallel is gone.
    """
    calls = _by_key.get(int(token[0]))
    if calls is None:
        raise InvalidState("the ExpertParallel of this operation is gone: keep it as long as its handles and graphs")
    return calls
