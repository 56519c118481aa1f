"""The folder of compiled kernels: what lies in it, and how to empty it. src/jit/cache.cc reads and writes it.

A file is named by the hash of everything that made it (source, headers, options, compiler), so nothing in it is ever
stale; files of older versions are only never asked for again. Needs no torch and no GPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from weft.errors import InvalidState
from weft.limits import LAYOUTS, MAX_SMALL_TOKENS

__all__ = ["CachedKernel", "clear", "entries", "is_private"]

_KERNEL = re.compile(r"[0-9a-f]{32}\.cubin")
_SOURCE = re.compile(r"[0-9a-f]{32}\.cu")
_NAME = re.compile(r'#include "weft/kernels/(?:(\w+)/)?(\w+)\.cuh"')  # folder and file, which may be an entry
_FIELD = re.compile(r"\.(\w+) = (?:static_cast<[\w:]+>\()?(\d+)")
_DTYPES = ("", "bf16", "fp16", "fp32")
_QUANTIZE = ("", " -> fp8", " -> fp8_ue8m0", " -> fp8_pow2")
_LEFT_OVER = re.compile(r"\.new-[A-Za-z0-9]{6}")  # a process died while it wrote
_NEW_FLAGS = 8  # ABI version from which the architecture stands in bits 8 to 15 of the flags, before in bits 0 to 7


@dataclass(frozen=True)
class CachedKernel:
    """One file: its key, the architecture it runs on ("" if it is no machine code), bytes, time of writing (Unix).

    Then what its source says, "" where that does not tell: `name`; `layout`; `dtype` of the rows, or their size where
    they are moved as they are; `tokens`, the T it serves.
    """

    key: str
    arch: str
    num_bytes: int
    written_at: float
    name: str = ""
    layout: str = ""
    dtype: str = ""
    tokens: str = ""


def entries(folder: str) -> tuple[CachedKernel, ...]:
    """The kernels in `folder`, newest first; none if there is no such folder.

    Raises:
        InvalidState: it is not a private folder of this user, so Weft does not use it.
    """
    found = []
    for file, status in _files(folder):
        if _KERNEL.fullmatch(file.name):
            with contextlib.suppress(FileNotFoundError):
                described = _described(file.with_suffix(".cu"))
                found.append(CachedKernel(file.stem, _arch(file), status.st_size, status.st_mtime, *described))
    return tuple(sorted(found, key=lambda kernel: kernel.written_at, reverse=True))


def clear(folder: str) -> tuple[int, int]:
    """Remove what Weft has written into `folder`; returns files and bytes. Other files stay, so does the folder.

    Safe while other processes use it: they compile again.

    Raises:
        InvalidState: as `entries`.
    """
    num_files = num_bytes = 0
    for file, status in _files(folder):
        with contextlib.suppress(FileNotFoundError):
            file.unlink()
            num_bytes += status.st_size
            num_files += 1
    return num_files, num_bytes


def is_private(folder: Path) -> bool:
    """Whether it is a folder, not a link to one, that is this user's and that others cannot write."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _files(folder: str) -> list[tuple[Path, os.stat_result]]:
    """Regular files of this user with names that the cache gives, but those that another process takes away meanwhile:
    every file that it writes has a name of its own first.
    """
    path = Path(folder)
    if not folder or not (path.exists() or path.is_symlink()):
        return []
    if not is_private(path):
        raise InvalidState(f"{folder} is not a private folder of this user (mode 0700), so Weft does not use it")
    found = []
    for file in sorted(path.iterdir()):
        if not any(names.fullmatch(file.name) for names in (_KERNEL, _SOURCE, _LEFT_OVER)):
            continue
        with contextlib.suppress(FileNotFoundError):
            status = file.lstat()
            if stat.S_ISREG(status.st_mode):
                found.append((file, status))
    return found


def _described(file: Path) -> tuple[str, str, str, str]:
    """Name, layout, dtype and T of a kernel by its source; "" for what does not stand there."""
    try:
        source = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", "", "", ""
    found = _NAME.search(source)
    if found is None:
        return "", "", "", ""
    name = f"{found[1] or ''} {found[2].removesuffix('entry')}".replace("_", " ").strip()
    config = {field: int(value) for field, value in _FIELD.findall(source)}
    layout = LAYOUTS[config["layout"]] if config.get("layout", len(LAYOUTS)) < len(LAYOUTS) else ""
    dtype = _DTYPES[config["dtype"]] if config.get("dtype", len(_DTYPES)) < len(_DTYPES) else ""
    if not dtype and "row_bytes" in config:
        dtype = f"{config['row_bytes']} bytes"
    quantize = config.get("quantize", 0)
    is_fp8 = config.get("wire_is_fp8") or config.get("sum_is_fp8")
    dtype += " -> fp8" if is_fp8 else _QUANTIZE[quantize] if quantize < len(_QUANTIZE) else ""
    return name, layout, dtype, f"up to {MAX_SMALL_TOKENS}" if name.startswith("small") else "any"


def _arch(file: Path) -> str:
    """From the ELF header: e_ident[8] is the ABI version, e_flags lies at byte 48."""
    with file.open("rb") as stream:
        header = stream.read(64)
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return ""
    (flags,) = struct.unpack_from("<I", header, 48)
    return f"sm_{flags >> 8 & 0xFF if header[8] >= _NEW_FLAGS else flags & 0xFF}"
