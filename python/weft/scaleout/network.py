"""NCCL as the network between nodes of GPUs: what a window needs to use it. Other windows need nothing of this."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from weft import _load, env
from weft.errors import InvalidArgument, Unsupported
from weft.scaleout import headers, nccl

if TYPE_CHECKING:
    from weft import _native

__all__ = ["VARIABLES", "cuda_folders", "paths", "variables"]

# What NCCL is told for Weft's own communicators: it reads them once, when the first is made.
VARIABLES = {
    "NCCL_DEV_API_JIT": "1",  # 2.30: device code is compiled with headers of the library's own release
    "NCCL_IB_MERGE_NICS": "0",  # a port is a device: contexts go round the ports
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RMA_DISABLE": "1",
}
_VERSION = re.compile(r"^#define CUDART_VERSION\s+(\d+)", re.MULTILINE)
_lock = threading.Lock()
_state = {"num_users": 0}


def paths() -> _native.NcclPaths:
    """Of the library, and of what kernels that post to it are compiled with.

    Raises:
        Unsupported: there is no NCCL that is new enough, or no headers of CUDA; the text says what to type.
        InvalidState: the copy that Weft has brought is not what it was.
        InvalidArgument: WEFT_CACHE_DIR is empty, so there is no place for rewritten headers.
    """
    folder = env.cache_folder()
    if not folder:
        raise InvalidArgument("WEFT_CACHE_DIR is empty: there is no folder for NCCL's headers, which kernels include")
    found = nccl.find(folder)
    rewritten = headers.prepare(found.include or Path(), Path(folder))
    cuda = cuda_folders()
    # A kernel's key in the cache has its source, not NCCL's and CUDA's headers: so the source names their versions.
    named = f"// {rewritten.name}, CUDA {_cuda_version(cuda[0])}\n"
    folders = [str(rewritten), *map(str, cuda)]
    prologue = named + headers.PROLOGUE
    made: _native.NcclPaths = _load.native().NcclPaths(library=str(found.library), prologue=prologue, includes=folders)
    return made


@contextlib.contextmanager
def variables() -> Iterator[None]:
    """NCCL's variables are as Weft wants them while a window is made, unless the user has set them."""
    with _lock:
        _state["num_users"] += 1
        if _state["num_users"] == 1:
            env.lend_variables(VARIABLES)
    try:
        yield
    finally:
        with _lock:
            _state["num_users"] -= 1
            if _state["num_users"] == 0:
                env.take_back_variables()


@functools.cache
def cuda_folders() -> tuple[Path, ...]:
    """CUDA's headers, and those of its C++ library.

    Raises:
        Unsupported: they are not installed.
    """
    from cuda import pathfinder

    runtime = pathfinder.find_nvidia_header_directory("cudart")
    if runtime is None or not (Path(runtime) / "cuda_fp8.h").is_file():
        raise _no_headers("cuda_fp8.h")
    library = pathfinder.find_nvidia_header_directory("cccl")
    for folder in (Path(runtime), Path(runtime) / "cccl", *((Path(library),) if library else ())):
        if (folder / "cuda" / "std" / "cstdint").is_file():
            return tuple(dict.fromkeys((Path(runtime), folder)))
    raise _no_headers("cuda/std/cstdint")


def _no_headers(name: str) -> Unsupported:
    need = "pip install nvidia-cuda-runtime nvidia-cuda-cccl, or a CUDA toolkit (CUDA_HOME)"
    return Unsupported("kernels that post to NCCL", f"no header {name} of CUDA", need)


def _cuda_version(folder: Path) -> str:
    found = _VERSION.search((folder / "cuda_runtime_api.h").read_text(encoding="utf-8"))
    return found[1] if found else "of no version"
