"""`weft.spawn`: ranks on this machine, as processes or threads, without torchrun.

Process ranks are forked, so that torch is imported once. What a fork can't copy is the reason for the rules in the
docstring of `spawn`: threads of the parent do not exist in the child, the locks they held stay locked.
"""

# check: allow file-size: parent and child of one protocol
# check: allow-in-file function-size: one parameter for each argument of spawn

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import pickle
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from weft import _callable
from weft.errors import Aborted, Error, InvalidArgument, InvalidState, PeerLost, PeerTimeout, Unsupported
from weft.machine.placement import local

if TYPE_CHECKING:
    from weft import _native
    from weft.communicator import Communicator
    from weft.machine.placement.model import Placement

__all__ = ["spawn"]

GRACE_S = 10.0  # after the first failure the other ranks have this long to come to an end by themselves
THREAD_GRACE_S = 0.5  # the same for ranks that are threads, and then their communicators are closed
_LENGTH_BYTES = 8
_WAITS, _WORKS = "waits", "works"  # what a spare says


def spawn(
    fn: Callable[..., Any],
    num_ranks: int = 4,
    args: Sequence[Any] = (),
    device: str = "auto",
    isolation: str = "process",
    *,
    on_failure: str = "raise",
    engine: str = "auto",
    placement: str | Placement = "auto",
    max_ranks: int | None = None,
    standby: int = 0,
) -> list[Any]:
    """Run `fn(comm, *args)` on `num_ranks` ranks of this machine and return their results in rank order.

    Args:
        fn: any callable, closures and lambdas too; its result must be picklable with isolation="process".
        num_ranks: 1 to `weft.limits().max_control_ranks`; an `ExpertParallel` takes up to `max_ranks`.
        args: handed to every rank as they are.
        device: where the tokens live: "cpu", "cuda" (GPU rank % number of GPUs) or "auto" (cuda where torch sees a
            GPU). It is the current device of the rank.
        isolation: "process" forks one process a rank; "thread" runs ranks as threads of this process (for tests), on a
            GPU each with a stream of its own as the current one; ranks that share a GPU share its SMs. There, wait for
            the stream before a result is copied to the host (docs/troubleshooting.md).
        on_failure: "raise" the root cause with the other errors as notes, after at most ten seconds of grace for the
            ranks that have not failed (threads: half a second, then their calls fail); "return": the errors stand in
            the list in place of results.
        engine: "auto", "cpu" or "nvlink".
        placement: "auto" binds Weft's own threads to each rank's share of the cores, "process" the ranks themselves
            (each process with its memory; each thread), "off" nothing; a `weft.Placement` is bound on every rank as it
            stands. docs/placement.md.
        max_ranks: other processes may join the group, up to so many ranks (`Communicator.join`); None: nobody but the
            spares. Processes on the cpu engine alone.
        standby: so many spares besides, ranks num_ranks and up: `fn` runs there, too, with a communicator that has
            joined with `standby=True` (`comm.is_member` is False). It makes its objects, and waits in
            `comm.boundary()` until `recover` or a change takes it in. Their results come last; None of a spare that
            waited until the members had come to their end, `PeerLost` of one that was killed, as of a member.

    Call it from the main thread of a program that is not inside a parallel operation: other threads of the parent do
    not exist in the ranks. Each rank runs torch with one thread. Nothing is left over, also after Ctrl-C or when this
    process dies.

    CUDA does not survive a fork: before ranks that are processes this program may not have used it. Before ranks that
    are threads of one GPU it should not have, since they need settings that CUDA reads when it starts.

    Raises:
        InvalidArgument: an argument is not allowed.
        InvalidState: CUDA was used before, see above.
        Unsupported: engine="nvlink" can't be here, or the system denies what ranks need.
        CapacityExceeded: a limit of the system is reached: processes, descriptors, memory.
        PeerLost: a rank was killed by a signal or left without a result.
        Whatever `fn` raised on a rank, with its traceback as a note.
    """
    _check(fn, num_ranks, args, device, isolation, on_failure, engine)
    slots = _slots(num_ranks, standby, max_ranks)
    if slots is not None and isolation == "thread":
        what = "max_ranks with isolation='thread'" if standby == 0 else "standby with isolation='thread'"
        raise Unsupported(what, "ranks that come and go", "isolation='process'")
    run = _run_processes if isolation == "process" else _run_threads
    outcomes = run(
        _Job(
            lambda comm: fn(comm, *args),
            num_ranks,
            device,
            engine,
            stop_on_failure=on_failure == "raise",
            placement=local.check_placement(placement),
            max_ranks=slots,
            standby=standby,
        )
    )
    errors = [outcome for outcome in outcomes if outcome.error is not None]
    if errors and on_failure == "raise":
        raise _root_cause(errors)
    return [outcome.result if outcome.error is None else outcome.error for outcome in outcomes]


@dataclass(frozen=True)
class _Job:
    """What spawn was asked for."""

    call: Callable[[Communicator], Any]
    num_ranks: int
    device: str
    engine: str
    stop_on_failure: bool
    placement: str | Placement
    max_ranks: int | None = None
    standby: int = 0

    @property
    def may_use_cuda(self) -> bool:
        """The device that was asked for is not the CPU."""
        return str(self.device).split(":")[0] != "cpu"

    def device_of(self, rank: int) -> str:
        """For this rank; a GPU becomes its current one."""
        if not self.may_use_cuda:
            return self.device
        import torch

        from weft.engine import choose_gpu

        device = choose_gpu(self.device, rank)
        if device.startswith("cuda:") and torch.cuda.is_available():
            torch.cuda.set_device(device)
        return device


@dataclass
class _Outcome:
    """How a rank ended. `when` orders the failures; 0: not sent yet."""

    rank: int
    result: Any = None
    error: BaseException | None = None
    when: float = 0.0
    was_killed: bool = False


def _check(fn: Any, num_ranks: Any, args: Any, device: Any, isolation: Any, on_failure: Any, engine: Any) -> None:
    from weft.limits import limits

    most = limits().max_control_ranks
    if not callable(fn):
        raise InvalidArgument(f"fn is {fn!r}; a callable fn(comm, *args) is expected")
    if not isinstance(num_ranks, int) or isinstance(num_ranks, bool) or not 1 <= num_ranks <= most:
        raise InvalidArgument(f"num_ranks is {num_ranks!r}; allowed are 1 to {most}")
    if not isinstance(args, Sequence):
        raise InvalidArgument(f"args is {args!r}; a tuple or another sequence is expected, of what fn takes after comm")
    for name, value, allowed in (
        ("device", str(device).split(":")[0], ("auto", "cpu", "cuda")),
        ("isolation", isolation, ("process", "thread")),
        ("on_failure", on_failure, ("raise", "return")),
        ("engine", engine, ("auto", *limits().engines)),
    ):
        if value not in allowed:
            raise InvalidArgument(f"{name} is {value!r}; allowed are {', '.join(map(repr, allowed))}")


def _slots(num_ranks: int, standby: Any, max_ranks: Any) -> int | None:
    """Of the group; None: nobody joins."""
    from weft.limits import MAX_RANKS

    if type(standby) is not int or standby < 0:
        raise InvalidArgument(f"standby is {standby!r}; allowed is the number of spares, an int from 0")
    if standby == 0:
        return max_ranks  # type: ignore[no-any-return]  # looked at where the ranks connect
    most = num_ranks + standby if max_ranks is None else max_ranks
    if type(most) is not int or not num_ranks + standby <= most <= MAX_RANKS:
        raise InvalidArgument(
            f"standby is {standby} beside {num_ranks} ranks, and max_ranks {max_ranks!r}; allowed are as many ranks "
            f"and spares as there are slots, up to {MAX_RANKS}"
        )
    return most


def _root_cause(failed: list[_Outcome]) -> BaseException:
    """The first error that is not about peers, else the killed rank, else the first of all; the others as notes."""

    def order(outcome: _Outcome) -> tuple[int, float]:
        error = outcome.error
        is_about_peers = isinstance(error, PeerLost | PeerTimeout) or (
            isinstance(error, Aborted) and error.rank != outcome.rank
        )
        return (1 if outcome.was_killed else 2 if is_about_peers else 0), outcome.when

    first, *others = sorted(failed, key=order)
    killed = tuple(outcome.rank for outcome in failed if outcome.was_killed)
    if first.was_killed and len(killed) > 1:
        first.error = PeerLost(sorted(killed), "; ".join(str(each.error) for each in failed if each.was_killed))
    cause = first.error
    assert cause is not None  # noqa: S101  for mypy: only failures are in the list
    _add_note(cause, f"raised by rank {first.rank} of weft.spawn")
    for outcome in sorted(others, key=lambda outcome: outcome.rank):
        _add_note(cause, f"rank {outcome.rank} ended with {type(outcome.error).__name__}: {outcome.error}")
    return cause


def _add_note(error: BaseException, note: str) -> None:
    """`add_note` of Python 3.11, also for 3.10, which keeps the notes but does not print them."""
    error.__notes__ = [*getattr(error, "__notes__", []), note]


# ---- ranks as threads


class _ThreadRanks:
    """Ranks as threads. Threads can't be ended, so closing the native communicators makes the ranks leave their waits:
    after Ctrl-C, or soon after a rank has failed.
    """

    def __init__(self, job: _Job) -> None:
        from weft import _load

        self.job, num_ranks = job, job.num_ranks
        self.hub = _load.native().LocalHub(num_ranks)
        self.outcomes = [_Outcome(rank) for rank in range(num_ranks)]
        self.at_end = threading.Barrier(num_ranks)  # broken by the first failure
        self.ended = [threading.Event() for _ in range(num_ranks)]
        self.lock = threading.Lock()
        self.natives: list[_native.Communicator] = []
        self.stopped_at = float("inf")

    def run(self, rank: int) -> None:
        """One rank, in its thread."""
        import torch

        from weft import _load
        from weft.communicator import Communicator
        from weft.group.joining import device_of

        # Backwards run in the thread that asks for them: torch has one thread a GPU for the backwards of all others,
        # and there the first rank to wait would keep every other from coming.
        torch.autograd.set_multithreading_enabled(False)
        outcome = self.outcomes[rank]
        try:
            device = self.job.device_of(rank)
            mine = local.resolve(
                self.job.placement, local_rank=rank, num_local_ranks=self.job.num_ranks, device=device_of(device)
            )
            native = self._started(_load.native().Communicator.local(self.hub, rank))
            comm = Communicator._local(native, device, engine=self.job.engine, placement=mine)
            with comm, _own_stream(device):
                outcome.result = self.job.call(comm)
                with contextlib.suppress(threading.BrokenBarrierError):
                    self.at_end.wait()
        except BaseException as error:  # noqa: BLE001  brought to the caller of spawn
            outcome.error, outcome.when = error, time.monotonic()
            if outcome.when >= self.stopped_at and self._is_of_the_stop(error):
                text = f"rank {rank} was stopped by weft.spawn, because another rank had failed"
                outcome.error = PeerLost((rank,), text)
                outcome.error.__cause__ = error
            self.at_end.abort()
        finally:
            self.ended[rank].set()

    def _is_of_the_stop(self, error: BaseException) -> bool:
        """Whether it comes of communicators that `stop` has closed: a rank may hear of another's before its own is.
        Ranks that had failed before are lost all the same."""
        if isinstance(error, PeerLost):
            had_failed = {each.rank for each in self.outcomes if 0 < each.when < self.stopped_at}
            return not had_failed.issuperset(error.ranks)
        return isinstance(error, InvalidState)

    def _started(self, native: _native.Communicator) -> _native.Communicator:
        """From now on `stop` ends its waits."""
        with self.lock:
            self.natives.append(native)
            is_late = self.stopped_at < float("inf")
        if is_late:
            native.close()
        return native

    def stop(self) -> None:
        """Let every wait of a rank end, and every later call."""
        with self.lock:
            self.stopped_at = min(self.stopped_at, time.monotonic())
            natives = list(self.natives)
        self.at_end.abort()
        for native in natives:
            native.close()

    def stop_after_failure(self) -> None:
        """Stop, once what a failed rank's peers see by themselves, PeerLost, has had its time."""
        whens = [outcome.when for outcome in self.outcomes if outcome.when]
        if whens and self.stopped_at == float("inf") and time.monotonic() > min(whens) + THREAD_GRACE_S:
            self.stop()


def _run_threads(job: _Job) -> list[_Outcome]:
    if job.may_use_cuda:
        from weft.engine import prepare_threads

        prepare_threads(job.num_ranks)
    ranks = _ThreadRanks(job)
    numbers = range(job.num_ranks)
    threads = [threading.Thread(target=ranks.run, args=(rank,), name=f"weft-rank-{rank}") for rank in numbers]
    try:
        for rank, thread in enumerate(threads):
            _start(rank, thread)
        for ended in ranks.ended:  # no join: Python 3.11 takes a thread for ended if Ctrl-C comes inside one
            while not ended.wait(0.1):
                if job.stop_on_failure:
                    ranks.stop_after_failure()
    except BaseException:
        ranks.stop()
        for thread, ended in zip(threads, ranks.ended, strict=True):
            if thread.ident is not None:
                ended.wait()
        raise
    for thread in threads:
        thread.join()
    return ranks.outcomes


def _start(rank: int, thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError:
        if thread.ident is not None:
            raise
        _raise_of(f"starting the thread of rank {rank}", OSError(errno.EAGAIN, ""))


@contextlib.contextmanager
def _own_stream(device: str) -> Iterator[None]:
    """A stream that no other rank has as the current one of this thread, on a GPU."""
    if not device.startswith("cuda"):
        yield
        return
    import torch

    from weft.engine import give_back_stream, own_stream

    stream = own_stream(torch.device(device))
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        give_back_stream(stream)


# ---- ranks as processes


@dataclass
class _Child:
    """A forked rank as its parent sees it. Messages are a length and a pickle: first the endpoint, then, if there are
    spares, the group's address, last the outcome. A spare says instead whether it waits."""

    rank: int
    pid: int
    channel: socket.socket
    waits: bool = False  # a spare that has joined, and is no member
    received: bytearray = field(default_factory=bytearray)
    endpoint: bytes | None = None
    address: str = ""
    outcome: _Outcome | None = None
    has_sent: bool = False
    was_let_go: bool = False

    def take_message(self) -> Any | None:
        """The next whole message, else None. Pickle: the sender is our own child."""
        if len(self.received) < _LENGTH_BYTES:
            return None
        length = int.from_bytes(self.received[:_LENGTH_BYTES], "little")
        if len(self.received) < _LENGTH_BYTES + length:
            return None
        message = pickle.loads(self.received[_LENGTH_BYTES : _LENGTH_BYTES + length])
        del self.received[: _LENGTH_BYTES + length]
        return message


def _run_processes(job: _Job) -> list[_Outcome]:
    import weft.expert_parallel  # noqa: F401  with torch: imported once, before the fork
    from weft import _load

    _load.native()
    if job.placement in ("auto", "process"):
        local.machine_here(with_gpus=job.may_use_cuda)  # read once, before the fork
    _flush()
    children: list[_Child] = []
    try:
        for rank in range(job.num_ranks + job.standby):
            children.append(_fork(job, rank, children))
        _supervise(children, job.num_ranks, job.stop_on_failure)
    finally:
        _kill(children)
    return [child.outcome or _Outcome(child.rank) for child in children]


def _fork(job: _Job, rank: int, earlier: list[_Child]) -> _Child:
    parent_pid = os.getpid()
    try:
        ours, theirs = socket.socketpair()
        pid = os.fork()
    except OSError as error:
        _raise_of(f"starting rank {rank}", error)
    if pid:
        theirs.close()
        return _Child(rank, pid, ours)
    # From here on the child: it never returns into the caller's frames.
    try:
        gc.freeze()  # what the parent has to collect may wait, when it is collected, for threads that are not here
        _die_with_parent(parent_pid)
        ours.close()
        for other in earlier:
            other.channel.close()
        _run_child(job, rank, theirs)
    finally:
        os._exit(1)


def _run_child(job: _Job, rank: int, channel: socket.socket) -> NoReturn:
    import torch

    from weft.communicator import Communicator

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # the parent's OpenMP pool does not exist here
    outcome = _Outcome(rank)

    def share(endpoint: bytes) -> list[bytes]:
        _send(channel, endpoint)
        endpoints: list[bytes] = _receive(channel)
        return endpoints

    comm: Communicator | None = None
    try:
        origin = f"weft.spawn, pid {os.getpid()}"
        device = job.device_of(rank)
        if rank >= job.num_ranks:
            comm = _spare(job, rank, device, channel)
        else:
            comm = Communicator._connect(
                rank, job.num_ranks, share, device, origin, engine=job.engine, placement=job.placement,
                max_ranks=job.max_ranks,
            )  # fmt: skip
            if job.standby:
                _send(channel, comm.address)
        with comm:
            outcome.result = job.call(comm)
            _send_outcome(channel, outcome)
            channel.recv(1)  # the communicator stays open until every rank has come to its end
    except BaseException as error:  # noqa: BLE001  brought to the parent
        waits_in_vain = isinstance(error, PeerLost) and comm is not None and not comm.is_member
        if not outcome.when and waits_in_vain and rank >= job.num_ranks:  # the group has ended without it
            with contextlib.suppress(OSError):
                _send_outcome(channel, outcome)
        elif not outcome.when:
            outcome.error = error
            with contextlib.suppress(OSError):  # the parent is gone: nobody wants to know
                _send_outcome(channel, outcome)
    if "weft.routing.traces" in sys.modules:
        sys.modules["weft.routing.traces"]._finish()  # a trace that the parent began to record
    _flush()
    os._exit(0)


def _spare(job: _Job, rank: int, device: str, channel: socket.socket) -> Communicator:
    """Joined, once the others are connected; tells the parent at each change whether it is a member."""
    from weft.communicator import Communicator

    address: str = _receive(channel)
    comm = Communicator.join(address, slot=rank, standby=True, device=device, placement=job.placement)
    comm.on_change(lambda change: _send(channel, _WORKS if comm.is_member else _WAITS))
    _send(channel, _WAITS)
    return comm


def _send_outcome(channel: socket.socket, outcome: _Outcome) -> None:
    outcome.when = time.monotonic()
    error = outcome.error
    if error is not None:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        outcome.error = _picklable(error)
        _add_note(outcome.error, f"traceback of rank {outcome.rank}:\n{text}")
        notes = getattr(outcome.error, "__notes__", [])
    else:
        notes = []
    try:
        message = pickle.dumps((outcome, notes), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as why:  # noqa: BLE001  whatever a foreign __reduce__ raises
        failure = Error(
            f"the result of rank {outcome.rank}, a {type(outcome.result).__name__}, can't be sent to the parent: {why}"
        )
        message = pickle.dumps((_Outcome(outcome.rank, None, failure, outcome.when), []))
    channel.sendall(len(message).to_bytes(_LENGTH_BYTES, "little") + message)


def _picklable(error: BaseException) -> BaseException:
    """The error itself if it survives a round trip, else a `weft.Error` with its text."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # noqa: BLE001  whatever a foreign __reduce__ raises
        pass
    return Error(f"{type(error).__name__}: {error}")


def _send(channel: socket.socket, message: Any) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    channel.sendall(len(data).to_bytes(_LENGTH_BYTES, "little") + data)


def _receive(channel: socket.socket) -> Any:
    data = bytearray()
    while len(data) < _LENGTH_BYTES or len(data) < _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little"):
        piece = channel.recv(1 << 20)
        if not piece:
            raise Error("the parent of this rank, or a rank that had not connected yet, is gone")
        data += piece
    return pickle.loads(data[_LENGTH_BYTES:])


def _raise_of(action: str, error: OSError) -> NoReturn:
    """What the system refused, as the typed error that names the limit and the mend."""
    from weft import _load

    _load.native().raise_system_error(action, error.errno or 0)
    raise error  # for mypy: the line above has raised


def _selector() -> selectors.BaseSelector:
    try:
        return selectors.DefaultSelector()
    except OSError as error:
        _raise_of("waiting for the ranks", error)


def _supervise(children: list[_Child], num_ranks: int, stop_on_failure: bool) -> None:
    """Hand the endpoints round, collect the outcomes, and end what hangs after a failure."""
    give_up = float("inf")
    with _selector() as selector:
        for child in children:
            selector.register(child.channel, selectors.EVENT_READ, child)
        while any(child.outcome is None for child in children):
            if time.monotonic() > give_up:
                _stop_late(children)
                return
            for key, _ in selector.select(timeout=0.5):
                child = key.data
                if not _read(child):
                    selector.unregister(child.channel)
            _share_endpoints([child for child in children if child.rank < num_ranks])
            _share_address(children, num_ranks)
            _let_go(children)
            _forgive(children, num_ranks)
            if stop_on_failure and give_up == float("inf") and _has_failed(children):
                give_up = time.monotonic() + GRACE_S


def _read(child: _Child) -> bool:
    """Read what is there; False once nothing more will come."""
    try:
        piece = child.channel.recv(1 << 20)
    except ConnectionResetError:
        piece = b""
    child.received += piece
    while (message := child.take_message()) is not None:
        if child.endpoint is None and isinstance(message, bytes):
            child.endpoint = message
        elif isinstance(message, str):
            child.address, child.waits = message, message == _WAITS
        else:
            child.outcome, notes = message
            child.has_sent = True
            if child.outcome.error is not None:
                child.outcome.error.__notes__ = notes
    if piece:
        return True
    if child.outcome is None:
        child.outcome = _death(child)
    return False


def _death(child: _Child) -> _Outcome:
    """The rank's end of the channel closed without an outcome."""
    pid = abs(child.pid)
    status = _reap(child)
    if status is not None and os.WIFSIGNALED(status):
        how = f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    else:
        how = "left without a result" + (
            "" if status is None else f" (exit status {os.waitstatus_to_exitcode(status)})"
        )
    error = PeerLost((child.rank,), f"rank {child.rank} (pid {pid}) {how}")
    return _Outcome(child.rank, None, error, time.monotonic(), was_killed=True)


def _share_endpoints(children: list[_Child]) -> None:
    """Once, when all are there. A rank that fails before it has an endpoint ends the wait of the others."""
    waiting = [child for child in children if child.endpoint]
    if len(waiting) == len(children):
        endpoints = [child.endpoint for child in children]
        for child in children:
            with contextlib.suppress(OSError):  # killed meanwhile: the others find out
                _send(child.channel, endpoints)
            child.endpoint = b""
    elif any(child.endpoint is None and child.outcome is not None for child in children):
        for child in waiting:
            with contextlib.suppress(OSError):
                child.channel.shutdown(socket.SHUT_WR)


def _share_address(children: list[_Child], num_ranks: int) -> None:
    """To the spares, when a rank has said it; once nobody will, their wait ends."""
    founders = children[:num_ranks]
    address = next((child.address for child in founders if child.address), "")
    for child in children[num_ranks:]:
        if child.endpoint is None and address:
            with contextlib.suppress(OSError):  # killed meanwhile
                _send(child.channel, address)
            child.endpoint = b""
        elif child.endpoint is None and any(each.outcome is not None for each in founders):
            child.endpoint = b""
            with contextlib.suppress(OSError):
                child.channel.shutdown(socket.SHUT_WR)


def _let_go(children: list[_Child]) -> None:
    """When all but spares that still wait have come to their end, these close, which ends the spares' wait."""
    if all(child.outcome is not None or child.waits for child in children):
        for child in children:
            if child.outcome is not None and not child.was_let_go:
                child.was_let_go = True
                with contextlib.suppress(OSError):  # it is gone already
                    child.channel.shutdown(socket.SHUT_WR)


def _forgive(children: list[_Child], num_ranks: int) -> None:
    """A spare that still makes its objects when the others close has failed at nothing."""
    if any(child.was_let_go for child in children[:num_ranks]):
        for child in children[num_ranks:]:
            outcome = child.outcome
            if not child.waits or outcome is None or outcome.was_killed:
                continue
            if isinstance(outcome.error, PeerLost | InvalidState):
                outcome.error = None


def _has_failed(children: list[_Child]) -> bool:
    return any(child.outcome is not None and child.outcome.error is not None for child in children)


def _stop_late(children: list[_Child]) -> None:
    for child in children:
        if child.outcome is None:
            text = (
                f"rank {child.rank} was stopped by weft.spawn: it went on for {GRACE_S:g} s after another rank failed"
            )
            child.outcome = _Outcome(child.rank, None, PeerLost((child.rank,), text), time.monotonic())


def _kill(children: list[_Child]) -> None:
    """Leave no process: those that have sent an outcome leave by themselves, the others are killed."""
    for child in children:
        if child.has_sent:
            with contextlib.suppress(OSError):  # it is gone already
                child.channel.shutdown(socket.SHUT_WR)
        elif child.pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
    for child in children:
        _reap(child)
        child.channel.close()


def _reap(child: _Child) -> int | None:
    """Wait for the process to end; its status, or None if that is known no more."""
    if child.pid <= 0:
        return None
    pid, child.pid = child.pid, -child.pid
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:  # somebody else reaped it, or SIGCHLD is ignored
        return None


def _die_with_parent(parent_pid: int) -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


_callable.make_callable(__name__, spawn)
