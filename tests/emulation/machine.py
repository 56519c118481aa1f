"""The memory of all ranks, and the streams that launch emulated kernels on it."""

import contextlib
import itertools
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from kernels import Program
from torch import Tensor

BASE = 0x200000000000  # driver.h has the same
ALIGN = 256
RED_ZONE = 256  # bytes behind everything that stay as they are


class Memory:
    """Memory that every rank reaches, poisoned. Addresses are those of the emulated kernels."""

    def __init__(self, num_bytes: int, poison: int) -> None:
        self.poison = poison
        self.num_bytes = (num_bytes + 4095) // 4096 * 4096
        self.file = os.memfd_create("weft-emulation")  # goes with the last process that has it
        os.ftruncate(self.file, self.num_bytes)
        with os.fdopen(os.dup(self.file), "r+b") as file:
            self.bytes = np.memmap(file, np.uint8, "r+", shape=(self.num_bytes,))
        self.bytes[:] = poison
        self._next = ALIGN
        self._ends: list[tuple[int, int]] = []

    def close(self) -> None:
        """Give the memory back."""
        os.close(self.file)

    def allocate(self, num_bytes: int) -> int:
        """Poisoned memory; returns its address."""
        begin = self._next
        self._next = (begin + num_bytes + RED_ZONE + ALIGN - 1) // ALIGN * ALIGN
        if self._next > self.num_bytes:
            raise MemoryError(f"the emulated memory of {self.num_bytes} bytes is too small")
        self._ends.append((begin + num_bytes, self._next))
        return BASE + begin

    def put(self, tensor: Tensor) -> int:
        """Memory with the bytes of a tensor."""
        data = as_bytes(tensor)
        address = self.allocate(len(data))
        self.view(address, len(data))[:] = data
        return address

    def view(self, address: int, num_bytes: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        """The bytes at an address, not a copy."""
        return self.bytes[address - BASE : address - BASE + num_bytes]

    def tensor(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A copy of what lies at an address."""
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if num_bytes == 0:
            return torch.zeros(tuple(shape), dtype=dtype)
        return torch.from_numpy(self.view(address, num_bytes).copy()).view(dtype).reshape(tuple(shape))

    def word(self, address: int, dtype: str = "u8") -> int:
        """A word, as numpy's `dtype`."""
        return int(self.view(address, np.dtype(dtype).itemsize).view(dtype)[0])

    def set_word(self, address: int, value: int, dtype: str = "u8") -> None:
        """Write a word."""
        self.view(address, np.dtype(dtype).itemsize).view(dtype)[0] = value

    def written_red_zones(self) -> list[int]:
        """Addresses behind an allocation that somebody has written."""
        found = []
        for begin, end in self._ends:
            wrong = np.nonzero(self.bytes[begin:end] != self.poison)[0]
            found += [BASE + begin + int(wrong[0])] if len(wrong) else []
        return found


def as_bytes(tensor: Tensor) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """The bytes of a tensor of any dtype."""
    data: np.ndarray[tuple[int], np.dtype[np.uint8]] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return data


@dataclass(frozen=True)
class Launch:
    """One kernel of one rank: its program, the values of its arguments by the names of driver.h.

    `copies`: what the host copies when it has ended, (to, from, bytes).
    """

    program: "Future[Program]"
    fields: dict[str, int]
    copies: tuple[tuple[int, int, int], ...] = ()

    def text(self, poison: int) -> str:
        """As driver.h reads it."""
        values = {**self.fields, "poison": poison, "num_copies": len(self.copies)}
        for idx, copy in enumerate(self.copies):
            values |= {f"copy{idx}_{name}": value for name, value in zip(("to", "from", "bytes"), copy, strict=True)}
        return "".join(f"{name} {value}\n" for name, value in values.items())


def sleeping(folder: Path, num_ns: int) -> Launch:
    """What makes a stream late."""
    sleep = folder / "sleep"
    sleep.write_text(f"#!/bin/sh\nexec sleep {num_ns / 1e9}\n")
    sleep.chmod(0o700)
    program: Future[Program] = Future()
    program.set_result(Program(sleep, sleep))
    return Launch(program, {})


class LaunchFailed(Exception):
    """An emulated kernel found a mistake, died, or did not end."""


class Streams:
    """The streams of all ranks, each with its launches in order; they wait for each other only in the kernels."""

    def __init__(self, memory: Memory, streams: Sequence[Sequence[Launch]], *, seed: int, timeout_s: float) -> None:
        self._memory, self._streams, self._seed, self._timeout_s = memory, streams, seed, timeout_s
        self._failures: list[str] = []
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._lock = threading.Lock()

    def run(self) -> None:
        """Leaves no process behind. Raises LaunchFailed, and what compiling raises."""
        for launch in itertools.chain(*self._streams):
            launch.program.result()
        with tempfile.TemporaryDirectory(prefix="emulated-") as folder:
            threads = [
                threading.Thread(target=self._run_stream, args=(rank, Path(folder)))
                for rank in range(len(self._streams))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self._failures:
            raise LaunchFailed(self._failures[0])

    def _run_stream(self, rank: int, folder: Path) -> None:
        for idx, (program, launches) in enumerate(itertools.groupby(self._streams[rank], lambda each: each.program)):
            paths = []
            for nth, launch in enumerate(launches):
                paths.append(folder / f"{rank}-{idx}-{nth}")
                paths[-1].write_text(launch.text(self._memory.poison))
            if not self._run_program(rank, program.result(), (self._seed * 64 + idx) * 64 + rank, paths):
                return

    def _run_program(self, rank: int, program: Program, seed: int, fields: list[Path]) -> bool:
        numbers = [str(self._memory.file), str(self._memory.num_bytes), str(program.shared_variables), str(seed)]
        with self._lock:
            if self._failures:
                return False
            self._running[rank] = subprocess.Popen(
                ["nice", "-n", "10", str(program.path), *numbers, *map(str, fields)],
                pass_fds=(self._memory.file,),
                start_new_session=True,
                stderr=subprocess.PIPE,
                text=True,
            )
        process = self._running[rank]
        try:
            said, code = process.communicate(timeout=self._timeout_s)[1], process.returncode
        except subprocess.TimeoutExpired:
            said, code = f"still runs after {self._timeout_s} s", -1
        with self._lock:
            if code != 0:
                self._failures.append(f"rank {rank}: exit {code}: {said.strip()}")
                for other in self._running.values():  # this one too
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(other.pid, signal.SIGKILL)
                process.wait()
            del self._running[rank]
        return code == 0


def is_found(run: Callable[[int], list[str]], tries: int = 60) -> bool:
    """Whether `run`, given one of some seeds, finds a mistake.

    Several, because who comes too early or too late is not the same each time.
    """
    for seed in range(tries):
        try:
            if run(seed):
                return True
        except LaunchFailed:
            return True
    return False
