"""Where the kernel compiler, the kernels' headers and the cache are. Needs neither torch nor a GPU."""

from __future__ import annotations

import functools
import importlib.metadata
from pathlib import Path

from weft import env
from weft.errors import Unsupported

__all__ = ["compiler_paths", "nvrtc_version"]


def compiler_paths(cache: str | None = None) -> dict[str, str]:
    """What the native module's compiler wants: `nvrtc`, `include` and `cache` (None: what the environment says; "": no
    cache).

    Raises:
        Unsupported: no NVRTC, or no kernel sources.
    """
    return {"nvrtc": _nvrtc(), "include": _include(), "cache": env.cache_folder() if cache is None else cache}


def nvrtc_version() -> str | None:
    """Of the wheel that NVRTC came with; None if it came with none."""
    try:
        return importlib.metadata.version("nvidia-cuda-nvrtc")
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _nvrtc() -> str:
    """Path of the compiler library that torch brings."""
    try:
        from cuda import pathfinder

        return str(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
    except Exception as error:
        raise Unsupported("compiling kernels", f"no NVRTC ({error})", "nvidia-cuda-nvrtc") from error


def _include() -> str:
    """The folder of the kernels' headers: in the package of a wheel, at the top of a source tree."""
    here = Path(__file__).parents[1]
    for folder in (here / "include", here.parents[1] / "include"):
        if (folder / "weft" / "kernels").is_dir():
            return str(folder)
    raise Unsupported("compiling kernels", f"no headers beside {here}", "an installed wheel, or a source tree")
