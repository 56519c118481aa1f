"""Guards against a rank that joins and waits for an object of the members that nobody is about to make."""

from __future__ import annotations

import time

import pytest
from joining_cases import LONG_S, Outer, checked_step, make_ep, number_of, open_group

import weft
from weft.group import windows


class _Clock:
    """In place of `time`: nothing is waited for."""

    monotonic = staticmethod(time.monotonic)

    @staticmethod
    def sleep(seconds: float) -> None:
        raise AssertionError(f"waits for {seconds} s, and again")


def _closed_on_one(outer_comm: weft.Communicator, has_another: bool) -> None:
    """Of two members one has closed an object, and keeps another one of the same window or none."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, device="cpu")
        windows.time = _Clock  # type: ignore[assignment]
        made = [make_ep(comm) for _ in range(has_another)]
        with pytest.raises(weft.InvalidState, match="no object of this kind"):
            make_ep(comm)
        outer.wait()
        comm.close()
        del made
        return
    objects = [make_ep(comm) for _ in range(1 + has_another)]
    for each in objects:
        checked_step(each, number_of(comm))
    if comm.rank == 0:
        objects[0].close()
    outer.wait()
    outer.wait()
    if has_another:
        checked_step(objects[1], number_of(comm))
    comm.meet(LONG_S)
    comm.close()


@pytest.mark.parametrize("has_another", [False, True])
def test_what_one_member_has_closed_is_not_waited_for(has_another: bool) -> None:
    """Nor what the newcomer has made itself: its next constructor is refused at once."""
    weft.spawn(_closed_on_one, 3, (has_another,), device="cpu")
