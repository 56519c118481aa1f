"""How the demo uses Weft: experts behind dispatch and combine, and sums over ranks made of the same two calls."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

import weft
from weft.demo.config import DemoConfig
from weft.demo.model import Experts

_SUM_ROW = 256  # values a row: 1 KB


@dataclass(frozen=True)
class Traffic:
    """What a rank gave to Weft and how long that took, forward and backward together.

    `num_tokens` counts forward only. Rows and bytes are those that left for other ranks.
    """

    num_tokens: int
    rows_sent: int
    bytes_sent: int
    dispatch_s: float
    combine_s: float


class WeftExchange:
    """Takes tokens to experts on other ranks and back, forward and backward. See `weft.demo.model.Exchange`.

    Rows travel in fp32, so that the losses are comparable with a run on one rank. One object serves all layers.
    """

    def __init__(self, comm: weft.Communicator, config: DemoConfig) -> None:
        self.ep = weft.ExpertParallel(
            comm,
            num_experts=config.experts,
            top_k=config.top_k,
            hidden=config.hidden,
            max_tokens_per_rank=config.tokens_per_rank,
            dtype=torch.float32,
        )
        self.before_combine: Callable[[], None] | None = None
        self._num_tokens = 0

    def __call__(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, experts: Experts) -> Tensor:
        self._num_tokens += len(x)
        r = self.ep.dispatch(x, topk_idx, topk_weights, layout="expert_major")
        answers = experts(r.x, r.num_tokens_per_expert.tolist())
        if self.before_combine is not None:
            self.before_combine()
        y: Tensor = self.ep.combine(answers, r.handle)
        return y

    def traffic(self) -> Traffic:
        """All that went through this object so far."""
        stats = self.ep.stats()
        return Traffic(
            num_tokens=self._num_tokens,
            rows_sent=stats["rows_sent"],
            bytes_sent=stats["bytes_sent"],
            dispatch_s=stats["dispatch_s"],
            combine_s=stats["combine_s"],
        )


class SumOverRanks:
    """Sums a vector of fp32 over the ranks, with the same bits on all of them: what data parallelism needs.

    The vector is cut into rows, and each rank owns an equal part of them. `combine` adds every rank's version of a row
    at its owner (a reduce-scatter), `dispatch` with the same handle takes the sums to everybody (an all-gather). So it
    fails and recovers exactly as the rest does; no second communication library has to notice that a rank died.
    """

    def __init__(self, comm: weft.Communicator, num_values: int) -> None:
        self._comm, self.num_values = comm, num_values
        self._ep = weft.ExpertParallel(
            comm,
            num_experts=comm.num_ranks,
            top_k=comm.num_ranks,
            hidden=_SUM_ROW,
            max_tokens_per_rank=-(-num_values // _SUM_ROW),  # as many as the last survivor would own
            dtype=torch.float32,
        )
        self.prepare()

    def prepare(self) -> None:
        """Shares the rows out among the active ranks. Collective; again after every `comm.rebuild`."""
        owners = len(self._comm.active_ranks)
        self._rows_per_owner = -(-self.num_values // (_SUM_ROW * owners))
        mine = torch.zeros(self._rows_per_owner, _SUM_ROW, device=self._comm.device, dtype=torch.float32)
        everybody = torch.full((self._comm.num_ranks,), -1, device=self._comm.device, dtype=torch.int64)
        everybody[list(self._comm.active_ranks)] = torch.tensor(
            self._comm.active_ranks, device=self._comm.device, dtype=torch.int64
        )
        self._handle = self._ep.dispatch(mine, everybody.repeat(self._rows_per_owner, 1)).handle
        self._rows = torch.zeros(owners * self._rows_per_owner, _SUM_ROW, device=self._comm.device, dtype=torch.float32)

    @torch.no_grad()
    def __call__(self, values: Tensor) -> Tensor:
        """values [num_values] fp32 -> their sum over the ranks. Collective."""
        self._rows.view(-1)[: self.num_values] = values
        sums = self._ep.combine(self._rows, self._handle)
        everybodys = cast(Tensor, self._ep.dispatch(sums, handle=self._handle).x)
        return everybodys.flatten()[: self.num_values].clone()


def kill_inside_next_call(announce: Callable[[int], None]) -> None:
    """This process dies by SIGKILL inside the next call of Weft it makes; `announce` is given the time, monotonic ns.

    A thread waits for the interpreter lock: the main thread lets go of it while it is inside dispatch or combine.
    """
    go = threading.Event()

    def die() -> None:
        go.wait()
        announce(time.monotonic_ns())
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()
    go.set()
