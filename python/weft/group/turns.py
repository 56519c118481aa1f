"""One thread at a time: who is inside a call of a communicator, what peers are told of a refused call, and what becomes
of threads inside calls when the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from weft import _load
from weft.call.shared import Shared
from weft.errors import (
    Aborted,
    Error,
    Evicted,
    InternalError,
    InvalidArgument,
    InvalidState,
    PeerLost,
    PeerTimeout,
)
from weft.limits import MAX_SECONDS

if TYPE_CHECKING:
    from weft import _native

__all__ = ["Process", "Turns", "first_line", "positive_seconds"]

_ASLEEP_CALLS = ("gather", "meet", "rebuild", "recover", "wake")
_BESIDE_REFUSALS = ("check", "empty_output", "meet")  # peers that wait for a refused call still hear of it
_EXIT_GRACE_S = 10.0  # when the process ends, for threads that are in a call and neither wait nor return
_BETWEEN_CALLS_S = 0.05  # then, for threads that make one call after the other to come to the next one


class Process:
    """This process; asking the system for its number in every call takes a quarter of a microsecond."""

    pid = os.getpid()
    is_ending = False


def _note_process() -> None:
    Process.pid, Process.is_ending = os.getpid(), False


os.register_at_fork(after_in_child=_note_process)

_living: weakref.WeakSet[Any] = weakref.WeakSet()


def _leave_at_exit() -> None:
    """A daemon thread may be inside a call, or begin one: it stays there until the process ends. The peers are told.

    Brought back, it would use torch while the interpreter is taken down, which ends a process by std::terminate.
    """
    if not _load.native.cache_info().currsize:
        return
    native = _load.native()
    Process.is_ending = True
    native.keep_other_threads_out()
    if threading.active_count() > 1:
        end = time.monotonic() + _EXIT_GRACE_S
        time.sleep(_BETWEEN_CALLS_S)
        while sum(comm._busy.locked() for comm in list(_living)) > native.threads_away() and time.monotonic() < end:
            time.sleep(_BETWEEN_CALLS_S / 10)
    for comm in list(_living):
        comm._leave_at_exit()


atexit.register(_leave_at_exit)


class _Closable(Protocol):
    """An object's calls, as far as the communicator knows them."""

    closed: bool

    def close(self) -> None: ...


class Turns(Shared):
    """The part of a communicator that calls take turns by."""

    _native: _native.Communicator
    _closed: bool

    def __init__(self) -> None:
        self._has_refused = False  # the peers were told so
        self._is_asleep = False
        self._pid = os.getpid()
        self._busy = threading.Lock()
        self._ended: list[_Closable] = []  # of objects that were dropped inside a call: closed before the next

    def _lives(self) -> None:
        """From now on it is left when the process ends."""
        _living.add(self)

    def alone(self, what: str) -> threading.Lock:
        """What a call holds: `with comm.alone("dispatch"): ...`. Refuses it when closed, forked or busy.

        The lock is taken and given back by `with` itself: an exception of a signal handler may come between any two
        lines of Python. Of two threads that ask at the same moment one may wait for the other.
        """
        if Process.is_ending:
            _load.native().stay_if_kept_out()
        if self._closed:
            raise InvalidState(f"{what}: the communicator is closed; make a new one")
        if self._pid != Process.pid:
            raise InvalidState(
                f"{what}: this is a forked child (pid {os.getpid()}) of the process that made the communicator "
                f"(pid {self._pid}); make one of its own in the child"
            )
        if self._busy.locked():
            raise InvalidState(
                f"{what}: another thread is inside a call of this communicator; one thread at a time may use it"
            )
        if self._is_asleep and what not in _ASLEEP_CALLS:
            raise InvalidState(f"{what}: the communicator is asleep; call comm.wake() on every rank first")
        if self._has_refused and what not in _BESIDE_REFUSALS:
            self._has_refused = False
            self._native.note_refusal("")
        while self._ended:
            with self._busy:
                self._ended.pop().close()
        return self._busy

    def note_refusal(self, error: object) -> None:
        """A call of this rank ended before anything was sent, and may be repeated: tell the peers, which wait for it.
        Errors that every rank raises are not among these."""
        about_all = isinstance(error, PeerLost | PeerTimeout | Aborted | Evicted | InternalError)
        if about_all or not isinstance(error, Error) or error._is_of_all or self._closed or self._pid != Process.pid:
            return
        self._native.note_refusal(first_line(error))
        self._has_refused = True  # last: a call of another thread takes back what it finds here

    @contextlib.contextmanager
    def telling_peers(self) -> Iterator[None]:
        """Around a collective call, where it begins: of what this rank refuses in it the peers are told. ExpertParallel
        has the same in its two calls, without the time that a block takes."""
        try:
            yield
        except Error as error:
            self.note_refusal(error)
            raise

    def closing(self, what: str) -> contextlib.AbstractContextManager[object]:
        """As `alone`, around what takes memory away, which a call may be using. A fork's child has copies of its own,
        and nobody to wait for."""
        if self._pid != Process.pid:
            return contextlib.nullcontext()
        if self._busy.locked():
            raise InvalidState(
                f"{what} while another thread is inside a call of this communicator, or from a signal handler that "
                "came in one: wait for it to return, or end it by comm.abort(); nothing was given back"
            )
        return self._busy

    def close_ended(self, calls: _Closable) -> None:
        """Of an ExpertParallel that nobody has any more: close it, inside a call before the next one."""
        try:
            with self.closing("the end of an ExpertParallel"):
                calls.close()
        except InvalidState:
            self._ended.append(calls)


def first_line(error: BaseException) -> str:
    """`ValueError: text`, as the native module wants it: UTF-8; it cuts it to what fits."""
    text = (str(error).splitlines() or [""])[0]
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line.encode(errors="replace").decode()


def positive_seconds(name: str, value: float) -> float:
    """`value` as a float, if it is a time to wait."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MAX_SECONDS:
        raise InvalidArgument(f"{name} is {value!r}; allowed are seconds above 0, up to {MAX_SECONDS:g}")
    return float(value)
