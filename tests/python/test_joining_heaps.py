"""Guards against a newcomer that can't map heaps that have grown, or stays small beside them."""

from __future__ import annotations

from typing import Any

import pytest
from joining_cases import LONG_S, Outer, checked_step, make_ep, number_of, open_group, run_until
from test_standby import until

import weft

SMALL, LARGE, LARGEST = 4096, 3 * 65536 + 100, 1 << 20
HEAP: dict[str, Any] = {"heap_bytes": SMALL, "max_heap_bytes": LARGEST}


def _joins(outer_comm: Any, when: str) -> list[int]:
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    sizes = []
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, standby=True, device="cpu")
        ep = make_ep(comm, **HEAP)
        sizes.append(ep.heap_bytes)
        if when == "ready":
            comm.ready()
        outer.wait()
        if when != "before":
            outer.wait()  # they have grown
        change = comm.boundary()
        assert change is not None
        checked_step(ep, number_of(comm))
    else:
        ep = make_ep(comm, **HEAP)
        if when == "before":
            ep.resize(heap_bytes=2 * 65536)  # in two pieces
            ep.resize(heap_bytes=LARGE)
        outer.wait()
        outer.wait()
        if when == "ready":
            until(lambda: comm.membership.standby == (2,))
            comm.meet(LONG_S)
        if when != "before":
            ep.resize(heap_bytes=LARGE)
            outer.wait()
        checked_step(ep, number_of(comm))
        if comm.rank == 0:
            comm.propose(admit=[2])
        run_until(comm, ep, [0, 1, 2])
    sizes.append(ep.heap_bytes)
    for _ in range(3):
        assert comm.boundary(LONG_S) is None
        checked_step(ep, number_of(comm))
    ep.resize(heap_bytes=LARGEST)  # all have the same, so all may grow
    checked_step(ep, number_of(comm))
    sizes.append(ep.heap_bytes)
    outer.wait()
    comm.close()
    return sizes


@pytest.mark.parametrize("when", ["before", "joining", "ready"])
def test_heaps_that_have_grown(when: str) -> None:
    """It maps all pieces, and its own heap is as large when it is in; with the reference's bits."""
    seen = weft.spawn(_joins, num_ranks=3, args=(when,), device="cpu")
    assert seen[0] == seen[1] == [LARGE, LARGEST]
    assert seen[2] == [LARGE if when == "before" else SMALL, LARGE, LARGEST]
