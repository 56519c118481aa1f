"""Who waits for whom: `weft bench --who-is-late` delays a rank on purpose and shows what the wait statistics say."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.bench.options import Options
from weft.errors import InvalidArgument

if TYPE_CHECKING:
    import weft

Row = dict[str, Any]


@dataclass(frozen=True)
class Waits:
    """What each rank waited for each other, a step (a dispatch and a combine), in microseconds."""

    matrix: tuple[tuple[float, ...], ...]  # [who waited][for whom]
    engine: str
    late_rank: int | None  # the one that was delayed
    late_us: float

    @property
    def waited_for(self) -> tuple[float, ...]:
        """For each rank how long the others waited, on average."""
        others = max(len(self.matrix) - 1, 1)
        return tuple(sum(column) / others for column in zip(*self.matrix, strict=True))

    @property
    def latest(self) -> int:
        """The rank that was waited for longest."""
        return max(range(len(self.matrix)), key=self.waited_for.__getitem__)

    def rows(self) -> list[Row]:
        """JSON objects: one a rank that waited, then the verdict."""
        waits: list[Row] = [
            {"kind": "waits", "rank": rank, "wait_us": list(mine)} for rank, mine in enumerate(self.matrix)
        ]
        verdict = {"kind": "who_is_late", "engine": self.engine, "late_rank": self.late_rank, "late_us": self.late_us}
        return [*waits, {**verdict, "waited_for_us": list(self.waited_for), "latest": self.latest}]


def who_is_late(options: Options, late_rank: int | None = None, late_us: float = 5000.0) -> Waits:
    """Run `options.iters` steps, before each of which one rank (None: the last) waits `late_us` of its own; 0: nobody.

    Raises:
        InvalidArgument: no such rank; a trace.
    """
    import weft

    if options.trace is not None:
        raise InvalidArgument(f"trace is {options.trace!r}; who is late is asked with the same routing in every step")
    options = options.complete()
    late_rank = options.ranks - 1 if late_rank is None else late_rank
    if not 0 <= late_rank < options.ranks:
        raise InvalidArgument(f"late_rank is {late_rank}; allowed are 0 to ranks - 1 = {options.ranks - 1}")
    ranks = weft.spawn(
        _run_rank,
        num_ranks=options.ranks,
        args=(options, late_rank, late_us / 1e6),
        device=options.device,
        placement=options.placement,
    )
    matrix = tuple(tuple(us / options.iters for us in waited) for waited, _ in ranks)
    return Waits(matrix, ranks[0][1], late_rank if late_us else None, late_us)


def _run_rank(comm: weft.Communicator, options: Options, late_rank: int, late_s: float) -> tuple[list[float], str]:
    """What this rank has waited for each other in all timed steps, and its engine. Collective."""
    import torch

    import weft
    from weft import routing
    from weft.verify.check import DTYPES

    made = (options.routing, options.tokens, options.experts, options.top_k)
    ids, weights = routing.make(*made, rank=comm.rank, num_ranks=options.ranks, seed=options.seed)
    ids, weights = ids.to(comm.device), weights.to(comm.device)
    x = torch.zeros((len(ids), options.hidden), dtype=DTYPES[options.dtype], device=comm.device)
    calls: dict[str, Any] = {"mode": options.mode, "num_sms": options.num_sms}
    with weft.ExpertParallel(
        comm,
        num_experts=options.experts,
        top_k=options.top_k,
        hidden=options.hidden,
        max_tokens_per_rank=max(1, options.tokens),
        dtype=DTYPES[options.dtype],
    ) as ep:

        def step() -> None:
            r = ep.dispatch(
                x,
                ids,
                weights,
                layout=options.layout,
                alignment=options.alignment,
                quantize=None if options.quantize == "none" else options.quantize,
                capacity=options.capacity,
                **calls,
            )
            ep.combine(ep.empty_output(r), r.handle, **calls)

        for _ in range(max(1, options.warmup)):
            step()
        before = ep.stats()["wait_us"]
        for _ in range(options.iters):
            if comm.rank == late_rank:
                time.sleep(late_s)
            step()
        after = ep.stats()["wait_us"]
    return [now - then for now, then in zip(after, before, strict=True)], str(comm.engine)
