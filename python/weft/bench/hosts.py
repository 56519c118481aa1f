"""Several machines on one: a network namespace a host, joined by a bridge, with torchrun's variables in each.

Ranks are forked from this process, which has imported torch. A namespace counts as a machine of its own, and its cable
can be pulled. Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from weft import env
from weft.errors import InternalError

__all__ = ["LONG_S", "HostRank", "Hosts"]

LONG_S = 60.0
_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


class HostRank:
    """A rank, as its parent sees it: `say` and `hear` are its end of a pipe."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process, self.pipe = process, pipe

    def say(self, what: object) -> None:
        self.pipe.send(what)

    def hear(self, timeout_s: float = LONG_S) -> Any:
        """What it says next; its error is raised here."""
        if not self.pipe.poll(timeout_s):
            raise InternalError("the rank says nothing")
        try:
            what = self.pipe.recv()
        except EOFError:
            self.process.join()
            raise InternalError(f"the rank has ended with {self.process.exitcode}") from None
        if isinstance(what, _Failed):
            raise InternalError(what.text)
        return what

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        """Wait for an orderly end."""
        self.process.join(LONG_S)
        if self.process.exitcode != 0:
            raise InternalError(f"the rank has ended with {self.process.exitcode}")


class _Failed:
    def __init__(self, text: str) -> None:
        self.text = text


class Hosts:
    """`num_hosts` machines; host h has the address `address(h)`."""

    def __init__(self, num_hosts: int) -> None:
        self._name = f"wt{os.getpid() % 100000}{next(_numbers) % 100}"
        self._made: list[tuple[str, ...]] = []
        self.num_hosts = num_hosts
        self.ranks: list[HostRank] = []
        try:
            self._make("link", "del", made=("link", "add", f"{self._name}b", "type", "bridge"))
            _ip("link", "set", f"{self._name}b", "up")
            for host in range(num_hosts):
                self._make("netns", "del", made=("netns", "add", self.namespace(host)))
                _ip(
                    "link",
                    "add",
                    self._cable(host),
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    self.namespace(host),
                )
                _ip("link", "set", self._cable(host), "master", f"{self._name}b", "up")
                _ip("-n", self.namespace(host), "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
                _ip("-n", self.namespace(host), "link", "set", "lo", "up")
                _ip("-n", self.namespace(host), "link", "set", "eth0", "up")
        except BaseException:
            self.close()
            raise

    def _make(self, *undo: str, made: tuple[str, ...]) -> None:
        _ip(*made)
        self._made.append((*undo, made[2]))

    def namespace(self, host: int) -> str:
        return f"{self._name}h{host}"

    def _cable(self, host: int) -> str:
        return f"{self._name}c{host}"

    @staticmethod
    def address(host: int) -> str:
        return f"10.213.7.{host + 1}"

    def pull_cable(self, host: int) -> None:
        _ip("link", "set", self._cable(host), "down")

    def mend_cable(self, host: int) -> None:
        _ip("link", "set", self._cable(host), "up")

    def enter(self, host: int) -> None:
        """This process from now on."""
        with open(f"/var/run/netns/{self.namespace(host)}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")

    def start(self, host: int, body: Callable[..., None], *args: object, **variables: object) -> HostRank:
        """Fork a process of `host` that runs body(pipe, *args) with these variables."""
        import weft.communicator  # noqa: F401  with torch: imported once, before the fork

        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(
            target=self._run, args=(host, ours, theirs, body, args, variables), daemon=True
        )
        process.start()
        theirs.close()
        rank = HostRank(process, ours)
        self.ranks.append(rank)
        return rank

    def start_ranks(
        self, body: Callable[..., None], *args: object, ranks_per_host: int = 1, port: int = 29611, **variables: object
    ) -> list[HostRank]:
        """One job, as torchrun without an agent's store starts it: rank 0 hosts the store."""
        started = []
        for rank in range(self.num_hosts * ranks_per_host):
            host, local = divmod(rank, ranks_per_host)
            torchrun = {
                "RANK": rank,
                "WORLD_SIZE": self.num_hosts * ranks_per_host,
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": ranks_per_host,
                "MASTER_ADDR": self.address(0),
                "MASTER_PORT": port,
            }
            started.append(self.start(host, body, *args, **(torchrun | variables)))
        return started

    def _run(
        self,
        host: int,
        parents: Connection,
        pipe: Connection,
        body: Callable[..., None],
        args: tuple[object, ...],
        variables: dict[str, object],
    ) -> None:
        parents.close()
        import torch

        torch.set_num_threads(1)  # the parent's OpenMP pool does not exist here
        env.set_variables({name: str(value) for name, value in variables.items()})
        code = 1
        try:
            self.enter(host)
            body(pipe, *args)
            code = 0
        except BaseException:  # noqa: BLE001  brought to the parent
            with contextlib.suppress(OSError):
                pipe.send(_Failed(traceback.format_exc()))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def close(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.signal(signal.SIGKILL)
            rank.process.join()
            rank.pipe.close()
        cables = [("link", "del", self._cable(host)) for host in range(self.num_hosts)]
        for undo in (*cables, *reversed(self._made)):
            with contextlib.suppress(subprocess.SubprocessError):
                _ip(*undo)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
