"""Guards against ranks that want different changes at the same time and hang, go on with different sets, or count
boundaries differently."""

from __future__ import annotations

import json
import pathlib
import random
import time
from typing import Any

import pytest
from joining_cases import LONG_S, Outer, checked_step, make_ep, number_of, open_group

import weft

R = 4
NUM_ROUNDS = 12
DEADLINE_S = 10.0
WAIT_S = 0.1  # of a suspended rank: in less it may not be able to prepare for the others


class _Seen(list[Any]):
    """Changes that one rank was told of."""

    def note(self, change: weft.Change) -> None:
        self.append((change.epoch, change.id, change.added, change.removed, change.active))


def _check_alike(seen: list[list[Any]]) -> None:
    """Who was told of an epoch was told the same; each rank of epochs in order, each once."""
    by_epoch: dict[int, Any] = {}
    for each in seen:
        epochs = [epoch for epoch, *_ in each]
        assert epochs == sorted(set(epochs)), seen
        for epoch, *change in each:
            assert by_epoch.setdefault(epoch, change) == change, (epoch, seen)


def _wish(chance: random.Random, comm: weft.Communicator) -> dict[str, list[int]]:
    """Of a member: somebody is let go for a while, or comes back; perhaps itself, perhaps two at once."""
    active, resting = list(comm.active_ranks), list(comm.membership.standby)
    going = chance.sample(active, chance.randint(0, min(2, len(active) - 1)))
    coming = chance.sample(resting, chance.randint(0, len(resting)))
    if not going and not coming:
        return {"suspend": [chance.choice(active)]} if len(active) > 1 else {}
    return {"suspend": going, "resume": coming}


def _settle(outer: Outer, comm: weft.Communicator) -> None:
    """Boundaries, on all ranks alike, until all are where the newest decision is, and nobody wants anything."""
    for _ in range(400):
        wants = comm._ticket is not None and comm._ticket.state in ("preparing", "proposed")
        newest = comm.epoch
        while comm._native.map_hashes(newest + 1, newest + 1):
            newest += 1
        wants = wants or (comm.is_member and comm.epoch < newest)
        mine = [comm.is_member, newest, comm.active_ranks, wants]
        told = [json.loads(each) for each in outer.tell(json.dumps(mine).encode())]
        members = [rank for rank, (is_member, *_) in enumerate(told) if is_member]
        sets = [active for is_member, _, active, _ in told if is_member]
        if (
            len({told[rank][1] for rank in members}) == 1
            and sets == [members] * len(sets)
            and not any(wants for *_, wants in told)
        ):
            return
        comm.boundary(LONG_S if comm.is_member else WAIT_S)
    raise AssertionError(f"never settled: {told}")


def _wait_outside(comm: weft.Communicator, folder: pathlib.Path, number: int) -> None:
    """Until all have ended their change. Who is suspended is at a boundary, where it prepares for the others; others
    follow what is decided meanwhile."""
    (folder / f"{number}.{comm.rank}").touch()
    while not all((folder / f"{number}.{rank}").exists() for rank in range(R)):
        if not comm.is_member or comm._is_change_due():
            comm.boundary(LONG_S if comm.is_member else WAIT_S)
        time.sleep(0.001)


def _changes_at_once(outer_comm: Any, folder: pathlib.Path, seed: int) -> tuple[list[Any], list[str]]:
    outer = Outer(outer_comm)
    comm, _ = open_group(outer, R, R)
    assert comm is not None
    ep = make_ep(comm)
    seen, ends = _Seen(), []
    comm.on_change(seen.note)
    chance = random.Random(seed * R + comm.rank)
    for number in range(NUM_ROUNDS):
        _settle(outer, comm)
        for _ in range(2):
            if comm.is_member:
                checked_step(ep, number_of(comm))
        wanted = _wish(chance, comm) if comm.is_member else {}
        outer.wait()
        if wanted:
            try:
                change = comm.change(**wanted, deadline_s=DEADLINE_S)
                ends.append("done")
                assert change.epoch <= comm.epoch
            except (weft.InvalidArgument, weft.InvalidState, weft.PeerTimeout) as error:
                ends.append(type(error).__name__)
        _wait_outside(comm, folder, number)
    _settle(outer, comm)
    comm.close()
    return list(seen), ends


@pytest.mark.parametrize("seed", range(4))
def test_different_changes_at_once(tmp_path: pathlib.Path, seed: int) -> None:
    """Each returns or raises what is documented, and all come to one sequence of sets; words are right in each."""
    results = weft.spawn(_changes_at_once, R, (tmp_path, seed), device="cpu")
    _check_alike([seen for seen, _ in results])
    ends = [each for _, ends in results for each in ends]
    assert "done" in ends


def _proposals_at_once(outer_comm: Any, folder: pathlib.Path, seed: int) -> tuple[list[Any], list[str]]:
    outer = Outer(outer_comm)
    comm, _ = open_group(outer, R, R)
    assert comm is not None
    ep = make_ep(comm)
    seen, states = _Seen(), []
    comm.on_change(seen.note)
    chance = random.Random(seed * R + comm.rank)
    outer.wait()
    passed, last = 0, 400
    ticket: Any = None
    while passed < last if comm.is_member else not (folder / "end").exists():
        if comm.is_member:
            passed += 1
            change = comm.boundary(LONG_S)
        else:
            change = comm.boundary(WAIT_S)
            passed = 0 if change is None else change.boundary
        if not comm.is_member:
            continue
        checked_step(ep, number_of(comm))
        if ticket is None or ticket.state in ("committed", "withdrawn"):
            states += [] if ticket is None else [ticket.state]
            wanted = _wish(chance, comm) if passed < last - 50 else {}
            ticket = comm.propose(**wanted, deadline_s=DEADLINE_S) if wanted else None
    (folder / "end").touch()
    outer.wait()
    comm.close()
    return list(seen), states


@pytest.mark.parametrize("seed", range(4))
def test_different_proposals_at_once(tmp_path: pathlib.Path, seed: int) -> None:
    """While all of them work: words are right, and all see one sequence."""
    results = weft.spawn(_proposals_at_once, R, (tmp_path, seed), device="cpu")
    _check_alike([seen for seen, _ in results])
    assert "committed" in [each for _, states in results for each in states]
