"""The calls between tensors and the native module: once for both engines. What differs between them, where tensors are
read and results lie, streams, and rows in pieces, is in call/cpu_calls.py and call/gpu_calls.py.

Nothing here knows autograd or torch.library.
"""

# check: allow-in-file function-size: the tensors of a call pass through

from __future__ import annotations

import itertools
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.call.calling import Calling
from weft.call.event import COMPLETE, Event
from weft.call.half import Half
from weft.call.plan import Plan, Planner
from weft.call.received import Counters, Results
from weft.call.scales import by_column
from weft.call.spec import MASKED, RANK_MAJOR
from weft.call.tensors import address, plain
from weft.call.window import Window
from weft.errors import CapacityExceeded, InvalidArgument, InvalidState
from weft.handle import Handle

if TYPE_CHECKING:
    from weft.communicator import Communicator

__all__ = ["Runner", "by_token"]

_keys = itertools.count(1)
_by_key: weakref.WeakValueDictionary[int, Runner] = weakref.WeakValueDictionary()


class _Last(threading.local):
    """Of the calls of this thread: another's may come before it is asked."""

    event = COMPLETE  # completion of the last one


class Runner(Planner):
    """State of one ExpertParallel on the native side: windows, its number in each, counters, what to raise later.

    `name` (float64 [2]: key, epoch) finds this object from inside an operator of torch.library; `token`, or a copy of
    it, is part of every handle, the `tie`: it proves whose the handle is, and of which epoch. All are in host memory.
    """

    MAX_UNUSED = 4  # unused results whose graphs are kept for a backward that may come (weft/autograd.py)
    plans_on_device = False  # where the plans of a handle lie
    alignment = 1  # of tensors that the engine reads as they lie
    is_elsewhere = False  # tensors lie where the engine can't read them
    names_ranges = False  # a profiler listens that knows no other names

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
        self.last = _Last()
        self.closed = False
        # Absent results; new_empty of these costs half of torch.empty.
        memory = self.device if self.plans_on_device else "cpu"
        self._ints = torch.empty(0, dtype=torch.int32, device=memory)
        self._no_floats = torch.empty(0, dtype=torch.float32, device=memory)
        self._no_ids = torch.empty(0, dtype=torch.int64, device=memory)
        self.plans, self.calls = {}, {}
        self.key = next(_keys)
        self._epoch = comm.epoch
        self.name = self.token = torch.tensor([self.key, self._epoch], dtype=torch.float64, device="cpu")
        _by_key[self.key] = self

    # ---- a call

    def run(self, plan: Plan, tie: Tensor | None, *tensors: Any, is_named: bool = False) -> Any:
        """Make the call of a plan; `tie`: of the handle among `tensors`, which `_first`, `_again` and `_sum` list.
        Results are theirs."""
        if not is_named and (self.names_ranges or torch.autograd._profiler_enabled()):
            with Calling(plan.what, plan.call, tells_nvtx=self.names_ranges):
                return self.run(plan, tie, *tensors, is_named=True)
        what, window, comm, lie_well = plan.what, plan.window, self.comm, not self.is_elsewhere
        if self.closed:
            self.raise_if_closed(what)
        try:
            for each in tensors:
                if each is not None and type(each) is not Handle:
                    place = each.data_ptr()
                    if place == 0 or place % self.alignment or not each.is_contiguous() or each.is_neg():
                        lie_well = False
        except RuntimeError:  # it has no memory
            lie_well = False
        if not lie_well:
            tensors = self._readable(plan, tensors)
        with comm.alone(what):
            plan.num_tokens = tensors[1].num_tokens if what == "combine" else tensors[0].shape[0]
            if tie is not None and (tie is not self.token or self._epoch != comm._native.epoch):
                self.check_tie(what, tie)
            if window.half is not None:
                self.raise_if_staged(what, plan.call.window)
            if plan.waits or self.bad_ids is not None:
                self.before_call(what)
            begin, stream = time.perf_counter(), 0
            if plan.has_scope:
                made = self._run_in_scope(plan, tensors)
            else:
                if window.streams is not None:
                    stream = torch._C._cuda_getCurrentRawStream(self.device.index)
                    known = stream == window.streams.last_handle
                    at = window.streams.last if known else window.streams.begin_here()
                    if self.last.event._event is not None or self.last.event._stream is not at:
                        self.last.event = Event(at)  # else nobody has asked for it: calls share it
                made = plan.work(self, plan, stream, *tensors)
            counters, seconds = self.counters, time.perf_counter() - begin  # calls that failed do not count
            if what == "dispatch":
                counters.num_dispatches += 1
                counters.dispatch_s += seconds
            else:
                counters.num_combines += 1
                counters.combine_s += seconds
        return made

    def _run_in_scope(self, plan: Plan, tensors: tuple[Any, ...]) -> Any:
        """A staged call, or one on the window's own stream."""
        made = plan.work(self, plan, 0, *tensors)
        self._stage(plan, made, None)
        return made

    def _stage(self, plan: Plan, made: Any, rest: Callable[[], None] | None) -> None:
        """A staged call has sent; `rest`: receives, None if it has done that already."""
        half = plan.window.half = Half(self, plan.what, plan.call, self.tie(), rest)
        if isinstance(made[2], Handle):
            made[2].__dict__["pending"] = half

    def _readable(self, plan: Plan, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same values where the engine reads them."""
        read = list(tensors)
        for idx, each in enumerate(tensors[:4]):  # behind them there is but `out`
            if not isinstance(each, Tensor):
                continue
            each = plain(each, plan.names[idx]) if idx < len(plan.names) else each
            if each.element_size() == 1 and each.is_contiguous():
                each = each.view(torch.uint8)  # some dtypes of one byte can't be copied
            is_scales = idx == 1 and plan.what == "dispatch"
            read[idx] = self._read_scales(plan.call, each) if is_scales else self._read(each)
            address(read[idx])
        return tuple(read)

    def _sum(
        self,
        plan: Plan,
        stream: int,
        y: Tensor,
        handle: Handle,
        bias: Tensor | None,
        side: Tensor | None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """See Planner."""
        if plan.parts:
            return self._sum_in_parts(plan, stream, y, handle, bias, side, out)
        side_out = None if side is None else self._no_floats.new_empty((plan.num_tokens, self.top_k))
        is_into = out is not None and not self.is_elsewhere and out.data_ptr() % self.alignment == 0
        total = out if out is not None and is_into else y.new_empty((plan.num_tokens, plan.hidden))
        made = handle.__dict__.get("made")
        _, send_plan, recv_plan, recv_plan_len, weights = handle._places() if made is None else made.places
        on_host = self._read(handle.weights) if self.is_elsewhere and plan.weighted else None
        weights = on_host.data_ptr() if on_host is not None else weights if plan.weighted else 0
        plan.window.native.combine_rows(
            plan.args, stream, plan.num_tokens, y.data_ptr(), y.numel() // plan.hidden, weights, send_plan, recv_plan,
            recv_plan_len, total.data_ptr() or address(total), 0 if bias is None else bias.data_ptr(),
            0 if side is None else side.data_ptr(),
            0 if side_out is None else side_out.data_ptr() or address(side_out),
        )  # fmt: skip
        if self.is_elsewhere:
            total, side_out = total.to(self.device), None if side_out is None else side_out.to(self.device)
        return total if out is None or out is total else out.copy_(total), side_out, total

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

    # ---- what differs between engines

    @abstractmethod
    def _read(self, tensor: Tensor) -> Tensor:
        """The same values where the engine reads them: contiguous, aligned."""

    @abstractmethod
    def _sum_in_parts(self, plan: Plan, stream: int, *tensors: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        """As `_sum`, of rows in pieces."""

    # ---- around them

    @abstractmethod
    def empty(self, window: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised, in the heap of the window if there is room."""

    def before_call(self, what: str) -> None:
        """Refuse what can't be done now; nothing has been sent."""
        self.raise_bad_ids(f"; this {what} sent nothing and may be repeated")

    def wait(self) -> None:
        """Block the host until the calls made so far have ended."""

    def window_stats(self, window: Window) -> dict[str, Any]:
        """What a native window counts."""
        return dict(window.native.stats())

    @abstractmethod
    def barrier(self, window: Window, deadline_s: float) -> None:
        """Wait for all ranks. Collective."""

    @abstractmethod
    def record_stream(self, things: Iterable[Any], stream: Any) -> None:
        """The memory of these tensors, and of what these handles have, is in use on `stream`."""

    def tie(self) -> Tensor:
        """For the handle of a dispatch. Handles of one epoch share it: nobody writes to it."""
        if self._epoch != self.comm.epoch:
            self._epoch = self.comm.epoch
            self.token = torch.tensor([self.key, self._epoch], dtype=torch.float64, device="cpu")
        return self.token

    def side_of_picks(self, side: Tensor, handle: Handle) -> Tensor:
        """rank_major: side values [N, K] as combine wants them. The nvlink engine adds those of all ranks, so what
        belongs to no pick here becomes 0; the cpu engine looks for itself."""
        topk_idx = handle.idx if self.plans_on_device and handle.call.layout == RANK_MAJOR else None
        return side if topk_idx is None else side.masked_fill(topk_idx < 0, 0)

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

    def finished(
        self, plan: Plan, rows: Tensor, scales: Tensor | None, handle: Handle, *, is_first: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Rows and scales of a dispatch whose plan clears the tail or wants column-major scales."""
        if plan.clears_tail:  # which rows hold no data, bool [N] or [L, C], without asking the device how many do
            layout, sizes = plan.call.layout, handle.sizes
            is_masked = layout == MASKED
            number = torch.arange(rows.shape[1 if is_masked else 0], dtype=torch.int32, device=self.device)
            tail = number >= (sizes[: self.num_local_experts].unsqueeze(-1) if is_masked else sizes[-1])
            of_rows = tail.unsqueeze(-1)
            rows.masked_fill_(of_rows, 0)
            if is_first:
                handle.weights.masked_fill_(of_rows if layout == RANK_MAJOR else tail, 0)
            idx = handle.idx if is_first and layout == RANK_MAJOR else None
            if idx is not None:
                idx.masked_fill_(of_rows, -1)
        return rows, scales if plan.word_dtype is None or scales is None else by_column(scales, plan.word_dtype)

    def bad_ids_text(self, num_bad: int, first_id: int, first_at: int) -> str:
        """For the user: what an earlier dispatch found."""
        token, pick = divmod(first_at, self.top_k)
        return (
            f"topk_idx of an earlier dispatch had {num_bad} ids out of range, the first {first_id} at token {token}, "
            f"pick {pick}; allowed are -1 to {self.num_experts - 1}. They counted as -1"
        )


def by_token(token: Tensor) -> Runner:
    """The object whose `token` or `tie` this is.

    Raises:
        InvalidState: its ExpertParallel is gone.
    """
    calls = _by_key.get(int(token[0]))
    if calls is None:
        raise InvalidState("the ExpertParallel of this operation is gone: keep it as long as its handles and graphs")
    return calls
