"""Guards against a call of an evicted rank that hangs, that does something, or that hides what has happened."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable

import torch
from joining_cases import LONG_S, make_ep
from surface_cases import ENDS, calls_of, method_names, property_names
from test_standby import until

import weft

_LOCAL = {"Communicator.abort", "Communicator.on_change", "ExpertParallel.stats"}  # they serve such a rank as any other
_AT_ONCE_S = 40.0  # less than any deadline


def _told(call: Callable[[], object]) -> str:
    start = time.monotonic()
    try:
        call()
        said = "nothing"
    except Exception as error:
        said = "Evicted" if isinstance(error, weft.Evicted) else f"{type(error).__name__}: {error}"
    return said if time.monotonic() - start < _AT_ONCE_S else f"late: {said}"


def _is_left_out(comm: weft.Communicator, where: pathlib.Path) -> dict[str, str]:
    """Each rank from 2 on begins with another call, and then makes all others."""
    ep = make_ep(comm, num_logical_experts=5, max_heap_bytes=1 << 24, max_tokens_per_rank=2)
    tokens, picks = torch.ones((2, ep.hidden)), torch.zeros((2, ep.top_k), dtype=torch.int64)
    result = ep.dispatch(tokens, picks)
    has_begun, has_ended = where / "begun", where / "ended"
    count = comm.num_ranks - 3  # of those left out: one slot is empty
    if comm.rank >= 2:
        (has_begun / str(comm.rank)).touch()
        until(lambda: comm.broken)
        calls = calls_of(ep, result)
        names = method_names()
        first = (comm.rank - 2) % len(names)
        names = [*names[first:], *names[:first], *property_names(), *ENDS]
        told = {name: _told(calls[name]) for name in names}
        (has_ended / str(comm.rank)).touch()
        return told
    until(lambda: len(list(has_begun.iterdir())) == count)  # nobody is left out inside of that dispatch
    assert comm.recover(range(2, comm.num_ranks)).active == (0, 1)
    is_over = False
    while not is_over:
        assert comm.boundary(LONG_S) is None
        plain = ep.dispatch(tokens, picks)
        ep.combine(plain.x, plain.handle)
        is_over = comm.gather(b"%d" % len(list(has_ended.iterdir())))[0] == b"%d" % count
    assert comm.active_ranks == (0, 1)
    return {}


def test_every_call_of_an_evicted_rank_says_so(tmp_path: pathlib.Path) -> None:
    """At once, by the same type, whatever is called first; what only looks answers; who goes on notices nothing."""
    names = method_names()
    assert {"Communicator.boundary", "Communicator.gather", "ExpertParallel.dispatch"} <= set(names)
    answered = _LOCAL | {*property_names(), *ENDS}
    for folder in ("begun", "ended"):
        (tmp_path / folder).mkdir()
    seen = weft.spawn(_is_left_out, 2 + len(names), (tmp_path,), device="cpu", max_ranks=3 + len(names))
    for told in seen[2:]:
        wanted = {name: "nothing" if name in answered else "Evicted" for name in told}
        assert {name: said for name, said in told.items() if said != wanted[name]} == {}
