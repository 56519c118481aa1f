"""`record`: save what `read` looks at, without secrets.

Nothing else is saved: reading runs on a tree that keeps what it hands out. Then what names a machine, a user or a
place in a network is replaced: GUIDs, UUIDs, MAC and IP addresses by made-up ones of the same form, equal ones by
equal ones. Files that hold more than is needed are cut down, a PCI configuration space to the two capabilities that
are read (its serial number is not one of them).
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft._version import __version__
from weft.machine.topology.config_space import minimal_config
from weft.machine.topology.cpus import PROCESS_FILE
from weft.machine.topology.gpus import NVML_FILE
from weft.machine.topology.live import LiveTree
from weft.machine.topology.reader import RECORDING_FILE, read_tree
from weft.machine.topology.system import MODULES
from weft.machine.topology.tree import ARCHIVE_NAME, Tree, open_tree, to_hex

__all__ = ["compact_json", "record"]

_LINE = 110
_SELF = "/proc/self"


def record(root: str | os.PathLike[str], directory: str | os.PathLike[str]) -> Path:
    """Write the files that `weft.topology.read(root)` looks at into `directory` as tree.json, and return its path.

    Host names, serial numbers and addresses are not written: GUIDs, UUIDs, MAC and IP addresses are replaced by
    made-up ones of the same form, the same one for the same value.

    Raises:
        OSError: `directory` can't be written.
    """
    where = os.fspath(root)
    tree = _RecordingTree(LiveTree() if where == "/" else open_tree(where))
    read_tree(tree, where)
    nodes = tree.nodes
    if not tree.exists(RECORDING_FILE):
        description = {"description": f"recorded by weft {__version__}"}
        nodes.setdefault("weft", {})["recording.json"] = {"@json": description}
    _cut_down(nodes)
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    target = path / ARCHIVE_NAME
    target.write_text(_mask(compact_json(nodes)) + "\n")
    return target


class _RecordingTree(Tree):
    """Another tree, with everything handed out kept in `nodes` as an archive has it."""

    def __init__(self, inner: Tree) -> None:
        super().__init__()
        self.inner = inner
        self.nodes: dict[str, Any] = {}

    def _read(self, path: str) -> bytes:
        try:
            data = self.inner._read(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, None):
                self._keep(path, {"@error": errno.errorcode.get(error.errno, "EIO")})
            raise
        self._keep(path, _as_node(_without_number(path), data))
        return data

    def _list(self, path: str) -> list[str]:
        names = self.inner._list(path)
        self._keep(path, {})
        for name in names:
            self._keep(f"{path.rstrip('/')}/{name}", {})
        return names

    def _link(self, path: str) -> str | None:
        target = self.inner._link(path)
        if target is not None and path != _SELF:
            self._keep(path, {"@link": target})
        return target

    def _is_there(self, path: str) -> bool:
        there = self.inner._is_there(path)
        if there:
            self._keep(path, {})
        return there

    def _keep(self, path: str, node: Any) -> None:
        """Put a node at a path without links; an empty directory never takes the place of something."""
        *above, name = [part for part in _without_number(path).split("/") if part] or [""]
        here = self.nodes
        for part in above:
            below = here.setdefault(part, {})
            if not isinstance(below, dict) or any(key.startswith("@") for key in below):
                return
            here = below
        if name and (node or name not in here):
            here[name] = node


def _without_number(path: str) -> str:
    """/proc/self is a link to a process number: keep the name."""
    return re.sub(r"^/proc/\d+(?=/|$)", _SELF, path)


def _as_node(path: str, data: bytes) -> Any:
    if path.endswith(".json"):
        try:
            return {"@json": _known(path, json.loads(data))}
        except ValueError:
            pass
    if path.endswith("/config"):
        return to_hex(minimal_config(data))
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return to_hex(data)
    return _cut(path, text)


# ---- without secrets


def _keep_lines(*beginnings: str) -> Callable[[str], str]:
    return lambda text: "\n".join(line for line in text.splitlines() if line.strip().startswith(beginnings))


def _first_words(text: str) -> str:
    return "\n".join(line.split()[0] for line in text.splitlines() if line.startswith(MODULES))


def _processor(text: str) -> str:
    """Of the first processor the model, of its flags the one that is read."""
    lines = _keep_lines("model name", "flags")(text.split("\n\n")[0]).splitlines()
    has = any("hypervisor" in line.split() for line in lines)
    flags = ["flags\t\t: hypervisor" if has else "flags\t\t: none"] if any("flags" in line for line in lines) else []
    return "\n".join([line for line in lines if not line.startswith("flags")] + flags)


def _driver(text: str) -> str:
    """The driver's version without who built it where: a module made on this machine says root@ and its name."""
    return re.sub(r"\s*\([^()]*@[^()]*\)", "", _keep_lines("NVRM")(text)).rstrip()


_CUTS: tuple[tuple[str, Callable[[str], str]], ...] = (
    (r"/proc/cpuinfo", _processor),
    (r"/proc/self/status", _keep_lines("Cpus_allowed_list", "Mems_allowed_list")),
    (r"/proc/modules", _first_words),
    (r"/proc/driver/nvidia/version", _driver),
    (r"/proc/devices", lambda text: "\n".join(line for line in text.splitlines() if "nvidia" in line)),
    (r".*/node\d+/meminfo", lambda text: "\n".join(line for line in text.splitlines() if "MemTotal" in line)),
)


# What `read` looks at in the JSON files; a driver may say more one day.
_NVML_KEYS = ("error", "driver", "cuda_driver", "gpus", "pairs")
_GPU_KEYS = (
    *("name", "uuid", "pci", "memory_bytes", "compute_capability", "cpus", "memory_nodes", "own_node"),
    *("is_mig", "is_c2c", "fabric", "nvlinks", "errors"),
)
_PROCESS_KEYS = (
    *("allowed", "memory_nodes", "cgroup_cpus", "cgroup_quota", "memlock_bytes", "max_files", "architecture"),
    *("shm_bytes", "shm_free_bytes", "can_bind_memory"),
)


def _known(path: str, value: Any) -> Any:
    """A JSON file without keys that nobody reads."""
    if not isinstance(value, dict):
        return value
    keys = {NVML_FILE: _NVML_KEYS, PROCESS_FILE: _PROCESS_KEYS}.get(path)
    kept = value if keys is None else {key: value[key] for key in keys if key in value}
    if path == NVML_FILE and isinstance(kept.get("gpus"), list):
        kept["gpus"] = [
            {key: gpu[key] for key in _GPU_KEYS if key in gpu} for gpu in kept["gpus"] if isinstance(gpu, dict)
        ]
    return kept


def _cut(path: str, text: str) -> str:
    """Of some files only what matters."""
    for pattern, cut in _CUTS:
        if re.fullmatch(pattern, path):
            return cut(text)
    return text.rstrip("\n")


def _cut_down(nodes: dict[str, Any]) -> None:
    """Of two listings only what matters."""
    for path in ("sys/module", "sys/class/net"):
        folder, name = _folder(nodes, path)
        listed = folder.get(name)
        if isinstance(listed, dict):
            keep = MODULES if path == "sys/module" else None
            folder[name] = {
                entry: node
                for entry, node in listed.items()
                if (entry.startswith(keep) if keep else _is_device(nodes, node))
            }
    links, virtual = _folder(nodes, "sys/devices/virtual/net")
    if isinstance(links.get(virtual), dict):
        links[virtual] = {name: node for name, node in links[virtual].items() if node and "bonding" in node}


def _is_device(nodes: dict[str, Any], node: Any) -> bool:
    """An interface with hardware below, or a bond; others are named by people."""
    target = node.get("@link", "") if isinstance(node, dict) else ""
    if "/virtual/" not in target:
        return True
    folder, name = _folder(nodes, "sys/devices/virtual/net/" + target.rsplit("/", 1)[-1])
    return "bonding" in (folder.get(name) or {})


def _folder(nodes: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    *above, name = path.split("/")
    here = nodes
    for part in above:
        below = here.get(part)
        here = below if isinstance(below, dict) else {}
    return here, name


_HEX4 = "[0-9a-fA-F]{4}"
_PATTERNS = re.compile(
    r"(?P<uuid>\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b)"
    rf"|(?P<gid>\b(?:{_HEX4}:){{7}}{_HEX4}\b)"
    rf"|(?P<guid>\b(?:{_HEX4}:){{3}}{_HEX4}\b)"
    r"|(?P<mac>\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b)"
    r"|(?P<name>\benx[0-9a-f]{12}\b)"
    r"|(?P<ip>\b(?:\d{1,3}\.){3}\d{1,3}\b)"
)


def _mask(text: str) -> str:
    """Replace what identifies: the n-th different value of a kind by number n. All zeros stay: they mean "none"."""
    numbers: dict[str, int] = {}

    def number(value: str) -> int:
        return numbers.setdefault(value.lower(), len(numbers) + 1)

    def replace(match: re.Match[str]) -> str:
        kind, value = match.lastgroup, match[0]
        if not value.strip("0:-."):
            return value
        if kind == "gid":
            return _mask_gid(value.lower(), number)
        nth = number(value)
        if kind == "uuid":
            return f"00000000-0000-4000-8000-{nth:012x}"
        if kind == "guid":
            return _quads(nth)
        if kind == "mac":
            return "02:00:00:00:" + ":".join(f"{nth:04x}"[at : at + 2] for at in (0, 2))
        return f"enx0200{nth:08x}" if kind == "name" else f"10.0.{nth >> 8 & 255}.{nth & 255}"

    return _PATTERNS.sub(replace, text)


def _mask_gid(value: str, number: Callable[[str], int]) -> str:
    """Keep what kind of GID it is: link-local, IPv4-mapped, another prefix."""
    prefix, address = value[:19], value[20:]
    if not address.strip("0:"):
        return value if prefix.startswith("fe80") else f"fd00:0000:0000:{number(prefix) & 0xFFFF:04x}:{address}"
    nth = number(address)
    if prefix == "0000:0000:0000:0000" and address.startswith("0000:ffff:"):
        return f"{prefix}:0000:ffff:0a00:{nth & 0xFFFF:04x}"
    if prefix.startswith("fe80"):
        return f"fe80:0000:0000:0000:{_quads(nth)}"
    return f"fd00:0000:0000:{number(prefix) & 0xFFFF:04x}:{_quads(nth)}"


def _quads(nth: int) -> str:
    digits = f"0200{nth:012x}"
    return ":".join(digits[at : at + 4] for at in range(0, 16, 4))


def compact_json(node: Any, depth: int = 0) -> str:
    """JSON in lines of bearable length: short entries share a line."""
    text = json.dumps(node, ensure_ascii=False)
    if len(text) + depth <= _LINE or not isinstance(node, dict) or not node:
        return text
    indent = " " * (depth + 1)
    lines = [indent]
    for key, entry in node.items():
        piece = f"{json.dumps(key)}: {compact_json(entry, depth + 1)},"
        if lines[-1] != indent and (len(lines[-1]) + len(piece) > _LINE or "\n" in piece or "\n" in lines[-1]):
            lines.append(indent)
        lines[-1] += piece if lines[-1] == indent else f" {piece}"
    return "{\n" + "\n".join(lines).removesuffix(",") + "\n" + " " * depth + "}"
