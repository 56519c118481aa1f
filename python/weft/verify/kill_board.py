"""What the ranks and the killer of weft.verify.kill tell each other."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time
from collections.abc import Iterable

__all__ = ["Board"]

_WORD = struct.Struct("q")


class Board:
    """A page shared by the ranks and the killer. Words of each rank: its pid, how many deaths it has run up to, and has
    come through, and what it does; words of each death: when it was, what memory was left and when that was, and
    whether it is over.
    """

    _PID, _RUNS, _THROUGH, _KILLED_AT, _MEMORY, _MEASURED_AT, _OVER, _DOING = range(8)

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def _get(self, kind: int, idx: int) -> int:
        return int(_WORD.unpack_from(self._page, (kind * self._ranks + idx) * _WORD.size)[0])

    def _set(self, kind: int, idx: int, value: int) -> None:
        _WORD.pack_into(self._page, (kind * self._ranks + idx) * _WORD.size, value)

    def note_running(self, rank: int, death: int) -> None:
        """This rank makes calls and waits for death number `death`."""
        self._set(self._PID, rank, os.getpid())
        self._set(self._RUNS, rank, death + 1)

    def note_doing(self, rank: int, what: int) -> None:
        """This rank begins an operation, by its number."""
        self._set(self._DOING, rank, what)

    def doing(self, rank: int) -> int:
        """The operation that it began last."""
        return self._get(self._DOING, rank)

    def note_through(self, rank: int, death: int) -> None:
        """This rank has rebuilt after it, or given up."""
        self._set(self._THROUGH, rank, death + 1)

    def are_running(self, ranks: Iterable[int], death: int) -> bool:
        return all(self._get(self._RUNS, rank) > death for rank in ranks)

    def are_through(self, ranks: Iterable[int], death: int) -> bool:
        return all(self._get(self._THROUGH, rank) > death for rank in ranks)

    def kill(self, victim: int, death: int) -> None:
        """Note the time, then kill."""
        pid = self._get(self._PID, victim)
        self._set(self._KILLED_AT, death, time.monotonic_ns())
        os.kill(pid, signal.SIGKILL)

    def killed_at_ns(self, death: int) -> int:
        return self._get(self._KILLED_AT, death)

    def set_memory_left(self, death: int, num_bytes: int) -> None:
        self._set(self._MEMORY, death, num_bytes)
        self._set(self._MEASURED_AT, death, time.monotonic_ns())

    def memory_left(self, death: int) -> tuple[int, int] | None:
        """Bytes, and when they were measured (ns); None: not measured."""
        at_ns = self._get(self._MEASURED_AT, death)
        return (self._get(self._MEMORY, death), at_ns) if at_ns else None

    def note_over(self, death: int) -> None:
        """All is measured: ranks may go on to the next death."""
        self._set(self._OVER, death, 1)

    def is_over(self, death: int) -> bool:
        return self._get(self._OVER, death) != 0
