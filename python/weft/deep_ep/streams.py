"""Where a call runs: on the current stream, or on the communication stream of its buffer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from weft.deep_ep.utils.event import EventHandle, EventOverlap, cuda_event
from weft.errors import Error, Unsupported

__all__ = ["Streams", "collective_call", "public_call", "run_without_gradients"]

F = TypeVar("F", bound=Callable[..., Any])


def public_call(function: F) -> F:
    """Of a method that sends: without gradients, and not for torch.compile to look into."""
    return _outside(function, tells_peers=False)


def collective_call(function: F) -> F:
    """As `public_call`. What this rank refuses, its peers are told: they wait for the corrected call."""
    return _outside(function, tells_peers=True)


def _outside(function: F, *, tells_peers: bool, looks: bool = True) -> F:
    """`looks`: whether torch.compile looks on. To disable it loads it, and takes some microseconds in every call."""
    disabled: list[Any] = []

    @functools.wraps(function)
    def run(self: Any, *args: Any, **named: Any) -> Any:
        if looks and (_is_traced() or _compiling() is not None):
            if not disabled:
                disabled.append(torch.compiler.disable(_outside(function, tells_peers=tells_peers, looks=False)))
            return disabled[0](self, *args, **named)
        has_gradients = torch.is_grad_enabled()
        if has_gradients:
            torch._C._set_grad_enabled(False)  # as no_grad, which takes longer
        try:
            return function(self, *args, **named)
        except Error as error:
            if tells_peers:
                self.comm.note_refusal(error)
            raise
        finally:
            if has_gradients:
                torch._C._set_grad_enabled(True)

    return run  # type: ignore[return-value]


def run_without_gradients(functions: Iterable[Callable[[], object]]) -> None:
    """One after the other."""
    has_gradients = torch.is_grad_enabled()
    if has_gradients:
        torch._C._set_grad_enabled(False)
    try:
        for each in functions:
            each()
    finally:
        if has_gradients:
            torch._C._set_grad_enabled(True)


_is_traced = torch.compiler.is_dynamo_compiling
# What torch.compile has set for the frames of this thread; None: nothing.
_compiling: Callable[[], Any] = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None), "get_eval_frame_callback", lambda: None
)


class Streams:
    """The communication stream of a buffer; on the cpu engine there is none, and every call is complete at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    @property
    def stream(self) -> torch.cuda.Stream:
        """Made when first asked for.

        Raises:
            Unsupported: the buffer's tokens are in host memory.
        """
        if self._device.type != "cuda":
            raise Unsupported("get_comm_stream", f"device {self._device}", "a CUDA device: calls are complete at once")
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        stream: torch.cuda.Stream = self._stream
        return stream

    def run(
        self, work: Callable[[], tuple[Any, Any]], previous: Any, is_async: bool, inputs: Any = ()
    ) -> tuple[Any, EventOverlap]:
        """`work()` returns its values, and the `weft.Dispatched` whose memory they lie in or None.

        Without `is_async` and `previous` on the current stream. Else on the communication stream, behind `previous`
        (each of a tuple), or behind the current stream where there is none; then the event of an async call stands for
        its end, and the current stream waits for a synchronous one.
        """
        if previous is None and not is_async:
            return work()[0], EventOverlap()
        events = [cuda_event(each) for each in (previous if isinstance(previous, tuple) else (previous,))]
        before = [each for each in events if each is not None]
        if self._device.type != "cuda":
            return work()[0], EventOverlap(EventHandle() if is_async else None)
        if not before and not is_async:
            return work()[0], EventOverlap()
        current = torch.cuda.current_stream(self._device)
        if not before:
            self.stream.wait_stream(current)
        for each in before:
            self.stream.wait_event(each)
        with torch.cuda.stream(self.stream):
            values, dispatched = work()
            event = EventHandle()
        _record(inputs, self.stream)
        _record(values, current)
        if dispatched is not None:
            dispatched.record_stream(current)
        if is_async:
            return values, EventOverlap(event)
        event.current_stream_wait()
        return values, EventOverlap()


def _record(values: Any, stream: torch.cuda.Stream) -> None:
    if isinstance(values, torch.Tensor):
        if values.is_cuda:
            values.record_stream(stream)
    elif type(values) in (tuple, list):  # a handle is a tuple of another kind, and makes its items when asked
        for each in values:
            _record(each, stream)
