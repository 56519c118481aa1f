"""Guards against a spare that is not there when it is needed, hangs when it is not, or changes the group before; and
against changes that take in too many, too few, or what was taken back."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from joining_cases import LONG_S, Outer, checked_step, make_ep, number_of, open_group, run_until

import weft
from weft.group.maps import asked_contract


def until(is_so: Any) -> None:
    """Bounded."""
    end = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.002)


def _work_until_suspended(comm: Any, ep: Any) -> NoReturn:
    """A spare, which the group's end finds waiting again."""
    assert comm.boundary() is not None
    checked_step(ep, number_of(comm))
    while comm.is_member:
        if comm.boundary(LONG_S) is None:
            checked_step(ep, number_of(comm))
    comm.boundary()
    raise AssertionError("taken in again")


# ---- spares


def _serve(comm: Any, victim: int) -> list[weft.Change]:
    """Steps; rank `victim` is killed when the spare is ready, and whoever is left goes on with the spare."""
    was_member = comm.is_member
    changes: list[weft.Change] = []
    comm.on_change(changes.append)
    ep = make_ep(comm)
    if was_member:
        until(lambda: comm.membership.standby == (3,))
        assert comm.num_active == 3
        checked_step(ep, number_of(comm))
        try:
            comm.meet(LONG_S)
            if comm.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                checked_step(ep, number_of(comm))
        except (weft.PeerLost, weft.PeerTimeout):
            until(lambda: victim in {rank for rank, _, _ in comm._native.detections()})  # as in test_spares.py
            comm.recover(min_ranks=2)
    else:
        assert comm.boundary() is not None
    for _ in range(3):
        checked_step(ep, number_of(comm))
        assert comm.boundary(LONG_S) is None
    checked_step(ep, number_of(comm))
    return changes


@pytest.mark.parametrize("victim", [0, 2])
def test_a_spare_of_spawn_takes_the_place_of_the_dead(victim: int) -> None:
    """It waits without a deadline, says by itself that it is ready, and is in with the recovery."""
    seen = weft.spawn(_serve, 3, (victim,), device="cpu", on_failure="return", standby=1)
    assert len(seen) == 4
    assert isinstance(seen.pop(victim), weft.PeerLost)
    for changes in seen:
        assert [(each.added, each.active) for each in changes] == [((3,), tuple({0, 1, 2, 3} - {victim}))]


def _say_when_ready_for(comm: Any, other: int, where: pathlib.Path) -> None:
    """In a thread: the spare itself waits in `boundary`."""

    def look() -> None:
        until(lambda: other in comm.membership.standby)
        (where / str(comm.rank)).touch()

    threading.Thread(target=look, daemon=True).start()


def _loses_two(comm: Any, where: pathlib.Path) -> weft.Change:
    ep = make_ep(comm)
    if comm.is_member:
        until(lambda: comm.membership.standby == (3, 4))
        until(lambda: len(list(where.iterdir())) == 2)  # the spares are prepared for each other, too
        comm.meet(LONG_S)
        with contextlib.suppress(weft.PeerLost):  # the other one may die before this one has come out of it
            comm.meet(LONG_S)  # all have come out of the first one
        if comm.rank > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                checked_step(ep, number_of(comm))
        except (weft.PeerLost, weft.PeerTimeout):
            until(lambda: {rank for rank, _, _ in comm._native.detections()} >= {1, 2})
            change: weft.Change = comm.recover()
    else:
        _say_when_ready_for(comm, 7 - comm.rank, where)
        found = comm.boundary()
        assert found is not None
        change = found
    checked_step(ep, number_of(comm))
    return change


def test_two_spares_come_in_together(tmp_path: pathlib.Path) -> None:
    """One recovery; each of them hears of the other, too."""
    seen = weft.spawn(_loses_two, 3, (tmp_path,), device="cpu", on_failure="return", standby=2)
    assert [type(each) for each in seen] == [weft.Change, weft.PeerLost, weft.PeerLost, weft.Change, weft.Change]
    for change in (seen[0], *seen[3:]):
        assert (change.added, change.active) == ((3, 4), (0, 3, 4))


def _makes_late(comm: Any) -> None:
    if comm.is_member:
        until(lambda: comm.membership.joining == (1,))
        time.sleep(0.5)  # the spare looks for it meanwhile
    kept = make_ep(comm)
    if comm.is_member:
        until(lambda: comm.membership.standby == (1,))
    else:
        comm.boundary()
        raise AssertionError(f"taken in with {kept}")


def test_a_spare_waits_for_what_members_make_late() -> None:
    assert weft.spawn(_makes_late, 1, device="cpu", standby=1) == [None, None]


def test_spares_that_nobody_needs() -> None:
    """They end with the group, with nothing to say."""
    kept = []  # an object that a member drops at its end is none that a spare could still make

    def rank(comm: Any) -> int:
        if comm.is_member:
            time.sleep(0.5)  # a spare waits for what the members have not made yet
        ep = make_ep(comm)
        kept.append(ep)
        if not comm.is_member:
            comm.boundary()
            raise AssertionError("taken in")
        checked_step(ep, 1)
        return int(comm.rank)

    assert weft.spawn(rank, 2, device="cpu", standby=2) == [0, 1, None, None]


@pytest.mark.parametrize("error", [weft.InvalidState, ValueError])
def test_a_spare_that_fails_when_the_others_have_closed(error: type[Exception]) -> None:
    """Objects that are closed under its hands are no failure of its own; anything else is."""

    def rank(comm: Any) -> int:
        if comm.is_member:
            return 0
        with pytest.raises(weft.PeerLost):
            comm.boundary()
        raise error("of the spare")

    if error is ValueError:
        with pytest.raises(ValueError, match="of the spare"):
            weft.spawn(rank, 1, device="cpu", standby=1)
    else:
        assert weft.spawn(rank, 1, device="cpu", standby=1) == [0, None]


def test_a_member_that_has_nothing_to_say_is_asked_again() -> None:
    """It has connected, and is about to say what the group is."""
    answers = ["", "", '{"objects": []}']
    native = SimpleNamespace(ask_contract=lambda deadline_s, of: answers.pop(0))
    assert asked_contract(native, 10.0) == {"objects": []}
    native.ask_contract = lambda deadline_s, of: ""
    with pytest.raises(weft.InvalidState, match="what its group is"):
        asked_contract(native, 0.0)


def test_quick_founders() -> None:
    """They are done before the spare has joined."""
    seen = weft.spawn(lambda comm: comm.rank if comm.is_member else comm.boundary(), 1, device="cpu", standby=1)
    assert seen == [0, None]


def test_a_spare_that_is_suspended_ends_with_the_group() -> None:
    def rank(comm: Any) -> int | None:
        ep = make_ep(comm)
        if comm.is_member:
            until(lambda: comm.membership.standby == (1,))
            comm.propose(admit=[1])
            run_until(comm, ep, [0, 1])
            comm.propose(suspend=[1])
            run_until(comm, ep, [0])
            return 0
        _work_until_suspended(comm, ep)

    assert weft.spawn(rank, 1, device="cpu", standby=1) == [0, None]


def test_a_spare_that_fails_is_told_of() -> None:
    def rank(comm: Any) -> None:
        if not comm.is_member:
            raise KeyError("the reason")
        make_ep(comm)

    with pytest.raises(KeyError, match="the reason") as caught:
        weft.spawn(rank, 2, device="cpu", standby=1)
    assert "raised by rank 2 of weft.spawn" in caught.value.__notes__


def _no_founder(comm: Any) -> None:
    raise AssertionError("unreachable")


def test_spares_of_a_group_that_can_not_be() -> None:
    with pytest.raises(weft.InvalidArgument, match="placement"):
        weft.spawn(_no_founder, 2, device="cpu", standby=1, placement="nonsense")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"standby": -1}, "standby is -1"),
        ({"standby": True}, "standby is True"),
        ({"standby": 2, "max_ranks": 3}, "standby is 2 beside 2 ranks, and max_ranks 3"),
        ({"standby": 63}, "standby is 63 beside 2 ranks"),
    ],
)
def test_numbers_of_spares_that_can_not_be(options: dict[str, Any], text: str) -> None:
    with pytest.raises(weft.InvalidArgument, match=text):
        weft.spawn(_no_founder, 2, device="cpu", **options)
    with pytest.raises(weft.Unsupported, match="standby"):
        weft.spawn(_no_founder, 2, device="cpu", isolation="thread", standby=1)
    with pytest.raises(weft.InvalidArgument, match="standby is 1"):
        weft.Communicator.join("weft-group:1", standby=1)  # type: ignore[arg-type]


def _falls_behind(outer_comm: Any, standby: bool) -> tuple[int, ...]:
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, standby=standby, device="cpu")
        first = make_ep(comm)
        comm.ready()
        outer.wait()  # it is ready
        outer.wait()  # and is not any more
        with pytest.raises(weft.InvalidState, match="windows that this rank has not"):
            comm.boundary()
        second = make_ep(comm, hidden=64)
        change = comm.boundary()
        assert change is not None
    else:
        first = make_ep(comm)
        outer.wait()
        outer.wait()
        until(lambda: comm.membership.standby == (2,))
        comm.meet(LONG_S)
        second = make_ep(comm, hidden=64)
        until(lambda: comm.membership.standby == ())
        outer.wait()
        if comm.rank == 1:
            comm.propose(admit=[2])
        change = run_until(comm, first, [0, 1, 2])
    if comm.rank == 2:
        checked_step(first, number_of(comm))
    checked_step(second, 3)
    outer.wait()
    comm.close()
    return change.active


@pytest.mark.parametrize("standby", [True, False])
def test_a_spare_hears_of_what_it_lacks(standby: bool) -> None:
    """An object that the group has made since: nobody takes it in before it has made it, too."""
    assert weft.spawn(_falls_behind, 3, (standby,), device="cpu") == [(0, 1, 2)] * 3


def _left_alone(outer_comm: Any) -> None:
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 1, 3)
    if comm is None:
        comm = weft.Communicator.join(address, standby=outer.rank == 1, device="cpu")
        outer.wait()
        for _ in range(2):
            with pytest.raises(weft.PeerLost, match="all members of the group have ended or closed"):
                comm.boundary()
    else:
        outer.wait()
        comm.close()
    outer.wait()


def test_who_waits_hears_that_the_group_has_ended() -> None:
    """A spare, and a rank that joins and is not ready: nobody can take them in any more."""
    weft.spawn(_left_alone, num_ranks=3, device="cpu")


# ---- together, withdraw


def _as_they_come(outer_comm: Any) -> tuple[list[tuple[int, ...]], Any]:
    """Two ranks let one of them go for two others, of which one is late."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 4)
    found: list[tuple[int, ...]] = []
    ticket: Any = None
    if comm is None:
        comm = weft.Communicator.join(address, slot=outer.rank, standby=True, device="cpu")
        outer.wait()
        if outer.rank == 2:
            outer.wait()  # 3 is in
        ep = make_ep(comm)
        change = comm.boundary()
        assert change is not None
        found.append(change.active)
        checked_step(ep, number_of(comm))
    else:
        outer.wait()
        ep = make_ep(comm)
        if comm.rank == 0:
            ticket = comm.propose(admit=[2, 3], remove=[1], together=False)
        change = run_until(comm, ep, [0, 3])
        found.append(change.active)
    if outer.rank != 2:
        if ticket is not None:
            assert ticket.state in ("preparing", "proposed")
        outer.wait()
    if outer.rank in (0, 3):
        found.append(run_until(comm, ep, [0, 2, 3]).active)
    if ticket is not None:
        ticket = ticket.wait(LONG_S), ticket.reason
    outer.wait()
    comm.close()
    return found, ticket


def test_ranks_come_in_as_they_are_ready() -> None:
    """One change each; who is to go goes with the first."""
    seen = weft.spawn(_as_they_come, num_ranks=4, device="cpu")
    both = [(0, 3), (0, 2, 3)]
    assert [found for found, _ in seen] == [both, both[:1], both[1:], both]
    assert seen[0][1] == ("committed", "")


def _one_is_missing(outer_comm: Any, together: bool) -> tuple[str, str]:
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 1, 3)
    told = ("", "")
    if comm is None:
        comm = weft.Communicator.join(address, slot=1, standby=True, device="cpu")
        ep = make_ep(comm)
        outer.wait()
        if together:
            comm.ready()
            assert comm.boundary(0.5) is None
            outer.wait()
        else:
            assert comm.boundary() is not None
            checked_step(ep, number_of(comm))
            outer.wait()
    else:
        ep = make_ep(comm)
        outer.wait()
        until(lambda: comm.membership.standby == (1,))
        for deadline_s in (0.1,) if together else (3.0, 10.0, LONG_S):
            ticket = comm.propose(admit=[1, 2], together=together, deadline_s=deadline_s)
            while not together and comm.active_ranks == (0,) and ticket.state in ("preparing", "proposed"):
                comm.boundary(LONG_S)
                checked_step(ep, number_of(comm))
            told = ticket.wait(LONG_S), ticket.reason
            if together or "came in" in told[1]:  # else rank 1 was slow, too
                break
        if not together and comm.active_ranks == (0,):
            run_until(comm, ep, [0, 1])
        outer.wait()
    comm.close()
    return told


@pytest.mark.parametrize("together", [True, False])
def test_what_a_deadline_leaves(together: bool) -> None:
    """All or none; or those that came, and the ticket names who did not."""
    (state, reason), _ = weft.spawn(_one_is_missing, num_ranks=2, args=(together,), device="cpu")
    assert state == "withdrawn"
    assert reason == ("" if together else "rank 1 came in; ") + "rank 2 was not ready by the deadline"


def _suspended_again(comm: Any) -> tuple[Any, ...]:
    ep = make_ep(comm)
    if not comm.is_member:
        _work_until_suspended(comm, ep)
    ticket: Any = None
    until(lambda: comm.membership.standby == (2,))
    comm.meet(LONG_S)
    if comm.rank == 0:
        ticket = comm.propose(admit=[2, 3], together=False, id="grow")
    run_until(comm, ep, [0, 1, 2])
    if comm.rank == 1:
        comm.propose(admit=[2, 3], together=False, id="grow").withdraw()
        comm.propose(suspend=[2])
    run_until(comm, ep, [0, 1])
    until(lambda: comm.membership.standby == (2,))
    for _ in range(200):  # a boundary lies ahead of each proposal
        assert comm.boundary(LONG_S) is None
        time.sleep(0.002)
    comm.meet(LONG_S)
    return (comm.active_ranks, *(() if ticket is None else (ticket.withdraw(), ticket.reason)))


def test_who_came_in_once_is_wanted_no_more() -> None:
    """A rank that is suspended stays so, while the same change waits for another one."""
    seen = weft.spawn(_suspended_again, 2, device="cpu", standby=1, max_ranks=4)
    assert seen == [((0, 1), "withdrawn", "rank 2 came in; it was taken back"), ((0, 1),), None]


def _taken_back(comm: Any) -> list[str]:
    ep = make_ep(comm)
    states = []
    if comm.rank == 0:
        ticket = comm.propose(admit=[2])  # who does not exist
        with pytest.raises(weft.InvalidState, match="not decided"):
            comm.propose(remove=[1])
        states += [ticket.withdraw(), ticket.state, ticket.reason]
        assert ticket.wait(LONG_S) == "withdrawn"
        later = comm.propose(remove=[1])
        states += [later.wait(LONG_S), later.withdraw(), ticket.withdraw()]
        with pytest.raises(weft.InvalidArgument, match="together is 1"):
            comm.propose(admit=[2], together=1)
    run_until(comm, ep, [0])
    return states


def test_a_change_is_taken_back() -> None:
    """Then another one may be proposed; what was committed stays."""
    seen = weft.spawn(_taken_back, num_ranks=2, device="cpu", max_ranks=3)
    assert seen[0] == ["withdrawn", "withdrawn", "it was taken back", "committed", "committed", "withdrawn"]
