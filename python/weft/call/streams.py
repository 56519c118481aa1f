"""The CUDA streams of a window, whose calls the native module keeps in order: one is in flight at a time."""

from __future__ import annotations

import time

import torch

from weft.engine import give_back_stream, own_stream

__all__ = ["WindowStreams"]


class WindowStreams:
    """The stream of a window's async calls, and where the last call outside of graph captures ran."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.index = device, device.index
        self.last: torch.cuda.Stream | None = None
        self.last_handle = -1  # its number
        self._known: dict[int, torch.cuda.Stream] = {}  # by handle: asking torch for a Stream costs microseconds
        self._own: torch.cuda.Stream | None = None

    def current(self) -> torch.cuda.Stream:
        """The current stream of this thread."""
        handle = torch._C._cuda_getCurrentRawStream(self.index)
        stream = self._known.get(handle)
        if stream is None:
            stream = self._known[handle] = torch.cuda.current_stream(self.device)
        return stream

    def begin(self, *, is_async: bool = False) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """The stream of the next call, and the current one: the same, or the own one, which waits for it first."""
        caller = self._known.get(torch._C._cuda_getCurrentRawStream(self.index)) or self.current()
        stream = caller
        if is_async:
            if self._own is None:
                self._own = own_stream(self.device)
            stream = self._own
            stream.wait_stream(caller)
        if stream is not self.last and not torch.cuda.is_current_stream_capturing():
            self.last, self.last_handle = stream, stream.cuda_stream
        return stream, caller

    def wait(self) -> None:
        """Block the host until the calls made so far have ended, and what is on the current stream: replays of graphs.
        Kernels that wait for a peer may take until their deadline. Ctrl-C leaves the wait."""
        pause_s = 20e-6
        current = None if torch.cuda.is_current_stream_capturing() else self.current()
        streams = [stream for stream in (self.last, current) if stream is not None]
        while not all(stream.query() for stream in streams):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-3)

    def close(self) -> None:
        """Give the own stream back."""
        own, self._own, self.last, self.last_handle = self._own, None, None, -1
        if own is not None:
            give_back_stream(own)
