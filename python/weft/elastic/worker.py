"""A rank of `weft elastic`: it founds the group or joins it, and does what its parent says."""

from __future__ import annotations

import gc
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import weft
from weft.elastic.playing import Report, play_phase
from weft.elastic.steps import STEP_DEADLINE_S, Load, Steps, Way

__all__ = ["JOIN_S", "held_things", "work"]

JOIN_S = 60.0
LEFTOVERS_S = 5.0


def work(pipe: Connection, rank: int, num_founders: int, slots: int, load: Load, way: Way) -> None:
    """The life of one rank: its parent sends phases until one is without it."""
    gc.freeze()  # what the parent has made: looking through it would copy its memory
    torch.set_num_threads(1)
    report = Report(rank)
    try:
        _work(pipe, rank, num_founders, slots, load, way)
    except BaseException as error:  # noqa: BLE001  told to the parent
        report.error = f"{type(error).__name__}: {error}"
        pipe.send(report)


def _open(pipe: Connection, rank: int, num_founders: int, slots: int) -> weft.Communicator:
    if not num_founders:
        return _join(pipe.recv(), rank)

    def share(endpoint: bytes) -> list[bytes]:
        pipe.send(endpoint)
        return list(pipe.recv())

    return weft.Communicator.from_allgather(rank, num_founders, share, device="cpu", max_ranks=slots)


def _work(pipe: Connection, rank: int, num_founders: int, slots: int, load: Load, way: Way) -> None:
    comm = _open(pipe, rank, num_founders, slots)
    me = Steps(comm, load)
    if num_founders:
        pipe.send(comm.address)
    while True:
        between, wrong = _go_on(pipe, me) if way.traffic and comm.is_member else (0, 0)
        phase, proposer = pipe.recv()
        if phase == "ready":
            comm.ready()
            pipe.send(phase)
            continue
        report = play_phase(me, phase, proposer == rank)
        report.between = between
        report.wrong += wrong
        if report.left:
            me.ep.close()
            comm.close()
            del me, comm
            report.leftovers = _leftovers()
        pipe.send(report)
        if report.left:
            return


def _go_on(pipe: Connection, me: Steps) -> tuple[int, int]:
    """Steps until all active ranks have been told what comes next, so that they begin it together; how many, and how
    many of them had a wrong word."""
    ops = wrong = 0
    while True:
        told = me.comm.gather(b"1" if pipe.poll() else b"0", deadline_s=STEP_DEADLINE_S)
        if all(each == b"1" for each in told.values()):
            return ops, wrong
        me.comm.boundary(STEP_DEADLINE_S)
        wrong += not me.step()
        ops += 1


def _join(address: str, rank: int) -> weft.Communicator:
    """The last owner of the slot may have ended just now: then it is free in a moment."""
    end = time.monotonic() + JOIN_S
    while True:
        try:
            return weft.Communicator.join(address, slot=rank, device="cpu")
        except weft.InvalidArgument:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def _leftovers() -> tuple[str, ...]:
    """What stays of a communicator that was closed: threads that watch peers look up now and then."""
    gc.collect()
    end = time.monotonic() + LEFTOVERS_S
    while (found := held_things()) and time.monotonic() < end:
        time.sleep(0.01)
    return tuple(found)


def held_things() -> list[str]:
    """Memory of Weft that this process maps, or has open."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:weft" in line]
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(("/memfd:weft", "anon_inode:[pidfd]")):
            found.append(f"descriptor of {target}")
    return found + [f"mapping {line.split()[0]}" for line in maps]
