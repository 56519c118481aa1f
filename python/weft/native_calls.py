"""Tensors in, native calls, tensors out: the one place where Weft's Python hands pointers to the native module.

Nothing here knows autograd or torch.library. All tensors may be anywhere; those not in host memory are copied, since
the only engine so far is the CPU's.
"""

# check: allow-in-file function-size: the flat arguments of the operators pass through
# check: allow file-size: one place that hands pointers to the native module

from __future__ import annotations

import itertools
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from weft import traces
from weft.errors import CapacityExceeded, Error, InternalError, InvalidArgument, InvalidState
from weft.limits import LAYOUTS

if TYPE_CHECKING:
    from weft.communicator import Communicator, Window

__all__ = ["BYTES", "Call", "NativeCalls", "Received", "by_token"]

DTYPE_CODES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
BYTES = 0
RANK_MAJOR, EXPERT_MAJOR, MASKED = range(3)
LEAST_COLUMNS = 4  # a row of 16 bytes in fp32: what a backward sends where only weights have gradients

_keys = itertools.count(1)
_by_key: weakref.WeakValueDictionary[int, NativeCalls] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Call:
    """What is equal on all ranks in a call, as the native module wants it."""

    layout: int
    alignment: int
    capacity: int  # -1: none
    max_tokens: int
    deadline_s: float
    window: int


class Received(NamedTuple):
    """The tensors of a dispatch. Absent ones are empty, so that operators of torch.library can return them."""

    x: Tensor  # as the native module gives it: bytes if quantised
    scales: Tensor  # fp32, or bytes
    topk_idx: Tensor
    topk_weights: Tensor
    num_tokens_per_expert: Tensor
    offsets: Tensor
    num_rows: Tensor
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
        self._waiting[self._next] = received
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


class NativeCalls:
    """State of one ExpertParallel on the native side: windows, counters, what is to be raised later.

    `token` (float64 [2]: key, epoch) finds this object from inside an operator of torch.library; a copy of it, the
    `tie`, is part of every handle: it proves whose the handle is, and of which epoch.
    """

    MAX_UNUSED = (
        4  # results not used on this rank whose graphs are kept for a backward that may come (weft/autograd.py)
    )

    def __init__(
        self, comm: Communicator, windows: list[Window], num_experts: int, top_k: int, hidden: int, device: torch.device
    ) -> None:
        self.comm, self.windows, self.device = comm, windows, device
        self.num_experts, self.top_k, self.hidden = num_experts, top_k, hidden
        self.num_ranks = comm.num_ranks
        self.num_local_experts = num_experts // comm.num_ranks
        self.overflow = torch.zeros((), dtype=torch.int64)
        self.num_dropped_checked = 0
        self.bad_ids: str | None = None
        self.counters = Counters()
        self.unused: list[Any] = []
        self.results = Results()
        self.closed = False
        self.key = next(_keys)
        self.token = torch.tensor([self.key, comm.epoch], dtype=torch.float64)
        _by_key[self.key] = self

    # ---- the three calls

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
        num_tokens, _ = topk_idx.shape
        x, scales, topk_idx = _host(x), None if scales is None else _host(scales), _host(topk_idx)
        weights = None if topk_weights is None else _host(topk_weights)
        counts = torch.empty(self.num_local_experts, dtype=torch.int32)
        num_groups = self.num_ranks if call.layout == RANK_MAJOR else self.num_local_experts
        offsets = torch.empty(num_groups + 1, dtype=torch.int32)
        num_rows = torch.empty((), dtype=torch.int32)
        plan_len = _native().send_plan_len(num_tokens, self.top_k, self.num_ranks, self.num_local_experts)
        send_plan = torch.empty(plan_len, dtype=torch.int32)
        with _Calling(self, "dispatch", call):
            if traces._recorders:
                traces._note(topk_idx, weights, self.comm.rank, self.num_experts)
            result = self.windows[call.window].native.dispatch(
                **_rows(x, scales, quantize, self.hidden),
                num_tokens=num_tokens,
                topk_ptr=topk_idx.data_ptr(),
                topk_is_int64=topk_idx.dtype == torch.int64,
                weights_ptr=_ptr(weights),
                send_plan_ptr=send_plan.data_ptr(),
                recv_plan_ptr=0,
                recv_plan_len=0,
                cached=False,
                **_shared(call),
                counts_ptr=counts.data_ptr(),
                offsets_ptr=offsets.data_ptr(),
                num_rows_ptr=num_rows.data_ptr(),
                overflow_ptr=self.overflow.data_ptr(),
            )
            self._count_sent(result)
            if result.num_bad_ids:
                self._note_bad_ids(result)
            self.token[1] = self.comm.epoch
            tie = self.token.clone()
        rows, out_scales, out_weights = _tensor(result.x), _tensor(result.scales), _tensor(result.topk_weights)
        out_idx = _tensor(result.topk_idx) if call.layout == RANK_MAJOR else topk_idx.new_empty(0)
        recv_plan = _tensor(result.recv_plan)
        if clear_tail:
            filled = counts if call.layout == MASKED else num_rows
            clear_tails(call.layout, rows, filled)
            clear_tails(call.layout, out_weights, filled)
            if call.layout == RANK_MAJOR:
                out_idx[result.num_rows :] = -1
        received = Received(
            rows, out_scales, out_idx, out_weights, counts, offsets, num_rows, send_plan, recv_plan, tie
        )
        if self.device.type == "cpu":
            return received
        return Received._make([*(part.to(self.device) for part in received[:7]), send_plan, recv_plan, tie])

    def dispatch_again(
        self,
        call: Call,
        x: Tensor,
        scales: Tensor | None,
        send_plan: Tensor,
        recv_plan: Tensor,
        tie: Tensor,
        filled: Tensor,
        num_tokens: int,
        clear_tail: bool,
        quantize: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """The routing of a handle with other rows: (x, scales). `filled` as in `clear_tails`."""
        x, scales = _host(x), None if scales is None else _host(scales)
        with _Calling(self, "dispatch", call, tie):
            result = self.windows[call.window].native.dispatch(
                **_rows(x, scales, quantize, self.hidden),
                num_tokens=num_tokens,
                topk_ptr=0,
                topk_is_int64=False,
                weights_ptr=0,
                send_plan_ptr=send_plan.data_ptr(),
                recv_plan_ptr=recv_plan.data_ptr(),
                recv_plan_len=recv_plan.numel(),
                cached=True,
                **_shared(call),
                counts_ptr=0,  # the first dispatch has counted
                offsets_ptr=0,
                num_rows_ptr=0,
                overflow_ptr=0,
            )
            self._count_sent(result)
        rows = _tensor(result.x)
        if clear_tail:
            clear_tails(call.layout, rows, filled)
        return rows.to(self.device), _tensor(result.scales).to(self.device)

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
        hidden = y.shape[-1]
        y, bias = _host(y), None if bias is None else _host(bias)
        weights, side = None if weights is None else _host(weights), None if side is None else _host(side)
        into = out if out is not None and out.device.type == "cpu" else torch.empty(num_tokens, hidden, dtype=y.dtype)
        side_out = torch.empty((num_tokens, self.top_k) if side is not None else 0, dtype=torch.float32)
        with _Calling(self, "combine", call, tie):
            self.windows[call.window].native.combine(
                y_ptr=y.data_ptr(),
                num_rows=y.numel() // hidden,
                weights_ptr=_ptr(weights),
                has_side=side is not None,
                side_ptr=_ptr(side),
                bias_ptr=_ptr(bias),
                bias_is_2d=bias is not None and bias.dim() == 2,
                bias_is_fp32=bias is not None and bias.dtype == torch.float32,
                out_ptr=into.data_ptr(),
                side_out_ptr=side_out.data_ptr() if side is not None else 0,
                num_tokens=num_tokens,
                send_plan_ptr=send_plan.data_ptr(),
                recv_plan_ptr=recv_plan.data_ptr(),
                recv_plan_len=recv_plan.numel(),
                dtype=DTYPE_CODES[y.dtype],
                hidden=hidden,
                weighted=weights is not None,
                **_shared(call),
            )
        if out is not None and out is not into:
            out.copy_(into)
        return into.to(self.device) if out is None else out, side_out.to(self.device)

    # ---- around them

    def raise_if_closed(self, what: str) -> None:
        """InvalidState if this ExpertParallel is closed."""
        if self.closed:
            raise InvalidState(f"{what}: the ExpertParallel is closed; make a new one")

    def raise_bad_ids(self, remark: str = "") -> None:
        """Raise what an earlier dispatch found in topk_idx, once."""
        if self.bad_ids is not None:
            text, self.bad_ids = self.bad_ids, None
            raise InvalidArgument(text + remark)

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
        key, epoch = tie.tolist()
        if key != self.key:
            raise InvalidState(f"{what}: the handle is of another ExpertParallel; use the one that made it")
        if epoch != self.comm.epoch:
            raise InvalidState(
                f"{what}: the handle is of epoch {int(epoch)}, a rebuild began epoch {self.comm.epoch}; dispatch anew"
            )

    def _note_bad_ids(self, result: Any) -> None:
        token, pick = divmod(result.first_bad_at, self.top_k)
        self.bad_ids = (
            f"topk_idx of an earlier dispatch had {result.num_bad_ids} ids out of range, the first "
            f"{result.first_bad_id} at token {token}, pick {pick}; allowed are "
            f"-1 to {self.num_experts - 1}. They counted as -1"
        )

    def _count_sent(self, result: Any) -> None:
        self.counters.rows_sent += result.rows_sent
        self.counters.bytes_sent += result.bytes_sent


class _Calling:
    """Around a native call: refuse what can't be done now, count, time, and name the range for profilers."""

    __slots__ = ("_begin", "_calls", "_range", "_tie", "_what")

    def __init__(self, calls: NativeCalls, what: str, call: Call, tie: Tensor | None = None) -> None:
        self._calls, self._what, self._tie = calls, what, tie
        self._range: Any = None
        if torch.autograd._profiler_enabled():
            self._range = torch.profiler.record_function(f"weft::{what} {LAYOUTS[call.layout]}")

    def __enter__(self) -> None:
        calls = self._calls
        calls.raise_if_closed(self._what)
        calls.comm.enter(self._what)
        try:
            if self._tie is not None:
                calls.check_tie(self._what, self._tie)
            calls.raise_bad_ids(f"; this {self._what} sent nothing and may be repeated")
        except Error:
            calls.comm.leave()
            raise
        if self._range is not None:
            self._range.__enter__()
        self._begin = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        seconds = time.perf_counter() - self._begin
        counters = self._calls.counters
        if error[0] is not None:
            pass  # calls that failed do not count
        elif self._what == "dispatch":
            counters.num_dispatches += 1
            counters.dispatch_s += seconds
        else:
            counters.num_combines += 1
            counters.combine_s += seconds
        if self._range is not None:
            self._range.__exit__(*error)
        self._calls.comm.leave()


def by_token(token: Tensor) -> NativeCalls:
    """The object whose `token` or `tie` this is.

    Raises:
        InvalidState: its ExpertParallel is gone.
    """
    calls = _by_key.get(int(token[0]))
    if calls is None:
        raise InvalidState("the ExpertParallel of this operation is gone: keep it as long as its handles and graphs")
    return calls


def clear_tails(layout: int, rows: Tensor, filled: Tensor) -> None:
    """Zero, in place, the rows that hold no data: training multiplies them by zero gradients, and NaN * 0 is NaN.

    `filled` is num_tokens_per_expert [L] for masked, else num_rows [].
    """
    if layout != MASKED:
        rows[int(filled) :].zero_()
        return
    for expert, count in enumerate(filled.tolist()):
        rows[expert, count:].zero_()


def _shared(call: Call) -> dict[str, Any]:
    return {
        "layout": call.layout,
        "alignment": call.alignment,
        "capacity": call.capacity,
        "max_tokens": call.max_tokens,
        "deadline_s": call.deadline_s,
    }


def _rows(x: Tensor, scales: Tensor | None, quantize: int, hidden: int) -> dict[str, Any]:
    code = DTYPE_CODES.get(x.dtype, BYTES)
    return {
        "x_ptr": x.data_ptr(),
        "scales_ptr": _ptr(scales),
        "dtype": code,
        "quantize": quantize,
        "row_bytes": x.shape[1] * x.element_size(),
        "scale_row_bytes": 0 if scales is None else scales.shape[1] * scales.element_size(),
        "hidden": x.shape[1] if code != BYTES else hidden,
    }


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous()


def _ptr(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _tensor(array: Any) -> Tensor:
    return torch.empty(0) if array is None else torch.from_dlpack(array)


def _native() -> Any:
    from weft import _load

    return _load.native()
