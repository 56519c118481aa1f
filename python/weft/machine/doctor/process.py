"""May this process do what ranks do: memfd, unix sockets, pidfds, files; what sandboxes refuse."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import stat
from collections.abc import Iterable
from pathlib import Path

from weft.env import cache_folder
from weft.machine.doctor.model import Answer, Check, Facts, fail, ok, skip, warn

__all__ = ["CHECKS"]

_RECORDED = "a recording: says nothing of this process"
_MIN_FILES = 1024


def _memfd(facts: Facts) -> Iterable[Answer]:
    if not facts.live:
        return [skip(_RECORDED)]
    try:
        fd = os.memfd_create("weft-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        fix = "docker run --security-opt seccomp=unconfined ...  # or a profile that allows memfd_create"
        return [fail(f"memfd_create is refused: {error.strerror}", fix=fix)]
    try:
        os.ftruncate(fd, 1 << 20)
        os.pwrite(fd, b"x", (1 << 20) - 1)
    except OSError as error:
        return [fail(f"a memfd can't be filled: {error.strerror}", fix="ulimit -f unlimited  # and check memory.max")]
    finally:
        os.close(fd)
    return [ok("memfd works; /dev/shm is not used")]


def _unix_socket(facts: Facts) -> Iterable[Answer]:
    if not facts.live:
        return [skip(_RECORDED)]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.bind(f"\0weft-doctor-{os.getpid()}")
            server.listen(1)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.settimeout(1.0)
                client.connect(server.getsockname())
                server.settimeout(1.0)
                accepted = server.accept()[0]
                with accepted:
                    _pass_descriptor(client, accepted)
    except OSError as error:
        fix = "run all ranks in one network namespace, with a seccomp profile that allows AF_UNIX"
        return [fail(f"abstract unix sockets don't work: {error.strerror or error}", fix=fix)]
    return [ok("abstract unix sockets work and pass descriptors")]


def _pass_descriptor(client: socket.socket, server: socket.socket) -> None:
    read, write = os.pipe()
    try:
        socket.send_fds(client, [b"x"], [read])
        for fd in socket.recv_fds(server, 1, 1)[1]:
            os.close(fd)
    finally:
        os.close(read)
        os.close(write)


def _pidfd(facts: Facts) -> Iterable[Answer]:
    if not facts.live:
        return [skip(_RECORDED)]
    try:
        fd = os.pidfd_open(os.getpid())
    except (OSError, AttributeError) as error:
        text = getattr(error, "strerror", None) or str(error)
        return [
            warn(
                f"pidfd_open is refused: {text}",
                cost="a killed rank is noticed by two ways instead of three: its robust mutex and its socket",
                fix="use Linux 5.3 or later and a seccomp profile that allows pidfd_open",
            )
        ]
    try:
        signal.pidfd_send_signal(fd, 0)
    except OSError:
        pass  # the watcher only waits on it
    finally:
        os.close(fd)
    return [ok("pidfd works")]


def _ptrace(facts: Facts) -> Iterable[Answer]:
    if not facts.live:
        return [skip(_RECORDED)]
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        return [ok("no ptrace restriction (no Yama)")]
    if scope == "0":
        return [ok("ptrace_scope 0")]
    return [
        ok(
            f"ptrace_scope {scope}: Weft passes descriptors over sockets and does not mind; PyTorch's expandable "
            f"segments between processes and CMA do (sudo sysctl kernel.yama.ptrace_scope=0)"
        )
    ]


def _files(facts: Facts) -> Iterable[Answer]:
    limit = facts.machine.limits.max_files
    if limit is None:
        return [skip("the limit is not known")]
    if limit < _MIN_FILES:
        return [warn(f"{limit} open files at most", cost="ranks of large groups fail to start", fix="ulimit -n 65536")]
    return [ok(f"{limit} open files at most")]


def _kernel_cache(facts: Facts) -> Iterable[Answer]:
    if not facts.live:
        return [skip(_RECORDED)]
    if not facts.gpus:
        return [skip("no GPU: nothing is compiled")]
    folder = cache_folder()
    if not folder:
        return [ok("no folder is chosen (WEFT_CACHE_DIR): kernels are compiled in every process")]
    return [_judge_cache(Path(folder))]


def _judge_cache(folder: Path) -> Answer:
    """The rules of src/jit/cache: a real folder of this user that nobody else can write."""
    cost = "kernels are compiled again in every process, 0.1 s each"
    name = shlex.quote(str(folder))
    try:
        state = folder.lstat()
    except FileNotFoundError:
        parent = next(place for place in folder.absolute().parents if place.is_dir())
        if os.access(parent, os.W_OK):
            return ok("the kernel cache is not there yet and can be made")
        fix = "export WEFT_CACHE_DIR=/a/folder/of/yours"
        return warn("the kernel cache can't be made: the folder above can't be written", cost=cost, fix=fix)
    except OSError as error:
        return warn(f"the kernel cache can't be looked at: {error.strerror}", cost=cost, fix=f"ls -ld {name}")
    if not stat.S_ISDIR(state.st_mode):
        return warn("the kernel cache is no real folder", cost=cost, fix=f"rm {name}")
    if state.st_uid != os.geteuid():
        return warn("the kernel cache belongs to another user", cost=cost, fix=f'sudo chown -R "$USER" {name}')
    mode = state.st_mode & 0o777
    if mode & 0o022:
        return warn(f"others can write the kernel cache (mode {mode:o})", cost=cost, fix=f"chmod 700 {name}")
    return ok(f"the kernel cache is private (mode {mode:o})")


CHECKS = (
    Check("process", "memfd", "Ranks share memory through memfds; nothing is named, nothing is left behind.", _memfd),
    Check("process", "unix-socket", "Ranks find each other and pass descriptors over abstract sockets.", _unix_socket),
    Check("process", "pidfd", "One of three ways by which the death of a rank is noticed.", _pidfd),
    Check("process", "ptrace", "Some libraries copy between processes by ptrace's permission.", _ptrace),
    Check("process", "open-files", "Each pair of ranks holds sockets and shared memory open.", _files),
    Check("process", "kernel-cache", "Compiled kernels are kept in a private folder, or not at all.", _kernel_cache),
)
