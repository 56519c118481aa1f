"""The part of NVRTC's C interface that the tests need, through ctypes. The library is a wheel: no GPU, no driver."""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

from cuda import pathfinder


class CompileFailedError(Exception):
    """NVRTC refused the source; the text is its log."""


@dataclass(frozen=True)
class Compiled:
    """What one compilation gave: machine code, the PTX it was made from, and the log with ptxas's figures."""

    cubin: bytes
    ptx: str
    log: str


@functools.cache
def load() -> ctypes.CDLL:
    """Load libnvrtc. Its builtins go first: libnvrtc opens them by bare name and fails only when it compiles."""
    found = Path(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
    for builtins in sorted(found.parent.glob("libnvrtc-builtins.so*")):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(found))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def version() -> tuple[int, int]:
    """Return NVRTC's version, major and minor."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(load().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def compile_source(source: str, options: list[str]) -> Compiled:
    """Compile one CUDA source. Raises CompileFailedError with NVRTC's log."""
    library = load()
    program = ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"test.cu", 0, None, None))
    try:
        encoded = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        status = library.nvrtcCompileProgram(program, len(options), encoded)
        log = _read(program, "nvrtcGetProgramLog").rstrip(b"\0").decode()
        if status != 0:
            raise CompileFailedError(f"{library.nvrtcGetErrorString(status).decode()}\n{log}")
        ptx = _read(program, "nvrtcGetPTX").rstrip(b"\0").decode()
        return Compiled(cubin=_read(program, "nvrtcGetCUBIN"), ptx=ptx, log=log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(program: ctypes.c_void_p, getter: str) -> bytes:
    library = load()
    size = ctypes.c_size_t()
    _check(getattr(library, f"{getter}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(library, getter)(program, buffer))
    return buffer.raw


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(load().nvrtcGetErrorString(status).decode())
