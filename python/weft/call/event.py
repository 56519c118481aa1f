"""`Event`: completion of a call."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["COMPLETE", "Event"]


class Event:
    """Completion of a call. On the nvlink engine a point of a CUDA stream; on the cpu engine a call is complete when it
    returns, so nothing here ever waits.

    An event says that the call is over, not that it went well: errors that only the GPU can see are raised by the next
    synchronising call or by `ExpertParallel.check`.
    """

    __slots__ = ("_event", "_stream")

    def __init__(self, stream: Any = None, recorded: Any = None) -> None:
        self._stream, self._event = stream, recorded  # an event of torch, or None: what is on the stream when asked

    @classmethod
    def recorded(cls, stream: Any) -> Event:
        """At what is on `stream` now."""
        return cls(stream, stream.record_event())

    def follow(self, later: Event) -> None:
        """Stand for the completion of a later part of the call."""
        self._stream, self._event = later._stream, later._event

    def _cuda_event(self) -> Any:
        """Recorded when first asked for: calls that nobody waits for cost nothing, and share it."""
        if self._event is not None or self._stream is None:
            return self._event
        event = self._stream.record_event()
        if not torch.cuda.is_current_stream_capturing():  # one of a graph is not for calls outside of it
            self._event = event
        return event

    def query(self) -> bool:
        """True once the call is complete. Never waits."""
        event = self._cuda_event()
        return event is None or bool(event.query())

    def wait(self, stream: Any = None) -> None:
        """Let `stream` (default: the current one) wait for the call. Does not block the host."""
        event = self._cuda_event()
        if event is not None:
            event.wait(stream)

    def synchronize(self) -> None:
        """Block the host until the call is complete."""
        event = self._cuda_event()
        if event is not None:
            event.synchronize()

    def __repr__(self) -> str:
        return "weft.Event(complete)" if self._stream is None else f"weft.Event(on {self._stream})"


COMPLETE = Event()
