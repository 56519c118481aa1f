"""Guards against a recovery that needs lists to agree, a group that splits, and an evicted rank that is not told."""

import os
import pathlib
import pickle
import signal
import time
from typing import Any

import pytest
import torch

import weft

SHAPE = {"num_experts": 12, "top_k": 2, "hidden": 16, "max_tokens_per_rank": 8}


def _call(ep: Any) -> None:
    ep.dispatch(torch.ones((2, 16), dtype=torch.bfloat16), torch.tensor([[0, 1], [2, 3]]))


def _after_a_death(comm: Any) -> dict[str, Any]:
    ep = weft.ExpertParallel(comm, **SHAPE)
    try:
        _call(ep)  # the others may still be in it when rank 1 has done with it
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            _call(ep)
    except weft.PeerLost as error:
        change = comm.recover(getattr(error, "peers", ()))
    _call(ep)
    ends = time.monotonic() + 20
    while comm.membership.safe_to_delete != (1,) and time.monotonic() < ends:
        time.sleep(0.01)
    seen = {"change": change, "membership": comm.membership, "num_active": comm.num_active, "num_ranks": comm.num_ranks}
    ep.close()
    return seen


def test_those_left_go_on_without_a_list() -> None:
    """One rank is killed; the others agree on who is left, and name it."""
    seen = weft.spawn(_after_a_death, num_ranks=4, device="cpu", on_failure="return")
    assert isinstance(seen.pop(1), weft.PeerLost)
    for each in seen:
        change = each["change"]
        assert change.active == (0, 2, 3)
        assert change.lost + change.evicted == (1,)  # a rank may hear of the death from another one first
        assert each["membership"] == weft.Membership(change.epoch, (0, 2, 3), (), (1,))
        assert (each["num_active"], each["num_ranks"]) == (3, 4)
    assert len({each["change"].epoch for each in seen}) == 1


def test_who_is_known_to_be_gone_is_lost() -> None:
    """Not evicted, which might still live."""
    survivor = weft.spawn(_after_a_death, num_ranks=2, device="cpu", on_failure="return")[0]
    assert survivor["change"] == weft.Change(2, (0,), (1,), ())


def _different_lists(comm: Any) -> tuple[str, tuple[int, ...], int]:
    half = [0, 1] if comm.rank < 2 else [2, 3]
    try:
        comm.rebuild(half)
    except weft.Evicted as error:
        for call in (lambda: comm.recover(), lambda: comm.rebuild(half), lambda: weft.ExpertParallel(comm, **SHAPE)):
            with pytest.raises(weft.Evicted):
                call()
        assert comm.broken
        return "evicted", (), error.epoch
    with weft.ExpertParallel(comm, **SHAPE) as ep:
        _call(ep)
    return "in", comm.active_ranks, comm.epoch


def test_lists_that_differ_leave_one_group() -> None:
    """Two halves each rebuild without the other: one of them is the group, the other is told at once."""
    seen = weft.spawn(_different_lists, num_ranks=4, device="cpu")
    assert sorted(what for what, _, _ in seen) == ["evicted", "evicted", "in", "in"]
    assert {epoch for _, _, epoch in seen} == {2}
    assert len({active for what, active, _ in seen if what == "in"}) == 1


def _await(path: pathlib.Path) -> None:
    """Until another rank has made this file."""
    ends = time.monotonic() + 100
    while not path.exists():
        assert time.monotonic() < ends
        time.sleep(0.01)


def _late(comm: Any, is_made: pathlib.Path) -> Any:
    ep = weft.ExpertParallel(comm, **SHAPE)
    if comm.rank == 2:
        is_made.touch()
        time.sleep(1.0)
        with pytest.raises(weft.Evicted):
            _call(ep)
        comm.abort("still here")
        return None
    _await(is_made)  # else it may be left out inside of its constructor
    change = comm.recover((2,))
    _call(ep)
    return change, comm.membership


def test_a_late_rank_is_left_out_and_told(tmp_path: pathlib.Path) -> None:
    """It lives, so it counts as evicted, not as safe to delete; what it does disturbs nobody."""
    first, second, third = weft.spawn(_late, num_ranks=3, device="cpu", args=(tmp_path / "made",))
    assert third is None
    for change, membership in (first, second):
        assert change.active == (0, 1)
        assert change.lost == ()
        assert change.evicted == (2,)
        assert membership.active == (0, 1)
        assert membership.epoch == change.epoch
        assert membership.evicted + membership.safe_to_delete == (2,)


def _calls_everything(comm: Any, done: pathlib.Path) -> Any:
    ep = weft.ExpertParallel(comm, **SHAPE)
    r = ep.dispatch(torch.ones((2, 16), dtype=torch.bfloat16), torch.tensor([[0, 1], [2, 3]]))
    if comm.rank < 2:
        _await(done.parent / "begun")  # else it may be left out inside of that dispatch
        active = comm.recover((2,)).active
        for _ in range(50):
            _call(ep)
            time.sleep(0.02)
        while not done.exists():
            time.sleep(0.01)
        _call(ep)
        return active, comm.membership.active
    (done.parent / "begun").touch()
    time.sleep(0.5)  # asleep while the others go on
    refused = {
        "dispatch": lambda: _call(ep),
        "combine": lambda: ep.combine(r.x, r.handle),
        "warmup": lambda: ep.warmup(),
        "object": lambda: weft.ExpertParallel(comm, **SHAPE),
        "meet": lambda: comm.meet(30.0),
        "raise_if_broken": lambda: comm.raise_if_broken(),
        "recover": lambda: comm.recover(),
        "evict all": lambda: comm.recover((0, 1)),
        "rebuild": lambda: comm.rebuild([0, 1, 2]),
        "alone": lambda: comm.rebuild([2]),
    }
    told = {}
    for name, call in refused.items():
        start = time.monotonic()
        try:
            call()
            told[name] = "nothing"
        except weft.Error as error:
            told[name] = type(error).__name__ if time.monotonic() - start < 30 else "late"
    comm.abort("still here")
    assert comm.broken
    assert comm.membership.active  # what it knew last; these never wait
    ep.stats()
    ep.close()
    comm.close()
    done.touch()
    return told


def test_an_evicted_rank_that_calls_everything_disturbs_nobody(tmp_path: pathlib.Path) -> None:
    first, second, told = weft.spawn(_calls_everything, num_ranks=3, device="cpu", args=(tmp_path / "done",))
    assert first == second == ((0, 1), (0, 1))
    assert set(told.values()) == {"Evicted"}, told


def _retried(comm: Any, done: pathlib.Path) -> tuple[int, ...]:
    ep = weft.ExpertParallel(comm, **SHAPE)
    if comm.rank == 0:
        for _ in range(70):
            with pytest.raises(weft.PeerTimeout):
                comm.recover(deadline_s=0.01)
        done.touch()
    while not done.exists():
        time.sleep(0.01)
    active: tuple[int, ...] = comm.recover().active
    _call(ep)
    return active


def test_a_late_rank_that_every_record_names_goes_on(tmp_path: pathlib.Path) -> None:
    """More recoveries are retried than the page has registers; the rank that they wait for is no evicted one."""
    assert weft.spawn(_retried, 2, (tmp_path / "done",), device="cpu") == [(0, 1), (0, 1)]


def _membership_in_a_child(comm: Any) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            _ = comm.membership
        except weft.InvalidState as error:
            os._exit(0 if "forked child" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def test_membership_is_refused_in_a_forked_child() -> None:
    """A lock that another thread of the parent held at the fork would keep it for ever."""
    weft.spawn(_membership_in_a_child, 1, device="cpu")


def _wrong_arguments(comm: Any) -> None:
    for wrong in ([comm.num_ranks], [-1], ["0"], 3):
        with pytest.raises(weft.InvalidArgument, match="evict"):
            comm.recover(wrong)
    for least in (0, 1.0, True):
        with pytest.raises(weft.InvalidArgument, match="min_ranks"):
            comm.recover(min_ranks=least)
    change = comm.recover([comm.rank] if comm.rank == 0 else [], min_ranks=2)
    assert change == weft.Change(2, (0, 1), (), ())


def test_wrong_arguments_are_refused() -> None:
    """And a rank never evicts itself."""
    weft.spawn(_wrong_arguments, num_ranks=2, device="cpu")


def test_evicted_can_be_pickled() -> None:
    """It crosses from a rank to its parent."""
    error = pickle.loads(pickle.dumps(weft.Evicted(7)))
    assert error.epoch == 7
    assert "epoch 7" in str(error)
