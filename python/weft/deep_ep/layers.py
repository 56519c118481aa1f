"""Windows of the shapes that a buffer meets: made at the first call, larger ones where a rank has more tokens."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from weft import env
from weft.call.room import NeedsRoom
from weft.deep_ep.nodes import Nodes
from weft.deep_ep.ranks import Ranks
from weft.errors import InvalidArgument, InvalidState
from weft.group.maps import asked_contract
from weft.limits import check_shape, dtype_name

if TYPE_CHECKING:
    from weft.communicator import Communicator
    from weft.expert_parallel import ExpertParallel

__all__ = ["Layers", "ShapeOf"]

T = TypeVar("T")

_LEAST_HEAP = 64 << 20
_LEAST_TOKENS = 512
_LOOK_S = 0.002
_MOST_KNOWN = 64
DEADLINE_S = 100.0


class ShapeOf(NamedTuple):
    """What an `ExpertParallel` serves; `kind`: "normal", or "low_latency" with two windows."""

    num_experts: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    kind: str = "normal"


class Turn:
    """Which window the next low-latency dispatch of a shape takes. Those of an epoch begin at 0, since ranks may have
    come."""

    __slots__ = ("_comm", "epoch", "number")

    def __init__(self, comm: Communicator) -> None:
        self._comm, self.epoch, self.number = comm, -1, 0

    def next(self) -> int:
        """Its number."""
        return self.number if self.epoch == self._comm._native.epoch else 0

    def note(self, number: int) -> None:
        """A dispatch has taken it. A refused one has sent nothing, so the next takes the same."""
        self.epoch, self.number = self._comm._native.epoch, 1 - number


class _Made:
    """What was made, by shape, and by how many buffers it is used."""

    def __init__(self) -> None:
        self.newest: dict[ShapeOf, ExpertParallel] = {}
        self.all: weakref.WeakSet[ExpertParallel] = weakref.WeakSet()
        self.num_users = 0
        self.turns: dict[ShapeOf, Turn] = {}  # of all buffers
        self.known: list[dict[Any, Any]] = []  # of each buffer

    def forget_known(self) -> None:
        """`newest` changes: the calls that are known may need another window."""
        for each in list(self.known):  # a buffer that is collected meanwhile takes its own out
            each.clear()


class Layers:
    """Of one buffer; where ranks come and go, of all buffers of their communicator: a rank that has to make what the
    others have made meanwhile can't know for which buffer it was. A handle keeps the object that made it, so the
    smaller ones live until their last handle goes."""

    def __init__(
        self, ranks: Ranks, *, heap_bytes: int, deadline_s: float = DEADLINE_S, nodes: Nodes | None = None,
        num_results: int = 0,
    ) -> None:  # fmt: skip
        """`nodes` between which rows go by rails; None: those of the ranks. `num_results`, with a row a pick, for which
        heaps have room whatever `heap_bytes` is."""
        chosen = env.deep_ep()
        self.ranks = ranks
        self.nodes = nodes or ranks.nodes
        self.deadline_s = chosen.timeout_s or deadline_s
        self._heap_bytes, self._num_results = max(_LEAST_HEAP, heap_bytes), num_results
        self._preset_tokens = chosen.max_tokens
        self._made = _Made()
        if ranks.comm._native.is_open:
            self._made = ranks.made = ranks.made or self._made
        self._newest, self._all = self._made.newest, self._made.all
        self.known: dict[Any, Any] = {}  # see note_known
        self._made.known.append(self.known)
        self._made.num_users += 1

    def has(self, shape: ShapeOf, max_tokens: int) -> bool:
        """Whether a call of so many tokens needs no new window."""
        found = self._newest.get(shape)
        return found is not None and found.max_tokens_per_rank >= max_tokens

    def forget(self, shape: ShapeOf) -> None:
        """It is made anew, by all ranks."""
        self._newest.pop(shape, None)
        self._made.forget_known()

    def note_known(self, key: Any, known: Any) -> None:
        """A dispatch like this was made: a `Known`. What `key` has beside the tensors says which window a call takes,
        while that is the newest of its shape."""
        if len(self.known) >= _MOST_KNOWN:
            self.known.clear()
        self.known[key] = known

    def turn(self, shape: ShapeOf) -> Turn:
        """Of the low-latency dispatches of a shape."""
        found = self._made.turns.get(shape)
        if found is None:
            found = self._made.turns[shape] = Turn(self.ranks.comm)
        return found

    def get(
        self, shape: ShapeOf, max_tokens: int, heap_bytes: int = 0, check: Callable[[], object] | None = None
    ) -> ExpertParallel:
        """With room for `max_tokens`, equal on all ranks. Collective where it is new: `check` raises before.

        Raises:
            InvalidState: it would be new, inside of a graph capture.
        """
        found = self._newest.get(shape)
        if found is not None and found.max_tokens_per_rank >= max_tokens:
            return found
        if check is not None:
            check()
        if is_capturing():
            raise InvalidState("run this call once before capturing it: its first call meets the other ranks")
        row_bytes = shape.dtype.itemsize * shape.hidden + 8 * shape.top_k
        heap_bytes = max(heap_bytes, self._num_results * max_tokens * shape.top_k * row_bytes * 9 // 8)
        made = self.ranks.window(
            num_experts=shape.num_experts, top_k=shape.top_k, hidden=shape.hidden, dtype=shape.dtype,
            max_tokens_per_rank=max_tokens, deadline_s=self.deadline_s, heap_bytes=max(self._heap_bytes, heap_bytes),
            num_windows=2 if shape.kind == "low_latency" else 1, node_ranks=self.nodes.node_ranks,
            small_tokens=max(1, max_tokens) if shape.kind == "low_latency" else None,
        )  # fmt: skip
        return self._kept(shape, made)

    def _kept(self, shape: ShapeOf, made: ExpertParallel) -> ExpertParallel:
        made.calls.tell_need()
        self._newest[shape] = made
        self._made.forget_known()
        self._all.add(made)
        return made

    def _lacking(self) -> list[dict[str, Any]]:
        comm = self.ranks.comm
        made = [(each["serials"], each["numbers"]) for each in comm._objects]
        theirs = asked_contract(comm._native, self.deadline_s)["objects"]
        return [each for each in theirs if (each["serials"], each["numbers"]) not in made]

    def catch_up(self, check: Callable[[dict[str, Any]], object] = bool, *, wait_s: float = 0.0) -> bool:
        """Make what the members have made, and this rank, which has joined them or is suspended, has not. False:
        nothing, also after `wait_s`: members speak of an object when all of it is there. `check` is asked before, with
        the arguments of each."""
        from weft.expert_parallel import ExpertParallel

        end = time.monotonic() + wait_s
        while not (lacking := self._lacking()) and time.monotonic() < end:
            time.sleep(_LOOK_S)
        for each in lacking:
            arguments = each["arguments"]
            check(arguments)
            dtype = getattr(torch, arguments["dtype"])
            made = ExpertParallel(self.ranks.comm, **{**arguments, "dtype": dtype})
            num_experts, top_k, hidden = (arguments[name] for name in ("num_experts", "top_k", "hidden"))
            if arguments["heap_bytes"] == 0:  # words between ranks
                self.ranks.mail[hidden] = made
                continue
            kind = "low_latency" if arguments["num_windows"] > 1 else "normal"
            self._kept(ShapeOf(num_experts, top_k, hidden, dtype, kind), made)
        return bool(lacking)

    def check(self, shape: ShapeOf, num_tokens: int) -> None:
        """Whether a window of this shape can be. Local: before the ranks tell each other anything.

        Raises:
            InvalidArgument, Unsupported: as `weft.ExpertParallel`.
        """
        check_shape({
            "num_ranks": self.ranks.num_ranks, "num_experts": shape.num_experts, "top_k": shape.top_k,
            "hidden": shape.hidden, "max_tokens_per_rank": num_tokens, "dtype": dtype_name(shape.dtype),
        })  # fmt: skip

    def agreed(self, shape: ShapeOf, num_tokens: int) -> ExpertParallel:
        """With room for the largest T of any rank, which the ranks tell each other. Collective, the host waits."""
        self.check(shape, num_tokens)
        return self.grow(shape, max(row[0] for row in self.ranks.gather([num_tokens], self.deadline_s)))

    def grow(self, shape: ShapeOf, most: int) -> ExpertParallel:
        """With room for `most` tokens, which all ranks know to be the largest T. Collective."""
        room = max(_LEAST_TOKENS, self._preset_tokens, 1 << max(0, most - 1).bit_length())
        return self.get(shape, max(most, min(room, (1 << 24) - 1)))

    def run(
        self,
        shape: ShapeOf,
        num_tokens: int,
        dispatch: Callable[[ExpertParallel], T],
        check: Callable[[], object] = lambda: None,
        *,
        has_capacity: bool = False,
    ) -> tuple[ExpertParallel, T]:
        """`dispatch(ep)`, which begins with a first dispatch of `num_tokens` tokens, with room for the largest T of any
        rank. It tells the ranks if there is not enough; then all make larger windows, and call it again. Before the
        first call of a shape they tell each other T, and on GPUs if it has a capacity: the host would not wait for it.
        Collective, the host waits. `check` raises if the arguments are not what a window takes: before the ranks meet,
        and of a call that the object has refused, which has sent nothing.
        """
        known = self._newest.get(shape)
        if known is None or (has_capacity and self.ranks.comm.engine != "cpu"):
            check()
            ep = self.agreed(shape, num_tokens)
            return ep, dispatch(ep)
        if num_tokens > known.max_tokens_per_rank:  # else it can be: there is one
            check()
            self.check(shape, num_tokens)
        try:
            return known, dispatch(known)
        except NeedsRoom as need:
            ep = self.grow(shape, need.num_tokens)
        except InvalidArgument:
            check()
            raise
        return ep, dispatch(ep)

    def close(self) -> None:
        """Its buffer ends: with the last one that uses them all are closed. Local, never waits.

        Raises:
            InvalidState: as `weft.ExpertParallel.close`; it may be called again.
        """
        if self._made.num_users == 1:
            for each in list(self._all):
                each.close()
            self._newest.clear()
        self._leave()

    def _leave(self) -> None:
        self._made.num_users -= 1
        self.known.clear()
        self._made.known[:] = [each for each in self._made.known if each is not self.known]

    def end(self) -> None:
        """Of a buffer that nobody has any more: inside a call of another thread the next call closes them."""
        self._leave()
        if self._made.num_users > 0:
            return
        for each in list(self._all):
            if not each.calls.closed:
                self.ranks.comm.close_ended(each.calls)
        self._newest.clear()

    def num_sms(self, value: Any) -> int | None:
        """DeepEP's `num_sms` as Weft takes it."""
        if not value:
            return None
        most = self.ranks.comm.max_num_sms
        return min(int(value), most) if most else None


def is_capturing() -> bool:
    """Whether the current stream records a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
