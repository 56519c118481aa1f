"""Where NVRTC, the kernel headers and the kernel cache are."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path


@functools.cache
def paths() -> dict[str, str]:
    """The keyword arguments `nvrtc`, `include` and `cache` of the native module's compiler."""
    from cuda import pathfinder

    found = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    include = Path(__file__).parents[3] / "include"
    return {"nvrtc": str(found), "include": str(include), "cache": str(Path(tempfile.gettempdir()) / "weft-kernels")}
