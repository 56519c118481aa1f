"""The control plane's times: `weft bench --control` makes groups, kills a rank of each, and leaves a late one out."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import statistics
import struct
import time
from typing import TYPE_CHECKING, Any

from weft.errors import Evicted, InvalidArgument, PeerLost

if TYPE_CHECKING:
    import torch

    import weft

Row = dict[str, Any]

MEASURED = {
    "construct_ms": "make an ExpertParallel",
    "rebuild_ms": "rebuild with everybody",
    "kill_to_out_ms": "kill -9 until a survivor's call raises",
    "recover_ms": "recover after that",
    "kill_to_right_op_ms": "kill -9 until a right result",
    "evict_to_told_ms": "recover without a rank until that rank's wait raises",
}
_REBUILDS = 20  # of each group
_MEET_S = 60.0


def control(ranks: int, trials: int, device: str = "cpu") -> list[Row]:
    """Time `trials` groups of `ranks` ranks: a row for each of MEASURED, with p50_ms, max_ms and count. Every result of
    an operation is compared before its time counts.

    Raises:
        InvalidArgument: fewer than 3 ranks.
    """
    import weft

    if ranks < 3:
        raise InvalidArgument(f"ranks is {ranks}; allowed are 3 and more: one is killed, and two go on")
    times: dict[str, list[float]] = {name: [] for name in MEASURED}
    for _ in range(trials):
        with mmap.mmap(-1, 8) as clock:  # when the victim was killed; shared by the ranks, which are forked
            for run in (_killed, _evicted):
                told = weft.spawn(run, num_ranks=ranks, args=(clock,), device=device, on_failure="return")
                for rank, result in enumerate(told):
                    if isinstance(result, BaseException) and not (rank == ranks - 1 and run is _killed):
                        raise result
                    if isinstance(result, dict):
                        for name, ms in result.items():
                            times[name].append(ms)
    return [
        {
            "kind": "control",
            "ranks": ranks,
            "what": name,
            "p50_ms": statistics.median(all_ms),
            "max_ms": max(all_ms),
            "count": len(all_ms),
        }
        for name, all_ms in times.items()
    ]


def operate(ep: weft.ExpertParallel, x: torch.Tensor) -> None:
    """A dispatch to the first experts of ranks 0 and 1 and a combine, whose result is compared."""
    import torch

    from weft.errors import InternalError

    ids = torch.tensor([[0, 2]] * len(x), dtype=torch.int64, device=x.device)  # two experts a rank
    received = ep.dispatch(x, ids)
    rows = received.x
    combined = ep.combine(rows, received.handle) if isinstance(rows, torch.Tensor) else None
    if combined is None or not torch.equal(combined, 2 * x):
        raise InternalError("a combine gave another sum than twice its input")


def begin_calls(comm: weft.Communicator, *, waits: bool = False) -> tuple[weft.ExpertParallel, torch.Tensor, float]:
    """An ExpertParallel, rows for it, and milliseconds of its constructor. `waits`: a spare, which makes no calls."""
    import torch

    import weft

    begin = time.monotonic_ns()
    ep = weft.ExpertParallel(comm, num_experts=2 * comm.num_ranks, top_k=2, hidden=64, max_tokens_per_rank=32)
    construct_ms = _ms_since(begin)
    x = torch.full((32, 64), comm.rank + 1.0, dtype=torch.bfloat16, device=comm.device)
    for _ in range(0 if waits else 3):
        operate(ep, x)
    return ep, x, construct_ms


def _ms_since(begin_ns: int) -> float:
    return (time.monotonic_ns() - begin_ns) / 1e6


def _killed(comm: weft.Communicator, clock: mmap.mmap) -> dict[str, float]:
    ep, x, construct_ms = begin_calls(comm)
    begin = time.monotonic_ns()
    for _ in range(_REBUILDS):
        comm.rebuild(comm.active_ranks)
    rebuild_ms = _ms_since(begin) / _REBUILDS
    operate(ep, x)
    with contextlib.suppress(PeerLost):
        comm.meet(_MEET_S)  # of many ranks some would still be in that operation
        if comm.rank == comm.num_ranks - 1:
            clock[:8] = struct.pack("q", time.monotonic_ns())
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            operate(ep, x)
    killed_ns: int = struct.unpack("q", clock[:8])[0]
    out_ms = _ms_since(killed_ns)
    begin = time.monotonic_ns()
    comm.recover()
    recover_ms = _ms_since(begin)
    operate(ep, x)
    return {
        "construct_ms": construct_ms,
        "rebuild_ms": rebuild_ms,
        "kill_to_out_ms": out_ms,
        "recover_ms": recover_ms,
        "kill_to_right_op_ms": _ms_since(killed_ns),
    }


def _evicted(comm: weft.Communicator, clock: mmap.mmap) -> dict[str, float]:
    ep, x, _ = begin_calls(comm)
    late = comm.num_ranks - 1
    if comm.rank == late:
        try:
            while True:
                operate(ep, x)  # waits for the others, which do not come
        except Evicted:
            return {"evict_to_told_ms": _ms_since(struct.unpack("q", clock[:8])[0])}
    time.sleep(0.05)  # the late rank is to be inside its wait
    if comm.rank == 0:
        clock[:8] = struct.pack("q", time.monotonic_ns())
        comm.recover([late])  # the others come later, so this rank's record is the one that counts
    else:
        time.sleep(0.05)
        comm.recover([late])
    operate(ep, x)
    return {}
