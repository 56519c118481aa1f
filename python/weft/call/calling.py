"""Around a native call of either engine; call/running.py adds the streams of GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.call.spec import Call
from weft.limits import LAYOUTS

__all__ = ["Calling"]


class Calling:
    """Around a native call: refuse what can't be done now, count, time, and name the range for profilers. `inputs`:
    tensors that it reads or writes; `is_rest`: the call has begun before, staged."""

    _range: Any = None
    handle = 0  # of the stream
    keeps_results = False  # `results` are wanted
    results: Sequence[Tensor] = ()
    receive: Callable[[], None] | None = None  # the other half of a staged call

    def __init__(
        self,
        calls: Any,
        what: str,
        call: Call,
        tie: Tensor | None = None,
        inputs: Iterable[Tensor | None] = (),
        *,
        is_rest: bool = False,
    ) -> None:
        self._calls, self._what, self._call, self._tie, self._is_rest = calls, what, call, tie, is_rest
        self._inputs = inputs
        self.after: list[Callable[[], Any]] = []  # to be done when a staged call has received
        if torch.autograd._profiler_enabled():
            self._range = torch.profiler.record_function(f"weft::{what} {LAYOUTS[call.layout]}")

    def __enter__(self) -> Any:
        calls = self._calls
        if self._tie is not None:
            calls.check_tie(self._what, self._tie)
        if not self._is_rest:
            if calls.windows[self._call.window].half is not None:
                calls.raise_if_staged(self._what, self._call.window)
            calls.before_call(self._what, self._call, self._tie)
        if self._range is not None:
            self._range.__enter__()
        self._begin = time.perf_counter()
        return self

    def launch(self, native: Callable[[Any], Any], args: Any, tensors: Sequence[Tensor | None]) -> Any:
        """Call `native(args)`; of a staged call the half that sends. `tensors`: what the other half works on."""
        return native(args)

    def __exit__(self, *error: object) -> None:
        seconds = time.perf_counter() - self._begin
        counters = self._calls.counters
        is_whole = not self._is_rest
        if error[0] is not None:  # calls that failed do not count
            seconds, is_whole = 0.0, False
        if self._what == "dispatch":
            counters.num_dispatches += is_whole
            counters.dispatch_s += seconds
        else:
            counters.num_combines += is_whole
            counters.combine_s += seconds
        if self._range is not None:
            self._range.__exit__(*error)
