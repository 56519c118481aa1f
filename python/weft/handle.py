"""What a dispatch gives back: `Dispatched`, the `Handle` that combine and later dispatches need, and `Event`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from weft.quantized import Quantized

__all__ = ["Dispatched", "Event", "Handle"]


class Event:
    """Completion of an `async_op=True` call. On the cpu engine a call is complete when it returns, so nothing here
    ever waits."""

    __slots__ = ()

    def query(self) -> bool:
        """True once the call is complete."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Let `stream` (default: the current one) wait for the call. Does not block the host."""

    def synchronize(self) -> None:
        """Block the host until the call is complete."""

    def __repr__(self) -> str:
        return "weft.Event(complete)"


COMPLETE = Event()


@dataclass(frozen=True, eq=False)
class Handle:
    """The routing of one dispatch. It owns what it needs, survives later calls and serves any number of times.

    Fields meant for users: `layout`, `alignment`, `capacity` (None if exact), `num_tokens` (T of this rank),
    `window` and `topk_weights`, the weights received (tracked by autograd). The plans are int32 tensors of the engine
    and opaque.
    """

    send_plan: torch.Tensor
    recv_plan: torch.Tensor
    topk_weights: torch.Tensor
    topk_idx: torch.Tensor | None
    num_tokens_per_expert: torch.Tensor
    offsets: torch.Tensor
    num_rows: torch.Tensor
    tie: torch.Tensor
    layout: str
    alignment: int
    capacity: int | None
    num_tokens: int
    max_tokens: int
    window: int
    sent: Any = None  # the record that weft.autograd keeps of the dispatch, eager mode with gradients only

    @property
    def filled(self) -> torch.Tensor:
        """How many rows hold data: [L] for masked, else []."""
        return self.num_tokens_per_expert if self.layout == "masked" else self.num_rows

    def repeated(self, tie: torch.Tensor, sent: Any) -> Handle:
        """The handle of a dispatch that repeats this routing."""
        return replace(self, tie=tie, sent=sent)

    def __repr__(self) -> str:
        capacity = "exact" if self.capacity is None else self.capacity
        return (
            f"weft.Handle({self.layout}, num_tokens={self.num_tokens}, alignment={self.alignment}, capacity={capacity})"
        )


@dataclass(frozen=True, eq=False)
class Dispatched:
    """The rows this rank's experts received. E experts, R ranks, L = E / R local experts, K = top_k.

    Attributes:
        x: rank_major and expert_major [N, H], masked [L, C, H]; a `weft.Quantized` if the rows are quantised.
        topk_idx: rank_major: [N, K] local expert ids, -1 where the pick is another rank's, in the integer dtype given;
            else None.
        topk_weights: fp32 [N, K], [N] or [L, C]; 0 where there is no pick.
        num_tokens_per_expert: int32 [L], picks kept.
        offsets: int32: rank_major [R + 1] by source rank; expert_major and masked [L + 1] by expert.
        num_rows: int32 [], rows that hold data (holes of expert_major included; masked: the sum of kept picks).
        handle: for `combine` and for `dispatch(handle=...)`.
        overflow: int64 [], picks dropped on this rank because of capacity, accumulated over the calls of the
            ExpertParallel.

    With `capacity`, rows at and beyond `num_rows` are undefined.
    """

    x: torch.Tensor | Quantized
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    offsets: torch.Tensor
    num_rows: torch.Tensor
    handle: Handle
    overflow: torch.Tensor

    @property
    def event(self) -> Event:
        """Completion of the call; on the cpu engine that is when it returns."""
        return COMPLETE

    def wait(self) -> Dispatched:
        """Receive the rows of a `staged=True` dispatch. On the cpu engine they are there already."""
        return self

    def __repr__(self) -> str:
        return f"weft.Dispatched({self.handle.layout}, x={list(self.x.data.shape)} {self.x.data.dtype})"
