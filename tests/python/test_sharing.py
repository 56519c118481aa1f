"""Guards against tensors and bytes that arrive changed, at the wrong place or not at all, and against what is left of
them: descriptors, threads, memory in forked children."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft.group import sharing as sharing_module

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * 100
    return (values > 0) if dtype is torch.bool else values.to(dtype)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )


def memfds() -> list[str]:
    found = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{each}")
            found += [name] if "weft-share" in name else []
    return found


def is_open(address: str) -> bool:
    """Whether somebody on this machine has the door of that name."""
    with open("/proc/net/unix") as table:
        return any(line.split()[-1] == "@" + address[1:] for line in table)


# ---- gather


def gathering(comm: weft.Communicator) -> None:
    rank, ranks = comm.rank, range(comm.num_ranks)
    assert comm.gather(bytes([rank]) * rank) == {each: bytes([each]) * each for each in ranks}
    large = os.urandom(3 << 20) if rank == 0 else b"{"
    found = comm.gather(large)
    assert found[rank] == large
    assert len(found[0]) == 3 << 20
    for refused in ("text", bytes(16 << 20)):
        with pytest.raises(weft.InvalidArgument, match=r"data (is a str|has 16777216 bytes)"):
            comm.gather(refused)  # type: ignore[arg-type]
    with pytest.raises(weft.InvalidArgument, match="deadline_s is 0"):
        comm.gather(b"", deadline_s=0)
    shape: dict[str, Any] = {"num_experts": 12, "top_k": 1, "hidden": 8, "max_tokens_per_rank": 4}
    if rank == 0:  # others make another call
        with pytest.raises(weft.InvalidArgument, match=r"gather: ranks? 1(, 2)? made another call"):
            comm.gather(b"x")
    else:
        with pytest.raises(weft.InvalidArgument, match=r"ExpertParallel: rank 0 made another call"):
            weft.ExpertParallel(comm, dtype=torch.float32, **shape)
    assert comm.gather(b"again") == dict.fromkeys(ranks, b"again")
    if rank == 2:
        comm.close()
        return
    with pytest.raises(weft.PeerLost, match="rank 2"):
        comm.gather(b"lost")
    with pytest.raises(weft.PeerLost, match="rank 2"):
        comm.gather(b"lost")
    comm.recover()
    assert comm.gather(b"left") == {0: b"left", 1: b"left"}
    comm.close()
    with pytest.raises(weft.InvalidState, match="closed"):
        comm.gather(b"")


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_gather(isolation: str) -> None:
    weft.spawn(gathering, 3, device="cpu", isolation=isolation)


# ---- share and fetch


def sharing(comm: weft.Communicator) -> str:
    rank, peer = comm.rank, (comm.rank + 1) % comm.num_ranks
    shapes = [(3, 5), (0, 4), (), (1 << 20,)]
    for number, dtype in enumerate(DTYPES):
        for idx, shape in enumerate(shapes):
            comm.share(f"{number}/{idx}", tensor_of(dtype, shape, 10 * rank + idx))
    comm.share("strided", tensor_of(torch.float32, (6, 4), rank).t())
    comm.meet(60.0)
    address = comm._address_of(rank)
    assert is_open(address)
    for number, dtype in enumerate(DTYPES):
        for idx, shape in enumerate(shapes):
            wanted = tensor_of(dtype, shape, 10 * peer + idx)
            out = torch.zeros_like(wanted)
            assert comm.fetch(f"{number}/{idx}", peer, out) is out
            assert same_bytes(out, wanted), (dtype, shape)
    out = torch.empty((4, 6), dtype=torch.float32, device="cpu")
    assert torch.equal(comm.fetch("strided", peer, out), tensor_of(torch.float32, (6, 4), peer).t())
    assert torch.equal(comm.fetch("strided", rank, out), tensor_of(torch.float32, (6, 4), rank).t())
    comm.meet(60.0)
    # A value is that of the moment; the name may be used again, or taken back.
    mine = torch.full((4, 6), float(rank), device="cpu", dtype=torch.float32)
    comm.share("strided", mine)
    mine.zero_()
    comm.share("0/0", None)
    comm.share("never there", None)
    comm.meet(60.0)
    assert torch.equal(comm.fetch("strided", peer, out), torch.full_like(out, float(peer)))
    before = out.clone()
    with pytest.raises(
        weft.InvalidArgument, match=rf"rank {peer} shares no '0/0'; it shares '0/1', '0/2', '0/3', '1/0'"
    ):
        comm.fetch("0/0", peer, out)
    for refused, remark in (
        (
            torch.empty((6, 4), dtype=torch.float32),
            r"out has shape \[6, 4\]; rank \d shares 'strided' with shape \[4, 6\]",
        ),
        (torch.empty((4, 6), dtype=torch.int32), r"out has dtype torch.int32; rank \d shares .* dtype torch.float32"),
        (torch.empty((6, 4), dtype=torch.float32).t(), "strides"),
        (torch.empty((4, 6), device="meta"), "dense tensor"),
        (None, "dense tensor"),
    ):
        with pytest.raises(weft.InvalidArgument, match=remark):
            comm.fetch("strided", peer, refused)  # type: ignore[arg-type]
    assert torch.equal(out, before)
    for name, of, remark in (
        ("", peer, "name is ''"),
        ("x" * 201, peer, "1 to 200 bytes"),
        ("x", 9, "rank is 9; allowed"),
    ):
        with pytest.raises(weft.InvalidArgument, match=remark):
            comm.fetch(name, of, out)
    with pytest.raises(weft.InvalidArgument, match="dense tensor"):
        comm.share("x", torch.empty(2, device="meta"))
    comm.meet(60.0)
    if os.getpid() != os.getppid() and comm._origin != "threads of one process":
        assert memfds()
        comm.close()
        assert memfds() == []
        assert not any(thread.name == "weft-share" for thread in threading.enumerate())
    comm.close()
    with pytest.raises(weft.InvalidState, match="closed"):
        comm.share("x", out)
    with pytest.raises(weft.InvalidState, match="closed"):
        comm.fetch("x", peer, out)
    return address


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_share_and_fetch(isolation: str) -> None:
    for address in weft.spawn(sharing, 2, device="cpu", isolation=isolation):
        assert not is_open(address)


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it was waited for
        return "X"


def owner_that_goes(comm: weft.Communicator, how: str) -> str:
    out = torch.empty(4, dtype=torch.float32, device="cpu")
    if comm.rank == 0 and how != "shares nothing":
        comm.share("w", torch.arange(4, dtype=torch.float32, device="cpu"))
    pid = int(comm.gather(str(os.getpid()).encode())[0])
    if comm.rank == 1 and how != "shares nothing":
        comm.fetch("w", 0, out)  # that one has shared is known from now on
    comm.gather(b"")
    if comm.rank == 0:
        if how in ("kill", "stop"):
            while True:  # the other one does it
                signal.pause()
        if how == "shares nothing":
            comm.gather(b"")
        comm.close()
        return ""
    if how in ("kill", "stop"):
        os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        while state_of(pid) not in ("Z", "X", "T"):
            time.sleep(0.001)
    kinds: dict[str, type[weft.Error]] = {"stop": weft.PeerTimeout, "shares nothing": weft.InvalidArgument}

    def fetch_until_it_fails() -> None:
        while True:  # closed: it may not have come to that
            comm.fetch("w", 0, out, deadline_s=0.5 if how == "stop" else 60.0)

    with pytest.raises(kinds.get(how, weft.PeerLost)) as caught:
        fetch_until_it_fails()
    if how == "stop":
        assert caught.value.peers == (0,)  # type: ignore[attr-defined]
        assert not comm.broken
        os.kill(pid, signal.SIGCONT)
        assert comm.fetch("w", 0, out).tolist() == [0, 1, 2, 3]
        os.kill(pid, signal.SIGKILL)
    elif how == "shares nothing":
        comm.gather(b"")
    else:
        assert caught.value.ranks == (0,)  # type: ignore[attr-defined]
        comm.recover()
        with pytest.raises(weft.InvalidArgument, match=r"rank is 0; allowed are active ranks: \[1\]"):
            comm.fetch("w", 0, out)
    return str(caught.value)


def at_once(comm: weft.Communicator, has_fetched: bool) -> None:
    out = torch.empty(4, dtype=torch.float32, device="cpu")
    if comm.rank == 0:
        comm.share("w", torch.arange(4, dtype=torch.float32, device="cpu"))
    pid = int(comm.gather(str(os.getpid()).encode())[0])
    if comm.rank == 0:
        while True:  # the other one kills it
            signal.pause()
    if has_fetched:
        comm.fetch("w", 0, out)
    os.kill(pid, signal.SIGKILL)
    while state_of(pid) not in ("Z", "X"):
        time.sleep(0.001)
    with pytest.raises(weft.PeerLost):
        comm.fetch("w", 0, out)


@pytest.mark.parametrize("has_fetched", [True, False])
def test_a_death_is_seen_at_once(has_fetched: bool) -> None:
    """The owner's life page says so before its door is shut, whether or not this rank has ever seen that open."""
    outcomes = weft.spawn(at_once, 2, (has_fetched,), device="cpu", on_failure="return")
    assert outcomes[1] is None


@pytest.mark.parametrize("how", ["close", "kill", "stop", "shares nothing"])
def test_an_owner_that_does_not_answer(how: str) -> None:
    texts = weft.spawn(owner_that_goes, 2, (how,), device="cpu", on_failure="return")
    assert isinstance(texts[1], str), texts[1]
    assert "shares nothing" in texts[1] or how != "shares nothing"


def beside_calls(comm: weft.Communicator) -> None:
    """The owner is inside a call, and the fetching rank too, by another thread."""
    weights = tensor_of(torch.bfloat16, (64, 1024), 1)
    if comm.rank == 0:
        comm.share("w", weights)
    comm.gather(b"")
    found: list[Tensor] = []

    def fetch() -> None:
        for _ in range(20):
            found.append(comm.fetch("w", 0, torch.empty_like(weights)))

    if comm.rank == 1:
        thread = threading.Thread(target=fetch)
        thread.start()
        while len(found) < 10:  # rank 0 waits in gather for this one
            time.sleep(0.001)
        comm.gather(b"")
        thread.join()
        assert all(same_bytes(each, weights) for each in found)
        assert len(found) == 20
    else:
        comm.gather(b"")
    comm.gather(b"")


def test_fetch_beside_calls() -> None:
    weft.spawn(beside_calls, 2, device="cpu")


def forked(comm: weft.Communicator) -> None:
    comm.share("w", torch.ones(4, dtype=torch.float32, device="cpu"))
    assert len(memfds()) == 1
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            refused = 0
            for call in (lambda: comm.share("x", None), lambda: comm.fetch("w", 0, torch.empty(4))):
                try:
                    call()
                except weft.InvalidState:
                    refused += 1
            code = 0 if memfds() == [] and refused == 2 else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    out = torch.empty(4, dtype=torch.float32, device="cpu")
    assert comm.fetch("w", 0, out).tolist() == [1, 1, 1, 1]


def test_a_forked_child_keeps_nothing() -> None:
    weft.spawn(forked, 1, device="cpu")


def forked_beside_a_caller(comm: weft.Communicator) -> None:
    comm.share("w", torch.ones(4, dtype=torch.float32, device="cpu"))
    shelf, is_held, may_go = comm._shelf, threading.Event(), threading.Event()
    assert shelf is not None

    def hold() -> None:
        with shelf._lock:
            is_held.set()
            may_go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)  # ends it where it hangs
        shelf.close()
        os._exit(0)
    may_go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert comm.fetch("w", 0, torch.empty(4, dtype=torch.float32, device="cpu")).tolist() == [1, 1, 1, 1]


def test_a_child_that_was_forked_beside_a_caller() -> None:
    weft.spawn(forked_beside_a_caller, 1, device="cpu")


def test_a_communicator_that_nobody_closes() -> None:
    before = memfds()
    comm = weft.Communicator.from_allgather(0, 1, lambda endpoint: [endpoint])
    comm.share("w", torch.ones(4, device="cpu"))
    address = comm._address_of(0)
    assert is_open(address)
    assert len(memfds()) == len(before) + 1
    del comm
    gc.collect()
    assert not is_open(address)
    assert memfds() == before


def test_more_names_than_a_message_takes() -> None:
    comm = weft.Communicator.from_allgather(0, 1, lambda endpoint: [endpoint])
    one = torch.ones(1, device="cpu")
    for number in range(60):
        comm.share("\u00e9" * 98 + f"{number:02}", one)  # of 6 bytes a letter in a message
    with pytest.raises(weft.InvalidArgument, match=r"it shares '\u00e9+00', .* and \d+ more"):
        comm.fetch("w", 0, one)
    comm.close()


def without_descriptors(comm: weft.Communicator) -> None:
    import resource

    out = torch.zeros(4, dtype=torch.float32, device="cpu")
    if comm.rank == 0:
        comm.share("w", torch.ones(4, dtype=torch.float32, device="cpu"))
    comm.gather(b"")
    if comm.rank == 1:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(each) for each in os.listdir("/proc/self/fd"))
        fds = [os.dup(0)]
        while fds[-1] <= highest:
            fds.append(os.dup(0))  # no hole is left below
        for number, remark in ((0, "making a socket"), (1, "taking the descriptor")):
            resource.setrlimit(resource.RLIMIT_NOFILE, (fds[-1] + 1 + number, limits[1]))
            with pytest.raises(weft.CapacityExceeded, match=remark):
                comm.fetch("w", 0, out)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in fds:
            os.close(fd)
        assert out.tolist() == [0, 0, 0, 0]
        assert comm.fetch("w", 0, out).tolist() == [1, 1, 1, 1]
    comm.gather(b"")


def test_a_fetch_that_finds_no_descriptors() -> None:
    weft.spawn(without_descriptors, 2, device="cpu")


def test_a_shelf_that_ends_in_its_own_thread() -> None:
    """Where the last reference of a communicator goes while it answers."""
    comm = weft.Communicator.from_allgather(0, 1, lambda endpoint: [endpoint])
    comm.share("w", torch.ones(1, device="cpu"))
    shelf = comm._shelf
    assert shelf is not None
    assert len(memfds()) == 1
    shelf._answer = lambda call: shelf.close()  # type: ignore[method-assign]
    with pytest.raises(weft.InvalidArgument, match="it shares nothing"):  # its communicator lives
        comm.fetch("w", 0, torch.ones(1, device="cpu"))
    shelf._thread.join()
    assert memfds() == []
    comm.close()


def owner_without_descriptors(comm: weft.Communicator) -> None:
    import resource

    out = torch.zeros(4, dtype=torch.float32, device="cpu")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if comm.rank == 0:
        highest = max(int(each) for each in os.listdir("/proc/self/fd"))
        fds = [os.dup(0)]
        while fds[-1] <= highest:
            fds.append(os.dup(0))  # no hole is left below
        comm.share("w", torch.ones(4, dtype=torch.float32, device="cpu"))  # its door is the next one
        resource.setrlimit(resource.RLIMIT_NOFILE, (fds[-1] + 2, limits[1]))
    comm.gather(b"")
    if comm.rank == 1:
        with contextlib.suppress(weft.PeerTimeout):  # the system may have set one descriptor aside
            comm.fetch("w", 0, out, deadline_s=0.2)
        with pytest.raises(weft.PeerTimeout):
            comm.fetch("w", 0, out, deadline_s=0.2)
    comm.gather(b"")
    if comm.rank == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    comm.gather(b"")
    if comm.rank == 1:
        assert comm.fetch("w", 0, out).tolist() == [1, 1, 1, 1]
    comm.gather(b"")


def test_an_owner_that_finds_no_descriptors() -> None:
    weft.spawn(owner_without_descriptors, 2, device="cpu")


def test_two_threads_that_share_first(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = weft.Communicator.from_allgather(0, 1, lambda endpoint: [endpoint])
    made = sharing_module._Shelf.__init__
    second = threading.Thread(target=lambda: comm.share("b", torch.full((2,), 2.0, device="cpu")))

    def made_beside(shelf: Any, address: str) -> None:
        if not second.ident:
            second.start()
            second.join(1.0)  # it waits for this thread
        made(shelf, address)

    monkeypatch.setattr(sharing_module._Shelf, "__init__", made_beside)
    comm.share("a", torch.ones(2, device="cpu"))
    second.join()
    out = torch.empty(2, device="cpu")
    assert [comm.fetch(name, 0, out).tolist() for name in "ab"] == [[1, 1], [2, 2]]
    comm.close()
    assert memfds() == []


def without_memory(comm: weft.Communicator) -> None:
    import resource

    comm.share("small", torch.ones(4, device="cpu"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    number = len(memfds())
    with pytest.raises(weft.CapacityExceeded, match="sharing a tensor"):
        comm.share("large", torch.ones(1 << 20, device="cpu"))
    assert len(memfds()) == number
    assert comm.fetch("small", 0, torch.empty(4, device="cpu")).tolist() == [1, 1, 1, 1]


def test_a_tensor_that_finds_no_memory() -> None:
    weft.spawn(without_memory, 1, device="cpu")


def before_it_is_taken_in(comm: weft.Communicator) -> str:
    """A spare loads what members share; they see from its standing by that it has."""
    mine = torch.arange(10) + comm.rank
    if comm.is_member:
        comm.share("weights", mine)
        while comm.membership.standby != (2,):
            time.sleep(0.001)
        comm.meet(60.0)
        return ""
    end = time.monotonic() + 60.0
    out = torch.zeros(10, dtype=torch.int64)
    while not torch.equal(out, torch.arange(10) + 1) and time.monotonic() < end:
        with contextlib.suppress(weft.InvalidArgument):  # not shared yet
            comm.fetch("weights", 1, out)
    with pytest.raises(weft.InvalidArgument) as refused:
        comm.fetch("weights", 2, out)
    assert "allowed are active ranks: [0, 1]" in str(refused.value)
    assert torch.equal(out, torch.arange(10) + 1)
    comm.boundary()
    return ""


def test_a_spare_fetches_before_it_is_taken_in() -> None:
    weft.spawn(before_it_is_taken_in, 2, device="cpu", standby=1)
