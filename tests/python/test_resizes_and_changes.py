"""Guards against a heap that grows while ranks come and go, and takes what lies in it along."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from joining_cases import LONG_S, Outer, checked_step, make_ep, number_of, open_group, run_until

import weft

SIZES = (1 << 16, 1 << 17, 1 << 18, 1 << 19)
HEAP: dict[str, Any] = {"heap_bytes": SIZES[0], "max_heap_bytes": SIZES[-1]}


class Kept:
    """The results of a dispatch in the heap, which a caller goes on using."""

    def __init__(self, ep: weft.ExpertParallel) -> None:
        self.ep, rows = ep, ep.max_tokens_per_rank
        generator = torch.Generator().manual_seed(ep.comm.rank)
        self.x = torch.randn((rows, ep.hidden), generator=generator)
        self.ids = torch.tensor([[0, 2, 4]] * rows)  # of each rank; of one that is not there it adds nothing
        self.found = ep.dispatch(self.x, self.ids)
        assert isinstance(self.found.x, torch.Tensor)
        self.values, self.place = self.found.x.clone(), self.found.x.data_ptr()
        assert ep.calls.windows[0].native.owns(self.place)

    def check(self) -> None:
        assert isinstance(self.found.x, torch.Tensor)
        assert self.found.x.data_ptr() == self.place
        assert torch.equal(self.found.x, self.values)

    def combine(self) -> None:
        """What its handle is for, as long as no change has come."""
        self.check()
        assert torch.equal(self.ep.combine(self.found.x, self.found.handle), self.ep.comm.num_active * self.x)


def _member(comm: weft.Communicator, outer: Outer) -> tuple[Any, ...]:
    ep = make_ep(comm, **HEAP)
    kept = Kept(ep)
    outer.wait()
    outer.wait()  # rank 2 is connected, and not ready
    ticket = comm.propose(admit=[2]) if comm.rank == 0 else None
    comm.meet(LONG_S)
    ep.resize(heap_bytes=SIZES[1])  # nothing is proposed yet: it waits for rank 2
    kept.combine()
    larger = Kept(ep)
    outer.wait()
    if ticket is not None:
        assert ticket.wait(LONG_S) == "committed"
    comm.meet(LONG_S)
    for _ in range(2):
        with pytest.raises(weft.InvalidState, match=r"a change of the membership is under way on rank [01]"):
            ep.resize(heap_bytes=SIZES[2])
        assert not comm.broken
        assert ep.heap_bytes == SIZES[1]
        kept.combine()
        larger.combine()
    change = run_until(comm, ep, [0, 1, 2])
    ep.resize(heap_bytes=SIZES[2])
    kept.check()
    larger.check()
    for each in (kept, larger):  # handles are void behind a change
        with pytest.raises(weft.InvalidState):
            each.combine()
    outer.wait()  # what was refused was so on all
    late = Kept(ep) if comm.rank < 2 else None
    return ep, change, (kept, larger, late)


def _resizes(outer_comm: Any) -> tuple[Any, ...]:
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, device="cpu")
        ep = make_ep(comm, **HEAP)
        outer.wait()
        outer.wait()
        comm.ready()
        change = comm.boundary(LONG_S)
        assert change is not None
        checked_step(ep, number_of(comm))
        ep.resize(heap_bytes=SIZES[2])
        outer.wait()
        late = Kept(ep)
        held: tuple[Any, ...] = (late,)
    else:
        ep, change, held = _member(comm, outer)
    assert comm.boundary(LONG_S) is None
    held[-1].combine()
    if comm.rank == 0:
        comm.propose(suspend=[2])
    removed = run_until(comm, ep, [0, 1])
    if comm.rank == 2:
        back = comm.boundary(LONG_S)
        assert back is not None
        checked_step(ep, number_of(comm))
    else:
        ep.resize(heap_bytes=SIZES[3])  # rank 2 is outside, and has to map it
        for each in held:
            each.check()
        if comm.rank == 0:
            comm.propose(resume=[2])
        back = run_until(comm, ep, [0, 1, 2])
    for each in held:
        each.check()
    outer.wait()
    seen = change.added, removed.removed, back.added, ep.heap_bytes
    comm.close()
    return seen


def test_heaps_grow_while_ranks_come_and_go() -> None:
    """Before a change is proposed, and behind it; in between all are told of it. What lies in the heap stays."""
    assert weft.spawn(_resizes, 3, device="cpu") == [((2,), (2,), (2,), SIZES[3])] * 3


def _outside(outer_comm: Any, how: str) -> tuple[Any, ...]:
    """Rank 2 resizes while it is no member: a newcomer, a spare, or one that was suspended."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 3 if how == "suspended" else 2, 3)
    state = "is suspended" if how == "suspended" else "has joined and was not taken in yet"
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, standby=how == "spare", device="cpu")
        ep = make_ep(comm, **HEAP)
    else:
        ep = make_ep(comm, **HEAP)
        outer.wait()
    if how == "suspended":
        assert comm.change(suspend=[2]).removed == (2,)
    if comm.rank == 2:
        for size in (SIZES[1], SIZES[0]):
            with pytest.raises(weft.InvalidState) as refused:
                ep.resize(heap_bytes=size)
            assert str(refused.value).startswith(f"resize: rank 2 {state}, and resize is collective among the members")
            assert "call resize with the members when a change has taken this rank in" in str(refused.value)
        assert (comm.broken, ep.heap_bytes) == (False, SIZES[0])
        checked_step(ep, 9)  # alone
        if how == "newcomer":
            comm.ready()
        change = comm.boundary(LONG_S)
        assert change is not None
        checked_step(ep, number_of(comm))
    else:
        if comm.rank == 0:
            comm.propose(admit=[2])
        change = run_until(comm, ep, [0, 1, 2])
    ep.resize(heap_bytes=SIZES[2])
    Kept(ep).combine()
    outer.wait()
    seen = change.added, ep.heap_bytes
    comm.close()
    return seen


@pytest.mark.parametrize("how", ["newcomer", "spare", "suspended"])
def test_who_is_no_member_resizes(how: str) -> None:
    """It is told its state and what to do, and nothing changes; as a member it resizes with the others."""
    assert weft.spawn(_outside, 3, (how,), device="cpu") == [((2,), SIZES[2])] * 3
