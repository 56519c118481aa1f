"""This machine as a tree: its files, and the JSON files that a recording has in place of calls."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import resource
from pathlib import Path
from typing import Any

from weft.machine.topology import live_nvml, parse, policy
from weft.machine.topology.cpus import PROCESS_FILE
from weft.machine.topology.gpus import NVML_FILE
from weft.machine.topology.tree import DirectoryTree

__all__ = ["LiveTree", "process_facts"]


class LiveTree(DirectoryTree):
    """The files of this machine. /weft/process.json and /weft/nvml.json are made by asking kernel and NVML, once."""

    def __init__(self, *, with_nvml: bool = True) -> None:
        super().__init__("/")
        self._made: dict[str, bytes] = {}
        if not with_nvml:
            self._made[NVML_FILE] = json.dumps({"error": "not asked"}).encode()

    def _read(self, path: str) -> bytes:
        makers = {PROCESS_FILE: process_facts, NVML_FILE: live_nvml.collect}
        if path in makers:
            if path not in self._made:
                self._made[path] = json.dumps(makers[path]()).encode()
            return self._made[path]
        return super()._read(path)


def process_facts() -> dict[str, Any]:
    """What this process was told about itself: the content of process.json."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    facts: dict[str, Any] = {
        "allowed": parse.format_cpus(os.sched_getaffinity(0)),
        "memlock_bytes": "unlimited" if soft == resource.RLIM_INFINITY else soft,
        "max_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "architecture": platform.machine(),
    }
    with contextlib.suppress(OSError):
        memory = os.statvfs("/dev/shm")
        facts["shm_bytes"] = memory.f_blocks * memory.f_frsize
        facts["shm_free_bytes"] = memory.f_bavail * memory.f_frsize
    # Asking is refused where setting is, and changes nothing.
    try:
        policy.get_policy()
        facts["can_bind_memory"] = True
    except OSError as error:
        facts["can_bind_memory"] = False if error.errno in (errno.EPERM, errno.ENOSYS) else None
    facts.update(_cgroup())
    return facts


def _cgroup() -> dict[str, str]:
    """Set and quota of this process's own cgroup: its path, which names users and jobs, is left out of recordings."""
    found: dict[str, str] = {}
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:  # version 2
            _from_cgroup(found, "cgroup_cpus", Path("/sys/fs/cgroup"), path, "cpuset.cpus.effective")
            _from_cgroup(found, "cgroup_quota", Path("/sys/fs/cgroup"), path, "cpu.max")
        elif "cpuset" in controllers.split(","):
            _from_cgroup(found, "cgroup_cpus", Path("/sys/fs/cgroup/cpuset"), path, "cpuset.effective_cpus")
    return found


def _from_cgroup(found: dict[str, str], key: str, mount: Path, path: str, name: str) -> None:
    """The file of the cgroup itself, else of the nearest one above that has it (inside a namespace: the root)."""
    here = mount / path.strip("/")
    for folder in [here, *here.parents]:
        if not folder.is_relative_to(mount):
            return
        with contextlib.suppress(OSError):
            text = (folder / name).read_text().strip()
            if text:
                found[key] = text
                return
