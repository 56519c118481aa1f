"""A rank of weft.verify.rejoin: founds the group or joins it, works, recovers, takes others in, until it is killed."""

from __future__ import annotations

import gc
import time
from multiprocessing.connection import Connection

import torch

import weft
from weft.elastic.steps import Load, Steps
from weft.elastic.worker import JOIN_S, held_things
from weft.verify.rejoin_board import Board, Word

__all__ = ["DOING", "GIVE_UP_S", "Group", "run_rank"]

GIVE_UP_S = 60.0
DOING = tuple((mode, what) for mode in ("throughput", "small") for what in ("dispatch", "combine", "other"))
_MODES = {"throughput": "throughput", "small": "latency"}
_END_EVERY = 4  # steps between two questions whether all are to end


class Group:
    """Of one run: how many ranks work, in one slot more, and what they do."""

    def __init__(self, ranks: int, load: Load) -> None:
        self.ranks, self.slots, self.load = ranks, ranks + 1, load
        self.board = Board(self.slots)


def run_rank(pipe: Connection, slot: int, is_founder: bool, group: Group) -> None:
    """Its life. By the pipe it says its endpoint, if it founds the group, and at the end what went wrong, or ""."""
    gc.freeze()  # what the parent has made: looking through it would copy its memory
    torch.set_num_threads(1)
    try:
        comm = _found(pipe, slot, group) if is_founder else _join(pipe, slot)
        _touch_shared_memory()
        steps = Steps(comm, group.load)
        if not is_founder:
            steps.step()  # alone
            comm.ready()
            group.board.set(slot, Word.READY, 1)
            while comm.boundary(GIVE_UP_S) is None:
                pass
        _work(steps, group, takes_part=not is_founder)
        steps.ep.close()
        comm.close()
        del steps, comm
        pipe.send(_left())
    except BaseException as error:  # noqa: BLE001  told to the parent
        pipe.send(f"{type(error).__name__}: {error}")


def _found(pipe: Connection, slot: int, group: Group) -> weft.Communicator:
    def share(endpoint: bytes) -> list[bytes]:
        pipe.send(endpoint)
        return list(pipe.recv())

    return weft.Communicator.from_allgather(slot, group.ranks, share, device="cpu", max_ranks=group.slots)


def _touch_shared_memory() -> None:
    """Read what is mapped. A page counts as held from its first use, so one used late would look like growth."""
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps:
            if "memfd:weft" in line:
                begin, end = (int(place, 16) for place in line.split()[0].split("-"))
                memory.seek(begin)
                memory.read(end - begin)


def _join(pipe: Connection, slot: int) -> weft.Communicator:
    """The last owner of the slot may have ended just now: then it is free in a moment."""
    address = pipe.recv()
    end = time.monotonic() + JOIN_S
    while True:
        try:
            return weft.Communicator.join(address, slot=slot, device="cpu")
        except weft.InvalidArgument:
            if time.monotonic() > end:
                raise
            time.sleep(0.002)


def _work(steps: Steps, group: Group, takes_part: bool) -> None:
    """Until all agree to end. `takes_part`: this rank was taken in just now, and its first step is due."""
    comm, board = steps.comm, group.board
    slot, ticket, is_due = comm.rank, None, takes_part
    board.tell(slot, comm.address)
    while True:
        try:
            if not is_due and comm.boundary(GIVE_UP_S) is not None:
                board.tell(slot, comm.address)
            is_due = False
            if comm.num_active < group.ranks and slot == min(comm.active_ranks):
                ticket = _take_in(comm, ticket)
            _step(steps, group)
            if steps.count[1] % _END_EVERY == 0 and _all_end(comm, board):
                return
        except (weft.PeerLost, weft.PeerTimeout) as error:
            board.set(slot, Word.LOST_AT, board.get(slot, Word.LOST_AT) or time.monotonic_ns())
            if isinstance(error, weft.PeerLost):
                board.set(slot, Word.NAMED, board.get(slot, Word.NAMED) | sum(1 << rank for rank in error.ranks))
            comm.recover()
            is_due = True  # the step is repeated; a spare begins with it, too
            board.set(slot, Word.RECOVERED_AT, time.monotonic_ns())
            board.tell(slot, comm.address)


def _take_in(comm: weft.Communicator, ticket: weft.Ticket | None) -> weft.Ticket | None:
    if ticket is not None and ticket.state in ("preparing", "proposed"):
        return ticket
    standby = comm.membership.standby
    return comm.propose(admit=standby[:1], deadline_s=GIVE_UP_S) if standby else None


def _step(steps: Steps, group: Group) -> None:
    comm, board = steps.comm, group.board
    slot = comm.rank
    kind = ("throughput", "small")[steps.count[1] % 2]
    is_right = steps.step(lambda what: board.set(slot, Word.DOING, DOING.index((kind, what))), _MODES[kind])
    now = time.monotonic_ns()
    if not is_right:
        board.set(slot, Word.WRONG, board.get(slot, Word.WRONG) + 1)
    if board.get(slot, Word.LOST_AT) and not board.get(slot, Word.RIGHT_AT):
        board.set(slot, Word.RIGHT_AT, now)
    if board.get(slot, Word.LOST_AT) and comm.num_active == group.ranks and not board.get(slot, Word.FULL_AT):
        board.set(slot, Word.FULL_AT, now)
    board.set(slot, Word.STEPS, 0)
    board.set(slot, Word.EPOCH, comm.epoch)
    board.set(slot, Word.ACTIVE, sum(1 << rank for rank in comm.active_ranks))
    board.set(slot, Word.STEPS, steps.count[1])


def _all_end(comm: weft.Communicator, board: Board) -> bool:
    said = comm.gather(b"1" if board.is_over() else b"0", deadline_s=GIVE_UP_S)
    return all(each == b"1" for each in said.values())


def _left() -> str:
    """What stays of a communicator that was closed; threads that watch peers look up now and then."""
    gc.collect()
    end = time.monotonic() + GIVE_UP_S
    while (found := held_things()) and time.monotonic() < end:
        time.sleep(0.01)
    return f"left over: {', '.join(found)}" if found else ""
