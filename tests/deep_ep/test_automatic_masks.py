"""Guards against a rank that dies or stops in a masked low-latency call and takes the others with it; and against
others that go on from different calls, or with a wrong word."""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from nixl_cases import LOCAL, TOP_K, Step, run
from test_masks import status

import weft
from weft import deep_ep, reference
from weft.deep_ep.journal import Journal

R = 4


def _experts(rank: int, rows: torch.Tensor) -> torch.Tensor:
    """bf16 [L, n, H]: what the experts of a rank make of rows, wherever these are."""
    scales = torch.arange(1.0, LOCAL + 1, device="cpu") + LOCAL * rank
    return (rows.float() * scales[:, None, None]).to(torch.bfloat16)


class Round:
    """A dispatch and its combine; each result is that of the ranks that took part at its end, and a combine's perhaps
    that of those before."""

    def __init__(self, buffer: Any, number: int, top_k: int = TOP_K, has_hook: bool = False) -> None:
        self.buffer, self.step, self.has_hook = buffer, Step(buffer, number, R, top_k), has_hook

    def dispatch(self) -> None:
        arguments = self.step.dispatch_arguments()
        results = self.buffer.low_latency_dispatch(**arguments, return_recv_hook=self.has_hook)
        if self.has_hook:
            results[-1]()
        self.step.check_dispatch(results)
        self.rows = results[0]
        handle = results[2]
        self.source = handle[0], handle[1]

    def combine(self, **more: Any) -> None:
        step, buffer = self.step, self.buffer
        self.outputs = _experts(step.rank, self.rows)
        arguments = {
            "x": self.outputs, "topk_idx": step.ids[step.rank], "topk_weights": step.weights[step.rank],
            "handle": step.handle, **more,
        }  # fmt: skip
        combined, _, _ = buffer.low_latency_combine(**arguments)
        assert any(torch.equal(combined, self.wanted(active)) for active in (step.active, buffer.comm.active_ranks))
        for before, now in zip(self.source, step.handle[:2], strict=True):  # of the rows that the caller has
            assert torch.equal(before, now)
        self.outputs.zero_()  # the caller's again
        step.xs[step.rank].zero_()

    def wanted(self, active: tuple[int, ...]) -> torch.Tensor:
        step = self.step
        sent = reference.dispatch(
            step.xs, step.ids, num_experts=R * LOCAL, layout="masked", capacity=step.num_rows, active_ranks=active
        )
        outputs = [
            _experts(rank, each.x) if rank in active else torch.zeros_like(self.outputs)
            for rank, each in enumerate(sent)
        ]
        used = [torch.where(ids >= 0, each, 0.0) for ids, each in zip(step.ids, step.weights, strict=True)]
        return reference.combine(outputs, sent, order="pick", owner_weights=used)[step.rank]


def _made(comm: weft.Communicator) -> Any:
    return deep_ep.Buffer(comm, low_latency_mode=True, enable_shrink=True, explicitly_destroy=True)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _check_end(buffer: Any, left: tuple[int, ...]) -> None:
    for number in range(900, 905):
        assert run(buffer, number, R) == left
    assert status(buffer) == [int(rank not in left) for rank in range(R)]
    buffer.destroy()


def _spawn(fn: Any, *args: Any) -> list[Any]:
    return weft.spawn(fn, R, args=args, device="cpu", max_ranks=R, on_failure="return")


def _dies(comm: weft.Communicator, folder: pathlib.Path, when: str, has_hook: bool) -> bool:
    buffer = _made(comm)
    run(buffer, 0, R)
    (folder / str(comm.rank)).touch()
    while comm.rank == 2 and len(list(folder.iterdir())) < R:  # else that step may be made again without it
        time.sleep(0.001)
    top_k = 2 if when == "new shape" else TOP_K
    rounds = [Round(buffer, number, top_k, has_hook) for number in (1, 2)]
    is_victim = comm.rank == 2
    if is_victim and when in ("dispatch", "new shape"):
        _kill()
    rounds[0].dispatch()
    if is_victim and when == "between":
        _kill()
    if when == "two":
        rounds[1].dispatch()
        if is_victim:
            _kill()
        rounds[1].combine()
    rounds[0].combine()
    if when == "alone" and comm.rank != 0:
        _kill()
    _check_end(buffer, (0,) if when == "alone" else (0, 1, 3))
    return True


def _where(seen: list[Any]) -> str:
    """Of each rank that has failed: with its traceback."""
    return "\n".join([repr(each) + "\n".join(getattr(each, "__notes__", [])) for each in seen])


WHEN = ("dispatch", "between", "two", "new shape", "alone")
WITH_HOOK = [pytest.param(when, True, marks=[pytest.mark.long] * (when != "between")) for when in WHEN]


@pytest.mark.parametrize(("when", "has_hook"), [*((when, False) for when in WHEN), *WITH_HOOK])
def test_a_rank_dies(tmp_path: pathlib.Path, when: str, *, has_hook: bool) -> None:
    """Before a dispatch, before its combine, with two dispatches open, before windows are made; all but one."""
    seen = _spawn(_dies, tmp_path, when, has_hook)
    assert [each for each in seen if each is True] == [True] * (1 if when == "alone" else 3), _where(seen)


def _is_behind(comm: weft.Communicator, call: str, folder: pathlib.Path) -> bool:
    """All have ended a call but rank 1, which has noticed there that rank 2 is dead."""
    buffer = _made(comm)
    run(buffer, 0, R)
    if comm.rank == 1:
        layers = buffer._layers
        ep = next(iter(layers._newest.values()))
        real = getattr(ep, call)

        def late(*args: Any, **named: Any) -> Any:
            setattr(ep, call, real)
            real(*args, **named)
            while not comm.broken:
                time.sleep(0.001)
            raise weft.PeerLost((2,))

        setattr(ep, call, late)
    each = Round(buffer, 1)
    each.dispatch()
    (folder / str(comm.rank)).touch()
    if comm.rank == 2 and call == "dispatch":
        while not ((folder / "0").exists() and (folder / "3").exists()):  # else they would be behind, too
            time.sleep(0.001)
        _kill()
    assert (each.step.active == (0, 1, 3)) == (comm.rank == 1 and call == "dispatch")
    each.combine()
    if comm.rank == 2:
        _kill()
    for number in range(2, 5):
        following = Round(buffer, number)
        following.dispatch()
        following.combine()
        assert following.step.active == (0, 1, 3)
    _check_end(buffer, (0, 1, 3))
    return True


@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_ranks_that_are_ahead_repeat_the_call_of_one_that_is_not(call: str, tmp_path: pathlib.Path) -> None:
    """From copies: what the caller has changed since does not count."""
    seen = _spawn(_is_behind, call, tmp_path)
    assert seen[:2] == [True, True], seen
    assert seen[3] is True, seen


def _at_random(comm: weft.Communicator, seed: int) -> bool:
    """Ranks 2 and 3 die, each at a moment of its own; two rounds are under way at once where the seed is odd."""
    buffer = _made(comm)
    chance = random.Random(seed * R + comm.rank)
    last = chance.randrange(2, 30)
    for number in range(1, 30):
        rounds = [Round(buffer, 2 * number + idx) for idx in range(1 + seed % 2)]
        if comm.rank >= 2 and number == last:
            threading.Timer(chance.random() * 0.01, _kill).start()
        for each in rounds:
            each.dispatch()
        for each in rounds:
            each.combine()
    if comm.rank >= 2:
        _kill()
    _check_end(buffer, (0, 1))
    return True


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))])
def test_ranks_die_at_any_moment(seed: int) -> None:
    """The others' words are right in each call."""
    seen = _spawn(_at_random, seed)
    assert seen[:2] == [True, True], seen


def _stops(comm: weft.Communicator, folder: pathlib.Path) -> bool:
    buffer = _made(comm)
    run(buffer, 0, R)
    (folder / "part").write_text(str(os.getpid())) if comm.rank == 2 else None
    comm.meet(60.0)
    pid = int((folder / "part").read_text())
    if comm.rank == 2:
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(weft.Evicted):
            run(buffer, 1, R)
        buffer.destroy()
        return True
    each = Round(buffer, 1)
    each.dispatch()
    each.combine()
    assert each.step.active == (0, 1, 3)
    if comm.rank == 0:
        os.kill(pid, signal.SIGCONT)
    _check_end(buffer, (0, 1, 3))
    return True


def test_a_rank_is_stopped(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it until the deadline, and go on. Awake again it is told."""
    monkeypatch.setenv("WEFT_DEEP_EP_TIMEOUT_S", "15")
    assert _spawn(_stops, tmp_path) == [True] * R


def _comes_early(comm: weft.Communicator, folder: pathlib.Path) -> bool:
    buffer = _made(comm)
    run(buffer, 0, R)
    while comm.rank != 0 and not (folder / "raised").exists():
        time.sleep(0.001)
    with pytest.raises(weft.PeerTimeout):
        Round(buffer, 1).dispatch()
    (folder / "raised").touch()
    comm.recover()
    _check_end(buffer, tuple(range(R)))
    return True


def test_who_is_early_leaves_nobody_out(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the ranks or more are late: all are told, and all go on together."""
    monkeypatch.setenv("WEFT_DEEP_EP_TIMEOUT_S", "10")  # also of the calls of all
    assert _spawn(_comes_early, tmp_path) == [True] * R


def _dropped(comm: weft.Communicator) -> bool:
    buffer = deep_ep.Buffer(comm, low_latency_mode=True, enable_shrink=True)
    for _ in range(2):
        each = Round(buffer, 1)
        each.dispatch()
    each.combine()
    gone = weakref.ref(buffer)
    del buffer, each
    return gone() is None


def test_what_is_kept_does_not_keep_the_buffer() -> None:
    """It ends with its last reference, as any other."""
    assert _spawn(_dropped) == [True] * R


class _FakeGroup:
    """Of this rank and one other, which says where it is."""

    rank, epoch, active_ranks = 0, 1, (0, 1)

    def __init__(self, told: list[Any]) -> None:
        self.told, self.num_recovered = told, 0

    def recover(self, late: Any, **_: Any) -> None:
        self.num_recovered += 1
        self.late = late

    def gather(self, mine: bytes, **_: Any) -> dict[int, bytes]:
        return {0: mine, 1: json.dumps(self.told).encode()}


@pytest.mark.parametrize("told", [[2, 0, True], [1, 2, True]])
def test_ranks_that_can_t_come_together_raise_what_was_lost(told: list[Any]) -> None:
    """A change has begun on some; or calls are not counted alike. On every rank the same."""
    comm: Any = _FakeGroup(told)
    journal = Journal(comm)
    lost = weft.PeerTimeout("dispatch", 7, (2,))
    with pytest.raises(weft.PeerTimeout) as raised:
        journal.mend(comm, lost, None, 1.0)
    assert raised.value is lost
    assert (comm.num_recovered, comm.late) == (1, (2,))


def test_windows_that_one_rank_lacks_are_made_by_all() -> None:
    """Of the call in which both are; not of one that is ahead."""
    for told, is_forgotten in (([1, 0, False], True), ([1, 0, True], False), ([1, 1, False], False)):
        comm: Any = _FakeGroup(told)
        forgotten: list[bool] = []
        windows = (lambda: True), (lambda forgotten=forgotten: forgotten.append(True))
        Journal(comm).mend(comm, weft.PeerLost((2,)), windows, 1.0)
        assert bool(forgotten) == is_forgotten
