"""`weft.spawn` and `weft.limits` are functions that live in modules of their own name: make such a module callable.

Python binds a submodule to its package under its name, whoever imports it first; without this `weft.spawn(...)` would
work or fail with import order.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any


def make_callable(module_name: str, function: Callable[..., Any]) -> None:
    """Calling the module `module_name` calls `function`, whose documentation and signature it shows."""

    class CallableModule(types.ModuleType):
        __call__ = staticmethod(function)
        __wrapped__ = staticmethod(function)

    sys.modules[module_name].__class__ = CallableModule
