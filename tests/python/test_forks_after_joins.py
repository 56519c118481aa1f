"""Guards against a forked child of a rank that joined, or that others have joined: it must not speak for its parent."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import torch
from joining_cases import LONG_S, Outer, make_ep, open_group
from surface_cases import ENDS, calls_of, method_names, property_names

import weft

_LOCAL = {"Communicator.abort", "Communicator.on_change", "ExpertParallel.stats"}  # these do nothing to the parent's
_CHILD_S = 100  # less than a deadline in which a call would hang


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except weft.InvalidState as error:
        return "forked" if "forked child" in str(error) else str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _in_child(work: Callable[[], str]) -> str:
    """What it says in a forked child, which ends without the parent's exit handlers."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        signal.alarm(_CHILD_S)
        with contextlib.suppress(BaseException):
            os.write(writer, work().encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    assert os.waitpid(child, 0)[1] == 0, "a call in the child hung"
    return said


def _forks(outer_comm: Any) -> list[str]:
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 4)
    heap = {"num_logical_experts": 5, "max_heap_bytes": 1 << 24}
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, device="cpu")
        ep = make_ep(comm, **heap)
        comm.ready()
        assert comm.boundary(LONG_S) is not None
    else:
        ep = make_ep(comm, **heap)
        outer.wait()
        assert comm.change(admit=[2]).added == (2,)
    tokens, picks = torch.ones((2, ep.hidden)), torch.zeros((2, ep.top_k), dtype=torch.int64)
    result = ep.dispatch(tokens, picks)
    outer.wait()

    def calls_everything() -> str:
        calls = calls_of(ep, result)
        looks = property_names()
        said = {name: _said(calls[name]) for name in [*method_names(), *looks, *ENDS]}
        wanted = {name: "nothing" if name in {*_LOCAL, *ENDS} else "forked" for name in said}
        wanted |= {name: "nothing" for name in looks if said[name] != "forked"}
        return "\n".join(f"{name}: {text}" for name, text in said.items() if text != wanted[name])

    told = [_in_child(calls_everything)]
    for _ in range(3):  # rank by rank the parents go on, each with what it had
        assert comm.boundary(LONG_S) is None
        plain = ep.dispatch(tokens, picks)
        ep.combine(plain.x, plain.handle)
    assert comm.active_ranks == (0, 1, 2)
    assert comm.gather(b"%d" % comm.rank) == {0: b"0", 1: b"1", 2: b"2"}
    outer.wait()
    comm.close()
    return told


def test_a_child_of_a_rank_calls_everything() -> None:
    """Of founders and of one that joined: a typed error at once, or nothing. The parents go on as if it were not
    there."""
    assert weft.spawn(_forks, 3, device="cpu") == [[""]] * 3
