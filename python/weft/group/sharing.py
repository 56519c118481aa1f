"""What ranks tell and hand each other beside calls: `gather`, `share` and `fetch`. docs/protocols/sharing.md."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import socket
import struct
import threading
import time
import weakref
from typing import Any

import torch
from torch import Tensor

from weft import _load
from weft.call.tensors import plain
from weft.errors import Error, InvalidArgument, InvalidState, PeerLost, PeerTimeout, Unsupported, rank_list
from weft.group.turns import Process, positive_seconds
from weft.group.windows import Windows

__all__ = ["Sharing"]

MAX_GATHER_BYTES = (16 << 20) - 1  # kMaxMessageBytes of src/bootstrap/control_plane.h, less a mark
_MARK = b"\0"  # of what gather sends; what calls compare begins with a brace
_MAX_NAME = 200
_MAX_MESSAGE = 32 << 10
_NAMES_SHOWN = 64
_CALLER_S = 1.0  # for a caller to say what it wants
_SLICE_S = 0.02  # between two looks whether the owner lives
_SEALS = 0x0001 | 0x0002 | 0x0004 | 0x0008  # F_SEAL_SEAL, _SHRINK, _GROW, _WRITE
_ADD_SEALS = 1033
_CLOSE_ON_EXEC = 0x40000000  # MSG_CMSG_CLOEXEC
_PIECE = 1 << 30  # bytes of a read or write


class Sharing(Windows):
    """The part of a communicator by which ranks hand each other bytes and tensors."""

    _closed: bool

    def __init__(self) -> None:
        super().__init__()
        self._shelf: _Shelf | None = None
        self._shelf_lock = threading.RLock()  # a signal handler may close the communicator inside of share()

    def gather(self, data: bytes, *, deadline_s: float = 100.0) -> dict[int, bytes]:
        """What every active rank gives, by rank; lengths may differ. Collective among the active ranks, as a
        constructor: on all of them in the same order with the other calls. For statistics and plans: it goes through
        the control plane, at most 16 MiB - 1 a rank.

        Raises:
            InvalidArgument: `data` is not bytes, or too long (on this rank); other ranks made another call.
            InvalidState: closed, forked or busy.
            PeerTimeout, PeerLost: a rank did not take part; the communicator is broken until `recover`.
        """
        with self.telling_peers():
            if not isinstance(data, bytes | bytearray | memoryview):
                raise InvalidArgument(f"data is a {type(data).__name__}; bytes are expected")
            given = bytes(data)
            if len(given) > MAX_GATHER_BYTES:
                raise InvalidArgument(f"data has {len(given)} bytes; allowed are 0 to {MAX_GATHER_BYTES}")
            seconds = positive_seconds("deadline_s", deadline_s)
            turn = self.alone("gather")
        with turn:
            found = self._exchange_bytes(_MARK + given, seconds)
        others = [rank for rank, each in found.items() if not each.startswith(_MARK)]
        if others:
            raise InvalidArgument(f"gather: {rank_list(others)} made another call of the communicator meanwhile")
        return {rank: each[1:] for rank, each in found.items()}

    def share(self, name: str, tensor: Tensor | None) -> None:
        """Let the other ranks `fetch` the values that `tensor` has now. They are copied here: that takes as much memory
        again, and later changes are not seen. The same name again replaces them, None takes them back, `close` all.
        Local, never waits; from any thread.

        Raises:
            InvalidArgument: `name` is no str of 1 to 200 bytes, or `tensor` no dense tensor.
            InvalidState: closed, or forked. Evicted: the others have gone on without this rank.
            Unsupported: the tensor is on a GPU.
            CapacityExceeded: no memory, or no descriptors.
        """
        self._check_usable("share")
        _check_name(name)
        if tensor is None:
            if self._shelf is not None:
                self._shelf.take_back(name)
            return
        tensor = _dense("tensor", tensor)
        facts = {"shape": list(tensor.shape), "dtype": str(tensor.dtype)}
        try:
            self._shelf_of_this_rank().put(name, facts, tensor)
        except OSError as error:
            _load.native().raise_system_error("sharing a tensor", error.errno or 0)

    def _shelf_of_this_rank(self) -> _Shelf:
        """Made by the first thread that shares."""
        with self._shelf_lock:
            self._check_usable("share")
            if self._shelf is None:
                self._shelf = _Shelf(self._address_of(self._rank))
                weakref.finalize(self, self._shelf.close).atexit = False  # where nobody calls close()
                if self._closed:
                    self._shelf.close()
            return self._shelf

    def fetch(self, name: str, rank: int, out: Tensor, *, deadline_s: float = 100.0) -> Tensor:
        """Copy what `rank` shares as `name` to `out`, and return it. That rank is not disturbed: it may be in a call,
        or compute. From any thread, also beside a call, and while the communicator is broken. A rank that has joined,
        or is suspended, fetches from the members before it is taken in.

        Args:
            out: contiguous, in host memory, of the shape and dtype that were shared.

        Raises:
            InvalidArgument: nothing of that name is shared there (the text names what is), `rank` is no active rank, or
                shape or dtype of `out` are others; `out` is as it was.
            InvalidState: closed, or forked. Evicted: the others have gone on without this rank.
            Unsupported: `rank` is on another machine, or `out` on a GPU.
            PeerLost: `rank` has died or closed. What it broke of other calls, they raise themselves.
            PeerTimeout: `rank` did not answer; the communicator is as it was.
            CapacityExceeded: no descriptors.
        """
        self._check_usable("fetch")
        _check_name(name)
        deadline = time.monotonic() + positive_seconds("deadline_s", deadline_s)
        owners = self._native.members() if self._native.is_solo else list(self._active)  # who joins loads weights
        if type(rank) is not int or rank not in owners:
            raise InvalidArgument(f"rank is {rank!r}; allowed are active ranks: {owners}")
        if not self._native.is_near(rank):
            raise Unsupported("fetch between machines", f"rank {rank} on another one", "ranks of one machine")
        out = _dense("out", out)
        if not out.is_contiguous():
            raise InvalidArgument(f"out has strides {out.stride()}; a contiguous tensor is expected")
        if out.requires_grad and torch.is_grad_enabled():
            raise InvalidArgument("out requires grad; fetch writes into it: use torch.no_grad() or out.detach()")
        answer, fd = self._ask(name, rank, deadline)
        try:
            if "names" in answer:
                raise InvalidArgument(f"rank {rank} shares no {name!r}; {_listed(answer['names'], answer['total'])}")
            wanted = {"shape": list(out.shape), "dtype": str(out.dtype)}
            for key in ("dtype", "shape"):
                if answer[key] != wanted[key]:
                    raise InvalidArgument(
                        f"out has {key} {wanted[key]}; rank {rank} shares {name!r} with {key} {answer[key]}"
                    )
            _read_into(fd, out)
        finally:
            if fd >= 0:
                os.close(fd)
        return out

    def _ask(self, name: str, rank: int, deadline: float) -> tuple[dict[str, Any], int]:
        """What it answers, and a descriptor, -1 if none came."""
        while True:
            message, fd = self._ask_once(name, rank, deadline)
            if message:
                return json.loads(message), fd
            self._raise_if_late(rank, deadline)  # it ended in the middle
            time.sleep(_SLICE_S)

    def _ask_once(self, name: str, rank: int, deadline: float) -> tuple[bytes, int]:
        try:
            call = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            _load.native().raise_system_error("fetch: making a socket", error.errno or 0)
        with call:
            try:
                self._connect_to(call, rank, deadline)
                _check_user(call, f"rank {rank}")
                call.sendall(json.dumps({"name": name}).encode())
                while True:
                    call.settimeout(_SLICE_S)
                    with contextlib.suppress(TimeoutError):
                        message, fds, flags, _ = socket.recv_fds(call, _MAX_MESSAGE, 1, _CLOSE_ON_EXEC)
                        break
                    self._raise_if_late(rank, deadline)
            except ConnectionRefusedError:
                if self._native.has_ended(rank):  # that shows before its door is shut
                    raise PeerLost((rank,), f"fetch: rank {rank} has died or closed its communicator") from None
                return _listing([]), -1
            except OSError:
                return b"", -1
        if flags & socket.MSG_CTRUNC:
            _load.native().raise_system_error("fetch: taking the descriptor of a tensor", errno.EMFILE)
        return message, fds[0] if fds else -1

    def _connect_to(self, call: socket.socket, rank: int, deadline: float) -> None:
        """A stopped owner's queue of callers may be full."""
        call.setblocking(False)
        while True:
            try:
                call.connect(self._address_of(rank))
                return
            except BlockingIOError:
                self._raise_if_late(rank, deadline)
                time.sleep(_SLICE_S)

    def _raise_if_late(self, rank: int, deadline: float) -> None:
        self._check_usable("fetch")
        if time.monotonic() > deadline:
            raise PeerTimeout("fetch", 0, (rank,), f"fetch: rank {rank} did not answer before the deadline")

    def _address_of(self, rank: int) -> str:
        """Of the incarnation that has this rank: nobody outside of the group knows the numbers that it is made of."""
        facts = self._native.group() + struct.pack("<iQ", rank, self._native.incarnation(rank))
        return "\0weft-share-" + hashlib.sha256(facts).hexdigest()[:32]

    def _check_usable(self, what: str) -> None:
        if self._closed:
            raise InvalidState(f"{what}: the communicator is closed; make a new one")
        if self._pid != Process.pid:
            raise InvalidState(f"{what}: this is a forked child (pid {os.getpid()}); make a communicator in it")
        self._native.raise_if_evicted()

    def _stop_sharing(self) -> None:
        with self._shelf_lock:
            if self._shelf is not None:
                self._shelf.close()


class _Shelf:
    """What a rank shares: sealed memfds by name, and the thread that hands them out. A forked child lets go of all."""

    def __init__(self, address: str) -> None:
        self._lock = threading.RLock()  # a signal handler may close the communicator inside of put()
        self._items: dict[str, tuple[dict[str, Any], int]] = {}
        self._is_closed = False
        self._call: socket.socket | None = None  # whom the thread answers
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._door.bind(address)
            self._door.listen(64)
        except BaseException:
            self._door.close()
            raise
        _shelves.add(self)
        self._thread = threading.Thread(target=self._serve, name="weft-share", daemon=True)
        self._thread.start()

    def put(self, name: str, facts: dict[str, Any], tensor: Tensor) -> None:
        fd = _sealed(tensor)
        with self._lock:
            if self._is_closed:
                os.close(fd)
                raise InvalidState("share: the communicator is closed; make a new one")
            old = self._items.get(name)
            self._items[name] = (facts, fd)
        if old is not None:
            os.close(old[1])

    def take_back(self, name: str) -> None:
        with self._lock:
            old = self._items.pop(name, None)
        if old is not None:
            os.close(old[1])

    def close(self) -> None:
        """Nobody is answered any more, and the memory is given back. Nothing in a forked child."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for each in (self._door, self._call):
                with contextlib.suppress(OSError):
                    if each is not None:
                        each.shutdown(socket.SHUT_RDWR)
        try:
            if self._thread is not threading.current_thread():
                self._thread.join(2 * _CALLER_S)
        finally:
            self._door.close()
            with self._lock:
                items, self._items = self._items, {}
            for _, fd in items.values():
                os.close(fd)

    def forget(self) -> None:
        """In a forked child: the lock may be one of a thread that it has not."""
        self._lock, self._is_closed = threading.RLock(), True
        self._door.close()
        for _, fd in self._items.values():
            with contextlib.suppress(OSError):
                os.close(fd)
        self._items = {}

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                call, _ = self._door.accept()
            except OSError:  # closed, or no descriptors
                time.sleep(_SLICE_S)
                continue
            with call:
                with self._lock:
                    self._call = None if self._is_closed else call
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError, Error):
                    if self._call is not None:
                        self._answer(call)
                with self._lock:
                    self._call = None

    def _answer(self, call: socket.socket) -> None:
        call.settimeout(_CALLER_S)
        _check_user(call, "a caller")
        name = json.loads(call.recv(_MAX_MESSAGE))["name"]
        with self._lock:  # the descriptor must not be closed before it was sent
            if name in self._items:
                facts, fd = self._items[name]
                socket.send_fds(call, [json.dumps(facts).encode()], [fd])
                return
            names = list(self._items)
        call.sendall(_listing(names))


_shelves: weakref.WeakSet[_Shelf] = weakref.WeakSet()


def _forget_in_child() -> None:
    for shelf in list(_shelves):
        shelf.forget()


os.register_at_fork(after_in_child=_forget_in_child)


def _listing(names: list[str]) -> bytes:
    """The first names, as many as a message takes."""
    shown = sorted(names)[:_NAMES_SHOWN]
    while len(message := json.dumps({"names": shown, "total": len(names)}).encode()) > _MAX_MESSAGE:
        shown.pop()
    return message


def _check_user(call: socket.socket, who: str) -> None:
    """The other end must be a process of this user."""
    facts = call.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", facts)
    if uid != os.geteuid():
        raise Unsupported("sharing between users", f"{who} of user {uid}", f"user {os.geteuid()}")


def _sealed(tensor: Tensor) -> int:
    """A memfd with the values, that nobody can change any more."""
    fd = os.memfd_create("weft-share", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = _bytes_of(tensor.detach().contiguous())
        while view:
            view = view[os.write(fd, view[:_PIECE]) :]
        fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read_into(fd: int, out: Tensor) -> None:
    view, at = _bytes_of(out.detach()), 0
    if fd < 0 or os.fstat(fd).st_size != len(view):
        raise InvalidArgument("the rank has sent other memory than it has told of")
    while at < len(view):
        at += os.preadv(fd, [view[at : at + _PIECE]], at)


def _bytes_of(tensor: Tensor) -> memoryview:
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).numpy().data.cast("B")


def _dense(name: str, given: Any) -> Tensor:
    """The plain tensor that an argument stands for."""
    tensor: Any = plain(given, name)
    is_dense = isinstance(tensor, Tensor) and tensor.layout is torch.strided and not tensor.is_nested
    is_dense = is_dense and type(tensor) in (Tensor, torch.nn.Parameter)  # no fake
    if not is_dense or tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise InvalidArgument(f"{name} is {type(tensor).__name__}; a dense tensor is expected")
    if tensor.device.type != "cpu":
        raise Unsupported(f"{name} on {tensor.device}", "tensors of GPUs", "a tensor in host memory: tensor.cpu()")
    return tensor  # type: ignore[no-any-return]


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not 0 < len(name.encode(errors="replace")) <= _MAX_NAME:
        raise InvalidArgument(f"name is {name!r}; allowed is a str of 1 to {_MAX_NAME} bytes")


def _listed(names: list[str], total: int) -> str:
    if not names:
        return "it shares nothing"
    more = f" and {total - len(names)} more" if total > len(names) else ""
    return f"it shares {', '.join(map(repr, names))}{more}"
