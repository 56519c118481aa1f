"""Weft: dispatch and combine of Mixture-of-Experts tokens between ranks.

`import weft` imports neither torch nor the native module: names are loaded when first used (PEP 562).
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

from weft._version import __version__

if TYPE_CHECKING:
    from weft import reference as reference
    from weft import routing as routing
    from weft.call.expert_map import ExpertMap
    from weft.call.half import Staged
    from weft.communicator import Communicator, Topology
    from weft.errors import (
        Aborted,
        CapacityExceeded,
        CompileError,
        ControlLost,
        CudaError,
        Error,
        Evicted,
        InternalError,
        InvalidArgument,
        InvalidState,
        PeerLost,
        PeerTimeout,
        Unsupported,
    )
    from weft.expert_parallel import ExpertParallel
    from weft.group.membership import Change, Membership
    from weft.handle import Dispatched, Event, Handle
    from weft.limits import limits, supports
    from weft.machine.placement.model import Placement
    from weft.planner.planning import plan
    from weft.quantized import Quantized
    from weft.spawn import spawn

_HOME = {
    "Aborted": "errors",
    "CapacityExceeded": "errors",
    "Change": "group.membership",
    "Communicator": "communicator",
    "CompileError": "errors",
    "ControlLost": "errors",
    "CudaError": "errors",
    "Dispatched": "handle",
    "Error": "errors",
    "Event": "handle",
    "Evicted": "errors",
    "ExpertMap": "call.expert_map",
    "ExpertParallel": "expert_parallel",
    "Handle": "handle",
    "InternalError": "errors",
    "InvalidArgument": "errors",
    "InvalidState": "errors",
    "Membership": "group.membership",
    "PeerLost": "errors",
    "PeerTimeout": "errors",
    "Placement": "machine.placement",
    "Quantized": "quantized",
    "Staged": "call.half",
    "Ticket": "group.ticket",
    "Topology": "communicator",
    "Unsupported": "errors",
    "limits": "limits",
    "plan": "planner",
    "spawn": "spawn",
    "supports": "limits",
}
_MODULES = ("autograd", "errors", "reference", "routing")
_IN_MACHINE = ("doctor", "placement", "settings", "topology")  # of weft.machine, importable as weft.NAME

__all__ = [
    "Aborted",
    "CapacityExceeded",
    "Change",
    "Communicator",
    "CompileError",
    "ControlLost",
    "CudaError",
    "Dispatched",
    "Error",
    "Event",
    "Evicted",
    "ExpertMap",
    "ExpertParallel",
    "Handle",
    "InternalError",
    "InvalidArgument",
    "InvalidState",
    "Membership",
    "PeerLost",
    "PeerTimeout",
    "Placement",
    "Quantized",
    "Staged",
    "Ticket",
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
    if name in (*_MODULES, *_IN_MACHINE):
        return importlib.import_module(f"weft.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"weft.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES, *_IN_MACHINE})


class _ShortNames:
    """Finds `weft.topology` in weft.machine, and so on: the same module under both names."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        if package != "weft" or rest.partition(".")[0] not in _IN_MACHINE:
            return None
        return ModuleSpec(name, _ShortNames)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> Any:
        module = importlib.import_module(f"weft.machine.{spec.name.removeprefix('weft.')}")
        spec.loader_state = module.__spec__
        return module

    @staticmethod
    def exec_module(module: Any) -> None:
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _ShortNames)  # before the one that would load submodules a second time
