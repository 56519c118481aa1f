"""Loads the native module when it is first needed, and gives it the error classes and the logger."""

from __future__ import annotations

import atexit
import functools
from typing import TYPE_CHECKING

from weft import log
from weft.errors import Unsupported, from_native

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["native"]


@functools.cache
def native() -> ModuleType:
    """The module `weft._native`.

    Raises:
        Unsupported: it is not built or can't be loaded here.
    """
    try:
        from weft import _native
    except ImportError as error:
        raise Unsupported(
            "running ranks", f"no native module ({error})", "an installed wheel, or `make dev` in a source tree"
        ) from error
    log.configure()
    _native.set_error_factory(from_native)
    _native.set_log_sink(log.native_line)
    atexit.register(_native.set_log_sink, None)  # its threads may log while the interpreter is being taken down
    atexit.register(_native.gpu_leave_graphs_to_the_exit)
    return _native
