"""Around a call of the nvlink engine: its stream, what is in use there, and the half of a staged call that receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.call.calling import Calling
from weft.call.event import Event
from weft.call.streams import WindowStreams
from weft.limits import LAYOUTS

__all__ = ["Running", "has_nvtx_tool"]

_RANGES = {
    (what, layout): f"weft::{what} {name}" for what in ("dispatch", "combine") for layout, name in enumerate(LAYOUTS)
}


class Running(Calling):
    """Around a call of the nvlink engine: also its stream, and what is in use there. `stream` is the current one
    inside; an async call's results are made there and used on the caller's."""

    _streams: WindowStreams | None = None
    _scope: Any = None
    _native: tuple[Callable[[Any], Any], Any] | None = None  # of a staged call: function and arguments
    _kept: Sequence[Tensor] = ()

    def __enter__(self) -> Running:
        super().__enter__()
        calls, call = self._calls, self._call
        self.keeps_results = call.is_async or call.is_staged
        if calls.names_ranges:
            torch.cuda.nvtx.range_push(_RANGES[self._what, call.layout])
        try:
            streams = calls.windows[call.window].streams
            self._caller = streams.current()
            self.stream = streams.begin(self._caller, call.is_async)
            self._streams, self.handle = streams, self.stream.cuda_stream
            if call.is_async:
                self._change_streams()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def launch(self, native: Callable[[Any], Any], args: Any, tensors: Sequence[Tensor | None]) -> Any:
        """Call `native(args)`; of a staged call the half that sends. `tensors`: what the other half works on."""
        if self._call.is_staged:
            args.receives = False
            self._native, self._kept = (native, args), [each for each in tensors if each is not None]
        return native(args)

    def receive(self) -> None:
        """The other half of a staged call, on the current stream."""
        assert self._native is not None and self._streams is not None  # noqa: S101, PT018  for mypy: launch() has been
        native, args = self._native
        stream = self._streams.begin(self._streams.current(), is_async=False)
        if stream is not self.stream:
            self._calls.record_stream([*self._kept, *self.results], stream)
        args.sends, args.receives, args.stream = False, True, stream.cuda_stream
        native(args)
        for each in self.after:
            each()
        self._calls.last_event = Event(stream)

    def _change_streams(self) -> None:
        inputs = [each for each in self._inputs if each is not None]
        self._calls.record_stream(inputs, self.stream)
        self._scope = torch.cuda.stream(self.stream)
        self._scope.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._streams is not None:
            self._calls.last_event = Event.recorded(self.stream) if self._call.is_async else Event(self.stream)
        if self._scope is not None:
            self._scope.__exit__(*error)
            self._calls.record_stream(self.results, self._caller)
        if self._calls.names_ranges:
            torch.cuda.nvtx.range_pop()
        super().__exit__(*error)


def has_nvtx_tool() -> bool:
    """Profilers load themselves at the first range of the process, or never; without one the depth is negative."""
    depth = torch.cuda.nvtx.range_push("weft")
    torch.cuda.nvtx.range_pop()
    return bool(depth >= 0)
