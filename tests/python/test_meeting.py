"""Guards against believing what ended processes left in a store, and endless waits for ranks that do not come."""

# check: allow file-size: all about one meeting

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from test_errors import raised

import weft
from weft.group import meeting

LONG_S, SHORT_S = 60.0, 2.0


def endpoint(rank: int, life: str = "new") -> bytes:
    return f"rank {rank} of the {life} life".encode().ljust(meeting.ENDPOINT_BYTES, b".")


def call(
    rank: int, num_ranks: int, life: str = "new", timeout_s: float = LONG_S, mine: bytes | None = None
) -> meeting.Meeting:
    deadline = time.monotonic() + timeout_s
    return meeting.Meeting(rank, num_ranks, mine or endpoint(rank, life), deadline, timeout_s, threading.Event())


class Ranks:
    """Threads that call `meet`, each with a client of its own as processes have; what each returned or raised."""

    def __init__(self, store: dist.Store, calls: list[meeting.Meeting]) -> None:
        self.results: dict[int, list[bytes] | BaseException] = {}
        self.calls = calls
        self.threads = [threading.Thread(target=self._run, args=(idx, store), daemon=True) for idx in range(len(calls))]
        for thread in self.threads:
            thread.start()

    def _run(self, idx: int, store: dist.Store) -> None:
        try:
            self.results[idx] = meeting.meet(client_of(store), self.calls[idx])
        except BaseException as error:
            self.results[idx] = error

    def join(self) -> list[Any]:
        for thread in self.threads:
            thread.join(2 * LONG_S)
        return [self.results[idx] for idx in range(len(self.calls))]


def client_of(store: dist.Store) -> dist.Store:
    """TCPStore's client lets one thread wait for what is not there, and the others for that thread."""
    if not isinstance(store, dist.TCPStore):
        return store
    client = store.clone()
    client.set_timeout(timedelta(seconds=1))
    return client


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    made: dist.Store
    if request.param == "hash":
        made = dist.HashStore()
    elif request.param == "file":
        made = dist.FileStore(str(tmp_path / "store"), -1)
    else:
        made = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    made.set_timeout(timedelta(seconds=1))
    return made


class EmptyOnce:
    """As TCPStore where a key is taken back between its two questions: each key once has nothing."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.asked: set[str] = set()

    def get(self, key: str) -> bytes:
        if key in self.asked or "/" not in key:  # the call is never taken back
            return self.store.get(key)
        self.asked.add(key)
        return b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_a_key_that_was_taken_back_meanwhile() -> None:
    store = dist.HashStore()
    ranks = [Ranks(EmptyOnce(store), [call(rank, 2)]) for rank in range(2)]  # type: ignore[arg-type]
    assert [each.join() for each in ranks] == [[[endpoint(0), endpoint(1)]]] * 2


class Dies(Exception):
    pass


class DyingStore:
    """The process that uses it ends right after so many changes of the store."""

    def __init__(self, store: dist.Store, num_changes: int) -> None:
        self.store, self.left = store, num_changes

    def _live(self, num_changes: int) -> None:
        if self.left == 0:
            raise Dies
        self.left -= num_changes

    def set(self, key: str, value: bytes) -> None:
        self._live(1)
        self.store.set(key, value)  # type: ignore[arg-type]

    def delete_key(self, key: str) -> bool:
        self._live(1)
        return self.store.delete_key(key)

    def get(self, key: str) -> bytes:
        self._live(0)
        return self.store.get(key)

    def check(self, keys: list[str]) -> bool:
        self._live(0)
        return self.store.check(keys)


# ---- rounds in a store that is kept


def test_rounds_in_one_store_meet_and_leave_little(store: dist.Store) -> None:
    for life in ("first", "second", "third"):
        found = Ranks(store, [call(rank, 3, life) for rank in range(3)]).join()
        assert found == [[endpoint(rank, life) for rank in range(3)]] * 3
    assert store.num_keys() <= 5  # the newest call, its state and all; FileStore and TCPStore count a key of their own


@pytest.mark.parametrize("num_changes", range(11))
def test_what_a_rank_0_that_died_anywhere_has_left_is_not_believed(num_changes: int, tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), -1)
    store.set_timeout(timedelta(seconds=1))
    Ranks(store, [call(rank, 2, "older") for rank in range(2)]).join()
    ranks = Ranks(store, [call(1, 2, "old")])
    with contextlib.suppress(Dies):
        meeting.meet(DyingStore(store, num_changes), call(0, 2, "old"))  # type: ignore[arg-type]
    ranks.calls[0].stop.set()
    ranks.join()
    assert Ranks(store, [call(rank, 2) for rank in (1, 0)]).join() == [[endpoint(0), endpoint(1)]] * 2


@pytest.mark.parametrize("num_changes", range(2))
def test_what_a_rank_that_died_anywhere_has_left_is_not_believed(num_changes: int, store: dist.Store) -> None:
    old = Ranks(store, [call(0, 3, "old"), call(2, 3, "old")])
    wait_for(lambda: store.check(["call"]))
    with contextlib.suppress(Dies):
        meeting.meet(DyingStore(store, num_changes), call(1, 3, "old"))  # type: ignore[arg-type]
    for each in old.calls:
        each.stop.set()
    old.join()
    new = [endpoint(rank) for rank in range(3)]
    assert Ranks(store, [call(rank, 3) for rank in (2, 1, 0)]).join() == [new] * 3


def test_the_others_may_come_long_before_rank_0(store: dist.Store) -> None:
    Ranks(store, [call(rank, 3, "old") for rank in range(3)]).join()
    early = Ranks(store, [call(rank, 3) for rank in (1, 2)])
    time.sleep(0.3)
    assert not early.results, "an old call and its state are there"
    new = [endpoint(rank) for rank in range(3)]
    assert [*Ranks(store, [call(0, 3)]).join(), *early.join()] == [new] * 3


def test_a_rank_that_is_started_anew_alone_counts(store: dist.Store) -> None:
    waiting = Ranks(store, [call(0, 3)])
    wait_for(lambda: store.check(["call"]))
    with pytest.raises(Dies):
        meeting.meet(DyingStore(store, 1), call(1, 3, "old"))  # type: ignore[arg-type]
    again = Ranks(store, [call(1, 3)])
    time.sleep(0.2)
    found = [*waiting.results, *Ranks(store, [call(2, 3)]).join(), *waiting.join(), *again.join()]
    assert found == [[endpoint(rank) for rank in range(3)]] * 3


def test_a_rank_that_has_left_is_waited_for_again(store: dist.Store) -> None:
    waiting = Ranks(store, [call(0, 3)])
    assert isinstance(Ranks(store, [call(1, 3, "old", SHORT_S)]).join()[0], weft.PeerTimeout)
    others = [waiting, Ranks(store, [call(2, 3)])]
    time.sleep(0.3)
    assert not waiting.results
    others.append(Ranks(store, [call(1, 3)]))
    assert [each.join()[0] for each in others] == [[endpoint(rank) for rank in range(3)]] * 3


@pytest.mark.parametrize("store", ["hash"], indirect=True)
def test_another_version_s_call_is_waited_out(store: dist.Store) -> None:
    for value in (b"", b"weft", b"WEFM\x02\x00\x02\x00" + bytes(16), b"x" * 4000):
        store.set("call", value)  # type: ignore[arg-type]
        error = Ranks(store, [call(1, 2, timeout_s=0.2)]).join()[0]
        assert isinstance(error, weft.PeerTimeout)
        assert error.peers == (0,)
        assert Ranks(store, [call(rank, 2) for rank in (1, 0)]).join() == [[endpoint(0), endpoint(1)]] * 2


# ---- who is missing


@pytest.mark.slow
@pytest.mark.parametrize("store", ["tcp"], indirect=True)
@pytest.mark.parametrize("missing", [0, 3])
@pytest.mark.parametrize("patient", ["rank 0", "the others", "none"])
def test_a_timeout_names_who_did_not_come(store: dist.Store, missing: int, patient: str) -> None:
    Ranks(store, [call(rank, 4, "old") for rank in range(4)]).join()
    waits = {"rank 0": (2 * SHORT_S, SHORT_S), "the others": (SHORT_S, LONG_S), "none": (SHORT_S, SHORT_S)}[patient]
    if missing == 0:
        waits = (0, SHORT_S)
    here = [rank for rank in range(4) if rank != missing]
    for error in Ranks(store, [call(rank, 4, timeout_s=waits[rank > 0]) for rank in here]).join():
        assert isinstance(error, weft.PeerTimeout)
        assert error.peers == (missing,), str(error)
        assert f"rank {missing} did not come within" in str(error)


@pytest.mark.parametrize("store", ["hash"], indirect=True)
def test_a_rank_0_of_another_size_is_named(store: dist.Store) -> None:
    errors = Ranks(store, [call(0, 3, timeout_s=SHORT_S), call(1, 2, timeout_s=SHORT_S / 2)]).join()
    assert [error.peers for error in errors] == [(1, 2), (0,)]
    assert "has 3 ranks, this one 2" in str(errors[1])


@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_processes_with_one_rank_the_later_counts(store: dist.Store, rank: int) -> None:
    others = [each for each in range(3) if each not in (rank, 2)]
    waiting = Ranks(store, [call(each, 3) for each in others])
    earlier = Ranks(store, [call(rank, 3, "earlier")])
    wait_for(lambda: any(endpoint(rank, "earlier") == store.get(key) for key in keys_of(store, rank)))
    later = Ranks(store, [call(rank, 3)])
    error = earlier.join()[0]
    assert isinstance(error, weft.InvalidState)
    assert f"another process has come to the store as rank {rank} of 3 after this one (pid {os.getpid()})" in str(error)
    found = [*Ranks(store, [call(2, 3)]).join(), *later.join(), *waiting.join()]
    assert found == [[endpoint(each) for each in range(3)]] * 3


def keys_of(store: dist.Store, rank: int) -> list[str]:
    """The key under which `rank` answers the newest call; of rank 0 one in which its endpoint can't be looked for."""
    if not store.check(["call"]):
        return []
    nonce = store.get("call")[-16:].hex()
    key = f"{nonce}/{rank}"
    if rank == 0:
        store.set("seen", endpoint(0, "earlier"))  # type: ignore[arg-type]
        return ["seen"]
    return [key] if store.check([key]) else []


# ---- the environment


@contextmanager
def variables(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def place(rank: int, num_ranks: int, port: int) -> Any:
    """torchrun's variables for a rank."""
    return variables(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set in the environment; the host of rank 0 is expected"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is empty in the environment"),
        (
            {"MASTER_ADDR": "http://host"},
            "MASTER_ADDR is 'http://host' in the environment; the name or address of a host",
        ),
        ({"MASTER_ADDR": "a b"}, "MASTER_ADDR is 'a b' in the environment"),
        ({"MASTER_ADDR": "a" * 300}, "MASTER_ADDR is 'aaa"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set in the environment"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http' in the environment; a number from 0 is expected"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is 0 in the environment; allowed are 1 to 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is 65536 in the environment; allowed are 1 to 65535"),
        ({"MASTER_PORT": "9" * 5000}, "MASTER_PORT is '9999"),
        ({"WORLD_SIZE": "1025"}, "WORLD_SIZE is 1025 in the environment; allowed are 1 to 1024"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0 in the environment; allowed are 1 to 1024"),
        ({"LOCAL_RANK": "first"}, "LOCAL_RANK is 'first' in the environment; a number from 0 is expected"),
        ({"RANK": None}, "RANK is None and WORLD_SIZE is '2' in the environment"),
        ({"RANK": "-1"}, "RANK is '-1' in the environment"),
    ],
)
def test_variables_that_are_refused(change: dict[str, str | None], text: str) -> None:
    with place(0, 2, free_port()):
        os.environ.pop("LOCAL_RANK", None)
        for name, value in change.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        start = time.monotonic()
        with pytest.raises(weft.InvalidArgument, match=text):
            weft.Communicator.from_env()
        assert time.monotonic() - start < LONG_S


def test_one_rank_needs_no_store() -> None:
    with variables(RANK="0", WORLD_SIZE="1"), weft.Communicator.from_env() as comm:
        assert (comm.rank, comm.num_ranks) == (0, 1)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 1e10, "1", None, True])
def test_timeouts_that_are_refused(value: Any) -> None:
    with pytest.raises(weft.InvalidArgument, match=r"timeout_s is .*; allowed are seconds above 0"):
        weft.Communicator.from_env(timeout_s=value)


def test_a_port_that_is_in_use_is_refused() -> None:
    with socket.socket() as held:
        held.bind(("0.0.0.0", 0))
        held.listen()
        port = held.getsockname()[1]
        with (
            place(0, 2, port),
            pytest.raises(weft.InvalidArgument, match=f"MASTER_PORT is {port} in the environment, which another"),
        ):
            weft.Communicator.from_env(timeout_s=LONG_S)


@pytest.mark.parametrize("address", ["127.0.0.1", "no-such-host.invalid"])
def test_a_store_that_is_not_there(address: str) -> None:
    with place(1, 2, free_port()), variables(MASTER_ADDR=address), pytest.raises(weft.PeerTimeout) as caught:
        weft.Communicator.from_env(timeout_s=SHORT_S)
    assert caught.value.peers == (0,)
    assert f"MASTER_ADDR:MASTER_PORT {address}:" in str(caught.value)


def test_a_store_that_accepts_and_says_nothing() -> None:
    """As that of a stopped process: torch's own client waits for it without end."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        with place(1, 2, held.getsockname()[1]), pytest.raises(weft.PeerTimeout) as caught:
            weft.Communicator.from_env(timeout_s=SHORT_S)
    assert caught.value.peers == (0,)
    assert "does not answer" in str(caught.value)


def test_ctrl_c_leaves_the_wait_for_a_rank() -> None:
    start = time.monotonic()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with place(0, 2, free_port()), pytest.raises(KeyboardInterrupt):
            weft.Communicator.from_env(timeout_s=20 * LONG_S)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < LONG_S


# ---- processes


def test_a_call_that_one_rank_refuses_may_be_repeated() -> None:
    port = free_port()

    def rank(comm: weft.Communicator) -> list[tuple[int, ...]]:
        with place(comm.rank, 3, port):
            if comm.rank == 1:
                for bad in ({"device": "shelf"}, {"engine": "x"}, {"placement": "x"}, {"engine": None}):
                    assert isinstance(raised(lambda: weft.Communicator.from_env(**bad)), weft.InvalidArgument)  # noqa: B023
            with weft.Communicator.from_env(timeout_s=LONG_S) as first, weft.Communicator.from_env() as second:
                return [first.active_ranks, second.active_ranks]

    assert weft.spawn(rank, 3) == [[(0, 1, 2)] * 2] * 3


def test_a_group_s_call_that_one_rank_refuses_may_be_repeated(tmp_path: Path) -> None:
    def rank(comm: weft.Communicator) -> tuple[int, ...]:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=comm.rank, world_size=3)
        if comm.rank == 1:
            for bad in ({"device": "shelf"}, {"engine": "x"}, {"placement": "x"}, {"timeout_s": 0}):
                assert isinstance(raised(lambda: weft.Communicator.from_process_group(**bad)), weft.InvalidArgument)  # noqa: B023
        with weft.Communicator.from_process_group(timeout_s=LONG_S) as made:
            return made.active_ranks

    assert weft.spawn(rank, 3) == [(0, 1, 2)] * 3


def test_a_rank_of_a_group_does_not_come(tmp_path: Path) -> None:
    def rank(comm: weft.Communicator) -> str:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{tmp_path}/store",
            rank=comm.rank,
            world_size=2,
            timeout=timedelta(seconds=LONG_S),
        )
        if comm.rank == 1:
            return ""
        error = raised(lambda: weft.Communicator.from_process_group(timeout_s=SHORT_S))
        assert isinstance(error, weft.PeerTimeout)
        assert error.peers == ()
        return str(error)

    assert "not all 2 ranks of the group called from_process_group within 2 s" in weft.spawn(rank, 2)[0]


def test_a_rank_does_not_come() -> None:
    port = free_port()

    def rank(comm: weft.Communicator) -> tuple[int, ...]:
        if comm.rank == 2:
            return (2,)
        with place(comm.rank, 3, port):
            error = raised(lambda: weft.Communicator.from_env(timeout_s=2 * SHORT_S))
        assert isinstance(error, weft.PeerTimeout)
        return error.peers

    assert weft.spawn(rank, 3) == [(2,)] * 3


RESTART = """
import os, signal, sys, weft
rank, attempt, how = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), sys.argv[1]
if attempt == 0 and how == "before" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
with weft.Communicator.from_env(timeout_s=60) as comm, weft.Communicator.from_env(timeout_s=60) as other:
    if attempt == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os._exit(1)
    print(f"rank {rank} attempt {attempt} {comm.active_ranks} {other.active_ranks}\\n", end="", flush=True)
    other.meet(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "exit", "before"])
def test_a_restart_by_torchrun(tmp_path: Path, how: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(RESTART)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    done = subprocess.run([*command, str(script), how], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} attempt 1 (0, 1) (0, 1)" in done.stdout


def can_unshare() -> bool:
    tried = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, check=False)
    return tried.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not can_unshare(), reason="unshare --pid is not permitted here")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--pid", "--fork", "--mount-proc"], "another pid namespace .*shareProcessNamespace: true .*--pid=host"),
        (["--net"], "another network namespace .*--network=host"),
    ],
)
def test_ranks_in_namespaces_of_their_own(tmp_path: Path, options: list[str], text: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, re, sys, time, weft
            import torch.distributed as dist
            from datetime import timedelta
            rank = int(sys.argv[1])
            store = dist.FileStore({str(tmp_path / "store")!r}, -1)
            def share(endpoint):
                store.set(str(rank), endpoint)
                endpoints = [bytes(store.get(str(peer))) for peer in range(3)]
                share.start = time.monotonic()
                return endpoints
            try:
                weft.Communicator._connect(rank, 3, share, None, "test")
            except weft.Unsupported as error:
                assert re.search({text!r}, str(error)), error
                print(f"refused after {{time.monotonic() - share.start:.3f}} s", flush=True)
            """
        )
    )
    command = ["unshare", *options, sys.executable, str(script)]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(3)
    ]
    for each in ranks:
        output, _ = each.communicate(timeout=5 * LONG_S)
        assert "refused after 0." in output
