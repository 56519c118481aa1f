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

__all__ = ["CachedKernel", "clear", "entries", "is_private"]

_KERNEL = re.compile(r"[0-9a-f]{32}\.cubin")
_LEFT_OVER = re.compile(r"\.new-[A-Za-z0-9]{6}")  # a process died while it wrote
_NEW_FLAGS = 8  # ABI version from which the architecture stands in bits 8 to 15 of the flags, before in bits 0 to 7


@dataclass(frozen=True)
class CachedKernel:
    """One file: its key, the architecture it runs on ("" if it is no machine code), bytes, time of writing (Unix)."""

    key: str
    arch: str
    num_bytes: int
    written_at: float


def entries(folder: str) -> tuple[CachedKernel, ...]:
    """The kernels in `folder`, newest first; none if there is no such folder.

    Raises:
        InvalidState: it is not a private folder of this user, so Weft does not use it.
    """
    found = []
    for file, status in _files(folder):
        if _KERNEL.fullmatch(file.name):
            with contextlib.suppress(FileNotFoundError):
                found.append(CachedKernel(file.stem, _arch(file), status.st_size, status.st_mtime))
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
        if not (_KERNEL.fullmatch(file.name) or _LEFT_OVER.fullmatch(file.name)):
            continue
        with contextlib.suppress(FileNotFoundError):
            status = file.lstat()
            if stat.S_ISREG(status.st_mode):
                found.append((file, status))
    return found


def _arch(file: Path) -> str:
    """From the ELF header: e_ident[8] is the ABI version, e_flags lies at byte 48."""
    with file.open("rb") as stream:
        header = stream.read(64)
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return ""
    (flags,) = struct.unpack_from("<I", header, 48)
    return f"sm_{flags >> 8 & 0xFF if header[8] >= _NEW_FLAGS else flags & 0xFF}"
