"""The names of calls for profilers."""

from __future__ import annotations

from typing import Any

import torch

from weft.call.spec import Call
from weft.limits import LAYOUTS

__all__ = ["Calling", "has_nvtx_tool"]


class Calling:
    """Around a call while somebody listens: its range. `tells_nvtx`: also for tools that know those of NVTX alone."""

    _range: Any = None

    def __init__(self, what: str, call: Call, *, tells_nvtx: bool = False) -> None:
        self._name, self._tells_nvtx = f"weft::{what} {LAYOUTS[call.layout]}", tells_nvtx

    def __enter__(self) -> Any:
        if torch.autograd._profiler_enabled():
            self._range = torch.profiler.record_function(self._name)
            self._range.__enter__()
        if self._tells_nvtx:
            torch.cuda.nvtx.range_push(self._name)
        return self

    def __exit__(self, *error: object) -> None:
        if self._tells_nvtx:
            torch.cuda.nvtx.range_pop()
        if self._range is not None:
            self._range.__exit__(*error)


def has_nvtx_tool() -> bool:
    """Profilers load themselves at the first range of the process, or never; without one the depth is negative."""
    depth = torch.cuda.nvtx.range_push("weft")
    torch.cuda.nvtx.range_pop()
    return bool(depth >= 0)
