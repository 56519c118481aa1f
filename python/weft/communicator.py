"""`Communicator`: the ranks that exchange tokens. How they find each other, take turns and share windows is in
weft/group."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.call.window import Window, WindowSpec, released_on_error
from weft.errors import InvalidArgument, InvalidState, rank_list
from weft.group.collective_changes import CollectiveChanges
from weft.group.joining import positive_seconds
from weft.group.membership import Change, Membership
from weft.group.turns import Process, first_line
from weft.group.wishes import spare_ranks
from weft.machine.placement import local
from weft.machine.placement.model import Placement

if TYPE_CHECKING:
    from types import TracebackType

    from weft.machine.topology import Machine

__all__ = ["Communicator", "Topology", "Window", "WindowSpec", "released_on_error"]


@dataclass(frozen=True)
class Topology:
    """What is known about where the ranks are.

    Attributes: `host` name of this machine, `num_cpus` this process may use, `scaleup` ranks reached by load and store
    (this one included), `scaleout` ranks on other machines, which no rows reach yet, `machine` all about this machine.
    """

    host: str
    num_cpus: int
    scaleup: tuple[int, ...]
    scaleout: tuple[int, ...] = ()

    @property
    def machine(self) -> Machine:
        """GPUs, processors, NICs and PCIe of this machine, read once in a process; see `weft.topology`."""
        return local.machine_here()


class Communicator(CollectiveChanges):
    """A group of ranks; with `max_ranks` others may join it and leave. Make one with `from_process_group`, `from_env`,
    `join` or inside `weft.spawn`; use it as a context manager.

    The engine is chosen here: `repr(comm)` says which and why. Constructing is collective, so is `rebuild`; `close`
    never waits for a peer. One thread at a time: a call while another thread is inside one raises `InvalidState`.
    After a fork only the parent may use it.
    """

    # ---- what it is

    @property
    def rank(self) -> int:
        """This rank, 0 to num_ranks - 1; a rebuild does not change it."""
        return self._rank

    @property
    def num_ranks(self) -> int:
        """Ranks at the start, or `max_ranks`: experts and shapes follow it. No change of the membership changes it; see
        `active_ranks`."""
        return self._num_ranks

    @property
    def active_ranks(self) -> tuple[int, ...]:
        """Ranks that belong to the group now, ascending."""
        return self._active

    @property
    def num_active(self) -> int:
        """How many of the ranks belong to the group now."""
        return len(self._active)

    @property
    def membership(self) -> Membership:
        """Epoch, active ranks, and those that were left out; local, never waits.

        Raises:
            InvalidState: it is closed, or this is a forked child.
        """
        if self._closed:
            raise InvalidState("the communicator is closed; make a new one")
        if self._pid != Process.pid:  # another thread of the parent may have held a lock at the fork
            raise InvalidState(f"membership: this is a forked child (pid {os.getpid()}); make a communicator in it")
        native = self._native
        is_open = native.is_open
        return Membership(
            native.epoch,
            self._active,
            tuple(native.evicted_ranks()),
            tuple(native.safe_to_delete()),
            tuple(native.prepared_ranks()) if is_open else (),
            tuple(native.joining_ranks()) if is_open else (),
            tuple(native.leaving_ranks()),
            self._num_ranks,
        )

    @property
    def engine(self) -> str:
        """The engine chosen, equal on all ranks: "nvlink", or "cpu" with the reason in the repr."""
        return self._choice.engine

    @property
    def max_num_sms(self) -> int:
        """Most SMs that a call may use on the nvlink engine, equal on all ranks; 0 on the cpu engine."""
        return self._choice.max_num_sms

    @property
    def epoch(self) -> int:
        """Number of the membership: grows with every rebuild."""
        return self._native.epoch

    @property
    def broken(self) -> bool:
        """True after `PeerLost`, `PeerTimeout` or `Aborted` until `rebuild` or `recover`, and after `Evicted`. Never
        waits."""
        return not self._closed and self._native.broken()

    def raise_if_broken(self) -> None:
        """Raise the `PeerLost`, `PeerTimeout`, `Aborted` or `Evicted` that broke it, or `InvalidState` if closed or
        forked. Local, never waits."""
        if self._closed:
            raise InvalidState("the communicator is closed; make a new one")
        if self._pid != Process.pid:
            raise InvalidState(f"this is a forked child (pid {os.getpid()}); make a communicator in it")
        self._native.raise_if_broken()

    @property
    def topology(self) -> Topology:
        """Where the active ranks are."""
        near = tuple(rank for rank in self._active if self._native.is_near(rank))
        far = tuple(rank for rank in self._active if rank not in near)
        return Topology(socket.gethostname(), len(os.sched_getaffinity(0)), near, far)

    @property
    def placement(self) -> Placement:
        """Cores, memory node and NICs of this rank, and what was bound; local."""
        return self._binding.placement

    def __repr__(self) -> str:
        state = "closed" if self._closed else "broken" if self.broken else f"epoch {self.epoch}"
        state += ", asleep" if self._is_asleep else ""
        lost = "" if len(self._active) == self._num_ranks else f", active {rank_list(self._active)}"
        network = self._network_text()
        between = f"network={network}, " if network else ""
        return (
            f"weft.Communicator(rank {self._rank} of {self._num_ranks}{lost}, engine={self.engine} "
            f"({self._choice.why}), {between}"
            f"device={self.device}, from {self._origin}, {state})"
        )

    # ---- life

    def rebuild(self, ranks: Iterable[int], *, deadline_s: float = 100.0) -> None:
        """Go on with `ranks`, those left after `PeerLost`, `PeerTimeout` or `Aborted`, in a new epoch. Collective among
        them, and it waits for them.

        `rank` and `num_ranks` stay as they were; picks of experts on lost ranks count as absent. ExpertParallel
        objects go on working; handles of an older epoch do not.

        Lists that differ never split a group: the first one counts, on all ranks. `recover` needs no list.

        Raises:
            InvalidArgument: `ranks` are not active ranks, or lack this one; or other ranks were decided before, which
                the text names.
            Evicted: ranks were decided without this one.
            PeerTimeout, PeerLost: one of them did not take part; rebuild may be called again.
            ControlLost: the ranks are on several machines, and the store in which they decide does not answer.
            Aborted: one of them called `abort` meanwhile; rebuild may be called again.
            InvalidState: inside another call; or the GPU must be asked whether replays of CUDA graphs have ended, and
                something in this process captures one, which that spoils. The others wait for this rank: call rebuild
                again when no capture is under way.
        """
        with self.telling_peers():
            wanted = _rebuild_ranks(ranks, self._active, self._rank)
            seconds = positive_seconds("deadline_s", deadline_s)
            self._tell_kept()
        with self.telling_peers():
            self._recover("rebuild", lambda: self._native.rebuild(wanted, seconds))
        self._hand_over_recovery()

    def recover(
        self,
        evict: Iterable[int] = (),
        *,
        spares: str | int | Iterable[int] = "auto",
        min_ranks: int = 1,
        deadline_s: float = 100.0,
    ) -> Change:
        """Go on in a new epoch with whoever is left after `PeerLost`, `PeerTimeout` or `Aborted`. Collective among
        those, and it waits for them. They need not agree on a list: who belongs is decided once, the first rank's
        record counts on all of them. When a further rank dies meanwhile, it goes on without that one by itself.

        `evict`: live ranks to leave out, such as `PeerTimeout.peers`; this rank among them is ignored. A rank whose
        wish comes too late goes along with what was decided. Everything else is as after `rebuild`.

        Interrupted, by Ctrl-C or what else a signal handler raises, it is to be called again; where the group has gone
        on by then, it does not recover once more, but returns what was done.

        `spares`: of the ranks that have joined and are `ready()`, whom to take in: "auto": the lowest, as many as are
        lost; 0: none; or these ranks. One that is not ready stays out, and so does one that has just joined beside a
        lower spare and is not connected to that: a later recovery or change takes it in.

        ```python
        try:
            step()
        except (weft.PeerLost, weft.PeerTimeout) as error:
            change = comm.recover(getattr(error, "peers", ()))
        ```

        Raises:
            InvalidArgument: `evict` holds what is no rank, or `min_ranks` is below 1.
            Evicted: the others have decided to go on without this rank.
            PeerLost: fewer than `min_ranks` ranks are left; nothing was decided.
            PeerTimeout: names who did not come; `recover(evict=those)` goes on without them.
            ControlLost, Aborted, InvalidState: as `rebuild`.
        """
        with self.telling_peers():
            self._tell_kept()
            unwanted = _evicted_ranks(evict, self._num_ranks)
            wanted = spare_ranks(spares, self._num_ranks)
            seconds = positive_seconds("deadline_s", deadline_s)
            if type(min_ranks) is not int or min_ranks < 1:
                raise InvalidArgument(f"min_ranks is {min_ranks!r}; allowed is an int of at least 1")
            self._recover("recover", lambda: self._native.recover(unwanted, min_ranks, seconds, wanted))
        return self._hand_over_recovery()

    def abort(self, reason: str = "") -> None:
        """End every wait of this rank now, and over the control plane those of the others: the call under way, and on
        every rank each later one, raises `Aborted` with `reason` and this rank. From any thread and from signal
        handlers, also beside a call; returns at once and waits for nobody.

        The communicator is broken then, as after `PeerLost`: `rebuild` with the ranks that are to go on, or `close`. If
        it was broken before, that error stays; a `rebuild` under way ends with `Aborted`. Kernels on GPUs leave their
        waits, too. Nothing happens when it is closed, or in a forked child. `reason`: its first 200 bytes, on one line.

        Raises:
            InvalidArgument: `reason` is no str.
        """
        if not isinstance(reason, str):
            raise InvalidArgument(f"reason is {reason!r}; allowed is a str")
        if not self._closed and self._pid == Process.pid:
            self._native.abort(reason.encode(errors="replace").decode())

    def close(self) -> None:
        """Give everything back. Never waits for a peer, works when all are dead, may be called twice; peers that still
        use the group get `PeerLost`.

        Raises:
            InvalidState: inside a call, of another thread or one that a signal handler has interrupted; `abort` ends
                it.
        """
        self._close("")

    def _close(self, why: str) -> None:
        """`why`: for the errors of the peers."""
        if self._closed or self._pid != os.getpid():
            return
        with self.closing("close()"):
            self._closed = True
            for window in list(self._all_windows):
                window.close()
            self._windows.clear()
            self._ended.clear()
            self._native.close(why)
            self._stop_sharing()  # peers that find nobody there have been told
            self._kept.clear()
            self._binding.restore()

    def _leave_at_exit(self) -> None:
        """Close, or abort where a thread is inside a call: what the call uses stays until the process has ended."""
        if self._closed or self._pid != Process.pid:
            return
        if self._busy.locked():
            self.abort(f"the process of rank {self._rank} ends while a thread of it is inside a call")
            return
        with contextlib.suppress(InvalidState):
            self.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close("" if value is None else _why_left(value))

    # ---- for ExpertParallel

    def meet(self, deadline_s: float) -> None:
        """Wait on the host until every active rank is here. Collective.

        Raises:
            InvalidState: closed, forked or busy. PeerTimeout, PeerLost: a rank did not come.
        """
        with self.alone("meet"):
            self._native.meet(deadline_s)


def _why_left(error: BaseException) -> str:
    """For the peers of a rank whose `with comm:` was left by an exception."""
    is_orderly = isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))
    return "" if is_orderly else first_line(error)


def _rebuild_ranks(ranks: Iterable[int], active: tuple[int, ...], mine: int) -> list[int]:
    listed = list(ranks) if isinstance(ranks, Iterable) else []
    if not listed or any(type(rank) is not int for rank in listed):
        raise InvalidArgument(f"ranks is {ranks!r}; allowed is a list of active ranks: {list(active)}")
    wanted = sorted(set(listed))
    if not set(wanted) <= set(active):
        raise InvalidArgument(f"ranks is {wanted}; allowed are active ranks: {list(active)}")
    if mine not in wanted:
        raise InvalidArgument(
            f"ranks is {wanted} and lacks this rank, {mine}; a rank that is to leave calls close() instead"
        )
    return wanted


def _evicted_ranks(ranks: Iterable[int], num_ranks: int) -> list[int]:
    listed = list(ranks) if isinstance(ranks, Iterable) else [None]
    if any(type(rank) is not int or not 0 <= rank < num_ranks for rank in listed):
        raise InvalidArgument(f"evict is {ranks!r}; allowed are ranks, 0 to {num_ranks - 1}")
    return sorted({rank for rank in listed if rank is not None})
