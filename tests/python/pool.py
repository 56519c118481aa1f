"""A pool of rank processes, forked once from the test process (which has imported torch), for tests of many small
cases.

``Pool.run(num_ranks, function, args)`` calls ``function(state, args[rank])`` on the first ``num_ranks`` processes and
returns their results. Functions travel by name, so they live in modules imported before the pool starts. A communicator
of each size is made when first asked for, and kept. A rank that raises, dies or is silent ends the pool; the next
``run`` starts a fresh one.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from weft import Communicator, spawn

MAX_RANKS = 8
ANSWER_TIMEOUT_S = 600.0
AFTER_FAILURE_S = 3.0


class RankFailed(AssertionError):
    """A rank of the pool raised, died or did not answer; the text says which and how."""


@dataclass
class RankState:
    """What a rank process keeps between cases; ``comm`` is the communicator of the current case."""

    rank: int
    communicators: dict[int, Communicator] = field(default_factory=dict)
    num_ranks: int = 0

    @property
    def comm(self) -> Communicator:
        return self.communicators[self.num_ranks]


def run_threads(
    num_ranks: int, function: Callable[[RankState, Any], Any], args: Sequence[Any], *, device: str
) -> list[Any]:
    """As `Pool.run`, on ranks that are threads of this process."""

    def work(comm: Communicator) -> Any:
        return function(RankState(comm.rank, {num_ranks: comm}, num_ranks), args[comm.rank])

    outcomes = spawn(work, num_ranks, device=device, isolation="thread", on_failure="return")
    failed = [(rank, each) for rank, each in enumerate(outcomes) if isinstance(each, BaseException)]
    if failed:
        raise RankFailed(
            "\n".join(f"rank {rank}: {''.join(traceback.format_exception(each))}" for rank, each in failed)
        )
    return outcomes


class Pool:
    """The parent's side. Use as a context manager, or call ``stop``. `device`: None, or "cuda", GPU rank % number."""

    def __init__(self, device: str | None = None, max_ranks: int = MAX_RANKS) -> None:
        self._device, self._max_ranks = device, max_ranks
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._sizes: set[int] = set()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def run(
        self,
        num_ranks: int,
        function: Callable[[RankState, Any], Any],
        args: Sequence[Any],
        *,
        may_die: Collection[int] = (),
    ) -> list[Any]:
        """Call ``function`` on the first ``num_ranks`` ranks; ``RankFailed`` holds every failed rank's traceback.

        Ranks in ``may_die`` give None if they die; the pool is of no use then.
        """
        if not self._processes:
            self._start()
        try:
            if num_ranks not in self._sizes:
                self._connect(num_ranks)
            for rank in range(num_ranks):
                _send(self._connections[rank], ("run", num_ranks, function, args[rank]))
            return self._answers(num_ranks, may_die)
        except BaseException:
            self.stop()  # ranks may be anywhere inside a collective call
            raise

    def stop(self) -> None:
        """End the processes; they hold nothing that outlives them."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections, self._sizes = [], [], set()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        for rank in range(self._max_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(rank, theirs, [*self._connections, ours]), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _connect(self, num_ranks: int) -> None:
        for connection in self._connections[:num_ranks]:
            _send(connection, ("connect", num_ranks, None, self._device))
        endpoints = self._answers(num_ranks)
        for connection in self._connections[:num_ranks]:
            _send(connection, endpoints)
        self._answers(num_ranks)
        self._sizes.add(num_ranks)

    def _answers(self, num_ranks: int, may_die: Collection[int] = ()) -> list[Any]:
        """One answer of each rank; once a rank has failed the others only get time to say what they saw."""
        results: list[Any] = [None] * num_ranks
        failures: list[str] = []
        waiting = {connection: rank for rank, connection in enumerate(self._connections[:num_ranks])}
        while waiting:
            ready = wait(list(waiting), AFTER_FAILURE_S if failures else ANSWER_TIMEOUT_S)
            if not ready:
                failures += [f"rank {rank}: no answer" for rank in waiting.values()]
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    kind, results[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    if rank in may_die:
                        continue
                    self._processes[rank].join(5)
                    kind, results[rank] = "failed", f"died, exit code {self._processes[rank].exitcode}"
                if kind == "failed":
                    failures.append(f"rank {rank}: {results[rank]}")
        if failures:
            raise RankFailed("\n".join(failures))
        return results


class _Pickler(pickle.Pickler):
    """Tensors as bytes: torch's way between processes passes descriptors, its way in files lacks 8-bit floats."""

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        fresh = value.detach().view(torch.uint8) if value.element_size() == 1 else value.detach()
        fresh = fresh.clone(memory_format=torch.contiguous_format)
        data = fresh.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, tuple(value.shape), value.dtype)


def _tensor(data: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if not data:  # as bytes first: torch can't fill new memory of every dtype, where it was told to
        return torch.empty(0, dtype=torch.uint8).view(dtype).reshape(shape)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _send(connection: Connection, message: object) -> None:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    connection.send_bytes(buffer.getvalue())


def _rank_main(rank: int, connection: Connection, of_parent: Sequence[Connection]) -> None:
    for inherited in of_parent:  # else no rank would see the parent's end
        inherited.close()
    torch.set_num_threads(1)
    state = RankState(rank)
    while True:
        try:
            kind, num_ranks, function, argument = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # the parent is gone or done; nothing of ours needs a clean end (R18)
        try:
            if kind == "connect":
                state.communicators[num_ranks] = _connect(rank, num_ranks, connection, argument)
                answer: tuple[str, object] = ("done", None)
            else:
                state.num_ranks = num_ranks
                answer = ("done", function(state, argument))
        except BaseException:
            answer = ("failed", traceback.format_exc())
        with contextlib.suppress(BrokenPipeError):
            _send(connection, answer)


def _connect(rank: int, num_ranks: int, connection: Connection, device: str | None) -> Communicator:
    if device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)

    def share(endpoint: bytes) -> list[bytes]:
        _send(connection, ("done", endpoint))
        endpoints: list[bytes] = pickle.loads(connection.recv_bytes())
        return endpoints

    return Communicator._connect(rank, num_ranks, share, device, "pool of test ranks", timeout_s=60.0)
