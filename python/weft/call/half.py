"""Calls in two halves: one sends and returns, the other receives when it is asked to."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft.call.calling import Calling
from weft.call.event import Event
from weft.call.spec import Call

__all__ = ["Half", "Staged"]


class Half:
    """What a staged call has still to do: to receive. Its window keeps it until then, and does nothing else (R5).

    `run` launches it on the current stream; None: the call has done everything already. `stream`: where it sent.
    """

    def __init__(self, calls: Any, what: str, call: Call, tie: Tensor, run: Callable[[], None] | None = None) -> None:
        self.event = Event()
        self.event.follow(calls.last.event)
        self.after: list[Callable[[], Any]] = []  # to be done when it has received
        self.is_over = False
        self._calls, self._what, self._call, self._run = calls, what, call, run
        self._tie = tie

    def blocks(self, epoch: int) -> bool:
        """Whether its window waits for it; a rebuild has made an end of it."""
        return not self.is_over and self._tie[1].item() == epoch

    def receive(self) -> None:
        """On the current stream; once, later ones wait for the first."""
        if self.is_over:
            self.event.wait()
            return
        calls, what = self._calls, self._what
        window = calls.windows[self._call.window]
        with calls.comm.telling_peers():
            if window.closed:  # it stays open, and blocked by this half, as long as another ExpertParallel shares it
                calls.raise_if_closed(what)
            with calls.comm.alone(what):
                calls.check_tie(what, self._tie)
                begin = time.perf_counter()
                with Calling(what, self._call):
                    if self._run is not None:
                        self._run()
                    for each in self.after:
                        each()
                calls.counters.add_rest(what, time.perf_counter() - begin)
        self.is_over, self._run = True, None
        window.half = None
        self.event.follow(calls.last.event)


class Staged:
    """A combine that has sent and not received: what `combine(..., staged=True)` returns.

    Attributes:
        event: completion of what has been launched: of the sending, after `wait` of the whole call.
    """

    def __init__(self, result: Any, half: Any) -> None:
        self._result, self._half = result, half

    @property
    def event(self) -> Event:
        """See the class."""
        event: Event = self._half.event
        return event

    def wait(self) -> Any:
        """Receive, and return what `combine` without staged=True returns; as `Dispatched.wait`."""
        self._half.receive()
        return self._result

    def __repr__(self) -> str:
        return f"weft.Staged({self._half})"
