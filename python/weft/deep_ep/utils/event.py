"""Events: `EventHandle`, `EventOverlap`, and what a call takes for `previous_event`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.errors import InvalidArgument

__all__ = ["EventHandle", "EventOverlap", "cuda_event"]


class EventHandle:
    """A point of the current CUDA stream, taken now. Without CUDA everything before it is done already."""

    def __init__(self) -> None:
        self.event: Any = torch.cuda.current_stream().record_event() if torch.cuda.is_available() else None

    def current_stream_wait(self) -> None:
        """The current stream waits for it; the host does not."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class EventOverlap:
    """What a call returns beside its results.

    Attributes: `event`, None after a synchronous call; `extra_tensors`, kept alive with it; `hook_after_wait`, called
    once by the next wait.
    """

    extra_tensors: tuple[torch.Tensor, ...] | None = None
    hook_after_wait: Callable[[], Any] | None = None
    _releases = False

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event = event
        if extra_tensors is not None:
            self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """The current stream waits for the event, if there is one; then the hook runs. `release_handle`: drop both."""
        if self.event is not None:
            self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = self.extra_tensors = None

    def register_hook_after_wait(self, hook: Callable[[], Any]) -> None:
        """Called once, after the next wait."""
        self.hook_after_wait = hook

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """For `with event():`, which waits at its end; `release_handle` as in `current_stream_wait`."""
        self._releases = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *exception: object) -> None:
        release, self._releases = self._releases, False
        self.current_stream_wait(release)


def cuda_event(previous: Any) -> Any:
    """The torch.cuda.Event in a `previous_event`, or None.

    Raises:
        InvalidArgument: it is nothing that stands for an event.
    """
    if isinstance(previous, EventOverlap):
        previous = previous.event
    if isinstance(previous, EventHandle):
        return previous.event
    if previous is None or isinstance(previous, torch.cuda.Event):
        return previous
    raise InvalidArgument(
        f"previous_event is {previous!r}; allowed are None, an EventHandle, an EventOverlap and a torch.cuda.Event"
    )
