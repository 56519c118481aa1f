"""Guards against refusals of the system (sandboxes, limits of processes and containers) that come out as internal
errors, as errors of Python, or without the limit and its mend; and against ranks that wait for one that was refused."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import pickle
import platform
import re
import resource
import signal
import socket
import struct
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft

SHAPE: dict[str, Any] = {
    "num_experts": 8, "top_k": 2, "hidden": 64, "max_tokens_per_rank": 64, "dtype": torch.float32, "deadline_s": 100.0
}  # fmt: skip
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "errors.md").read_text()
x86_only = pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls of x86-64")


def is_on_the_page(text: str) -> bool:
    return re.sub(r"\d+", "N", text) in re.sub(r"\d+", "N", PAGE)


def one_step(comm: weft.Communicator, **shape: Any) -> float:
    """Dispatch and combine once; the first value of the result."""
    ep = weft.ExpertParallel(comm, **SHAPE | shape)
    ids = torch.arange(2).repeat(4, 1)
    received = ep.dispatch(torch.ones(4, 64), ids)
    return float(ep.combine(received.x.clone(), received.handle)[0, 0])


def limited(limit: Callable[[], None], call: Callable[[], Any]) -> Any:
    """What `call` returns or raises in a forked child of this process that has put `limit` on itself."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            gc.freeze()  # stores of other tests, whose threads are not here
            os.close(reading)
            try:
                limit()
                outcome = call()
            except BaseException as error:
                outcome = error
            with os.fdopen(writing, "wb") as file:
                pickle.dump(outcome, file)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        data = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"the limited child ended with {status} and said: {data!r}"
    return pickle.loads(data)


def rlimit(which: int, most: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(which, (most, most))


def denied(*calls: int, error_number: int, first_argument: int | None = None) -> Callable[[], None]:
    """These system calls (with this argument) fail with this error from now on, as under a container's seccomp
    profile."""

    def deny() -> None:
        load, equal, give = 0x20, 0x15, 0x06
        allow, refuse = 0x7FFF0000, 0x00050000 | error_number
        steps = [(load, 0, 0, 0)]
        for call in calls:
            if first_argument is None:
                steps += [(equal, 0, 1, call), (give, 0, 0, refuse)]
            else:
                steps += [(equal, 0, 4, call), (load, 0, 0, 16), (equal, 0, 1, first_argument), (give, 0, 0, refuse)]
                steps.append((load, 0, 0, 0))
        steps.append((give, 0, 0, allow))
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
        program = ctypes.create_string_buffer(struct.pack("H6xP", len(steps), ctypes.addressof(code)))
        libc = ctypes.CDLL(None, use_errno=True)
        no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
        assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
        assert libc.prctl(set_seccomp, filter_mode, program, 0, 0) == 0

    return deny


def spawned(num_ranks: int = 2, **options: Any) -> list[Any]:
    return weft.spawn(one_step, num_ranks, device="cpu", placement="off", **options)


SOCKET, MEMFD_CREATE, CLONE, FORK, VFORK, CLONE3 = 41, 319, 56, 57, 58, 435


@x86_only
@pytest.mark.parametrize("error_number", [errno.EPERM, errno.ENOSYS])
def test_shared_memory_that_is_denied(error_number: int) -> None:
    error = limited(denied(MEMFD_CREATE, error_number=error_number), spawned)
    assert type(error) is weft.Unsupported
    assert "memfd_create" in str(error)
    assert "seccomp profile of a container" in str(error)
    assert "is not supported" not in str(error)
    assert error_number != errno.EPERM or is_on_the_page(str(error))


@pytest.mark.parametrize("most", [0, 65_536, 1_100_000])  # no room for the life lock, the group's page, the window
def test_file_sizes_that_are_limited(most: int) -> None:
    def work(comm: weft.Communicator) -> float:
        return one_step(comm, heap_bytes=4 << 20)

    def call() -> Any:
        return weft.spawn(work, 2, device="cpu", placement="off", on_failure="return")

    errors = limited(rlimit(resource.RLIMIT_FSIZE, most), call)
    assert {type(error) for error in errors} <= {weft.CapacityExceeded, weft.PeerLost}
    refused = [error for error in errors if isinstance(error, weft.CapacityExceeded)]
    assert refused
    assert all(f"at most {most} bytes (ulimit -f, RLIMIT_FSIZE)" in str(error) for error in refused)
    if not most:
        assert is_on_the_page(str(refused[0]))
    elif most == 65_536:
        assert isinstance(errors[0], weft.CapacityExceeded)  # rank 0 makes it
    else:  # connected: every rank learns it from the constructor
        assert len(refused) == 2
        assert all("rank 0 could not make or map" in str(error) for error in refused)


def test_one_rank_that_finds_no_memory_tells_the_others() -> None:
    def step(comm: weft.Communicator) -> float:
        if comm.rank == 1:
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
            rlimit(resource.RLIMIT_AS, used + (1 << 28))()
        return one_step(comm, heap_bytes=1 << 30)

    errors = weft.spawn(step, 2, device="cpu", on_failure="return", placement="off")
    assert [type(error) for error in errors] == [weft.CapacityExceeded] * 2
    assert all(
        "rank 1 could not make or map the memory of the window (heap_bytes: 1073741824" in str(e) for e in errors
    )
    assert all("ulimit -v, RLIMIT_AS" in str(error) for error in errors)


def test_rails_that_find_no_memory_are_named() -> None:
    """With what makes them smaller, and not as the heap, which is there by then."""

    def step(comm: weft.Communicator) -> None:
        if comm.rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            rlimit(resource.RLIMIT_FSIZE, 1 << 20)()
        shape = {"num_experts": 4, "top_k": 2, "hidden": 4096, "max_tokens_per_rank": 8}
        weft.ExpertParallel(comm, **shape, heap_bytes=1 << 20, node_ranks=1)

    errors = weft.spawn(step, 2, device="cpu", on_failure="return", placement="off")
    assert [type(error) for error in errors] == [weft.CapacityExceeded] * 2
    for error in errors:
        assert "rank 1 could not make or map the memory of the window (rail memory: " in str(error)
        assert "less with a smaller max_tokens_per_rank, top_k or hidden" in str(error)
        assert "heap_bytes" not in str(error)


def descriptors() -> Iterator[int]:
    used = len(os.listdir("/proc/self/fd"))
    yield from range(used + 1, used + 32)


@pytest.mark.slow
def test_too_few_descriptors_at_every_place() -> None:
    ended_well = refused = 0
    texts = ""
    for most in descriptors():
        outcome = limited(rlimit(resource.RLIMIT_NOFILE, most), lambda: spawned(4, on_failure="return"))
        errors = [each for each in (outcome if isinstance(outcome, list) else [outcome]) if not isinstance(each, float)]
        if not errors:
            ended_well += 1
            continue
        refused += 1
        texts += "\n".join(f"{type(error).__name__}: {error}" for error in errors)
        assert {type(error) for error in errors} <= {weft.CapacityExceeded, weft.PeerLost}, (most, texts)
        assert f"no file descriptor left of {most} (ulimit -n, RLIMIT_NOFILE)" in texts, (most, texts)
    assert is_on_the_page(re.search("duplicating file descriptor.*and 20 more", texts)[0])
    assert refused > 10
    assert ended_well > 0


@x86_only
def test_processes_that_are_limited() -> None:
    error = limited(denied(CLONE, FORK, VFORK, CLONE3, error_number=errno.EAGAIN), spawned)
    assert type(error) is weft.CapacityExceeded
    assert "starting rank 0" in str(error)
    assert "ulimit -u, RLIMIT_NPROC" in str(error)


@x86_only
@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_threads_that_are_limited(isolation: str) -> None:
    def solo() -> Any:
        os.environ.pop("WORLD_SIZE", None)
        with weft.Communicator.from_env() as comm:
            return one_step(comm)

    def threads() -> Any:
        return spawned(isolation="thread")

    call = solo if isolation == "process" else threads
    error = limited(denied(CLONE, CLONE3, error_number=errno.EAGAIN), call)
    assert type(error) is weft.CapacityExceeded
    assert "starting" in str(error)
    assert "thread" in str(error)
    assert "ulimit -u, RLIMIT_NPROC" in str(error)


def engine_of_a_group(limit: Callable[[], None]) -> str:
    """Of one rank, under `limit`; for all it knows before the gather there are peers on other machines."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    limit()
    with weft.Communicator.from_process_group(placement="off") as comm:
        return comm.engine


@x86_only
@pytest.mark.parametrize("error_number", [errno.EPERM, errno.EAFNOSUPPORT])
def test_one_machine_needs_no_network_interfaces(error_number: int) -> None:
    deny = denied(SOCKET, error_number=error_number, first_argument=socket.AF_NETLINK)
    assert limited(lambda: None, lambda: engine_of_a_group(deny)) == "cpu"


def test_one_machine_needs_no_door() -> None:
    wrong = {"WEFT_CONTROL_INTERFACE": "no-such-interface"}
    assert limited(lambda: None, lambda: engine_of_a_group(lambda: os.environ.update(wrong))) == "cpu"


def test_no_proc() -> None:
    def unmount() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        new_mounts, private, detach = 0x00020000, 0x44000, 2
        if libc.unshare(new_mounts) or libc.mount(None, b"/", None, private, None) or libc.umount2(b"/proc", detach):
            raise PermissionError

    error = limited(unmount, spawned)
    if isinstance(error, PermissionError):
        pytest.skip("needs root")
    assert type(error) is weft.Unsupported
    assert str(error).endswith("mount /proc in this container or sandbox")
    assert is_on_the_page(str(error))
