"""What the ranks of `weft elastic` do: a dispatch and a combine again and again, every word against the reference."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import weft
from weft import reference
from weft.group import files

__all__ = ["STEP_DEADLINE_S", "Load", "Steps", "Way", "warm_up"]

STEP_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Load:
    """What a step dispatches and combines: up to `tokens` rows a rank of `hidden` fp32, `top_k` of `experts` a slot."""

    tokens: int = 32
    hidden: int = 64
    experts: int = 2
    top_k: int = 2
    ops: int = 20


@dataclass(frozen=True)
class Way:
    """`fresh`: who joins is a new interpreter, which has nothing but the address; else it is forked from one that is
    warm. `traffic`: active ranks go on with steps between phases; else they wait there."""

    fresh: bool = False
    traffic: bool = False


class Steps:
    """A dispatch and a combine of the active ranks, again and again: each draws the rows of all from the epoch and the
    number of the step in it, and compares its own with the reference."""

    def __init__(self, comm: weft.Communicator, load: Load) -> None:
        self.comm, self.load = comm, load
        self.ep = weft.ExpertParallel(
            comm,
            num_experts=load.experts * comm.num_ranks,
            top_k=load.top_k,
            hidden=load.hidden,
            max_tokens_per_rank=load.tokens,
            dtype=torch.float32,
            deadline_s=STEP_DEADLINE_S,
        )
        self.count = (0, 0)  # epoch, and steps in it
        self.shortest_s: dict[str, float] = {}  # dispatch and combine, so far

    def step(
        self, note: Callable[[str], object] | None = None, mode: str = "auto", deadline_s: float | None = None
    ) -> bool:
        """One dispatch and one combine; whether all words were right. `note` is told which of them begins."""
        comm, ep = self.comm, self.ep
        note = note or str
        epoch, count = self.count
        self.count = comm.epoch, count + 1 if epoch == comm.epoch else 1
        seed = self.count[0] * 100_003 + self.count[1]
        xs, ids, weights = [], [], []
        for slot in range(comm.num_ranks):
            draw = torch.Generator(device="cpu").manual_seed(seed * 1000 + slot)
            tokens = int(torch.randint(1, self.load.tokens + 1, (), generator=draw, dtype=torch.int64, device="cpu"))
            xs.append(torch.randn((tokens, self.load.hidden), generator=draw, dtype=torch.float32, device="cpu"))
            ids.append(
                torch.randint(
                    0, ep.num_experts, (tokens, self.load.top_k), generator=draw, dtype=torch.int64, device="cpu"
                )
            )
            weights.append(torch.randn((tokens, self.load.top_k), generator=draw, dtype=torch.float32, device="cpu"))
        options: dict[str, Any] = {"num_experts": ep.num_experts, "layout": "expert_major"}
        wanted: list[Any] = list(reference.dispatch(xs, ids, weights, active_ranks=comm.active_ranks, **options))
        mine = comm.rank
        outputs = [each.x * (slot + 2) for slot, each in enumerate(wanted)]
        right: Any = reference.combine(outputs, wanted)[mine]
        note("dispatch")
        begin = time.perf_counter()
        found: Any = ep.dispatch(
            xs[mine], ids[mine], weights[mine], layout="expert_major", mode=mode, deadline_s=deadline_s
        )
        self._took("dispatch", begin)
        note("combine")
        begin = time.perf_counter()
        y = ep.combine(outputs[mine], found.handle, mode=mode, deadline_s=deadline_s)
        self._took("combine", begin)
        note("other")
        return torch.equal(found.x, wanted[mine].x) and torch.equal(y, right)

    def _took(self, call: str, begin: float) -> None:
        seconds = time.perf_counter() - begin
        self.shortest_s[call] = min(seconds, self.shortest_s.get(call, seconds))


def warm_up(load: Load) -> None:
    """What each rank needs and a forked one inherits: modules, facts about the machine and of the
    package's files, torch at its first call."""
    torch.set_num_threads(1)
    files.digest()
    with weft.Communicator.from_allgather(0, 1, lambda mine: [mine], device="cpu") as comm:
        Steps(comm, load).step()
