"""Guards against a rebuild that leaves something behind: descriptors, threads, mappings or memory."""

import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import weft

SHAPE = {"num_experts": 4, "top_k": 2, "hidden": 16, "max_tokens_per_rank": 8}
SETTLED = 5_000  # rebuilds after which everything that is made once has been made


def _held() -> dict[str, int]:
    status = Path("/proc/self/status").read_text()
    anon = re.search(r"RssAnon:\s*(\d+) kB", status)
    assert anon is not None
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "python threads": threading.active_count(),
        "anonymous KiB": int(anon[1]),
    }


def _rebuilds(comm: Any, count: int, has_window: bool, by_recover: bool) -> tuple[dict[str, int], dict[str, int], int]:
    everyone = list(range(comm.num_ranks))
    ep = weft.ExpertParallel(comm, **SHAPE, heap_bytes=1 << 16) if has_window else None
    early: dict[str, int] = {}
    for turn in range(count):
        if turn == SETTLED:
            early = _held()
        if by_recover:
            comm.recover()
        else:
            comm.rebuild(everyone)
    late = _held()
    if ep is not None:
        x, ids = torch.full((4, 16), comm.rank + 1.0, dtype=torch.bfloat16), torch.tensor([[0, 3]] * 4)
        received = ep.dispatch(x, ids)
        combined = ep.combine(received.x, received.handle)
        assert torch.equal(combined, 2 * x)
        ep.close()
    return early, late, comm.epoch


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("num_ranks", "count", "has_window", "by_recover"),
    [(2, 100_000, True, False), (2, 100_000, False, True), (4, 20_000, False, False)],
)
def test_nothing_grows(num_ranks: int, count: int, has_window: bool, by_recover: bool) -> None:
    """Back to back, past 65,536 epochs: what a rank holds at the end is what it held soon after the beginning."""
    seen = weft.spawn(_rebuilds, args=(count, has_window, by_recover), num_ranks=num_ranks, device="cpu")
    for early, late, epoch in seen:
        assert epoch == count + 1
        grown = late.pop("anonymous KiB") - early.pop("anonymous KiB")
        assert grown < 1024, f"{grown} KiB more after {count} rebuilds"
        assert late == early
