"""How an ExpertParallel ends, closed or dropped, and what it shows of itself."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeVar

import torch

from weft.call.runner import Runner
from weft.communicator import Communicator
from weft.errors import InvalidState
from weft.limits import dtype_name

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Lifetime"]

Self = TypeVar("Self", bound="Lifetime")


class Lifetime:
    """The part of an ExpertParallel that ends it."""

    calls: Runner
    comm: Communicator
    dtype: torch.dtype
    num_experts: int
    num_local_experts: int
    num_ranks: int
    top_k: int
    hidden: int
    max_tokens_per_rank: int

    def close(self) -> None:
        """Give the windows back once no other object uses them. Local, never waits for a peer, may be called twice.

        On a GPU it waits, bounded, for this rank's own kernels. Tensors that calls returned stay valid. Memory that
        CUDA graphs with its calls use, that of the peers too, is given back when the last of these graphs is destroyed.

        Raises:
            InvalidState: inside a call of the communicator, of another thread or one that a signal handler has
                interrupted. Nothing was given back: call it again afterwards.
        """
        if not self.calls.closed:
            with self.comm.closing("ExpertParallel.close()"):
                self.calls.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except InvalidState:  # inside a call of another thread: the end of this object or of comm gives them back
            if value is None:
                raise

    def __del__(self) -> None:
        if not hasattr(self, "calls"):  # the constructor has not come to its end
            return
        if sys.is_finalizing():
            self.calls.close()
        elif not self.calls.closed:
            self.comm.close_ended(self.calls)

    def __repr__(self) -> str:
        state = ", closed" if self.calls.closed else ""
        return (
            f"weft.ExpertParallel({self.num_experts} experts, {self.num_local_experts} on each of "
            f"{self.num_ranks} ranks, top_k={self.top_k}, hidden={self.hidden}, "
            f"max_tokens_per_rank={self.max_tokens_per_rank}, {dtype_name(self.dtype)}, "
            f"engine={self.comm.engine}{state})"
        )
