"""How ranks of several machines decide who belongs to the group: compare-and-set in a store that all of them reach.

docs/protocols/membership.md, "Between machines", has the keys and the values. This module imports torch only inside
functions.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias

from weft import env
from weft.errors import InvalidArgument

if TYPE_CHECKING:
    from torch.distributed import Store

    from weft import _native

__all__ = ["Decide", "Network", "Secret", "by_store", "serve"]

Decide: TypeAlias = Callable[[str, str, str], bytes | str]
Secret: TypeAlias = "str | os.PathLike[str] | int | None"

_STORE_S = 10.0  # for one question to the store
_LEAST_SECRET, _MOST_SECRET = 16, 4096  # bytes


@dataclass(frozen=True)
class Network:
    """What a rank needs for peers on other machines: how to `decide`, and the `secret` of the user, if any."""

    decide: Decide
    secret: bytes = field(default=b"", repr=False)
    interface: str = ""
    port: int = 0

    @classmethod
    def make(cls, decide: Decide, secret: Secret) -> Network:
        """With what the environment says.

        Raises:
            InvalidArgument: `decide` can't be called, the secret can't be read or others can read it, or a variable of
                the environment is set to what is not allowed.
        """
        if not callable(decide):
            raise InvalidArgument(f"decide is {decide!r}; allowed is a function of key, expected and desired")
        return cls(decide, _read_secret(secret), *env.control())


def by_store(store: Store) -> Decide:
    """Compare-and-set in a store of torch.distributed."""

    def decide(key: str, expected: str, desired: str) -> bytes:
        if expected or desired:
            return bytes(store.compare_set(key, expected, desired))
        return bytes(store.get(key)) if store.check([key]) else b""

    return decide


def of_group(store: Store) -> Decide:
    """In the store of a process group, by a connection of its own where that can be: the program may wait in the
    group's for as long as it likes, and holds it up."""
    import torch.distributed as dist

    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if not isinstance(base, dist.TCPStore):
        return by_store(store)
    with contextlib.suppress(RuntimeError):
        own: Store = dist.TCPStore(
            base.host, base.port, None, False, timedelta(seconds=_STORE_S), wait_for_workers=False
        )
        return by_store(dist.PrefixStore("weft", own))
    return by_store(dist.PrefixStore("weft", base))


def serve(decider: _native.Decider, decide: Decide) -> None:
    """Answer what the native module asks, in a thread of its own, until it closes. A store that hangs keeps that thread
    alone."""

    def run() -> None:
        while (request := decider.next()) is not None:
            number, key, expected, desired = request
            try:
                value = decide(key, expected, desired)
                if not isinstance(value, str | bytes):
                    raise TypeError(f"decide returned {value!r}; allowed are bytes and str")
                answer = value.encode() if isinstance(value, str) else value
            except Exception as error:  # noqa: BLE001  of whatever store: it is tried again, then ControlLost has it
                decider.fail(number, f"{type(error).__name__}: {error}".encode(errors="replace").decode())
            else:
                decider.answer(number, answer)

    threading.Thread(target=run, name="weft-deciding", daemon=True).start()


def _read_secret(secret: Secret) -> bytes:
    """Of a file that its owner alone can read, or an open descriptor: who made that has chosen who may. Of a file it is
    read from the start, so that the descriptor serves again."""
    if secret is None:
        return b""
    if isinstance(secret, bool) or not isinstance(secret, str | os.PathLike | int):
        raise InvalidArgument(f"secret is {secret!r}; allowed are the path of a file, an open descriptor and None")
    name = f"descriptor {secret}" if isinstance(secret, int) else f"file {os.fspath(secret)!r}"
    try:
        fd = os.dup(secret) if isinstance(secret, int) else os.open(secret, os.O_RDONLY | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            about = os.fstat(fd)
            is_file = stat.S_ISREG(about.st_mode)
            is_shared = about.st_mode & 0o077 or about.st_uid != os.geteuid()
            if is_file and is_shared and not isinstance(secret, int):
                raise InvalidArgument(
                    f"secret: {name} can be read by others (mode {about.st_mode & 0o777:04o}, owner {about.st_uid}); "
                    "make it this user's, with mode 0600"
                )
            found = os.pread(fd, _MOST_SECRET + 1, 0) if is_file else file.read(_MOST_SECRET + 1)
    except OSError as error:
        raise InvalidArgument(f"secret: {name} can't be read: {error}") from error
    if not _LEAST_SECRET <= len(found) <= _MOST_SECRET:
        raise InvalidArgument(
            f"secret: {name} holds {len(found) if len(found) <= _MOST_SECRET else 'more'} bytes; allowed are "
            f"{_LEAST_SECRET} to {_MOST_SECRET}"
        )
    return found
