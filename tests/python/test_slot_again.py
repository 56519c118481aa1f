"""Guards against a rank that is taken for the one that had its slot before, which left and closed."""

from __future__ import annotations

import contextlib
from typing import Any

from joining_cases import LONG_S, Outer, checked_step, make_ep, number_of, open_group
from test_standby import until

import weft


def _is_free(address: str, found: list[weft.Communicator]) -> bool:
    """Slot 1, which is joined then."""
    with contextlib.suppress(weft.InvalidArgument):
        found.append(weft.Communicator.join(address, slot=1, standby=True, device="cpu"))
    return bool(found)


def _closes_early(outer_comm: Any) -> int:
    """Rank 1 leaves and closes before rank 0 has come to the boundary; the third process takes its slot."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 2)
    found: list[weft.Communicator] = []
    if comm is None:
        outer.wait()
        until(lambda: _is_free(address, found))
        (comm,) = found
        ep = make_ep(comm)
        assert comm.boundary() is not None
    elif comm.rank == 1:
        ep = make_ep(comm)
        checked_step(ep, 1)
        while comm.boundary(LONG_S) is None:
            pass
        comm.close()
        outer.wait()
    else:
        ep = make_ep(comm)
        checked_step(ep, 1)
        assert comm.propose(remove=[1]).wait(LONG_S) == "committed"
        until(lambda: any(rank == 1 for rank, _, _ in comm._native.detections()))
        while comm.boundary(LONG_S) is None:
            pass
        outer.wait()
        comm.change(admit=[1])
    steps = 0
    while outer.rank != 1 and steps < 3:
        checked_step(ep, number_of(comm))
        steps += 1
    outer.wait()
    comm.close()
    return steps


def test_a_slot_whose_owner_closed_before_the_others_let_it_go() -> None:
    assert weft.spawn(_closes_early, num_ranks=3, device="cpu") == [3, 0, 3]
