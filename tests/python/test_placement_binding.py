"""Guards against ranks that are not where they say, threads left bound after close, and refused placements that bind.

All of it on this machine, seen through /proc.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.machine.placement.binding import WEFT_THREADS, bind
from weft.machine.topology import policy
from weft.machine.topology.parse import cpu_list

NUM_CPUS = len(os.sched_getaffinity(0))
needs_two_cpus = pytest.mark.skipif(NUM_CPUS < 2, reason="one CPU: every mask is the same")


def masks() -> dict[str, set[tuple[int, ...]]]:
    """Thread names of this process and the CPUs they may use, as /proc says."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for task in Path("/proc/self/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        text = next(line.split(":")[1].strip() for line in lines if line.startswith("Cpus_allowed_list"))
        found.setdefault((task / "comm").read_text().strip(), set()).add(cpu_list(text) or ())
    return found


def at_rank(comm: weft.Communicator) -> tuple[weft.Placement, dict[str, set[tuple[int, ...]]], int]:
    try:
        mode = policy.get_policy().mode
    except OSError:
        mode = -1
    return comm.placement, masks(), mode


def split(found: dict[str, set[tuple[int, ...]]]) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """Masks of Weft's threads, and of the others."""
    ours: set[tuple[int, ...]] = set()
    others: set[tuple[int, ...]] = set()
    for name, each in found.items():
        (ours if name in WEFT_THREADS else others).update(each)
    return ours, others


@needs_two_cpus
def test_auto_binds_threads_of_weft_only() -> None:
    everything = tuple(sorted(os.sched_getaffinity(0)))
    results = weft.spawn(at_rank, num_ranks=2)
    for placement, found, _ in results:
        ours, others = split(found)
        assert ours == {placement.cpus}
        assert others == {everything}
        assert placement.mode == "auto"
        assert "threads of Weft" in placement.applied[0]
    assert not set(results[0][0].cpus) & set(results[1][0].cpus)


@needs_two_cpus
def test_process_binds_everything_and_prefers_memory() -> None:
    for placement, found, mode in weft.spawn(at_rank, num_ranks=2, placement="process"):
        ours, others = split(found)
        assert ours | others == {placement.cpus}
        assert placement.node is not None
        assert mode in (-1, 1)  # refused here, or MPOL_PREFERRED
        assert ("preferred" in placement.applied[1]) == (mode == 1)


def test_off_binds_nothing() -> None:
    everything = tuple(sorted(os.sched_getaffinity(0)))
    for placement, found, _ in weft.spawn(at_rank, num_ranks=2, placement="off"):
        assert set().union(*found.values()) == {everything}
        assert placement == weft.Placement(mode="off", local_rank=placement.local_rank, num_local_ranks=2)


@needs_two_cpus
def test_explicit_placement_is_bound_as_it_stands() -> None:
    cpu = max(os.sched_getaffinity(0))
    for placement, found, _ in weft.spawn(at_rank, num_ranks=2, placement=weft.Placement(cpus=(cpu,))):
        assert set().union(*found.values()) == {(cpu,)}
        assert placement.cpus == (cpu,)


@needs_two_cpus
def test_threads_of_one_process_are_bound_each() -> None:
    def run(comm: weft.Communicator) -> tuple[tuple[int, ...], set[int]]:
        return comm.placement.cpus, os.sched_getaffinity(0)

    results = weft.spawn(run, num_ranks=2, isolation="thread", placement="process")
    assert all(set(cpus) == mask for cpus, mask in results)
    assert results[0][1] != results[1][1]
    assert len(os.sched_getaffinity(0)) == NUM_CPUS


@needs_two_cpus
def test_threads_are_still_bound_after_a_rebuild() -> None:
    def run(comm: weft.Communicator) -> tuple[weft.Placement, set[tuple[int, ...]]]:
        connected.wait(60)
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        while not comm.broken:
            time.sleep(0.01)
        comm.rebuild([0, 1])
        return comm.placement, split(masks())[0]

    connected = multiprocessing.get_context("fork").Barrier(3)
    cpu = max(os.sched_getaffinity(0))
    mine = weft.Placement(mode="auto", cpus=(cpu,))
    results = weft.spawn(run, num_ranks=3, placement=mine, on_failure="return")
    assert isinstance(results[2], weft.PeerLost)
    for placement, ours in results[:2]:
        assert ours == {(cpu,)}
        assert placement.applied


def in_own_process(function: Callable[[], Any]) -> Any:
    """Run it in a process whose masks may be spoilt."""
    return weft.spawn(lambda comm: function(), num_ranks=1, placement="off")[0]


@needs_two_cpus
def test_close_restores_every_thread_also_those_started_since() -> None:
    def run() -> None:
        before = os.sched_getaffinity(0)
        earlier, later, stop = threading.Event(), threading.Event(), threading.Event()
        first = threading.Thread(target=lambda: (earlier.set(), stop.wait()))
        first.start()
        earlier.wait()
        cpus = (min(before),)
        comm = weft.Communicator.from_env(placement=weft.Placement(cpus=cpus, memory_node=0))
        second = threading.Thread(target=lambda: (later.set(), stop.wait()))
        second.start()
        later.wait()
        assert set().union(*masks().values()) == {cpus}
        comm.close()
        assert set().union(*masks().values()) == {tuple(sorted(before))}
        assert comm.placement.applied == ()
        with contextlib.suppress(PermissionError):
            assert policy.get_policy().mode == 0
        comm.close()
        stop.set()
        first.join()
        second.join()

    in_own_process(run)


@needs_two_cpus
def test_a_mask_that_the_user_chose_meanwhile_stays() -> None:
    def run() -> None:
        low, high = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
        with weft.Communicator.from_env(placement=weft.Placement(cpus=(low,))):
            os.sched_setaffinity(0, {high})
        assert os.sched_getaffinity(0) == {high}

    in_own_process(run)


@needs_two_cpus
def test_a_second_communicator_does_not_take_the_first_ones_mask_for_the_users() -> None:
    def run() -> None:
        low, high = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
        everything = os.sched_getaffinity(0)
        first = weft.Communicator.from_env(placement=weft.Placement(cpus=(low,)))
        second = weft.Communicator.from_env(placement=weft.Placement(cpus=(high,)))
        assert os.sched_getaffinity(0) == {high}
        second.close()
        assert os.sched_getaffinity(0) == {low}
        first.close()
        assert os.sched_getaffinity(0) == everything

    in_own_process(run)


@pytest.mark.parametrize(
    "placement",
    [
        "near",
        None,
        7,
        weft.Placement(mode="fast"),
        weft.Placement(cpus=(1 << 14,)),
        weft.Placement(cpus=(-1,)),
        weft.Placement(cpus=[0]),  # type: ignore[arg-type]
        weft.Placement(cpus=("0",)),  # type: ignore[arg-type]
        weft.Placement(memory_node=-1),
    ],
)
def test_refused_placements_name_what_is_allowed_and_bind_nothing(placement: Any) -> None:
    before = os.sched_getaffinity(0)
    for call in (
        lambda: weft.spawn(at_rank, num_ranks=1, placement=placement),
        lambda: weft.Communicator.from_env(placement=placement),
    ):
        with pytest.raises(weft.InvalidArgument, match=r"placement.* is .*(allowed|may use)"):
            call()
    assert os.sched_getaffinity(0) == before


@needs_two_cpus
def test_a_narrower_mask_is_kept() -> None:
    def run() -> None:
        cpu = max(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpu})
        with weft.Communicator.from_env(placement="process") as comm:
            assert comm.placement.cpus == (cpu,)
        assert os.sched_getaffinity(0) == {cpu}

    in_own_process(run)


def test_memory_that_can_not_be_bound_is_said_and_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(node: int) -> None:
        raise PermissionError(1, "no")

    monkeypatch.setattr(policy, "prefer_node", refuse)
    binding = bind(weft.Placement(cpus=tuple(sorted(os.sched_getaffinity(0))), memory_node=0))
    assert "is not preferred: operation not permitted" in binding.placement.applied[1]
    binding.restore()


def test_cpus_that_are_refused_are_said_and_harmless() -> None:
    before = os.sched_getaffinity(0)
    binding = bind(weft.Placement(cpus=(1 << 12,)))
    assert "was refused: invalid argument" in binding.placement.applied[0]
    binding.restore()
    assert os.sched_getaffinity(0) == before


def test_the_machine_is_part_of_the_topology() -> None:
    with weft.Communicator.from_env() as comm:
        assert set(os.sched_getaffinity(0)) <= set(comm.topology.machine.cpus.online)
