"""Memory policy of the calling thread, by system call: no libnuma is needed. Containers often refuse it."""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass

__all__ = ["MemoryPolicy", "get_policy", "prefer_node", "set_policy"]

_MPOL_PREFERRED = 1
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}  # set_mempolicy, get_mempolicy
_MAX_NODES = 1024
_WORD_BITS = 64


@dataclass(frozen=True)
class MemoryPolicy:
    """A policy as the kernel has it: mode with flags, and nodes."""

    mode: int
    nodes: tuple[int, ...]


def get_policy() -> MemoryPolicy:
    """The policy of this thread.

    Raises:
        OSError: not permitted (a container without CAP_SYS_NICE), or not known for this processor.
    """
    mode = ctypes.c_int()
    words = (ctypes.c_ulong * (_MAX_NODES // _WORD_BITS))()
    _call(1, ctypes.byref(mode), words, ctypes.c_ulong(_MAX_NODES), None, ctypes.c_ulong(0))
    nodes = tuple(
        idx * _WORD_BITS + bit for idx, word in enumerate(words) for bit in range(_WORD_BITS) if word >> bit & 1
    )
    return MemoryPolicy(mode.value, nodes)


def set_policy(policy: MemoryPolicy) -> None:
    """Set the policy of this thread and of threads it starts from now on.

    Raises:
        OSError: not permitted, or a node that does not exist.
    """
    words = (ctypes.c_ulong * (_MAX_NODES // _WORD_BITS))()
    for node in policy.nodes:
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    # The kernel takes one bit less than it is told.
    _call(0, ctypes.c_int(policy.mode), words if policy.nodes else None, ctypes.c_ulong(_MAX_NODES + 1))


def prefer_node(node: int) -> None:
    """Prefer a node's memory; others are used when it is full.

    Raises:
        OSError: not permitted, or no such node.
    """
    if not 0 <= node < _MAX_NODES:
        raise OSError(22, f"no node {node}")
    set_policy(MemoryPolicy(_MPOL_PREFERRED, (node,)))


def _call(which: int, *arguments: object) -> None:
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        raise OSError(38, f"memory policies are not known for {platform.machine()}")
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(ctypes.c_long(numbers[which]), *arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
