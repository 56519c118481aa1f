"""`Communicator`: the ranks that exchange tokens, how they found each other, and the windows they share."""

# check: allow file-size: one class and the ways to construct it

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch

from weft import _load, env
from weft.call.shared import Shared
from weft.call.streams import WindowStreams
from weft.call.window import Window, WindowSpec, released_on_error
from weft.deciding import Decide, Network, Secret, by_store, of_group, serve
from weft.engine import Choice, Facts, choose_engine, driver_gpu, look
from weft.errors import (
    Aborted,
    Error,
    Evicted,
    InternalError,
    InvalidArgument,
    InvalidState,
    PeerLost,
    PeerTimeout,
    Unsupported,
    rank_list,
)
from weft.limits import MAX_RANKS, MAX_SECONDS
from weft.log import logger
from weft.machine.placement import local
from weft.machine.placement.binding import Binding
from weft.machine.placement.model import Placement
from weft.meeting import ENDPOINT_BYTES, hosts_store, meet_by_env
from weft.membership import Change, Membership

if TYPE_CHECKING:
    from types import TracebackType

    from torch.distributed import Store

    from weft import _native
    from weft.machine.topology import Machine

__all__ = ["Communicator", "Topology", "Window", "WindowSpec", "released_on_error"]

CONNECT_TIMEOUT_S = 300.0
_LEAST_CONNECT_S = 1.0  # for ranks that met right before the deadline
_THREADS = "threads of one process"
_COMPARE_TAG = 1 << 22  # exchange tags of constructors: this plus their number; all below 1 << 24
_ENGINE_TAG = 1 << 23  # of the choice of the engine
_LOCAL_CALLS = ("check", "empty_output")  # nobody waits for them
_EXIT_GRACE_S = 10.0  # when the process ends, for threads that are in a call and neither wait nor return
_BETWEEN_CALLS_S = 0.05  # then, for threads that make one call after the other to come to the next one


class _Process:
    """This process; asking the system for its number in every call takes a quarter of a microsecond."""

    pid = os.getpid()
    is_ending = False


def _note_process() -> None:
    _Process.pid, _Process.is_ending = os.getpid(), False


os.register_at_fork(after_in_child=_note_process)

_living: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _leave_at_exit() -> None:
    """A daemon thread may be inside a call, or begin one: it stays there until the process ends. The peers are told.

    Brought back, it would use torch while the interpreter is taken down, which ends a process by std::terminate.
    """
    if not _load.native.cache_info().currsize:
        return
    native = _load.native()
    _Process.is_ending = True
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


class Communicator(Shared):
    """A fixed group of ranks. Make one with `from_process_group`, `from_env` or inside `weft.spawn`; use it as a
    context manager.

    The engine is chosen here: `repr(comm)` says which and why. Constructing is collective, so is `rebuild`; `close`
    never waits for a peer. One thread at a time: a call while another thread is inside one raises `InvalidState`.
    After a fork only the parent may use it.
    """

    def __init__(
        self,
        native: _native.Communicator,
        device: torch.device,
        origin: str,
        facts: Facts,
        *,
        placement: Placement | None = None,
    ) -> None:
        self._native = native
        self.device = device
        self._origin = origin
        self._choice = self._choose(facts)
        self._has_refused = False  # the peers were told so
        self._kept: list[object] = []  # what lives until close()
        self._pid = os.getpid()
        self._busy = threading.Lock()
        self._ended: list[_Closable] = []  # of objects that were dropped inside a call: closed before the next
        self._closed = False
        self._rank, self._num_ranks = native.rank, native.num_ranks
        self._active = tuple(native.active_ranks)
        self._windows: dict[WindowSpec, Window] = {}
        self._all_windows: weakref.WeakSet[Window] = weakref.WeakSet()
        self._num_compared = 0
        self._binding = Binding(placement or Placement(mode="off"), own_thread_only=origin == _THREADS)
        self._binding.apply()
        if placement is not None and placement.mode != "off":
            logger.info("rank %d: %s", native.rank, self._binding.placement)
        self.recorded: dict[int, weakref.ref[Any]] = {}  # by weft.autograd
        _living.add(self)

    # ---- constructors

    @classmethod
    def from_process_group(
        cls,
        group: torch.distributed.ProcessGroup | None = None,
        *,
        device: torch.device | str | int | None = None,
        engine: str = "auto",
        placement: str | Placement = "auto",
        timeout_s: float = CONNECT_TIMEOUT_S,
        decide: Decide | None = None,
        secret: Secret = None,
    ) -> Communicator:
        """Ranks of a torch.distributed group (default: the whole world). Collective over it.

        Any backend serves, gloo included: only one fixed-size tensor of bytes a rank is gathered, nothing is pickled,
        and the group is not used afterwards. The ranks may be on several machines: they connect over TCP and agree on
        who belongs to the group, but no rows cross machines yet; docs/several_machines.md has `decide` and `secret`.
        `device`: where x lives; "auto": the current GPU where torch sees one;
        default: the current GPU with a group of NCCL, else the CPU. `engine`: "auto", "cpu" or "nvlink". `placement`:
        "auto" binds Weft's own threads to cores near this rank's GPU, "process" the whole process and its memory, "off"
        nothing, a `weft.Placement` what it says; docs/placement.md. Taken back by `close`. `timeout_s`: for all ranks
        to call it and to connect. The gather itself can't be taken back: after a timeout use the group no more; torch
        may wait for the group's own timeout when the process ends.

        Raises:
            InvalidArgument: an argument is not allowed (before the group is used: the call may be repeated), or the
                ranks asked for different engines.
            InvalidState: torch.distributed is not initialised, or this process is not in `group`.
            Unsupported: a rank on another machine can't be reached, or engine="nvlink" can't be.
            PeerTimeout: a rank did not come within `timeout_s`; of the gather, torch does not say which (`peers` is
                empty).
            PeerLost: a rank ended while the ranks connected.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise InvalidState(
                "torch.distributed is not initialised: call torch.distributed.init_process_group first, or use "
                "weft.Communicator.from_env() under torchrun, or weft.spawn"
            )
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise InvalidState("this process is not a member of the group: call from_process_group only on its members")
        is_nccl = "nccl" in dist.get_backend(group)
        where = torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
        if device is None and is_nccl:
            device = where

        def share(endpoint: bytes) -> list[bytes]:
            mine = torch.tensor(list(endpoint), dtype=torch.uint8, device=where)
            gathered = [torch.empty_like(mine) for _ in range(num_ranks)]
            start = time.monotonic()
            try:
                dist.all_gather(gathered, mine, group=group, async_op=True).wait(timedelta(seconds=timeout_s))
            except RuntimeError as error:
                if time.monotonic() - start < timeout_s:
                    raise
                text = f"rank {rank}: not all {num_ranks} ranks of the group called from_process_group within "
                raise PeerTimeout(
                    "connect", 0, (), f"{text}{timeout_s:g} s; raise timeout_s if that is too short"
                ) from error
            return [bytes(each.cpu().tolist()) for each in gathered]

        origin = "torch.distributed group"
        network = Network.make(decide or _decide_in(group), secret)
        return cls._connect(
            rank, num_ranks, share, device, origin, timeout_s, engine=engine, placement=placement, network=network
        )

    @classmethod
    def from_allgather(
        cls,
        rank: int,
        num_ranks: int,
        allgather: Callable[[bytes], Sequence[bytes]],
        *,
        device: torch.device | str | int | None = None,
        engine: str = "auto",
        placement: str | Placement = "auto",
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> Communicator:
        """Ranks that can gather bytes in a way of their own, such as mpi4py's `comm.allgather`. Collective.

        `allgather` is called once, with bytes of this rank, equally many on each, and returns those of all ranks, by
        rank; what it raises is raised here. It is not used afterwards. `device`: "auto": the current GPU where torch
        sees one; default: the CPU. `timeout_s`: to connect, once all are gathered. `engine` and `placement` as in
        `from_process_group`.

        Raises:
            InvalidArgument: an argument is not allowed (before `allgather` is called), or what it returned, or the
                ranks asked for different engines.
            Unsupported: the ranks are not on one machine and in one pid namespace, or engine="nvlink" can't be.
            PeerTimeout, PeerLost: a rank did not connect.
        """
        for name, value, most in (("num_ranks", num_ranks, MAX_RANKS), ("rank", rank, num_ranks)):
            least = int(name == "num_ranks")
            if type(value) is not int or not least <= value < most + least:
                raise InvalidArgument(f"{name} is {value!r}; allowed are {least} to {most - 1 + least}")
        if not callable(allgather):
            raise InvalidArgument(f"allgather is {allgather!r}; allowed is a function of bytes")
        return cls._connect(
            rank, num_ranks, lambda endpoint: list(allgather(endpoint)), device, "allgather", timeout_s, engine=engine,
            placement=placement,
        )  # fmt: skip

    @classmethod
    def from_env(
        cls,
        device: torch.device | str | int | None = None,
        *,
        engine: str = "auto",
        placement: str | Placement = "auto",
        timeout_s: float = CONNECT_TIMEOUT_S,
        decide: Decide | None = None,
        secret: Secret = None,
    ) -> Communicator:
        """Ranks started by torchrun, or by anything that sets its variables; without them a group of one rank.
        Collective.

        The ranks meet in the store at MASTER_ADDR:MASTER_PORT, which rank 0 hosts where torchrun does not. Needs no
        `init_process_group` and does not disturb one. What ended processes left in the store is not believed, so it
        works after a restart. device="cuda" is the GPU of LOCAL_RANK, "auto" the same where torch sees a GPU; default:
        the CPU. `timeout_s`: for all ranks to come and to connect. Ranks on several machines, `engine`, `placement`,
        `decide` and `secret` as in `from_process_group`.

        Raises:
            InvalidArgument: an argument is not allowed, or RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR or MASTER_PORT is
                missing or wrong (before anything is sent: the call may be repeated); or the ranks asked for different
                engines.
            InvalidState: another process came as this rank after this one.
            Unsupported: a rank on another machine can't be reached, or engine="nvlink" can't be.
            PeerTimeout: naming the ranks that did not come within `timeout_s`.
            PeerLost: a rank ended while the ranks connected.
        """
        found = env.torchrun(MAX_RANKS)
        place = found or env.Torchrun(0, 1, 0)
        origin = "one rank, torchrun's variables are not set" if found is None else "torchrun"
        if device in ("cuda", "auto") and torch.cuda.is_available():
            device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        kept: list[Store] = []

        def share(endpoint: bytes) -> list[bytes]:
            if place.num_ranks == 1:
                return [endpoint]
            endpoints, store = meet_by_env(place, endpoint, timeout_s)
            kept.append(store)
            return endpoints

        def decide_in_it(key: str, expected: str, desired: str) -> bytes | str:
            return by_store(kept[0])(key, expected, desired)

        network = Network.make(decide or decide_in_it, secret)
        comm = cls._connect(
            place.rank, place.num_ranks, share, device, origin, timeout_s, engine=engine, placement=placement,
            network=network if place.num_ranks > 1 else None,
        )  # fmt: skip
        comm._kept = list(kept) if hosts_store(place) else []
        return comm

    @classmethod
    def _connect(
        cls,
        rank: int,
        num_ranks: int,
        share: Callable[[bytes], list[bytes]],
        device: torch.device | str | int | None,
        origin: str,
        timeout_s: float = CONNECT_TIMEOUT_S,
        *,
        engine: str = "auto",
        placement: str | Placement = "auto",
        network: Network | None = None,
    ) -> Communicator:
        """Connect processes: `share` is given this rank's endpoint and returns those of all ranks. With a `network`
        they may be on several machines.

        Whatever can be refused here is refused before the first peer hears of this rank, so the call may be repeated.
        """
        wanted = local.check_placement(placement)
        deadline = time.monotonic() + _positive_seconds("timeout_s", timeout_s)
        native = _load.native()
        where = _device(device)
        facts = look(where, engine)
        mine = local.resolve(wanted, local_rank=rank, num_local_ranks=num_ranks, device=where)
        listener = native.Listener() if network is None else native.Listener(True, network.interface, network.port)
        endpoints = share(listener.endpoint())
        lengths = [len(each) if isinstance(each, bytes) else -1 for each in endpoints]
        if len(endpoints) != num_ranks or any(length != ENDPOINT_BYTES for length in lengths):
            raise InvalidArgument(
                f"the endpoints of {num_ranks} ranks were expected, {ENDPOINT_BYTES} bytes each; got lengths "
                f"{lengths}: do all ranks run the same version of Weft?"
            )
        left_s = max(deadline - time.monotonic(), _LEAST_CONNECT_S)
        if network is None:
            connected = native.Communicator.connect(rank, endpoints, listener, left_s)
        else:
            decider = native.Decider()
            connected = native.Communicator.connect(
                rank, endpoints, listener, left_s, decider=decider, secret=network.secret
            )
            if not all(map(connected.is_near, range(num_ranks))):
                serve(decider, network.decide)  # ends with the communicator
        return cls(connected, where, origin, facts, placement=mine)

    @classmethod
    def _local(
        cls,
        native: _native.Communicator,
        device: torch.device | str | int | None = None,
        *,
        engine: str = "auto",
        placement: Placement | None = None,
    ) -> Communicator:
        """A rank that is a thread of this process; `placement` (resolved) binds this thread alone."""
        try:
            where = _device(device)
            facts = look(where, engine)
        except BaseException:
            native.close()
            raise
        return cls(native, where, _THREADS, facts, placement=placement)

    def _choose(self, facts: Facts) -> Choice:
        """Tell the peers what is here and decide, as they do. A failure closes the native communicator."""
        try:
            mine = json.dumps(facts.to_json()).encode()
            told = self._native.exchange(_ENGINE_TAG, mine, CONNECT_TIMEOUT_S)
            far = [rank for rank in range(len(told)) if not self._native.is_near(rank)]
            return choose_engine({rank: Facts.from_json(json.loads(text)) for rank, text in enumerate(told)}, far)
        except BaseException:
            self._native.close()
            raise

    # ---- what it is

    @property
    def rank(self) -> int:
        """This rank, 0 to num_ranks - 1; a rebuild does not change it."""
        return self._rank

    @property
    def num_ranks(self) -> int:
        """Ranks at the start; a rebuild does not change it, see `active_ranks`."""
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
        if self._pid != _Process.pid:  # another thread of the parent may have held a lock at the fork
            raise InvalidState(f"membership: this is a forked child (pid {os.getpid()}); make a communicator in it")
        native = self._native
        return Membership(native.epoch, self._active, tuple(native.evicted_ranks()), tuple(native.safe_to_delete()))

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
        """Raise the `PeerLost`, `PeerTimeout` or `Aborted` that broke it, or `InvalidState` if closed. Local, never
        waits."""
        if self._closed:
            raise InvalidState("the communicator is closed; make a new one")
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
        lost = "" if len(self._active) == self._num_ranks else f", active {rank_list(self._active)}"
        return (
            f"weft.Communicator(rank {self._rank} of {self._num_ranks}{lost}, engine={self.engine} "
            f"({self._choice.why}), "
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
            seconds = _positive_seconds("deadline_s", deadline_s)
        with self.telling_peers(), self.alone("rebuild"):
            self._native.rebuild(wanted, seconds)
            self._begin_epoch()

    def recover(self, evict: Iterable[int] = (), *, min_ranks: int = 1, deadline_s: float = 100.0) -> Change:
        """Go on in a new epoch with whoever is left after `PeerLost`, `PeerTimeout` or `Aborted`. Collective among
        those, and it waits for them. They need not agree on a list: who belongs is decided once, the first rank's
        record counts on all of them. When a further rank dies meanwhile, it goes on without that one by itself.

        `evict`: live ranks to leave out, such as `PeerTimeout.peers`; this rank among them is ignored. A rank whose
        wish comes too late goes along with what was decided. Everything else is as after `rebuild`.

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
        before = self._active
        with self.telling_peers():
            unwanted = _evicted_ranks(evict, self._num_ranks)
            seconds = _positive_seconds("deadline_s", deadline_s)
            if type(min_ranks) is not int or min_ranks < 1:
                raise InvalidArgument(f"min_ranks is {min_ranks!r}; allowed is an int of at least 1")
            with self.alone("recover"):
                self._native.recover(unwanted, min_ranks, seconds)
                self._begin_epoch()
                gone = {rank for rank, _, _ in self._native.detections()}
        left_out = [rank for rank in before if rank not in self._active]
        lost = tuple(rank for rank in left_out if rank in gone)
        return Change(self._native.epoch, self._active, lost, tuple(rank for rank in left_out if rank not in gone))

    def _begin_epoch(self) -> None:
        self._active = tuple(self._native.active_ranks)
        self._binding.apply()  # to threads that the change has started
        self._num_compared = 0  # the native module adds the epoch to the tag: ranks count alike again

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
        if not self._closed and self._pid == _Process.pid:
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
            self._kept.clear()
            self._binding.restore()

    def _leave_at_exit(self) -> None:
        """Close, or abort where a thread is inside a call: what the call uses stays until the process has ended."""
        if self._closed or self._pid != _Process.pid:
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

    def alone(self, what: str) -> threading.Lock:
        """What a call holds: `with comm.alone("dispatch"): ...`. Refuses it when closed, forked or busy.

        The lock is taken and given back by `with` itself: an exception of a signal handler may come between any two
        lines of Python. Of two threads that ask at the same moment one may wait for the other.
        """
        if _Process.is_ending:
            _load.native().stay_if_kept_out()
        if self._closed:
            raise InvalidState(f"{what}: the communicator is closed; make a new one")
        if self._pid != _Process.pid:
            raise InvalidState(
                f"{what}: this is a forked child (pid {os.getpid()}) of the process that made the communicator "
                f"(pid {self._pid}); make one of its own in the child"
            )
        if self._busy.locked():
            raise InvalidState(
                f"{what}: another thread is inside a call of this communicator; one thread at a time may use it"
            )
        if self._has_refused and what not in _LOCAL_CALLS:
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
        if about_all or not isinstance(error, Error) or error._is_of_all or self._closed or self._pid != _Process.pid:
            return
        self._native.note_refusal(_first_line(error))
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
        if self._pid != _Process.pid:
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

    def meet(self, deadline_s: float) -> None:
        """Wait on the host until every active rank is here. Collective."""
        self._native.meet(deadline_s)

    def open_windows(
        self,
        what: str,
        arguments: dict[str, Any],
        specs: Sequence[WindowSpec],
        deadline_s: float,
        tell: Callable[[], dict[str, Any]],
    ) -> tuple[list[Window], list[int], dict[str, Any]]:
        """Compare the arguments of a constructor over all ranks, then share or make its windows, and number the object
        in each. Collective.

        A window is shared only if every rank still has it: closing is local, so ranks may differ in what they have. A
        constructor may also have failed on some ranks: the largest number that a rank proposes is free on all.
        What the first active rank has to `tell` is handed to all.

        Raises:
            InvalidArgument: on every rank, naming the first argument that differs, its values and their ranks.
        """
        with self.telling_peers():
            alone = self.alone(what)
            self._native.check_one_machine(what)
        with alone:
            kept = [self._windows.get(spec) for spec in specs]
            serials = [-1 if window is None or window.closed else window.serial for window in kept]
            told = tell() if self.rank == self._active[0] else None
            objects = [0 if window is None else window.next_object for window in kept]
            message = {"what": what, "arguments": arguments, "serials": serials, "objects": objects, "told": told}
            answers = self._exchange_json(message, deadline_s)
            _compare(answers)
            shared = [list({answer["serials"][idx] for answer in answers.values()}) for idx in range(len(specs))]
            windows: list[Window] = []
            with released_on_error(windows):
                for spec, mine, found in zip(specs, kept, shared, strict=True):
                    window = (
                        mine
                        if mine is not None and len(found) == 1 and found[0] >= 0
                        else self._new_window(spec, deadline_s)
                    )
                    window.num_users += 1
                    windows.append(window)
                numbers = [
                    max(answer["objects"][idx] for answer in answers.values()) if window is kept[idx] else 0
                    for idx, window in enumerate(windows)
                ]
                for window, number in zip(windows, numbers, strict=True):
                    window.next_object = number + 1
            return windows, numbers, answers[self._active[0]]["told"]

    def _exchange_json(self, message: dict[str, Any], deadline_s: float) -> dict[int, dict[str, Any]]:
        payload = json.dumps(message).encode()
        self._native.raise_if_broken()
        tag = _COMPARE_TAG + self._num_compared
        self._num_compared += 1
        payloads = self._native.exchange(tag, payload, deadline_s)
        return {rank: json.loads(payloads[rank]) for rank in self._active}

    def _new_window(self, spec: WindowSpec, deadline_s: float) -> Window:
        shape: dict[str, Any] = {
            "num_experts": spec.num_experts,
            "top_k": spec.top_k,
            "max_tokens": spec.max_tokens,
            "heap_bytes": spec.heap_bytes,
            "timeout_s": deadline_s,
        }
        if self.engine == "nvlink":
            shape |= {"landing_row_bytes": spec.landing_row_bytes, "num_blocks": self.max_num_sms}
            shape["small_tokens"] = spec.small_tokens
            native = _load.native().GpuWindow(self._native, driver_gpu(self.device.index), **shape)
            window = Window(native, native.id, spec.max_tokens, WindowStreams(self.device))
        else:
            native = _load.native().CpuWindow(self._native, max_row_bytes=spec.max_row_bytes, **shape)
            window = Window(native, native.id, spec.max_tokens)
        self._windows[spec] = window
        self._all_windows.add(window)
        return window


def _decide_in(group: torch.distributed.ProcessGroup | None) -> Decide:
    """In the group's own store; looked up when it is needed."""
    found: list[Decide] = []

    def decide(key: str, expected: str, desired: str) -> bytes | str:
        import torch.distributed.distributed_c10d as c10d

        if not found:
            found.append(of_group(c10d._get_process_group_store(group or c10d._get_default_group())))
        return found[0](key, expected, desired)

    return decide


def _first_line(error: BaseException) -> str:
    """`ValueError: text`, as the native module wants it: UTF-8; it cuts it to what fits."""
    text = (str(error).splitlines() or [""])[0]
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line.encode(errors="replace").decode()


def _why_left(error: BaseException) -> str:
    """For the peers of a rank whose `with comm:` was left by an exception."""
    is_orderly = isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))
    return "" if is_orderly else _first_line(error)


def _compare(answers: dict[int, dict[str, Any]]) -> None:
    """All ranks see the same answers, so all raise the same error."""
    _compare_field("constructor called", {rank: answer["what"] for rank, answer in answers.items()})
    names = next(iter(answers.values()))["arguments"]
    for name in names:
        _compare_field(name, {rank: answer["arguments"].get(name) for rank, answer in answers.items()})


def _compare_field(name: str, values: dict[int, Any]) -> None:
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(str(value), []).append(rank)
    if len(by_value) > 1:
        found = "; ".join(f"{value} on {rank_list(ranks)}" for value, ranks in by_value.items())
        raise InvalidArgument(f"{name} differs between ranks: {found}. It must be equal on all ranks")


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


def _positive_seconds(name: str, value: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MAX_SECONDS:
        raise InvalidArgument(f"{name} is {value!r}; allowed are seconds above 0, up to {MAX_SECONDS:g}")
    return float(value)


def _device(device: torch.device | str | int | None) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.device_count() else "cpu"
    if device is None:
        return torch.device("cpu")
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        text = f'device is {device!r}; allowed are "auto", "cpu", "cuda", "cuda:N" and None'
        raise InvalidArgument(text) from error
    if wanted.type == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)
    if wanted.type != "cpu":
        raise Unsupported(
            f"device {wanted}", "no such device in torch here", '"cpu", or a CUDA device that torch can see'
        )
    return wanted
