"""Guards against a rank that joins and waits for an object of the members that nobody is about to make, or takes one of
theirs for another one."""

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


def _in_another_order(outer_comm: weft.Communicator) -> list[str]:
    """Three objects that are alike but for their names, of which one has none. The newcomer makes them in another
    order."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    told = []
    names = ["up", None, "down"]
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, device="cpu")
        with pytest.raises(weft.InvalidArgument) as refused:
            make_ep(comm, name="left")
        told.append(str(refused.value))
        with pytest.raises(weft.InvalidArgument) as refused:
            make_ep(comm, name="down", deadline_s=50.0)  # of its namesake, not of the first one
        told.append(str(refused.value))
        made = {name: make_ep(comm, name=name) for name in ("down", "up", None)}
        comm.ready()
        assert comm.boundary(LONG_S) is not None
    else:
        made = {name: make_ep(comm, name=name) for name in names}
        outer.wait()
        assert comm.change(admit=[2], deadline_s=LONG_S).added == (2,)
    assert [made[name].name for name in names] == names
    for name in names:  # each rank calls them in one order: another object would be named by the others
        checked_step(made[name], number_of(comm))
    assert list(made["down"].calls.numbers) == [2]
    outer.wait()
    comm.close()
    return told


def test_a_name_finds_its_object() -> None:
    """In whatever order the newcomer makes them; a name that the members have not is refused with both."""
    told = weft.spawn(_in_another_order, 3, device="cpu")[2]
    assert told[0].startswith("name is left on this rank, which joins, and up in the group")
    assert told[1].startswith("deadline_s is 50.0 on this rank, which joins, and 100.0 in the group")


@pytest.mark.parametrize("name", [3, "", b"up"])
def test_bad_names(name: object, solo: weft.Communicator) -> None:
    with pytest.raises(weft.InvalidArgument, match="name is"):
        make_ep(solo, name=name)


def _with_two_names(comm: weft.Communicator) -> str:
    with pytest.raises(weft.InvalidArgument) as refused:
        make_ep(comm, name="up" if comm.rank else "down")
    return str(refused.value)


def test_members_with_other_names() -> None:
    """Are told which."""
    for text in weft.spawn(_with_two_names, 2, device="cpu"):
        assert text.startswith("name differs between ranks: down on rank 0; up on rank 1")
