"""Guards against masks that outlive their buffer, wait for dispatches that nobody combines, or count what is made
again; and against a second combine that a loss takes away."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from nixl_cases import Step, run
from test_automatic_masks import R, Round, _check_end, _kill, _made, _spawn
from test_masks import run_until

import weft
from weft import deep_ep

SOON = 300  # steps


def _ends(comm: weft.Communicator) -> None:
    """Rank 0 wants a mask, and nobody makes a dispatch any more."""
    for _ in range(2):
        buffer = _made(comm)
        run(buffer, 0, comm.num_ranks)
        if comm.rank == 0:
            buffer.low_latency_update_mask_buffer(1, True)
        buffer.destroy()
        assert comm._listeners == []
        assert not comm._says_ready
    for _ in range(20):
        comm.meet(60.0)
        assert comm.boundary() is None
    plain = deep_ep.Buffer(comm, explicitly_destroy=True)
    assert run(plain, 1, comm.num_ranks) == (0, 1, 2)
    comm.change(suspend=[1])
    assert run(plain, 1, comm.num_ranks) == ((1,) if comm.rank == 1 else (0, 2))
    plain.destroy()


def test_masks_end_with_their_buffer() -> None:
    """The communicator is the caller's, as before; what was wanted is not wanted any more."""
    weft.spawn(_ends, 3, device="cpu", max_ranks=3)


def _ends_inside_a_call(comm: weft.Communicator) -> None:
    buffer = _made(comm)
    ticket = buffer._masks._ticket = comm.propose(admit=[1])  # nobody is there: it stays open
    with comm.alone("a call"):
        del buffer
        assert ticket.state == "preparing"
    assert comm.boundary() is None
    assert (ticket.state, ticket.reason) == ("withdrawn", "it was taken back")


def test_what_was_wanted_is_taken_back_behind_the_call_in_which_the_buffer_ended() -> None:
    """Else the caller's next boundaries carry it out, and nobody is left who could unmask."""
    weft.spawn(_ends_inside_a_call, 1, device="cpu", max_ranks=2)


def _left_open(comm: weft.Communicator, how: str) -> None:
    buffer = _made(comm)
    if how in ("destroyed", "dropped"):
        other = _made(comm)
        Step(other, 0, 3).check_dispatch(other.low_latency_dispatch(**Step(other, 0, 3).dispatch_arguments()))
        run(buffer, 0, 3)
        if how == "destroyed":
            other.destroy()
        del other
    else:
        open_one = Step(buffer, 0, 3, top_k=2 if how == "another shape" else 3)
        open_one.check_dispatch(buffer.low_latency_dispatch(**open_one.dispatch_arguments()))
    if comm.rank == 0:
        buffer.low_latency_update_mask_buffer(2, True)
    wanted = (2,) if comm.rank == 2 else (0, 1)
    assert run_until(buffer, wanted, 1) < SOON
    buffer.destroy()


@pytest.mark.parametrize("how", ["one shape", "another shape", "destroyed", "dropped"])
def test_a_dispatch_that_nobody_combines_does_not_keep_masks_away(how: str) -> None:
    weft.spawn(_left_open, 3, (how,), device="cpu", max_ranks=3)


def _is_early(comm: weft.Communicator) -> None:
    """One is always open: that of the step before."""
    buffer = _made(comm)
    before = Step(buffer, 0, 3)
    before.check_dispatch(buffer.low_latency_dispatch(**before.dispatch_arguments()))
    if comm.rank == 0:
        buffer.low_latency_update_mask_buffer(2, True)
    for number in range(1, 50):
        step = Step(buffer, number, 3)
        step.check_dispatch(buffer.low_latency_dispatch(**step.dispatch_arguments()))
        before.check_combine(buffer.low_latency_combine(**before.combine_arguments())[0])
        before = step
    assert before.active == (0, 1, 2)
    buffer.destroy()


def test_a_dispatch_is_open_until_the_second_one_behind_it() -> None:
    """No mask comes between it and its combine."""
    weft.spawn(_is_early, 3, device="cpu", max_ranks=3)


def _combines_again(comm: weft.Communicator) -> bool:
    buffer = _made(comm)
    first, second = Round(buffer, 1), Round(buffer, 2)
    xs = [each.clone() for each in first.step.xs]
    first.dispatch()
    first.combine()
    if comm.rank == 2:
        time.sleep(0.2)  # no matter: the others may be inside of that combine
        _kill()
    second.dispatch()
    for each in (second, first, first):
        for kept, before in zip(first.step.xs, xs, strict=True):
            kept.copy_(before)  # the reference's
        each.combine()
    _check_end(buffer, (0, 1, 3))
    return True


def test_a_second_combine_along_a_handle_after_a_loss() -> None:
    """It is without the lost rank, as a first one would be."""
    seen = _spawn(_combines_again)
    assert [each for each in seen if each is True] == [True] * 3, seen


def _fail_next_dispatch(buffer: Any) -> None:
    """Of this rank: it notices in the dispatch, which the others have ended, that rank 2 is dead."""
    ep = next(iter(buffer._layers._newest.values()))
    real = ep.dispatch

    def late(*args: Any, **named: Any) -> Any:
        ep.dispatch = real
        real(*args, **named)
        while not buffer.comm.broken:
            time.sleep(0.001)
        raise weft.PeerLost((2,))

    ep.dispatch = late


def _ends_before_a_loss(comm: weft.Communicator) -> bool:
    buffer, other = _made(comm), _made(comm)
    run(buffer, 0, R)
    if comm.rank == 1:
        _fail_next_dispatch(other)
    step = Step(other, 1, R)
    step.check_dispatch(other.low_latency_dispatch(**step.dispatch_arguments()))
    if comm.rank == 2:
        _kill()
    step.buffer = buffer
    del other
    run(buffer, 2, R)
    _check_end(buffer, (0, 1, 3))
    return True


def test_a_buffer_that_has_ended_before_a_loss() -> None:
    """Its last dispatch is made again on the ranks where it is gone, too."""
    seen = _spawn(_ends_before_a_loss)
    assert [each for each in seen if each is True] == [True] * 3, seen


def _counts_waits(comm: weft.Communicator) -> bool:
    buffer = _made(comm)
    run(buffer, 0, R)
    if comm.rank == 1:
        _fail_next_dispatch(buffer)
    each = Round(buffer, 1)
    stats = torch.zeros(R, dtype=torch.int64, device="cpu")
    arguments = each.step.dispatch_arguments()
    results = buffer.low_latency_dispatch(**arguments, dispatch_wait_recv_cost_stats=stats)
    each.step.check_dispatch(results)
    each.rows, each.source = results[0], (results[2][0], results[2][1])
    if comm.rank == 2:
        _kill()
    counted = stats.clone()
    each.combine()
    assert torch.equal(stats, counted)
    _check_end(buffer, (0, 1, 3))
    return True


def test_waits_of_a_call_that_is_made_again_are_counted_once() -> None:
    seen = _spawn(_counts_waits)
    assert [each for each in seen if each is True] == [True] * 3, seen


def _shares_windows(comm: weft.Communicator) -> list[int]:
    buffers = [deep_ep.Buffer(comm, explicitly_destroy=True) for _ in range(2)]
    handles = []
    for number, buffer in enumerate(buffers):
        step = Step(buffer, number, comm.num_ranks)
        results = buffer.low_latency_dispatch(**step.dispatch_arguments(), return_recv_hook=True)
        handles.append((step, buffer, results))
    for step, buffer, results in handles:
        results[-1]()
        step.check_dispatch(results)
        step.check_combine(buffer.low_latency_combine(**step.combine_arguments())[0])
    for buffer in buffers:
        buffer.destroy()
    return [results[2].dispatched.handle.window for *_, results in handles]


def test_two_buffers_of_one_shape_take_turns_with_its_windows() -> None:
    """Of a group whose ranks come and go: else the second hook's dispatch finds the window of the first one taken."""
    assert weft.spawn(_shares_windows, 2, device="cpu", max_ranks=2) == [[0, 1]] * 2
