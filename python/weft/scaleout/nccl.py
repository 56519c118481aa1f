"""Which NCCL the network engine uses: the one that the process has, or a copy of Weft's own that `fetch` brings.

Two NCCLs may live in one process: a copy is loaded with its symbols to itself. Needs neither torch nor a GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from weft.errors import InvalidArgument, InvalidState, Unsupported
from weft.kernels.cache import is_private

__all__ = ["MIN_VERSION", "PINNED", "Nccl", "fetch", "fetched", "find", "loaded"]

MIN_VERSION = (2, 30, 7)  # device code with weak signals, and a device interface that is kept
PINNED = (2, 32, 3)
_PACKAGE = "nvidia-nccl-cu13"
_LIBRARY = "nvidia/nccl/lib/libnccl.so.2"
_INCLUDE = "nvidia/nccl/include"
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class _Wheel:
    """SHA-256 of the pinned version's wheel and of the library in it."""

    wheel: str
    library: str


_WHEELS = {
    "x86_64": _Wheel(
        "1459723080ac889d73a26edfa3e04383a7928ab31ac8f0ec43b3ea9548b04ff3",
        "651cf05af28976ca8d996f4e2750e69db1fa427667ee3405b9e576e9d2960eaf",
    ),
    "aarch64": _Wheel(
        "a5bee92b2f4af218c109f8d221c3c9adcc752b94ae0ffcb0ed5abf9341a7724c",
        "c77f5ced2c4b538aad2b0ab88a9838e9eac9a68e22017863ffb0cff9c4f58745",
    ),
}


@dataclass(frozen=True)
class Nccl:
    """A library of NCCL: its file, version, folder of headers (None: it came without), and whether this process had
    loaded it before Weft looked."""

    library: Path
    version: tuple[int, int, int]
    include: Path | None
    is_of_process: bool

    def __str__(self) -> str:
        origin = "of this process" if self.is_of_process else "Weft's own copy"
        return f"NCCL {'.'.join(map(str, self.version))} ({origin}, {self.library})"


def find(cache: str) -> Nccl:
    """The process's own if it is new enough and has its headers beside it; else the copy in `cache`.

    Raises:
        Unsupported: there is neither; the text says what there is and what to type.
        InvalidState: the copy in `cache` is not what `fetch` wrote there.
    """
    own = loaded()
    if own is not None and own.version >= MIN_VERSION and own.include is not None:
        return own
    copy = fetched(cache)
    if copy is not None:
        return copy
    have = "no NCCL" if own is None else f"{own}{'' if own.include else ' without headers'}"
    raise Unsupported("a network engine", have, f"NCCL {_text(MIN_VERSION)} or newer: type `weft scaleout fetch`")


def loaded() -> Nccl | None:
    """The NCCL that this process has loaded, as torch does; None without one."""
    for library in _mapped():
        found = ctypes.c_int()
        handle = ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_NOW | os.RTLD_LOCAL)
        if handle.ncclGetVersion(ctypes.byref(found)) == 0:
            return Nccl(library, _version(found.value), _headers_of(library), is_of_process=True)
    return None


def _mapped() -> list[Path]:
    """Files of this process's memory that are called like NCCL's library."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {Path(fields[5].rstrip()) for line in maps if len(fields := line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if path.name.startswith("libnccl.so") and path.is_file())


def _version(code: int) -> tuple[int, int, int]:
    """From 22907 to (2, 29, 7)."""
    return code // 10000, code // 100 % 100, code % 100


def _headers_of(library: Path) -> Path | None:
    include = library.parent.parent / "include"
    return include if (include / "nccl_device.h").is_file() else None


def _text(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))


# ---- a copy of Weft's own


def fetched(cache: str) -> Nccl | None:
    """The copy that `fetch` has put into `cache`; None without one. Reads the whole library, to compare its hash.

    Raises:
        InvalidState: another user's folder, or another library.
    """
    folder = _folder(cache)
    if not folder.exists():
        return None
    if not is_private(folder):
        raise InvalidState(f"{folder} is not a private folder of this user (mode 0700), so Weft does not load from it")
    library = folder / _LIBRARY
    if not library.is_file() or _hash(library) != _wheel().library:
        raise InvalidState(f"{library} is not what `weft scaleout fetch` wrote; remove {folder} and fetch again")
    return Nccl(library, PINNED, folder / _INCLUDE, is_of_process=False)


def fetch(cache: str, file: str | None = None) -> Nccl:
    """Bring the pinned NCCL into `cache`, from the package index with pip, or from `file`, a wheel. Once.

    Raises:
        InvalidArgument: `file` is another wheel than the pinned one; there is no cache.
        InvalidState: as `fetched`.
        Unsupported: this processor's wheel is not known, or pip could not bring it.
    """
    if not cache:
        raise InvalidArgument("WEFT_CACHE_DIR is empty: there is no folder to put NCCL into")
    there = fetched(cache)
    if there is not None:
        return there
    folder = _folder(cache)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        wheel = _download(made) if file is None else Path(file)
        _unpack(wheel, made / "copy")
        os.rename(made / "copy", folder)
    except OSError as error:
        if not folder.exists():  # else another process was first
            raise InvalidArgument(f"{error.filename or file}: {error.strerror}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return Nccl(folder / _LIBRARY, PINNED, folder / _INCLUDE, is_of_process=False)


def _folder(cache: str) -> Path:
    return Path(cache) / f"nccl-{_text(PINNED)}"


def _wheel() -> _Wheel:
    wheel = _WHEELS.get(platform.machine())
    if wheel is None:
        raise Unsupported("a network engine", f"a {platform.machine()} processor", f"one of {', '.join(_WHEELS)}")
    return wheel


def _download(folder: Path) -> Path:
    """The pinned wheel, with the interpreter's pip. `folder` is private."""
    needed = folder / "needed.txt"
    needed.write_text(f"{_PACKAGE}=={_text(PINNED)} --hash=sha256:{_wheel().wheel}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    found = subprocess.run(
        [*pip, "--require-hashes", "--dest", str(folder), "--requirement", str(needed)],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if found.returncode != 0 or len(wheels) != 1:
        lines = found.stderr.strip().splitlines() or ["no output"]
        raise Unsupported(
            f"fetching {_PACKAGE} {_text(PINNED)}",
            f"pip says: {lines[-1]}",
            "a package index, or its wheel with `weft scaleout fetch --from FILE`",
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> None:
    """Library and headers of the pinned wheel, and of no other."""
    found = _hash(wheel)
    if found != _wheel().wheel:
        raise InvalidArgument(
            f"{wheel} has SHA-256 {found}; {_PACKAGE} {_text(PINNED)} for {platform.machine()} has {_wheel().wheel}"
        )
    folder.mkdir(mode=0o700)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name == _LIBRARY or name.startswith(f"{_INCLUDE}/"):
                archive.extract(name, folder)


def _hash(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE_BYTES):
            total.update(piece)
    return total.hexdigest()
