"""Guards against a rank that can't join, a change that disturbs others, and words that a join makes wrong."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest
from joining_cases import LONG_S, Outer, checked_step, descriptors, make_ep, mappings, number_of, open_group, run_until

import weft


def _join_one(outer_comm: Any) -> dict[str, Any]:
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 3, 4)
    seen: dict[str, Any] = {}
    if comm is not None:
        ep = make_ep(comm)
        checked_step(ep, number_of(comm))
        before = mappings(), descriptors()
        outer.wait()
        if comm.rank == 1:
            seen["ticket"] = comm.propose(admit=[3], id="grow")
        change = run_until(comm, ep, [0, 1, 2, 3])
        after = mappings(), descriptors()
        seen["lost"] = [before[0] - after[0], before[1] - after[1]]
        if comm.rank == 1:
            seen["ticket"] = seen["ticket"].wait(LONG_S)
    else:
        outer.wait()
        comm = weft.Communicator.join(address, device="cpu")
        assert (comm.rank, comm.num_ranks, comm.is_member, comm.epoch) == (3, 4, False, 1)
        ep = make_ep(comm)
        checked_step(ep, 7)  # alone
        comm.ready()
        found = comm.boundary(LONG_S)
        assert found is not None
        change = found
        checked_step(ep, number_of(comm))
    seen["change"] = change
    for _ in range(5):
        assert comm.boundary(LONG_S) is None
        checked_step(ep, number_of(comm))
    seen["membership"] = comm.membership
    outer.wait()
    comm.close()
    return seen


def test_a_process_joins_between_two_calls() -> None:
    """3 of 4 slots work, then all four: with the reference's bits, and nothing of the three is made anew."""
    seen = weft.spawn(_join_one, num_ranks=4, device="cpu")
    assert {each["change"] for each in seen} == {seen[0]["change"]}
    assert seen[0]["change"].added == (3,)
    assert seen[0]["change"].removed == ()
    assert seen[1]["ticket"] == "committed"
    for each in seen[:3]:
        assert each["lost"] == [set(), set()]
    for each in seen:
        assert each["membership"].active == (0, 1, 2, 3)
        assert each["membership"].slots == 4


_ALONE = """
import sys
import torch, weft
from joining_cases import checked_step, make_ep, number_of, run_until
with weft.Communicator.join(sys.argv[1], device="cpu") as comm:
    ep = make_ep(comm)
    comm.ready()
    assert comm.boundary(60.0).added == (2,)
    for _ in range(3):
        checked_step(ep, number_of(comm))
        assert comm.boundary(60.0) is None
    checked_step(ep, number_of(comm))
    change = comm.leave(lambda: checked_step(ep, number_of(comm)))
    assert change.removed == (2,)
    print("left", comm.rank)
"""


def _host(comm: Any) -> tuple[str, weft.Membership]:
    """Two ranks with room for a third, which is a process of its own."""
    ep = make_ep(comm)
    said = ""
    if comm.rank == 0:
        command = [sys.executable, "-c", _ALONE, comm.address]
        path = os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        comm.propose(admit=[2])
    run_until(comm, ep, [0, 1, 2])
    run_until(comm, ep, [0, 1])
    if comm.rank == 0:
        said = child.communicate(timeout=LONG_S)[0]
    ends = time.monotonic() + LONG_S
    while comm.membership.safe_to_delete != (2,) and time.monotonic() < ends:
        time.sleep(0.01)
    return said, comm.membership


def test_an_independent_process_joins_and_leaves() -> None:
    """It gets the address alone; afterwards its slot is free again."""
    seen = weft.spawn(_host, num_ranks=2, device="cpu", max_ranks=3)
    assert seen[0][0] == "left 2\n"
    for _, membership in seen:
        assert membership.active == (0, 1)
        assert membership.safe_to_delete == (2,)
        assert membership.leaving == ()


def _replace(outer_comm: Any) -> list[weft.Change]:
    """Two processes join together while one leaves; the slot that it leaves is taken again."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 4)
    changes = []
    ep = None
    if comm is None and outer.rank < 4:
        comm = weft.Communicator.join(address, slot=outer.rank, device="cpu")
        outer.wait()
        ep = make_ep(comm)
        comm.ready()
        outer.wait()
        found = comm.boundary(LONG_S)
        assert found is not None
        changes.append(found)
    elif comm is not None:
        ep = make_ep(comm)
        outer.wait()
        outer.wait()
        changes.append(comm.change(admit=[2, 3], remove=[1]))
    else:
        outer.wait()
        outer.wait()
    if comm is not None and comm.rank == 1:
        comm.close()
    elif comm is not None and ep is not None:
        checked_step(ep, number_of(comm))
    outer.wait()
    if outer.rank == 4:
        comm = weft.Communicator.join(address, device="cpu")
        assert comm.rank == 1
        ep = make_ep(comm)
        comm.ready()
        found = comm.boundary(LONG_S)
        assert found is not None
        changes.append(found)
    elif outer.rank != 1:
        assert comm is not None
        changes.append(comm.change(admit=[1]))
    if outer.rank != 1:
        assert comm is not None
        assert ep is not None
        checked_step(ep, number_of(comm))
    outer.wait()
    if comm is not None:
        comm.close()
    return changes


def test_several_join_and_one_leaves_at_once() -> None:
    """All or none, and the slot that was left is taken again by another process."""
    seen = weft.spawn(_replace, num_ranks=5, device="cpu")
    first, second = seen[0]
    assert (first.added, first.removed, first.active) == ((2, 3), (1,), (0, 2, 3))
    assert (second.added, second.removed, second.active) == ((1,), (), (0, 1, 2, 3))
    assert seen[1] == [first]
    assert seen[2] == seen[3] == [first, second]
    assert seen[4] == [second]


def _refused(outer_comm: Any) -> None:
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    if comm is not None:
        ep = make_ep(comm)
        more = make_ep(comm, hidden=64)
        before = mappings(), descriptors()
        outer.wait()
        checked_step(ep, number_of(comm))
        outer.wait()  # the newcomers are there or refused
        assert comm.boundary() is None
        checked_step(more, number_of(comm))
        gained = [one - other for one, other in zip((mappings(), descriptors()), before, strict=True)]
        lost = [other - one for one, other in zip((mappings(), descriptors()), before, strict=True)]
        assert lost == [set(), set()]
        assert len(gained[0]) <= 1 + 4  # its life lock, and two mappings a window
        outer.wait()
        comm.close()
        return
    outer.wait()
    refusals: list[tuple[type[weft.Error], str, dict[str, Any], str]] = [
        (weft.InvalidArgument, "nonsense", {}, "address is 'nonsense'"),
        (weft.Unsupported, address.replace("weft-group:1:", "weft-group:2:"), {}, "version 2"),
        (weft.Unsupported, address.replace(address.split(":")[2], "0" * 32), {}, "another machine"),
        (weft.InvalidArgument, address.replace(address.split(":")[5], "0" * 32), {}, "another group"),
        (weft.PeerLost, ":".join([*address.split(":")[:6], "weft-0"]), {}, "nobody answers"),
        (weft.InvalidArgument, address, {"slot": 1}, "which another process has"),
        (weft.InvalidArgument, address, {"slot": 3}, "allowed are 0 to 2"),
    ]
    for kind, where, options, text in refusals:
        with pytest.raises(kind, match=text):
            weft.Communicator.join(where, device="cpu", **options)
    joined = weft.Communicator.join(address, device="cpu") if outer.rank == 2 else None
    if joined is not None:
        with pytest.raises(weft.InvalidState, match="this process is rank 2"):
            weft.Communicator.join(address, device="cpu")
        with pytest.raises(weft.InvalidArgument, match="top_k is 2 on this rank, which joins, and 3 in the group"):
            make_ep(joined, top_k=2)
        make_ep(joined)
        with pytest.raises(weft.InvalidState, match="windows that this rank has not"):
            joined.ready()
        for call in (joined.recover, lambda: joined.rebuild([2]), lambda: joined.propose(admit=[1])):
            with pytest.raises(weft.InvalidState, match="no member of the group yet"):
                call()
        assert joined.boundary(0.05) is None
    outer.wait()
    outer.wait()
    if joined is not None:
        joined.close()


def test_what_a_newcomer_may_not_do() -> None:
    """Typed, with both values; the members notice nothing."""
    weft.spawn(_refused, num_ranks=3, device="cpu")


def _full(comm: Any) -> None:
    if comm.rank == 0:
        address = comm.address
        child = os.fork()
        if child == 0:
            code = 1
            try:
                weft.Communicator.join(address, device="cpu")
            except weft.CapacityExceeded:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
    comm.meet(LONG_S)


def test_a_full_group_says_so() -> None:
    """And which limit that is."""
    weft.spawn(_full, num_ranks=2, device="cpu", max_ranks=2)


def _nobody_stays(comm: Any) -> None:
    with pytest.raises(weft.InvalidArgument, match="leaves none of the active ranks"):
        comm.propose(admit=[2], remove=[0, 1])
    with pytest.raises(weft.InvalidArgument, match="leaves none of the active ranks"):
        comm.propose(suspend=[0, 1])


def test_a_change_keeps_a_member() -> None:
    """A newcomer learns from those that stay where to begin."""
    weft.spawn(_nobody_stays, num_ranks=2, device="cpu", max_ranks=3)


def _closed(comm: Any) -> None:
    for call in (comm.boundary, lambda: comm.address, lambda: comm.propose(remove=[1]), comm.ready, comm.leave):
        with pytest.raises(weft.InvalidState, match="max_ranks"):
            call()
    assert comm.membership.slots == 2


def test_a_group_without_max_ranks_stays_as_it_is() -> None:
    """Nobody finds a door, and no thread is there for one."""
    weft.spawn(_closed, num_ranks=2, device="cpu")
    weft.spawn(_closed, num_ranks=2, device="cpu", isolation="thread")
    with pytest.raises(weft.Unsupported, match="max_ranks"):
        weft.spawn(_closed, num_ranks=2, device="cpu", isolation="thread", max_ranks=4)
    with pytest.raises(weft.InvalidArgument, match="max_ranks is 1; allowed are None and 2 to 64"):
        weft.spawn(_closed, num_ranks=2, device="cpu", max_ranks=1)


def _impatient(outer_comm: Any) -> tuple[int, bool]:
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    num_waits = 0
    if comm is not None:
        ep = make_ep(comm)
        outer.wait()
        outer.wait()
        if comm.rank == 0:
            assert comm.propose(admit=[2]).wait(LONG_S) == "committed"
            time.sleep(0.2)  # it is decided, and nobody has come to the boundary
        run_until(comm, ep, [0, 1, 2])
    else:
        outer.wait()
        comm = weft.Communicator.join(address, device="cpu")
        ep = make_ep(comm)
        comm.ready()
        outer.wait()
        while comm.boundary(deadline_s=0.02) is None:
            num_waits += 1
        checked_step(ep, number_of(comm))
    checked_step(ep, number_of(comm))
    outer.wait()
    comm.close()
    outer.wait()
    is_refused = False
    if outer.rank == 2:
        try:
            weft.Communicator.join(address, device="cpu", timeout_s=5.0)
        except weft.PeerLost:  # its doors are closed though its processes live
            is_refused = True
    outer.wait()
    return num_waits, is_refused


def test_a_newcomer_may_wait_in_small_pieces() -> None:
    """A deadline that passes between the decision and the boundary breaks nothing; a closed group has no doors."""
    seen = weft.spawn(_impatient, num_ranks=3, device="cpu")
    assert seen[2][0] > 0
    assert seen[2][1]


def _two_tickets(comm: Any) -> None:
    first = comm.propose(admit=[1], deadline_s=0.01)
    assert comm._native.await_change(LONG_S)[0] == "withdrawn"  # nobody has looked at the ticket
    second = comm.propose(admit=[1])
    assert (first.state, first.reason) == ("withdrawn", "rank 1 was not ready by the deadline")
    assert second.state == "preparing"


def test_a_ticket_tells_of_its_own_change() -> None:
    """Also when the next one was proposed before anybody looked at it."""
    weft.spawn(_two_tickets, num_ranks=1, device="cpu", max_ranks=2)


class _Interrupting:
    """The native communicator of a rank that is interrupted behind each change, or each boundary."""

    def __init__(self, native: Any, *, each: bool = False) -> None:
        self.native, self.each = native, each

    def boundary(self, *args: Any) -> Any:
        epoch = self.native.epoch
        ended = self.native.boundary(*args)
        if self.each or self.native.epoch != epoch:
            raise KeyboardInterrupt
        return ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)


def _interrupted(comm: Any, call: str) -> None:
    ep = make_ep(comm)
    told: list[weft.Change] = []
    comm.on_change(told.append)
    if comm.rank == 1:
        run_until(comm, ep, [0])
        return
    comm.propose(remove=[1])
    native, comm._native = comm._native, _Interrupting(comm._native)
    with pytest.raises(KeyboardInterrupt):
        run_until(comm, ep, [0])
    comm._native = native
    assert comm.active_ranks == (0,)
    assert comm.membership.active == (0,)
    assert told == []
    if call == "recover":
        comm.recover()
        change, _ = told
    else:
        change = comm.change(remove=[1]) if call == "change" else comm.boundary()
        assert told == [change]
    assert (change.removed, change.active) == ((1,), (0,))
    checked_step(ep, 1)
    assert comm.boundary() is None


@pytest.mark.parametrize("call", ["boundary", "change", "recover"])
def test_a_rank_is_interrupted_behind_a_change(call: str) -> None:
    """What was decided is done there, too, and told by the next call."""
    weft.spawn(_interrupted, 2, (call,), device="cpu", max_ranks=2)


def _interrupted_everywhere(comm: Any) -> tuple[int, weft.Change]:
    native, num_passed = comm._native, 0
    if comm.rank == 1:
        comm.propose(remove=[2])
    while True:
        if comm.rank == 0:
            comm._native = _Interrupting(native, each=True)
            with pytest.raises(KeyboardInterrupt):
                comm.boundary(LONG_S)
            comm._native = native
        change = comm.boundary(LONG_S)
        num_passed += 1
        if change is not None:
            return num_passed, change


def test_a_boundary_that_is_called_again_is_passed_once() -> None:
    """The ranks come to the change at the same one, though one of them is interrupted behind each."""
    ended = weft.spawn(_interrupted_everywhere, 3, device="cpu", max_ranks=3)
    assert {(passed, change.boundary, change.active) for passed, change in ended} == {
        (ended[0][0], ended[0][1].boundary, (0, 1))
    }
