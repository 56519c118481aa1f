"""Binds threads of this process to the cores of a `Placement`, and takes it back.

The kernel binds threads, not processes: "process" binds every thread there is, later ones inherit from the one that
starts them. The memory policy is the calling thread's, and of threads it starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading

from weft.log import logger
from weft.machine.placement.model import Placement
from weft.machine.topology import policy
from weft.machine.topology.parse import format_cpus

__all__ = ["WEFT_THREADS", "Binding", "bind", "unbound_mask"]

WEFT_THREADS = frozenset({"weft-life", "weft-monitor", "weft-watch"})  # as the native module names them


# What this process could use before its first binding, as long as one lasts: the next communicator starts from there.
_unbound: dict[int, frozenset[int]] = {}
_bindings: set[Binding] = set()


def unbound_mask() -> frozenset[int]:
    """The CPUs that the calling thread may use, but for what Weft has bound itself."""
    return _unbound.get(os.getpid()) or frozenset(os.sched_getaffinity(0))


class Binding:
    """What was bound. `placement` says so in `applied`; `restore` takes it back."""

    def __init__(self, placement: Placement, *, own_thread_only: bool = False) -> None:
        self.placement = placement
        self._own_thread_only = own_thread_only
        self._before: dict[int, frozenset[int]] = {}  # thread -> its mask
        self._bound: set[frozenset[int]] = set()  # what the kernel made of our mask: it cuts silently
        self._own_mask = frozenset(os.sched_getaffinity(0))  # for threads started since
        self._policy: policy.MemoryPolicy | None = None
        self._policy_thread = 0
        self._pid = os.getpid()

    def apply(self) -> None:
        """Bind. Call it again when threads were started that no bound one has started. Never raises: what is refused
        is in `placement.applied`."""
        mode, cpus = self.placement.mode, frozenset(self.placement.cpus)
        if mode == "off":
            return
        threads = [threading.get_native_id()] if self._own_thread_only else _threads(mode == "auto")
        if self._own_thread_only and mode == "auto":
            threads = []  # the thread is the user's
        if cpus and mode == "process" and not self._own_thread_only:
            _unbound.setdefault(self._pid, frozenset(os.sched_getaffinity(0)))
            _bindings.add(self)
        notes = [self._bind_threads(threads, cpus)] if cpus else []
        if mode == "process" and self.placement.memory_node is not None:
            notes.append(self._prefer(self.placement.memory_node))
        self.placement = dataclasses.replace(self.placement, applied=tuple(note for note in notes if note))

    def restore(self) -> None:
        """Give the threads that are left their masks back, and to those started since this thread's. The
        memory policy comes back where it was set, in the thread that bound. May be called twice, never raises."""
        before, self._before = self._before, {}
        _bindings.discard(self)
        if not _bindings:
            _unbound.clear()
        if self._pid != os.getpid() or (not before and self._policy is None):
            return
        for thread in _threads(False) if before else []:
            mask = before.get(thread)
            if mask is None and self.placement.mode == "process" and not self._own_thread_only:
                mask = self._own_mask
            with contextlib.suppress(OSError):
                if (
                    mask is not None and frozenset(os.sched_getaffinity(thread)) in self._bound
                ):  # else somebody chose another mask
                    os.sched_setaffinity(thread, mask)
        old, self._policy = self._policy, None
        if old is not None and self._policy_thread == threading.get_native_id():
            with contextlib.suppress(OSError):
                policy.set_policy(old)
        self.placement = dataclasses.replace(self.placement, applied=())

    def _bind_threads(self, threads: list[int], cpus: frozenset[int]) -> str:
        num_bound, refused = 0, ""
        for thread in threads:
            try:
                mask = frozenset(os.sched_getaffinity(thread))
                if mask != cpus:
                    os.sched_setaffinity(thread, cpus)
                    self._bound.add(frozenset(os.sched_getaffinity(thread)))
                self._before.setdefault(thread, mask)
                num_bound += 1
            except ProcessLookupError:
                continue  # it has ended
            except OSError as error:
                refused = os.strerror(error.errno or 0).lower()
        where = f"CPUs {format_cpus(cpus)}"
        if refused:
            logger.warning("placement: binding to %s was refused: %s", where, refused)
            return f"binding to {where} was refused: {refused}"
        if self.placement.mode == "auto":
            return f"{num_bound} threads of Weft on {where}" if num_bound else ""
        if self._own_thread_only:
            return f"this thread on {where}"
        return f"{num_bound} thread{'s' * (num_bound != 1)} of this process on {where}"

    def _prefer(self, node: int) -> str:
        try:
            if self._policy is None:
                self._policy, self._policy_thread = policy.get_policy(), threading.get_native_id()
            policy.prefer_node(node)
        except OSError as error:
            self._policy = None
            return f"memory of node {node} is not preferred: {os.strerror(error.errno or 0).lower()}"
        return f"memory of node {node} preferred"


def bind(placement: Placement, *, own_thread_only: bool = False) -> Binding:
    """Bind by a placement: mode "process" all threads and memory, "auto" Weft's own threads, "off" nothing.

    own_thread_only: ranks are threads of one process: "process" then binds the calling thread alone.
    """
    binding = Binding(placement, own_thread_only=own_thread_only)
    binding.apply()
    return binding


def _threads(only_weft: bool) -> list[int]:
    """Thread numbers of this process."""
    found = []
    for entry in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            # Not a Path: it interns each part, and the table of these grows by megabytes over many rebuilds.
            with open(f"/proc/self/task/{entry}/comm") as file:
                name = file.read().strip()
            if not only_weft or name in WEFT_THREADS:
                found.append(int(entry))
    return sorted(found)
