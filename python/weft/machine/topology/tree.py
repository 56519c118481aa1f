"""The files a machine is read from: a directory, or one file that holds a recorded tree. Reads never raise.

An archive is a JSON object of objects: a directory is an object, a file its text, and an object with one key that
begins with "@" something else: {"@link": target}, {"@hex": {offset: digits}, "@size": length},
{"@error": "EACCES"}, {"@json": value}.
At the top, "@base" names another archive, relative to this one, whose tree lies underneath; null takes a name away.
Links are followed inside the tree, as after a chroot.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from weft.machine.topology.natural import natural_key

__all__ = ["ARCHIVE_NAME", "ArchiveTree", "DirectoryTree", "Tree", "open_tree", "to_hex"]

ARCHIVE_NAME = "tree.json"
MAX_FILE_BYTES = 1 << 20
MAX_LINKS = 40
_EXPECTED = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ENODATA, errno.EOPNOTSUPP)  # no problem worth a line


class Tree:
    """Files below a root. Paths are absolute inside it. `problems` collects what could not be read for other reasons
    than that it is not there."""

    def __init__(self) -> None:
        self.problems: dict[str, str] = {}
        self._links: dict[str, str | None] = {}

    # ---- what a kind of tree provides, for paths without links; each may raise OSError

    def _read(self, path: str) -> bytes:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def _list(self, path: str) -> list[str]:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def _link(self, path: str) -> str | None:
        return None

    def _is_there(self, path: str) -> bool:
        return False

    # ---- what readers use

    def real(self, path: str) -> str:
        """The path with every link followed; parts that are not there stay as they are."""
        left = [part for part in path.split("/") if part]
        done: list[str] = []
        num_links = 0
        while left:
            part = left.pop(0)
            if part in (".", ".."):
                done = done[:-1] if part == ".." else done
                continue
            here = "/" + "/".join([*done, part])
            if here not in self._links:
                try:
                    self._links[here] = self._link(here)
                except (OSError, ValueError):
                    self._links[here] = None
            target = self._links[here]
            if target is None:
                done.append(part)
                continue
            num_links += 1
            if num_links > MAX_LINKS:
                return here
            done = [] if target.startswith("/") else done
            left = [piece for piece in target.split("/") if piece] + left
        return "/" + "/".join(done)

    def read(self, path: str) -> bytes | None:
        """The first MiB of a file, or None."""
        try:
            return self._read(self.real(path))
        except (OSError, ValueError, TypeError) as error:
            self._note(path, error)
            return None

    def text(self, path: str) -> str | None:
        """A file as text without white space at its ends, or None."""
        data = self.read(path)
        return None if data is None else data.decode("utf-8", "replace").strip().strip("\0")

    def names(self, path: str) -> list[str]:
        """The names in a directory, numbers in them ordered as numbers; none if it is not there."""
        try:
            return sorted(self._list(self.real(path)), key=natural_key)
        except (OSError, ValueError) as error:
            self._note(path, error)
            return []

    def exists(self, path: str) -> bool:
        """Whether something is there."""
        try:
            return self._is_there(self.real(path))
        except (OSError, ValueError):
            return False

    def json(self, path: str) -> dict[str, Any]:
        """A file with a JSON object; empty if it is missing or none."""
        data = self.read(path)
        if data is None:
            return {}
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            self.problems[path] = f"no JSON: {error}"
            return {}
        if not isinstance(value, dict):
            self.problems[path] = f"a JSON object is expected, found {type(value).__name__}"
            return {}
        return value

    def why(self, path: str) -> str:
        """Why a path could not be read."""
        return self.problems.get(path, "not there")

    def _note(self, path: str, error: Exception) -> None:
        if not isinstance(error, OSError) or error.errno not in _EXPECTED:
            text = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            self.problems[path] = text.lower()


class DirectoryTree(Tree):
    """A directory, "/" for this machine."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__()
        self._root = os.fspath(root).rstrip("/")

    def _read(self, path: str) -> bytes:
        # Not blocking: a recorded tree may hold anything, a pipe too.
        handle = os.open(self._root + path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            pieces: list[bytes] = []
            while sum(map(len, pieces)) < MAX_FILE_BYTES and (piece := os.read(handle, 1 << 16)):
                pieces.append(piece)
            return b"".join(pieces)
        finally:
            os.close(handle)

    def _list(self, path: str) -> list[str]:
        return os.listdir(self._root + path)

    def _link(self, path: str) -> str | None:
        try:
            return os.readlink(self._root + path)
        except OSError:
            return None

    def _is_there(self, path: str) -> bool:
        return os.path.lexists(self._root + path)


class ArchiveTree(Tree):
    """A tree in one JSON file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._nodes = self._load(Path(path), 0)

    def _load(self, path: Path, depth: int) -> dict[str, Any]:
        try:
            nodes = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            self.problems["/"] = f"{path.name}: {error}"
            return {}
        if not isinstance(nodes, dict):
            self.problems["/"] = f"{path.name}: a JSON object is expected"
            return {}
        base = nodes.pop("@base", None)
        if isinstance(base, str) and depth < 4:
            return _merge(self._load(path.parent / base, depth + 1), nodes)
        return nodes

    def _find(self, path: str) -> Any:
        node: Any = self._nodes
        for part in filter(None, path.split("/")):
            if not isinstance(node, dict) or node.get(part) is None or part.startswith("@"):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            node = node[part]
        if isinstance(node, dict) and "@error" in node:
            code = getattr(errno, str(node["@error"]), errno.EIO)
            raise OSError(code, os.strerror(code))
        return node

    def _read(self, path: str) -> bytes:
        node = self._find(path)
        if isinstance(node, str):
            return node.encode()
        if isinstance(node, dict) and "@hex" in node:
            return _from_hex(node["@hex"], node.get("@size"))
        if isinstance(node, dict) and "@json" in node:
            return json.dumps(node["@json"]).encode()
        raise IsADirectoryError(errno.EINVAL, os.strerror(errno.EINVAL))

    def _list(self, path: str) -> list[str]:
        node = self._find(path)
        if not isinstance(node, dict):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return [name for name, entry in node.items() if entry is not None and not name.startswith("@")]

    def _link(self, path: str) -> str | None:
        with contextlib.suppress(OSError):
            node = self._find(path)
            target = node.get("@link") if isinstance(node, dict) else None
            return target if isinstance(target, str) else None
        return None

    def _is_there(self, path: str) -> bool:
        try:
            self._find(path)
        except OSError as error:
            return error.errno not in (errno.ENOENT, errno.ENOTDIR)
        return True


def to_hex(data: bytes) -> dict[str, Any]:
    """Bytes as an archive has them: runs without long stretches of zeros, by their offset."""
    runs = {f"{match.start():x}": match[0].hex() for match in re.finditer(rb"[^\0](?:\0{0,7}[^\0])*", data, re.DOTALL)}
    return {"@hex": runs, "@size": len(data)}


def _from_hex(runs: Any, size: Any) -> bytes:
    if not isinstance(runs, dict) or not isinstance(size, int) or not 0 <= size <= MAX_FILE_BYTES:
        raise ValueError('"@hex" is offset -> hexadecimal digits, beside it "@size"')
    data = bytearray(size)
    for at, digits in runs.items():
        piece, start = bytes.fromhex(digits), int(at, 16)
        if not 0 <= start <= size - len(piece):
            raise ValueError(f'"@hex": {len(piece)} bytes at {at} are outside of {size} bytes')
        data[start : start + len(piece)] = piece
    return bytes(data)


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, entry in above.items():
        old = merged.get(name)
        if isinstance(entry, dict) and isinstance(old, dict) and not any(key.startswith("@") for key in (*entry, *old)):
            merged[name] = _merge(old, entry)
        else:
            merged[name] = entry
    return merged


def open_tree(root: str | os.PathLike[str]) -> Tree:
    """The tree at `root`: an archive (a file, or a directory with tree.json in it), else the directory itself."""
    path = Path(root)
    with contextlib.suppress(OSError):
        if path.is_file():
            return ArchiveTree(path)
        if (path / ARCHIVE_NAME).is_file():
            return ArchiveTree(path / ARCHIVE_NAME)
    return DirectoryTree(path)
