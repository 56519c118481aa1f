"""Guards against ranks of several machines that do not find each other, split, hang, or are not told of a death: each
machine is a network namespace (hosts.py)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hosts import LONG_S, HostRank, Hosts, needs_hosts

import weft
from weft import deep_ep

pytestmark = [needs_hosts, pytest.mark.slow]


@pytest.fixture
def three() -> Iterator[Hosts]:
    with Hosts(3) as hosts:
        yield hosts


def connect(**options: object) -> weft.Communicator:
    return weft.Communicator.from_env(timeout_s=LONG_S, **options)  # type: ignore[arg-type]


def follow(pipe: Connection, comm: weft.Communicator) -> None:
    """Do what the test says, and say what came of it."""
    while True:
        word, *rest = pipe.recv()
        start = time.monotonic()
        try:
            if word == "close":
                comm.close()
                pipe.send("closed")
                return
            if word == "meet":
                comm.meet(*rest)
                result: object = "met"
            elif word == "recover":
                result = comm.recover(*rest[:1], deadline_s=rest[1] if len(rest) > 1 else LONG_S).active
            elif word == "rebuild":
                comm.rebuild(*rest)
                result = comm.active_ranks
            elif word == "settle":  # until those are out; ranks may die meanwhile
                while not set(comm.active_ranks).isdisjoint(rest[0]):
                    comm.recover(deadline_s=LONG_S)
                result = comm.active_ranks
            elif word == "abort":
                comm.abort(*rest)
                result = None
            else:
                result = (comm.epoch, comm.membership)
        except weft.Error as error:
            result = error
        pipe.send((result, time.monotonic() - start))


def serve(pipe: Connection, **options: object) -> None:
    comm = connect(**options)
    pipe.send((comm.topology.scaleup, comm.topology.scaleout, comm.engine, repr(comm)))
    follow(pipe, comm)


def tell(ranks: list[HostRank], *words: object) -> list[Any]:
    for rank in ranks:
        rank.say(words)
    return [rank.hear()[0] for rank in ranks]


def close(ranks: list[HostRank]) -> None:
    for rank in ranks:
        rank.say(("close",))
    for rank in ranks:
        assert rank.hear() == "closed"
        rank.end()


def test_ranks_meet_and_go_on_after_a_death(three: Hosts) -> None:
    ranks = three.start_ranks(serve, ranks_per_host=2)
    for number, rank in enumerate(ranks):
        near, far, engine, text = rank.hear()
        mates = (number // 2 * 2, number // 2 * 2 + 1)
        assert near == mates
        assert far == tuple(each for each in range(6) if each not in mates)
        assert engine == "cpu"
        assert "several machines" in text
    assert tell(ranks, "meet", LONG_S) == ["met"] * 6
    left = [rank for number, rank in enumerate(ranks) if number != 3]
    for rank in left:
        rank.say(("meet", LONG_S))
    ranks[3].signal(signal.SIGKILL)
    for rank in left:
        error, _ = rank.hear()
        assert isinstance(error, weft.PeerLost)
        assert error.ranks == (3,)
    assert tell(left, "recover") == [(0, 1, 2, 4, 5)] * 5
    assert tell(left, "meet", LONG_S) == ["met"] * 5
    epochs = tell(left, "state")
    assert {epoch for epoch, _ in epochs} == {2}
    assert all(3 in (*state.evicted, *state.safe_to_delete) for _, state in epochs)
    close(left)


def share_cores(pipe: Connection, mode: str) -> None:
    with connect(placement=mode) as comm:
        pipe.send((comm.placement.local_rank, comm.placement.num_local_ranks))
        pipe.recv()


def test_ranks_share_the_cores_of_their_machine_alone(three: Hosts) -> None:
    for port, mode in ((29631, "off"), (29632, "process")):
        ranks = three.start_ranks(share_cores, mode, ranks_per_host=2, port=port)
        assert [rank.hear() for rank in ranks] == [(0, 2), (1, 2)] * 3
        for rank in ranks:
            rank.say("go")
            rank.end()


def test_a_stopped_rank_is_left_out_and_told(three: Hosts) -> None:
    ranks = three.start_ranks(serve)
    for rank in ranks:
        rank.hear()
    ranks[2].signal(signal.SIGSTOP)
    for error in tell(ranks[:2], "meet", 0.5):
        assert isinstance(error, weft.PeerTimeout)
    assert tell(ranks[:2], "recover", (2,)) == [(0, 1)] * 2
    assert tell(ranks[:2], "meet", LONG_S) == ["met"] * 2
    ranks[2].signal(signal.SIGCONT)
    # The others came to this one, so it may end well, or as they told that it ended for them; not the next one.
    ranks[2].say(("meet", LONG_S))
    first = ranks[2].hear()[0]
    assert first == "met" or isinstance(first, weft.Evicted | weft.PeerTimeout)
    ranks[2].say(("meet", LONG_S))
    error, seconds = ranks[2].hear()
    assert isinstance(error, weft.Evicted)
    assert seconds < LONG_S / 2
    close(ranks)


@pytest.mark.parametrize("lost", [1, 2])
def test_a_cable_that_is_pulled(three: Hosts, lost: int) -> None:  # of ranks that called it, and that it called
    left = [rank for rank in range(3) if rank != lost]
    ranks = three.start_ranks(serve)
    for rank in ranks:
        rank.hear()
    for rank in left:
        ranks[rank].say(("meet", LONG_S))
    three.pull_cable(lost)
    for rank in left:
        error, _ = ranks[rank].hear()
        assert isinstance(error, weft.PeerLost)
        assert error.ranks == (lost,)
        assert "unreachable" in str(error)
    assert tell([ranks[rank] for rank in left], "recover") == [tuple(left)] * 2
    # Its store is out of reach, so this rank decides nothing.
    ranks[lost].say(("recover", (), 2.0))
    error, seconds = ranks[lost].hear()
    assert isinstance(error, weft.ControlLost)
    assert seconds < LONG_S / 2
    three.mend_cable(lost)
    assert tell([ranks[rank] for rank in left], "meet", LONG_S) == ["met"] * 2
    close(ranks)


def test_the_host_of_the_store_dies(three: Hosts) -> None:
    ranks = three.start_ranks(serve)  # rank 0 hosts it
    for rank in ranks:
        rank.hear()
    ranks[0].signal(signal.SIGKILL)
    left = ranks[1:]
    assert all(isinstance(error, weft.PeerLost) for error in tell(left, "meet", LONG_S))
    for rank in left:
        rank.say(("recover", (), 3.0))
    for rank in left:
        error, seconds = rank.hear()
        assert isinstance(error, weft.ControlLost)
        assert seconds < LONG_S / 2
    close(left)


def host_store(pipe: Connection, address: str, port: int) -> None:
    store = dist.TCPStore(address, port, None, True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def test_a_store_of_its_own_outlives_rank_0(three: Hosts) -> None:
    store = three.start(0, host_store, three.address(0), 29700)
    assert store.hear() == 29700
    ranks = three.start_ranks(serve, port=29700, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="a job")
    for rank in ranks:
        rank.hear()
    ranks[0].signal(signal.SIGKILL)
    assert all(isinstance(error, weft.PeerLost) for error in tell(ranks[1:], "meet", LONG_S))
    assert tell(ranks[1:], "recover") == [(1, 2)] * 2
    # Torchrun starts all anew: the keys of before are not believed.
    close(ranks[1:])
    again = three.start_ranks(serve, port=29700, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="a job")
    for rank in again:
        rank.hear()
    assert tell(again, "meet", LONG_S) == ["met"] * 3
    assert {epoch for epoch, _ in tell(again, "state")} == {1}
    close(again)


def test_two_jobs_on_the_same_hosts(three: Hosts) -> None:
    jobs = [three.start_ranks(serve, port=port) for port in (29611, 29612)]
    for rank in (*jobs[0], *jobs[1]):
        rank.hear()
    jobs[0][1].signal(signal.SIGKILL)
    left = [jobs[0][0], jobs[0][2]]
    assert all(isinstance(error, weft.PeerLost) for error in tell(left, "meet", LONG_S))
    assert tell(left, "recover") == [(0, 2)] * 2
    assert tell(jobs[1], "meet", LONG_S) == ["met"] * 3
    close([*left, *jobs[1]])


def test_an_abort_ends_the_waits_of_all(three: Hosts) -> None:
    ranks = three.start_ranks(serve)
    for rank in ranks:
        rank.hear()
    for rank in ranks[:2]:
        rank.say(("meet", LONG_S))
    ranks[2].say(("abort", "enough"))
    ranks[2].hear()
    for rank in ranks[:2]:
        error, _ = rank.hear()
        assert isinstance(error, weft.Aborted)
        assert (error.reason, error.rank) == ("enough", 2)
    assert tell(ranks, "rebuild", [0, 1, 2]) == [(0, 1, 2)] * 3
    close(ranks)


def layer(pipe: Connection) -> None:
    with connect() as comm:
        with pytest.raises(weft.Unsupported, match="run on another machine; ExpertParallel needs") as caught:
            weft.ExpertParallel(comm, num_experts=12, top_k=2, hidden=64, max_tokens_per_rank=4)
        comm.meet(LONG_S)  # not broken
        pipe.send("met")
        pipe.recv()  # all have ended that meeting: who is left out inside it is told so
        near = comm.topology.scaleup
        if comm.rank < 2:
            comm.rebuild(near)
            layer = weft.ExpertParallel(comm, num_experts=12, top_k=2, hidden=64, max_tokens_per_rank=4)
            x = torch.ones(4, 64, dtype=torch.bfloat16)
            result = layer.dispatch(x, torch.tensor([[0, 2]] * 4))
            assert isinstance(result.x, torch.Tensor)
            pipe.send((str(caught.value), layer.combine(result.x, result.handle).sum().item()))
        else:
            pipe.send((str(caught.value), 0.0))
            pipe.recv()


def test_rows_do_not_cross_machines_but_go_where_they_may(three: Hosts) -> None:
    ranks = three.start_ranks(layer, ranks_per_host=2)
    assert [rank.hear() for rank in ranks] == ["met"] * 6
    for rank in ranks:
        rank.say("go")
    sums = [rank.hear()[1] for rank in ranks]
    assert sums[0] == sums[1] == 4 * 64 * 2
    for rank in ranks[2:]:
        rank.say("go")
    for rank in ranks:
        rank.end()


def refused(pipe: Connection, secrets: list[str | None], timeout_s: float) -> None:
    try:
        comm = weft.Communicator.from_env(timeout_s=timeout_s, secret=secrets[int(os.environ["RANK"])])
    except weft.Error as error:
        pipe.send(error)
    else:
        comm.meet(LONG_S)
        pipe.send("met")
        pipe.recv()


def make_buffers(pipe: Connection, node_ranks: str) -> None:
    """Of deep_ep: nodes are machines. Whatever WEFT_DEEP_EP_NODE_RANKS says besides is refused on all ranks."""
    os.environ["WEFT_DEEP_EP_NODE_RANKS"] = node_ranks
    with connect() as comm:
        try:
            buffer = deep_ep.Buffer(comm)
        except weft.InvalidArgument as error:
            pipe.send(str(error))
            return
        assert buffer.runtime is not None
        v2 = deep_ep.ElasticBuffer(comm, num_bytes=1 << 20, num_max_tokens_per_rank=4)
        x = torch.ones((2, 64), dtype=torch.bfloat16, device="cpu")
        ids = torch.tensor([[0, 1], [4, 5]], dtype=torch.int64, device="cpu")
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 6)
        assert per_node is not None
        refused = []
        for call in (
            lambda: buffer.dispatch(
                x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert
            ),
            lambda: v2.dispatch(x, ids, num_experts=6),
        ):
            try:
                call()
            except deep_ep.NotSupported as error:
                refused.append(str(error))
        where = buffer.runtime.get_num_rdma_ranks(), buffer.runtime.get_rdma_rank()
        pipe.send((where, v2.get_physical_domain_size(), per_node.tolist(), refused))


def test_buffers_of_deep_ep_know_their_machines(three: Hosts) -> None:
    ranks = three.start_ranks(make_buffers, "0", ranks_per_host=2)
    for number, rank in enumerate(ranks):
        where, domains, per_node, refused = rank.hear()
        assert (where, domains, per_node) == ((3, number // 2), (3, 2), [1, 0, 1])
        assert len(refused) == 2
        assert all("no rows cross them yet" in text for text in refused)
        rank.end()
    for rank in three.start_ranks(make_buffers, "3", ranks_per_host=2, port=29633):
        assert "WEFT_DEEP_EP_NODE_RANKS is 3; allowed is 2, the ranks of a machine" in rank.hear()
        rank.end()


def test_the_secret_is_asked_for(three: Hosts, tmp_path: Path) -> None:
    for name in ("right", "wrong", "open"):
        path = tmp_path / name
        path.write_text(f"the {name} secret of the group")
        path.chmod(0o644 if name == "open" else 0o600)
    right, wrong, shared = (str(tmp_path / name) for name in ("right", "wrong", "open"))
    ranks = three.start_ranks(refused, [right] * 3, LONG_S)
    assert [rank.hear() for rank in ranks] == ["met"] * 3
    for rank in ranks:
        rank.say("go")
        rank.end()
    errors = [rank.hear() for rank in three.start_ranks(refused, [right, right, wrong], 15.0, port=29613)]
    assert isinstance(errors[2], weft.InvalidArgument)
    assert "knows the group's secret" in str(errors[2])
    assert all(isinstance(error, weft.Error) for error in errors)
    error = three.start_ranks(refused, [shared] * 3, LONG_S, port=29614)[0].hear()
    assert isinstance(error, weft.InvalidArgument)
    assert "can be read by others (mode 0644" in str(error)


def by_group(pipe: Connection, address: str, is_kept: bool) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://{address}:29620", rank=int(os.environ["RANK"]), world_size=3)
    comm = weft.Communicator.from_process_group(timeout_s=LONG_S)
    if not is_kept:
        dist.destroy_process_group()
    pipe.send("made")
    follow(pipe, comm)


@pytest.mark.parametrize("is_kept", [True, False])
def test_ranks_of_a_process_group(three: Hosts, is_kept: bool) -> None:
    ranks = three.start_ranks(by_group, three.address(0), is_kept, GLOO_SOCKET_IFNAME="eth0")
    for rank in ranks:
        assert rank.hear() == "made"
    assert tell(ranks, "meet", LONG_S) == ["met"] * 3
    ranks[2].signal(signal.SIGKILL)
    assert all(isinstance(error, weft.PeerLost) for error in tell(ranks[:2], "meet", LONG_S))
    assert tell(ranks[:2], "recover") == [(0, 1)] * 2
    for rank in ranks[:2]:
        rank.say(("close",))
        assert rank.hear() == "closed"


def own_decide(pipe: Connection, folder: str) -> None:
    import fcntl

    def decide(key: str, expected: str, desired: str) -> str:
        path = Path(folder) / key.replace("/", ".")
        with open(Path(folder) / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            held = path.read_text() if path.exists() else ""
            if held == expected and desired:
                path.write_text(desired)
                return desired
            return held

    serve(pipe, decide=decide)


def test_a_program_decides_where_it_likes(three: Hosts, tmp_path: Path) -> None:
    ranks = three.start_ranks(own_decide, str(tmp_path), WEFT_CONTROL_INTERFACE="eth0", WEFT_CONTROL_PORT=29650)
    for rank in ranks:
        rank.hear()
    ranks[0].signal(signal.SIGKILL)  # it hosts the store of the meeting, which is not asked
    assert all(isinstance(error, weft.PeerLost) for error in tell(ranks[1:], "meet", LONG_S))
    assert tell(ranks[1:], "recover") == [(1, 2)] * 2
    assert [path.name.rsplit(".", 1)[1] for path in tmp_path.glob("weft.membership.*")] == ["2"]
    close(ranks[1:])


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_hundred_kills(three: Hosts) -> None:
    """One rank or two die at any moment of a wait or of the recovery: those left are all told, and agree."""
    store = three.start(0, host_store, three.address(0), 29700)
    store.hear()
    random = Random(20261126)
    for trial in range(100):
        per_host = random.choice([1, 2])
        ranks = three.start_ranks(
            serve, ranks_per_host=per_host, port=29700, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID=trial
        )
        for rank in ranks:
            rank.hear()
        victims = random.sample(range(3 * per_host), random.choice([1, 2]))
        left = [rank for number, rank in enumerate(ranks) if number not in victims]
        told = [rank for number, rank in enumerate(ranks) if number != victims[0]]
        for rank in told:
            rank.say(("meet", LONG_S))
        time.sleep(random.random() * 0.02)
        ranks[victims[0]].signal(signal.SIGKILL)
        for rank in told:
            error, _ = rank.hear()
            assert isinstance(error, weft.PeerLost), (trial, error)
            assert error.ranks == (victims[0],)
        for rank in told:
            rank.say(("settle", tuple(victims)))
        time.sleep(random.random() * 0.02)
        for victim in victims[1:]:
            ranks[victim].signal(signal.SIGKILL)
        expected = tuple(sorted(set(range(3 * per_host)) - set(victims)))
        assert [rank.hear()[0] for rank in left] == [expected] * len(left), trial
        assert tell(left, "meet", LONG_S) == ["met"] * len(left)
        assert len({epoch for epoch, _ in tell(left, "state")}) == 1
        close(left)
        for rank in ranks:
            rank.process.join(LONG_S)
