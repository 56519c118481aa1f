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
from weft.elastic.steps import Load, Steps

__all__ = ["JOIN_S", "held_things", "work"]

JOIN_S = 60.0
LEFTOVERS_S = 5.0


def work(pipe: Connection, rank: int, num_founders: int, slots: int, load: Load) -> None:
    """The life of one rank: its parent sends phases until one is without it."""
    gc.freeze()  # what the parent has made: looking through it would copy its memory
    torch.set_num_threads(1)
    report = Report(rank)
    try:
        _work(pipe, rank, num_founders, slots, load, report)
    except BaseException as error:  # noqa: BLE001  told to the parent
        report.error = f"{type(error).__name__}: {error}"
        pipe.send(report)


def _work(pipe: Connection, rank: int, num_founders: int, slots: int, load: Load, report: Report) -> None:
    if num_founders:

        def share(endpoint: bytes) -> list[bytes]:
            pipe.send(endpoint)
            return list(pipe.recv())

        comm = weft.Communicator.from_allgather(rank, num_founders, share, device="cpu", max_ranks=slots)
    else:
        comm = _join(pipe.recv(), rank)
    me = Steps(comm, load)
    if num_founders:
        pipe.send(comm.address)
    while True:
        phase, proposer = pipe.recv()
        if phase == "ready":
            comm.ready()
            pipe.send(phase)
            continue
        report = play_phase(me, phase, proposer == rank)
        if report.left:
            me.ep.close()
            comm.close()
            del me, comm
            report.leftovers = _leftovers()
        pipe.send(report)
        if report.left:
            return


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
