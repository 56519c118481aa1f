"""Groups that processes join and leave, for tests: the processes are the ranks of an outer group, by which they tell
each other what a test needs; every word of every call is compared with the reference."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

import weft
from weft import reference

SHAPE: dict[str, Any] = {"top_k": 3, "hidden": 32, "max_tokens_per_rank": 16, "dtype": torch.float32}
LONG_S = 60.0
_TAG = 1 << 20


def rank_2_dies(comm: weft.Communicator, work: Callable[[], object]) -> None:
    """When all are here; the others hear of it here or in their `work`."""
    comm.meet(LONG_S)
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    work()


def dies_behind(comm: weft.Communicator, victim: int, where: pathlib.Path) -> None:
    """Rank `victim` dies when all others have returned from the call before this; nobody else waits."""
    if comm.rank != victim:
        (where / str(comm.rank)).touch()
        return
    while len(list(where.iterdir())) < comm.num_active - 1:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


class Outer:
    """What the processes of a test tell each other; collective among those of `comm`."""

    def __init__(self, comm: weft.Communicator) -> None:
        self.comm, self.rank, self._number = comm, comm.rank, 0

    def tell(self, data: bytes = b"") -> list[bytes]:
        """Those of all, by rank."""
        self._number += 1
        return list(self.comm._native.exchange(_TAG + self._number, data, LONG_S))

    def wait(self) -> None:
        """Until all are here."""
        self.tell()

    def die(self, gone_on: pathlib.Path, num_others: int) -> NoReturn:
        """By SIGKILL, behind a `wait` that all others have returned from: each has said so by `go_on`."""
        while len(list(gone_on.iterdir())) < num_others:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still here")

    def go_on(self, gone_on: pathlib.Path) -> None:
        """This process has returned from its `wait`: another one may die."""
        (gone_on / str(self.rank)).touch()


def open_group(outer: Outer, num_founders: int, max_ranks: int) -> tuple[weft.Communicator | None, str]:
    """The inner group of the first processes, None on the others, and its address."""
    comm = None
    if outer.rank < num_founders:
        comm = weft.Communicator.from_allgather(
            outer.rank, num_founders, lambda mine: outer.tell(mine)[:num_founders], device="cpu", max_ranks=max_ranks
        )
    else:
        outer.tell()
    address = outer.tell(comm.address.encode() if comm is not None else b"")[0].decode()
    return comm, address


def make_ep(comm: weft.Communicator, **options: Any) -> weft.ExpertParallel:
    """Two experts a slot."""
    return weft.ExpertParallel(comm, num_experts=2 * comm.num_ranks, **{**SHAPE, **options})


def checked_step(ep: weft.ExpertParallel, number: int, layout: str = "expert_major") -> None:
    """One dispatch and one combine of the active ranks; `number`, equal on all of them, draws the rows."""
    comm, shape = ep.comm, (ep.max_tokens_per_rank, ep.hidden)
    rank, active = comm.rank, comm.active_ranks if comm.is_member else (comm.rank,)
    xs, ids, weights = [], [], []
    for slot in range(comm.num_ranks):
        generator = torch.Generator().manual_seed(number * 1000 + slot)
        num_tokens = int(torch.randint(1, shape[0] + 1, (), generator=generator))
        xs.append(torch.randn((num_tokens, shape[1]), generator=generator))
        ids.append(torch.randint(-1, ep.num_experts, (num_tokens, ep.top_k), generator=generator))
        weights.append(torch.randn((num_tokens, ep.top_k), generator=generator))
    options = {"layout": layout, "active_ranks": active}
    wanted = reference.dispatch(xs, ids, weights, num_experts=ep.num_experts, **options)
    found = ep.dispatch(xs[rank], ids[rank], weights[rank], layout=layout)
    assert torch.equal(found.x, wanted[rank].x)
    assert torch.equal(found.num_tokens_per_expert, wanted[rank].num_tokens_per_expert)
    outputs = [each.x * (slot + 2) for slot, each in enumerate(wanted)]
    y = ep.combine(outputs[rank], found.handle)
    assert torch.equal(y, reference.combine(outputs, wanted)[rank])


def run_until(
    comm: weft.Communicator, ep: weft.ExpertParallel, wanted: Sequence[int], limit: int = 100_000
) -> weft.Change:
    """Steps with a boundary before each, until a change leads to these active ranks; its first step included."""
    for _ in range(limit):
        change = comm.boundary(LONG_S)
        if comm.rank not in comm.active_ranks or (change is not None and comm.rank in change.removed):
            assert change is not None
            return change
        checked_step(ep, number_of(comm))
        if change is not None and list(change.active) == list(wanted):
            return change
    raise AssertionError(f"no change to {wanted}")


_steps: dict[int, tuple[int, int]] = {}


def number_of(comm: weft.Communicator) -> int:
    """Of the next step, alike on all ranks: counted from the last change."""
    epoch, count = _steps.get(id(comm), (0, 0))
    count = count + 1 if epoch == comm.epoch else 1
    _steps[id(comm)] = comm.epoch, count
    return comm.epoch * 10_000 + count


def stop(pid: int) -> None:
    """Stop a process, and wait until it is."""
    os.kill(pid, signal.SIGSTOP)
    wait_until_stopped(pid)


def wait_until_stopped(pid: int) -> None:
    """Bounded."""
    end = time.monotonic() + LONG_S
    while pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < end
        time.sleep(0.002)


def mappings() -> set[str]:
    """Shared memory of this process: address and file."""
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return {f"{line.split()[0]} {line.split()[4]}" for line in lines if "memfd:weft" in line}


def descriptors() -> set[str]:
    """Sockets and memory files that are open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(("socket:", "/memfd:weft", "anon_inode:[pidfd]")):
            found.add(f"{name} {target}")
    return found
