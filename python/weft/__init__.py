"""Weft: dispatch and combine of Mixture-of-Experts tokens between ranks.

`import weft` imports neither torch nor the native module: names are loaded when first used (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weft._version import __version__

if TYPE_CHECKING:
    from weft import reference as reference
    from weft import routing as routing
    from weft.call.half import Staged
    from weft.communicator import Communicator, Topology
    from weft.errors import (
        Aborted,
        CapacityExceeded,
        CompileError,
        CudaError,
        Error,
        InternalError,
        InvalidArgument,
        InvalidState,
        PeerLost,
        PeerTimeout,
        Unsupported,
    )
    from weft.expert_parallel import ExpertParallel
    from weft.handle import Dispatched, Event, Handle
    from weft.limits import limits, supports
    from weft.placement.model import Placement
    from weft.planner.planning import plan
    from weft.quantized import Quantized
    from weft.spawn import spawn

_HOME = {
    "Aborted": "errors",
    "CapacityExceeded": "errors",
    "Communicator": "communicator",
    "CompileError": "errors",
    "CudaError": "errors",
    "Dispatched": "handle",
    "Error": "errors",
    "Event": "handle",
    "ExpertParallel": "expert_parallel",
    "Handle": "handle",
    "InternalError": "errors",
    "InvalidArgument": "errors",
    "InvalidState": "errors",
    "PeerLost": "errors",
    "PeerTimeout": "errors",
    "Placement": "placement",
    "Quantized": "quantized",
    "Staged": "call.half",
    "Topology": "communicator",
    "Unsupported": "errors",
    "limits": "limits",
    "plan": "planner",
    "spawn": "spawn",
    "supports": "limits",
}
_MODULES = ("autograd", "errors", "reference", "routing")

__all__ = [
    "Aborted",
    "CapacityExceeded",
    "Communicator",
    "CompileError",
    "CudaError",
    "Dispatched",
    "Error",
    "Event",
    "ExpertParallel",
    "Handle",
    "InternalError",
    "InvalidArgument",
    "InvalidState",
    "PeerLost",
    "PeerTimeout",
    "Placement",
    "Quantized",
    "Staged",
    "Topology",
    "Unsupported",
    "__version__",
    "limits",
    "plan",
    "reference",
    "routing",
    "spawn",
    "supports",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"weft.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"weft.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
