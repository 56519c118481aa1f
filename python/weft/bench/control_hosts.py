"""Times of the control plane between machines: `weft bench --control --hosts N`, each host a network namespace."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import time
from multiprocessing.connection import Connection
from typing import Any

from weft.bench.hosts import LONG_S, HostRank, Hosts
from weft.errors import InvalidArgument, PeerLost, Unsupported

MEASURED_BETWEEN_HOSTS = {
    "connect_ms": "connect, the meeting in the store included",
    "meet_ms": "meet",
    "host_rebuild_ms": "rebuild with everybody",
    "host_kill_to_told_ms": "kill -9 until a survivor's wait raises",
    "host_recover_ms": "recover after that",
    "cable_to_told_ms": "cable pulled until a survivor's wait raises",
}
_REBUILDS = 20  # of each group


def control_between_hosts(num_hosts: int, trials: int) -> list[dict[str, Any]]:
    """Time `trials` groups of one rank a host that lose a rank, and one in five that lose a cable: a row for each of
    MEASURED_BETWEEN_HOSTS, with p50_ms, max_ms and count. The store is on the first host and outlives all ranks.

    Raises:
        InvalidArgument: fewer than 3 hosts.
        Unsupported: network namespaces are denied here.
    """
    if num_hosts < 3:
        raise InvalidArgument(f"hosts is {num_hosts}; allowed are 3 and more: one is lost, and two go on")
    times: dict[str, list[float]] = {name: [] for name in MEASURED_BETWEEN_HOSTS}
    try:
        with Hosts(num_hosts) as hosts:
            for trial in range(trials):
                for name, ms in _lose_rank(hosts, trial):
                    times[name].append(ms)
            for trial in range(-(-trials // 5)):
                for name, ms in _lose_cable(hosts, trials + trial):
                    times[name].append(ms)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unsupported(
            "weft bench --control --hosts", str(error), "root, and network namespaces (ip netns)"
        ) from error
    return [
        {
            "kind": "control",
            "ranks": num_hosts,
            "what": name,
            "p50_ms": statistics.median(all_ms),
            "max_ms": max(all_ms),
            "count": len(all_ms),
        }
        for name, all_ms in times.items()
    ]


def _begin(hosts: Hosts, trial: int) -> tuple[HostRank, list[HostRank]]:
    """The store's process, and the ranks, which have connected."""
    port = 29000 + trial % 1000
    store = hosts.start(0, _host_store, hosts.address(0), port)
    store.hear()
    return store, hosts.start_ranks(_rank, port=port, TORCHELASTIC_USE_AGENT_STORE="True")


def _lose_rank(hosts: Hosts, trial: int) -> list[tuple[str, float]]:
    store, ranks = _begin(hosts, trial)
    seen = [time for rank in ranks for time in rank.hear()]
    lost = ranks[trial % len(ranks)]
    left = [rank for rank in ranks if rank is not lost]
    for rank in left:
        rank.say("wait")
        rank.hear()
    killed_ns = time.monotonic_ns()
    lost.process.kill()
    for rank in left:
        told_ns, recover_ms = rank.hear()
        seen += [("host_kill_to_told_ms", (told_ns - killed_ns) / 1e6), ("host_recover_ms", recover_ms)]
    _end(store, left)
    return seen


def _lose_cable(hosts: Hosts, trial: int) -> list[tuple[str, float]]:
    store, ranks = _begin(hosts, trial)
    for rank in ranks:
        rank.hear()
    for rank in ranks[:-1]:
        rank.say("wait")
        rank.hear()
    pulled_ns = time.monotonic_ns()
    hosts.pull_cable(hosts.num_hosts - 1)
    seen = [("cable_to_told_ms", (rank.hear()[0] - pulled_ns) / 1e6) for rank in ranks[:-1]]
    ranks[-1].process.kill()
    hosts.mend_cable(hosts.num_hosts - 1)
    _end(store, ranks[:-1])
    return seen


def _end(store: HostRank, ranks: list[HostRank]) -> None:
    for rank in ranks:
        rank.say("close")
    for rank in ranks:
        rank.end()
    store.say("close")
    store.end()


def _host_store(pipe: Connection, address: str, port: int) -> None:
    import torch.distributed as dist

    store = dist.TCPStore(address, port, None, True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def _rank(pipe: Connection) -> None:
    import weft

    begin = time.monotonic_ns()
    comm = weft.Communicator.from_env(timeout_s=LONG_S)
    seen = [("connect_ms", _ms_since(begin))]
    begin = time.monotonic_ns()
    for _ in range(_REBUILDS):
        comm.meet(LONG_S)
    seen.append(("meet_ms", _ms_since(begin) / _REBUILDS))
    begin = time.monotonic_ns()
    for _ in range(_REBUILDS):
        comm.rebuild(comm.active_ranks)
    seen.append(("host_rebuild_ms", _ms_since(begin) / _REBUILDS))
    pipe.send(seen)
    pipe.recv()
    pipe.send("waits")
    with contextlib.suppress(PeerLost):
        comm.meet(LONG_S)
    told_ns = time.monotonic_ns()
    comm.recover()
    pipe.send((told_ns, _ms_since(told_ns)))
    pipe.recv()
    comm.close()


def _ms_since(begin_ns: int) -> float:
    return (time.monotonic_ns() - begin_ns) / 1e6
