"""Every public method and property of a communicator and of an ExpertParallel, found by looking, for tests that use
them all: what comes new is in them by itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

import weft

# What the parts of Weft call; users find them in no page.
_INSIDE = {
    "alone", "close_ended", "closing", "compare", "handed_map", "note_closed_object", "note_map", "note_refusal",
    "open_windows", "telling_peers",
}  # fmt: skip
KINDS = (weft.Communicator, weft.ExpertParallel)
ENDS = ("ExpertParallel.close", "Communicator.close")


def _names(is_wanted: Callable[[object], bool]) -> list[str]:
    return [
        f"{kind.__name__}.{name}"
        for kind in KINDS
        for name in dir(kind)
        if not name.startswith("_") and name not in _INSIDE and is_wanted(inspect.getattr_static(kind, name))
    ]


def method_names() -> list[str]:
    """Constructors of other communicators, and what ends an object, left out."""
    return [name for name in _names(inspect.isfunction) if name not in ENDS]


def property_names() -> list[str]:
    """All of them."""
    return _names(lambda found: isinstance(found, property))


def calls_of(ep: weft.ExpertParallel, result: weft.Dispatched) -> dict[str, Callable[[], object]]:
    """Each method and property of `ep` and its communicator by name, as a call that would do something. `result`: of a
    dispatch of `ep`. Methods that are not listed here are called without arguments."""
    comm = ep.comm
    tensor, tokens = torch.zeros(4), torch.zeros((2, ep.hidden), dtype=ep.dtype)
    picks = torch.zeros((2, ep.top_k), dtype=torch.int64)
    others = [rank for rank in comm.active_ranks if rank != comm.rank]
    made: dict[str, Callable[[], object]] = {
        "Communicator.change": lambda: comm.change(remove=others[:1]),
        "Communicator.fetch": lambda: comm.fetch("name", others[0], tensor),
        "Communicator.gather": lambda: comm.gather(b"data"),
        "Communicator.meet": lambda: comm.meet(100.0),
        "Communicator.on_change": lambda: comm.on_change(print),
        "Communicator.propose": lambda: comm.propose(remove=others[:1]),
        "Communicator.rebuild": lambda: comm.rebuild(comm.active_ranks),
        "Communicator.share": lambda: comm.share("name", tensor),
        "ExpertParallel.combine": lambda: ep.combine(result.x, result.handle),
        "ExpertParallel.dispatch": lambda: ep.dispatch(tokens, picks),
        "ExpertParallel.empty_output": lambda: ep.empty_output(result),
        "ExpertParallel.resize": lambda: ep.resize(heap_bytes=1 << 20),
        "ExpertParallel.set_expert_map": lambda: ep.set_expert_map(
            weft.ExpertMap.spread(5, ep.num_experts, ep.num_ranks, comm.active_ranks)
        ),
    }
    owners: dict[str, Any] = {"Communicator": comm, "ExpertParallel": ep}
    for name in [*method_names(), *ENDS]:
        kind, _, each = name.partition(".")
        made.setdefault(name, getattr(owners[kind], each))
    for name in property_names():
        kind, _, each = name.partition(".")
        made[name] = lambda owner=owners[kind], each=each: getattr(owner, each)
    return made
