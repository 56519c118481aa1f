"""The calls between tensors and the native module: once for both engines. What differs between them, where tensors are
read and results lie, streams, and rows in pieces, is in call/cpu_calls.py and call/gpu_calls.py.

Nothing here knows autograd or torch.library.
"""

# check: allow-in-file function-size: the flat arguments of the operators pass through
# check: allow file-size: what both engines share, in one class

from __future__ import annotations

import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from weft import _load
from weft.call import half
from weft.call.calling import Calling
from weft.call.event import Event
from weft.call.gpu_tensors import clear, column_bytes, row_bytes
from weft.call.received import Counters, Received, Results
from weft.call.scales import by_column
from weft.call.spec import BYTES, DTYPE_CODES, MASKED, RANK_MAJOR, Call, changed
from weft.call.tensors import address
from weft.call.window import Window
from weft.errors import CapacityExceeded, InvalidArgument, InvalidState
from weft.routing import traces

if TYPE_CHECKING:
    from weft.communicator import Communicator

__all__ = ["Kind", "Routing", "Runner", "by_token"]

_MOST_KINDS = 256  # of calls, whose arguments are kept
_keys = itertools.count(1)
_by_key: weakref.WeakValueDictionary[int, Runner] = weakref.WeakValueDictionary()


class Routing(NamedTuple):
    """What a repeated dispatch needs of a first one; `lead`: shape of its rows without the last dimension."""

    send_plan: Tensor
    recv_plan: Tensor
    sizes: Tensor
    lead: tuple[int, ...]


class Kind(NamedTuple):
    """What throughput dispatches of equal options and row formats have in common: native arguments, in which the
    native calls fill in what differs."""

    is_whole: bool  # rows are not sent in pieces
    first: Any
    again: Any  # with the routing of a handle


class Runner(ABC):
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
        # Absent results; new_empty of these costs half of torch.empty.
        memory = self.device if self.plans_on_device else "cpu"
        self._ints = torch.empty(0, dtype=torch.int32, device=memory)
        self._no_floats = torch.empty(0, dtype=torch.float32, device=memory)
        self._no_ids = torch.empty(0, dtype=torch.int64, device=memory)
        self._kinds: dict[tuple[Any, ...], Any] = {}  # Kind of dispatches, native arguments of combines
        self.key = next(_keys)
        self._epoch = comm.epoch
        self.token = torch.tensor([self.key, self._epoch], dtype=torch.float64, device="cpu")
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
        x, scales, topk_idx = self._read(x), self._read_scales(call, scales), self._read(topk_idx)
        weights = None if topk_weights is None else self._read(topk_weights)
        self._check_capture(call)
        if traces._recorders:
            traces._note(topk_idx, weights, self.comm.rank, self.num_experts)
        kind = self.kind(call, x, scales, quantize, topk_idx.dtype)
        pieces = [x] if kind.is_whole else self._pieces(call, x, scales, quantize)
        inputs = (*pieces, scales, topk_idx, weights) if call.is_async else ()
        with self.alone("dispatch"), self._running("dispatch", call, inputs=inputs) as run:
            received = self._first(call, kind, pieces[0], scales, topk_idx, weights, quantize, run)
            if len(pieces) > 1:
                routing = Routing(received.send_plan, received.recv_plan, received.sizes, tuple(received.x.shape[:-1]))
                again = changed(call, counts_dropped=False)  # the first piece has counted
                rest = [self._again(again, kind, piece, None, routing, 0, run)[0] for piece in pieces[1:]]
                received = received._replace(x=torch.cat([received.x, *rest], dim=-1))
            if clear_tail:
                tail = self._tail(call.layout, received.x, received.sizes)
                clear(received.x, tail)
                clear(received.topk_weights, tail)
                if call.layout == RANK_MAJOR:
                    received.topk_idx.masked_fill_(tail.unsqueeze(-1), -1)
            if call.scale_dtype is not None and not call.is_small:
                received = received._replace(scales=by_column(received.scales, call.scale_dtype))
            if run.keeps_results:
                run.results = received[:-1]
        half.note(self, "dispatch", call, run.receive)
        return received

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
        x, scales = self._read(x), self._read_scales(call, scales)
        kind = self.kind(call, x, scales, quantize)
        pieces = [x] if kind.is_whole else self._pieces(call, x, scales, quantize)
        routing = Routing(send_plan, recv_plan, sizes, rows_shape)
        inputs = (*pieces, scales, send_plan, recv_plan, sizes) if call.is_async else ()
        with self.alone("dispatch"), self._running("dispatch", call, tie, inputs) as run:
            rows, out_scales = self._again(call, kind, pieces[0], scales, routing, quantize, run)
            if len(pieces) > 1:
                again = changed(call, counts_dropped=False)  # the first piece has counted
                rest = [self._again(again, kind, piece, None, routing, 0, run)[0] for piece in pieces[1:]]
                rows = torch.cat([rows, *rest], dim=-1)
            if clear_tail:
                clear(rows, self._tail(call.layout, rows, sizes))
            if not call.is_small:
                out_scales = by_column(out_scales, call.scale_dtype)
            run.results = (rows, out_scales)
        half.note(self, "dispatch", call, run.receive)
        return rows, out_scales

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
        weights, side = (None if each is None else self._read(each) for each in (weights, side))
        parts = self._columns(call, y, bias)
        inputs = (*itertools.chain(*parts), weights, side, out, send_plan, recv_plan) if call.is_async else ()
        with self.alone("combine"), self._running("combine", call, tie, inputs) as run:
            into = out if out is not None and self._is_written(out) and len(parts) == 1 else None
            sums: list[Tensor] = []
            side_out = self._no_floats if side is None else self._no_floats.new_empty((num_tokens, self.top_k))
            for idx, (rows, row_bias) in enumerate(parts):
                sum_into = rows.new_empty((num_tokens, rows.shape[-1])) if into is None else into
                sums.append(sum_into)
                native, hidden = self.windows[call.window].native, rows.shape[-1]
                addresses = (
                    run.handle, num_tokens, address(rows), rows.numel() // hidden, address(weights),
                    address(send_plan), address(recv_plan), recv_plan.numel(), address(sum_into),
                )  # fmt: skip
                if side is None and row_bias is None and not call.is_staged:
                    native.combine_rows(self.combine_kind(call, rows.dtype, hidden), *addresses)
                    continue
                args = self._combine_args(call, rows.dtype, hidden, *addresses)
                if side is not None and idx == 0:
                    args.has_side, args.side, args.side_out = True, address(side), address(side_out)
                if row_bias is not None:
                    # The half that receives reads it, when the caller may have overwritten it.
                    row_bias = row_bias.clone() if call.is_staged else row_bias
                    args.bias, args.bias_is_2d = address(row_bias), row_bias.dim() == 2
                    args.bias_is_fp32 = row_bias.dtype == torch.float32
                run.launch(native.combine, args, (sum_into, side_out, row_bias, send_plan))
            total = self._given(sums[0] if len(sums) == 1 else torch.cat(sums, dim=-1))
            side_out = self._given(side_out)
            result = total
            if out is not None and out is not total:
                result = out.copy_(total)
                run.after.append(lambda: out.copy_(total))
            run.results = (total, side_out)
        half.note(self, "combine", call, run.receive)
        return result, side_out

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
    def _read_scales(self, call: Call, scales: Tensor | None) -> Tensor | None:
        """As `_read`; column-major ones as they are where the engine takes them."""

    @abstractmethod
    def _is_written(self, out: Tensor) -> bool:
        """Whether the engine can write a result where `out` lies."""

    def _given(self, tensor: Tensor) -> Tensor:
        """A result on the device of the communicator."""
        return tensor

    @abstractmethod
    def _running(self, *args: Any, **named: Any) -> Calling:
        """Around a native call: `Calling(self, ...)`, and its stream."""

    def _check_capture(self, call: Call) -> None:  # noqa: B027  of GPUs alone
        """Refuse what a CUDA graph can't record."""

    @abstractmethod
    def _pieces(self, call: Call, x: Tensor, scales: Tensor | None, quantize: int) -> list[Tensor]:
        """x, or its columns in parts that the engine can send at once."""

    @abstractmethod
    def _columns(self, call: Call, y: Tensor, bias: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
        """y and bias as the engine reads them, or their columns in parts."""

    @abstractmethod
    def _first(
        self,
        call: Call,
        kind: Kind,
        x: Tensor,
        scales: Tensor | None,
        topk_idx: Tensor,
        weights: Tensor | None,
        quantize: int,
        run: Calling,
    ) -> Received:
        """The native call of a first dispatch."""

    @abstractmethod
    def _again(
        self,
        call: Call,
        kind: Kind,
        x: Tensor,
        scales: Tensor | None,
        routing: Routing,
        quantize: int,
        run: Calling,
    ) -> tuple[Tensor, Tensor]:
        """The native call of a repeated one: rows and scales."""

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

    # ---- arguments of native calls

    def kind(
        self,
        call: Call,
        x: Tensor,
        scales: Tensor | None,
        quantize: int,
        topk_dtype: torch.dtype = torch.int64,
    ) -> Kind:
        """Of a throughput dispatch."""
        of_scales = () if scales is None else (scales.dtype, scales.shape[1], column_bytes(scales))
        key = (call, x.dtype, x.shape[1], of_scales, quantize, topk_dtype)
        kind: Kind | None = self._kinds.get(key)
        if kind is None:
            first, again = (self._dispatch_args(call, x, scales, quantize, 0, 0) for _ in range(2))
            first.makes_send_plan, first.overflow = True, address(self.overflow)
            first.topk_is_int64 = topk_dtype == torch.int64
            again.cached, again.overflow = True, address(self.overflow) if call.counts_dropped else 0
            self._give_sizes(again, 0, self._sizes_len(call.layout))
            is_whole = len(self._pieces(call, x, scales, quantize)) == 1
            kind = Kind(is_whole, first, again)
            self._keep(key, kind)
        return kind

    def combine_kind(self, call: Call, dtype: torch.dtype, hidden: int) -> Any:
        """Native arguments that combines have in common, without side and bias."""
        key = (call, dtype, hidden)
        args = self._kinds.get(key)
        return args or self._keep(key, self._combine_args(call, dtype, hidden, *[0] * 9))

    def _keep(self, key: tuple[Any, ...], made: Any) -> Any:
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        self._kinds[key] = made
        return made

    def _tail(self, layout: int, rows: Tensor, sizes: Tensor) -> Tensor:
        """Which rows hold no data, bool [N] or [L, C], without asking the device how many do."""
        number = torch.arange(rows.shape[1 if layout == MASKED else 0], dtype=torch.int32, device=self.device)
        return number >= (sizes[: self.num_local_experts].unsqueeze(-1) if layout == MASKED else sizes[-1])

    def _dispatch_args(
        self, call: Call, x: Tensor, scales: Tensor | None, quantize: int, num_tokens: int, stream: int
    ) -> Any:
        code = DTYPE_CODES.get(x.dtype, BYTES)
        hidden = x.shape[1] if code != BYTES else self.hidden
        args: Any = _load.native().DispatchArgs(
            *_common(call, hidden, num_tokens, stream), address(x), x.shape[1] * x.element_size(), code, quantize
        )
        args.object = self.numbers[call.window]
        if scales is not None:
            args.scales, args.scale_row_bytes = address(scales), row_bytes(scales)
            args.scale_stride = column_bytes(scales)
            args.scales_are_fp32 = scales.dtype == torch.float32
        if not call.zero_holes:
            args.zeroes_holes = False
        if call.is_small and call.scale_dtype is not None and (quantize or scales is not None):
            args.scale_word_bytes = call.scale_dtype.itemsize
        return args

    def _combine_args(
        self,
        call: Call,
        dtype: torch.dtype,
        hidden: int,
        stream: int,
        num_tokens: int,
        y: int,
        num_rows: int,
        weights: int,
        send_plan: int,
        recv_plan: int,
        recv_plan_len: int,
        out: int,
    ) -> Any:
        args: Any = _load.native().CombineArgs(
            *_common(call, hidden, num_tokens, stream), y, num_rows, DTYPE_CODES[dtype], weights, send_plan, recv_plan,
            out, call.wire != 0,
        )  # fmt: skip
        args.recv_plan_len = recv_plan_len
        args.object = self.numbers[call.window]
        return args

    def _give_sizes(self, args: Any, counts: int, sizes_len: int) -> None:
        args.counts = counts
        args.offsets, args.num_rows_out = counts + 4 * self.num_local_experts, counts + 4 * (sizes_len - 1)

    def _sizes_len(self, layout: int) -> int:
        return self.num_local_experts + (self.num_ranks if layout == RANK_MAJOR else self.num_local_experts) + 2

    def bad_ids_text(self, num_bad: int, first_id: int, first_at: int) -> str:
        """For the user: what an earlier dispatch found."""
        token, pick = divmod(first_at, self.top_k)
        return (
            f"topk_idx of an earlier dispatch had {num_bad} ids out of range, the first {first_id} at token {token}, "
            f"pick {pick}; allowed are -1 to {self.num_experts - 1}. They counted as -1"
        )


def _common(call: Call, hidden: int, num_tokens: int, stream: int) -> tuple[Any, ...]:
    """The first arguments of each native call."""
    return (
        call.layout, call.alignment, call.capacity, call.max_tokens, hidden, num_tokens, call.num_sms,
        int(call.deadline_s * 1e9), stream, call.is_small,
    )  # fmt: skip


def by_token(token: Tensor) -> Runner:
    """The object whose `token` or `tie` this is.

    Raises:
        InvalidState: its ExpertParallel is gone.
    """
    calls = _by_key.get(int(token[0]))
    if calls is None:
        raise InvalidState("the ExpertParallel of this operation is gone: keep it as long as its handles and graphs")
    return calls
