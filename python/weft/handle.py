"""What a dispatch gives back: `Dispatched`, and the `Handle` that combine and later dispatches need."""

# check: allow-in-file function-size: constructors of a field each

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from weft.call.event import Event
from weft.call.spec import RANK_MAJOR, Call, rows_shape
from weft.limits import LAYOUTS

if TYPE_CHECKING:
    from weft.call.sources import Sources
    from weft.quantized import Quantized

__all__ = ["Dispatched", "Event", "Handle"]


ROUTING = ("sizes", "send_plan", "recv_plan", "topk_weights", "topk_idx")  # names in the native module
# Fields of a handle that may become tensors when asked for, with their native names.
_LAZY = {"sizes": "sizes", "send_plan": "send_plan", "recv_plan": "recv_plan", "weights": "topk_weights",
         "idx": "topk_idx"}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Handle:
    """The routing of one dispatch. It owns what it needs, survives later calls and serves any number of times; its
    fields can't be assigned.

    Fields meant for users: `layout`, `alignment`, `capacity` (None if exact), `num_tokens` (T of this rank),
    `window` and `topk_weights`, the weights received (tracked by autograd). What users get is their own: they may write
    to it, and later calls with the handle do not notice. The plans are int32 tensors of the engine and opaque.
    """

    send_plan: torch.Tensor
    recv_plan: torch.Tensor
    weights: torch.Tensor  # received; users get copies of these three
    idx: torch.Tensor | None
    sizes: torch.Tensor  # int32: picks of each local expert | offsets | number of rows
    num_local_experts: int
    tie: torch.Tensor
    num_tokens: int
    call: Call  # that made it
    sent: Any = None  # the record that weft.autograd keeps of the dispatch, eager mode with gradients only

    @classmethod
    def _lazily(
        cls, made: Any, lead: tuple[int, ...], num_local_experts: int, tie: torch.Tensor, num_tokens: int, call: Call
    ) -> Handle:
        """`made`: what has the `ROUTING`; `lead`: shape of the rows without their last dimension."""
        handle: Handle = object.__new__(cls)
        fields = handle.__dict__  # one by one takes less time than update()
        fields["made"], fields["lead"], fields["num_local_experts"] = made, lead, num_local_experts
        fields["tie"], fields["num_tokens"], fields["call"], fields["sent"] = tie, num_tokens, call, None
        return handle

    def __getattr__(self, name: str) -> Any:
        made = self.__dict__.get("made")
        if made is None or name not in _LAZY:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        has_one = name != "idx" or self.layout == "rank_major"
        found = self.__dict__[name] = made.tensor(_LAZY[name], torch._C._from_dlpack) if has_one else None
        return found

    def of_user(self, name: str) -> Any:
        """`weights`, `idx` or `sizes` as users get them, who may write to them: a copy where calls with this handle
        read the original. The copy follows the call, also one that has not ended (async_op) or received (staged).

        What a CUDA graph has recorded is the graph's own memory, renewed by each replay: asked for outside of it, it is
        given as it is.
        """
        original = getattr(self, name)
        if original is None or (name == "weights" and self.layout == "rank_major"):  # no call reads its values
            return original
        if torch.compiler.is_compiling():
            return original.clone()
        copies = self.__dict__.setdefault("copies", {})
        if name not in copies:
            if self.__dict__.get("is_captured", False) and not torch.cuda.is_current_stream_capturing():
                return original
            copies[name] = _copy(original, self.__dict__.get("pending"))
        return copies[name]

    @property
    def topk_weights(self) -> torch.Tensor:
        """fp32 [N, K], [N] or [L, C], the weights received."""
        weights: torch.Tensor = self.of_user("weights")
        return weights

    @property
    def topk_idx(self) -> torch.Tensor | None:
        """rank_major: [N, K] local expert ids; else None."""
        idx: torch.Tensor | None = self.of_user("idx")
        return idx

    @property
    def layout(self) -> str:
        """As asked for."""
        return LAYOUTS[self.call.layout]

    @property
    def alignment(self) -> int:
        """As asked for."""
        return self.call.alignment

    @property
    def capacity(self) -> int | None:
        """As asked for; None: exact sizes."""
        return None if self.call.capacity < 0 else self.call.capacity

    @property
    def max_tokens(self) -> int:
        """Most tokens of any rank in the call."""
        return self.call.max_tokens

    @property
    def window(self) -> int:
        """Of the call, and of all that use this handle."""
        return self.call.window

    @property
    def map_number(self) -> int:
        """Which expert map its picks went by: 1 for that of the constructor, one more with each `set_expert_map`; 0
        without num_logical_experts."""
        return int(self.tie[2])

    @property
    def is_small(self) -> bool:
        """Of a small-batch dispatch: only the small-batch kernels understand its plans."""
        return self.call.is_small

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """Shape of the rows without their last dimension: (N,), masked (L, C)."""
        lead: tuple[int, ...] | None = self.__dict__.get("lead")
        return rows_shape(self.weights, self.call.layout) if lead is None else lead

    def _received(self) -> tuple[torch.Tensor | None, torch.Tensor]:
        """`idx` and `weights`, made together."""
        fields = self.__dict__
        made = fields.get("made")
        if made is None or self.call.layout != RANK_MAJOR:
            return self.idx, self.weights
        fields["idx"], fields["weights"] = found = made.picks(torch._C._from_dlpack)
        ids_and_weights: tuple[torch.Tensor | None, torch.Tensor] = found
        return ids_and_weights

    def _counts(self) -> torch.Tensor:
        """Picks of each local expert: the head of `sizes`, in its memory."""
        made = self.__dict__.get("made")
        if made is None or "sizes" in self.__dict__:
            return self.sizes.narrow(0, 0, self.num_local_experts)
        counts: torch.Tensor = made.counts_of(self.num_local_experts, torch._C._from_dlpack)
        return counts

    def _places(self) -> tuple[int, int, int, int, int]:
        """Where calls with this handle find sizes, send plan, receive plan (and its length) and weights."""
        if "made" in self.__dict__:
            found: tuple[int, int, int, int, int] = self.__dict__["made"].places
            return found
        recv_plan = self.recv_plan
        plans = (self.sizes.data_ptr(), self.send_plan.data_ptr(), recv_plan.data_ptr(), recv_plan.numel())
        return (*plans, self.weights.data_ptr())

    def _tensors(self) -> list[torch.Tensor]:
        """Those there are, copies of users too."""
        known = [self.__dict__.get(name) for name in _LAZY]
        return [each for each in (*known, *self.__dict__.get("copies", {}).values()) if each is not None]

    def _move(self, device: torch.device) -> None:
        """Sizes, weights and ids to where the user's tensors lie; the plans stay."""
        for name in ("sizes", "weights", "idx"):
            here = getattr(self, name)
            self.__dict__[name] = None if here is None else here.to(device)

    def repeated(self, tie: torch.Tensor, sent: Any) -> Handle:
        """The handle of a dispatch that repeats this routing."""
        return self if tie is self.tie and sent is self.sent else self._changed(tie=tie, sent=sent)

    def _changed(self, **fields: Any) -> Handle:
        """The same routing with other fields."""
        changed: Handle = object.__new__(type(self))
        changed.__dict__.update(self.__dict__, **fields)
        return changed

    def __repr__(self) -> str:
        capacity = "exact" if self.capacity is None else self.capacity
        return (
            f"weft.Handle({self.layout}, num_tokens={self.num_tokens}, alignment={self.alignment}, capacity={capacity})"
        )


def _copy(original: torch.Tensor, pending: Any) -> torch.Tensor:
    """`pending`: None, the `Event` of an async call, or the `Half` of a staged one."""
    if isinstance(pending, Event):
        pending.wait()
    elif pending is not None and not pending.is_over:
        copy = torch.empty_like(original)
        pending.after.append(lambda: copy.copy_(original))
        return copy
    return original.clone()


@dataclass(frozen=True, eq=False, init=False)  # as Handle
class Dispatched:
    """The rows this rank's experts received. E experts, R ranks, L = E / R local experts, K = top_k. Fields can't be
    assigned.

    Attributes:
        x: rank_major and expert_major [N, H], masked [L, C, H]; a `weft.Quantized` if the rows are quantised.
        topk_idx: rank_major: [N, K] local expert ids, -1 where the pick is another rank's, in the integer dtype given;
            else None.
        topk_weights: fp32 [N, K], [N] or [L, C]; 0 where there is no pick.
        handle: for `combine` and for `dispatch(handle=...)`.
        overflow: int64 [], picks dropped on this rank because of capacity, accumulated over the calls of the
            ExpertParallel.
        event: completion of the call; of a staged one until `wait`: of its sending.

    With `capacity`, rows at and beyond `num_rows` are undefined.
    """

    x: torch.Tensor | Quantized
    handle: Handle
    overflow: torch.Tensor
    event: Event
    calls: Any  # of the ExpertParallel
    half: Any  # of a staged dispatch: the half that receives

    def __init__(
        self,
        x: torch.Tensor | Quantized,
        handle: Handle,
        overflow: torch.Tensor,
        event: Event,
        calls: Any,
        half: Any = None,  # defaults that are constants: others torch 2.11 does not trace
    ) -> None:
        fields = self.__dict__  # as Handle._lazily
        fields["x"], fields["handle"], fields["overflow"] = x, handle, overflow
        fields["event"], fields["calls"], fields["half"] = event, calls, half

    @property
    def topk_idx(self) -> torch.Tensor | None:
        """See the class."""
        return self.handle.topk_idx

    @property
    def topk_weights(self) -> torch.Tensor:
        """See the class."""
        return self.handle.topk_weights

    @property
    def side(self) -> torch.Tensor | None:
        """Of a dispatch with side=: its values in the places of topk_weights, fp32, 0 where there is no pick. Local; on
        a GPU some kernels on the current stream, so a staged or async call has to be waited for first. Else None."""
        words = self.__dict__.get("words")
        if words is None:
            return None
        from weft.call.sources import side_of

        return side_of(words, self.topk_idx, None if self.topk_idx is not None else self.sources().pick)

    @property
    def num_tokens_per_expert(self) -> torch.Tensor:
        """int32 [L], picks kept."""
        sizes: torch.Tensor = self.handle.of_user("sizes")
        return sizes[: self.handle.num_local_experts]

    @property
    def num_tokens_per_expert_list(self) -> list[int]:
        """The same as Python ints. Of a dispatch with host_counts=True, or along its handle, the host knows them; else
        on a GPU it waits for the call."""
        counts: tuple[int, ...] | None = self.handle.__dict__.get("counts")
        return self.num_tokens_per_expert.tolist() if counts is None else list(counts)

    @property
    def offsets(self) -> torch.Tensor:
        """int32: rank_major [R + 1] by source rank; expert_major and masked [L + 1] by expert."""
        sizes: torch.Tensor = self.handle.of_user("sizes")
        return sizes[self.handle.num_local_experts : -1]

    @property
    def num_rows(self) -> torch.Tensor:
        """int32 [], rows that hold data (holes of expert_major included; masked: the sum of kept picks)."""
        sizes: torch.Tensor = self.handle.of_user("sizes")
        return sizes[-1]

    @property
    def dropped(self) -> torch.Tensor:
        """int32 [], picks of this dispatch for which the result had no room on this rank; those of a handle, which its
        every dispatch drops again. Not in compiled code."""
        from weft import _load

        handle, native = self.handle, _load.native()
        place = native.gpu_plan_dropped if self.calls.plans_on_device else native.recv_plan_dropped
        number = handle.recv_plan[place]
        if handle.__dict__.get("is_captured", False) and not torch.cuda.is_current_stream_capturing():
            return number  # renewed by each replay
        return _copy(number, handle.__dict__.get("pending")).to(handle.sizes.device)

    def sources(self) -> Sources:
        """Who sent each row: source rank, token there, and pick. Local; a staged dispatch has to be received first. On
        a GPU it takes some kernels on the current stream, and the host does not wait. Not in compiled code.
        """
        from weft.call.sources import sources_of

        calls = self.calls
        return sources_of(self.handle, calls.num_ranks, calls.top_k, is_on_device=calls.plans_on_device)

    def wait(self) -> Dispatched:
        """Receive what a `staged=True` dispatch has sent, on the current stream of the GPU, where its results may then
        be used; they are not there before. Every rank calls it, before any other call on the window. A second call, on
        any stream, makes that stream wait. Nothing happens for a dispatch that was not staged.

        Raises:
            As dispatch, what the peers have not done among it. InvalidState: there was a `rebuild` in between.
        """
        if self.half is not None:
            self.half.receive()
        return self

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """These tensors, the handle's too, are in use on `stream`: their memory is not given to anybody else before the
        work that is on it when they are freed. As `torch.Tensor.record_stream`, which knows nothing of the heap.

        Nothing happens where the tokens are in host memory.
        """
        data = [self.x] if isinstance(self.x, torch.Tensor) else [self.x.data, self.x.scales]
        self.calls.record_stream([*data, self.__dict__.get("words"), self.handle], stream)

    def __repr__(self) -> str:
        return f"weft.Dispatched({self.handle.layout}, x={list(self.x.data.shape)} {self.x.data.dtype})"
