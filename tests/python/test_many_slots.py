"""Guards against groups with as many slots as there can be: numbers and masks of 64 ranks, with few processes."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from joining_cases import LONG_S, Outer, checked_step, make_ep, number_of, open_group, rank_2_dies
from test_standby import until

import weft

SLOTS = 64


def _last_slots(outer_comm: Any, gone_on: pathlib.Path) -> tuple[Any, ...]:
    """Processes come into slots 63 and 62; the former dies."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, SLOTS)
    changes = []
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, slot=65 - outer.rank, device="cpu")
        ep = make_ep(comm)
        comm.ready()
    else:
        ep = make_ep(comm)
        checked_step(ep, 1)
        outer.wait()
    outer.wait()
    change = comm.change(admit=[62, 63]) if comm.is_member else comm.boundary(LONG_S)
    assert change is not None
    changes.append(change.active)
    for layout in ("rank_major", "expert_major"):
        checked_step(ep, number_of(comm), layout)
    if comm.rank == 63:
        outer.die(gone_on, 3)
    outer.go_on(gone_on)
    until(lambda: comm.broken)
    changes.append(comm.recover().active)
    checked_step(ep, number_of(comm))
    return tuple(changes)


def test_the_last_of_64_slots(tmp_path: pathlib.Path) -> None:
    """Founders are few, experts many; a newcomer in the last slot works, dies, and is left out."""
    seen = weft.spawn(_last_slots, 4, (tmp_path,), device="cpu", on_failure="return")
    assert [seen[0], seen[1], seen[3]] == [((0, 1, 62, 63), (0, 1, 62))] * 3
    assert isinstance(seen[2], weft.PeerLost)


def _spares(comm: weft.Communicator) -> tuple[int, ...]:
    ep = make_ep(comm)
    if comm.is_member:
        until(lambda: comm.membership.standby == (1, 2))
        change = comm.change(admit=[1, 2])
    else:
        found = comm.boundary()
        assert found is not None
        change = found
    checked_step(ep, number_of(comm))
    with pytest.raises(weft.PeerLost):
        rank_2_dies(comm, lambda: comm.meet(LONG_S))
    active = comm.recover().active
    checked_step(ep, number_of(comm))
    return change.active + active


def test_spares_beside_many_empty_slots() -> None:
    seen = weft.spawn(_spares, 1, device="cpu", standby=2, max_ranks=SLOTS, on_failure="return")
    assert seen[:2] == [(0, 1, 2, 0, 1)] * 2


def test_more_slots_than_there_can_be() -> None:
    def rank(comm: weft.Communicator) -> None:
        raise AssertionError(f"made: {comm}")

    with pytest.raises(weft.InvalidArgument, match="65"):
        weft.spawn(rank, 1, device="cpu", max_ranks=SLOTS + 1)
