"""The cpu engine's calls: tensors may be anywhere, those not in host memory are copied."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from weft.call.runner import Runner
from weft.call.spec import Call
from weft.handle import Handle

__all__ = ["CpuCalls"]


class CpuCalls(Runner):
    """Every call is complete when it returns."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_elsewhere = self.device.type != "cpu"

    def _read(self, tensor: Tensor) -> Tensor:
        """See Runner."""
        return tensor.detach().to("cpu").contiguous().resolve_neg()

    def _read_scales(self, call: Call, scales: Tensor) -> Tensor:
        """See Planner."""
        return self._read(scales)

    def record_stream(self, things: Iterable[Any], stream: Any, also: Iterable[Any] = (), other: Any = None) -> None:
        """See Runner."""
        for those, user in ((things, stream), (also, other)):
            for thing in those:
                if isinstance(thing, Handle):
                    self.record_stream(thing._tensors(), user)
                elif thing is not None and thing.is_cuda:
                    thing.record_stream(user)
