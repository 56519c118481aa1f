"""Guards against a rebuild that leaves something behind: descriptors, threads, mappings or memory; and against epochs
that are taken for those of 65,536 changes ago."""

import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from joining_cases import LONG_S, Outer, checked_step, make_ep, open_group

import weft

SHAPE = {"num_experts": 4, "top_k": 2, "hidden": 16, "max_tokens_per_rank": 8}
WRAP = 1 << 16  # epochs that signals tell apart
SETTLED = 5_000  # rebuilds after which everything that is made once has been made


def _held() -> dict[str, int]:
    """Mappings are those of files: arenas of the interpreter come and go, and their memory is counted."""
    status = Path("/proc/self/status").read_text()
    anon = re.search(r"RssAnon:\s*(\d+) kB", status)
    assert anon is not None
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "maps": sum(int(line.split()[4]) != 0 for line in Path("/proc/self/maps").read_text().splitlines()),
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
    comm.meet(LONG_S)  # what is held of a rank goes with it, so none may end before all have looked
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


def _past_the_wrap(outer_comm: Any, is_near: Path) -> tuple[int, ...]:
    """Rank 1 joins, leaves and comes back at each of the epochs around it."""
    comm, address = open_group(Outer(outer_comm), 1, 2)
    first = None
    if comm is not None:
        ep = make_ep(comm)
        first = ep.dispatch(torch.ones((4, ep.hidden)), torch.tensor([[0, 2, -1]] * 4))
        assert comm.epoch == 1
        while comm.epoch < WRAP - 8:  # alone, since that takes a tenth of the time
            comm.recover()
        checked_step(ep, comm.epoch)
        is_near.touch()
    else:
        while not is_near.exists():
            time.sleep(0.01)
        comm = weft.Communicator.join(address, device="cpu")
        ep = make_ep(comm)
        comm.ready()
    seen = []
    for turn in range(16):
        if comm.is_member:
            change = comm.change(suspend=[1]) if turn % 2 else comm.change(admit=[1])
        else:
            change = comm.boundary(LONG_S)
        assert change.active == ((0,) if turn % 2 else (0, 1))
        assert change.epoch == comm.epoch
        seen.append(comm.epoch)
        if not comm.is_member:
            continue
        for number in range(3):
            checked_step(ep, 10 * comm.epoch + number)
        if first is not None:
            with pytest.raises(weft.InvalidState):
                ep.combine(first.x, first.handle)
    return tuple(seen)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_ranks_come_and_go_past_65536_epochs(tmp_path: Path) -> None:
    """Words are right, and a handle of epoch 1 is none of epoch 65,537."""
    wanted = tuple(range(WRAP - 7, WRAP + 9))
    assert weft.spawn(_past_the_wrap, 2, (tmp_path / "near",), device="cpu") == [wanted] * 2
