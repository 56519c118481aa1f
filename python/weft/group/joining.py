"""How the ranks of a group find each other: the constructors of `weft.Communicator`."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from weft import _load, env
from weft.engine import Choice, Facts, choose_engine, look
from weft.errors import InvalidArgument, InvalidState, PeerTimeout, Unsupported
from weft.group.deciding import Decide, Network, Secret, by_store, of_group, serve
from weft.group.meeting import ENDPOINT_BYTES, hosts_store, meet_by_env
from weft.group.membership import Change
from weft.group.sleeping import Sleeping
from weft.group.turns import positive_seconds
from weft.limits import MAX_CONTROL_RANKS, MAX_RANKS
from weft.log import logger
from weft.machine.placement import local
from weft.machine.placement.binding import Binding
from weft.machine.placement.model import Placement

if TYPE_CHECKING:
    from torch.distributed import Store
    from typing_extensions import Self

    from weft import _native

__all__ = ["CONNECT_TIMEOUT_S", "Joining", "device_of", "positive_seconds"]

CONNECT_TIMEOUT_S = 300.0
_LEAST_CONNECT_S = 1.0  # for ranks that met right before the deadline
_THREADS = "threads of one process"
_ENGINE_TAG = 1 << 23  # of the exchange for the choice of the engine


class Joining(Sleeping):
    """The part of a communicator that makes it."""

    def __init__(
        self,
        native: _native.Communicator,
        device: torch.device,
        origin: str,
        facts: Facts | Choice,
        *,
        placement: Placement | None = None,
    ) -> None:
        """`facts`: for the choice of the engine, which is made together; or the choice itself."""
        super().__init__()
        self._native = native
        self.device = device
        self._origin = origin
        self._choice = facts if isinstance(facts, Choice) else self._choose(facts)
        self._kept: list[object] = []  # what lives until close()
        self._closed = False
        self._rank, self._num_ranks = native.rank, native.num_ranks
        self._active = tuple(native.active_ranks)
        self._binding = Binding(placement or Placement(mode="off"), own_thread_only=origin == _THREADS)
        self._binding.apply()
        if placement is not None and placement.mode != "off":
            logger.info("rank %d: %s", native.rank, self._binding.placement)
        self._listeners: list[Callable[[Change], object]] = []
        self._map_epoch = 0 if native.is_solo else native.epoch
        self._publish_contract()
        self.recorded: dict[int, weakref.ref[Any]] = {}  # by weft.autograd
        self._lives()

    @classmethod
    def from_process_group(
        cls,
        group: torch.distributed.ProcessGroup | None = None,
        *,
        device: torch.device | str | int | None = None,
        engine: str = "auto",
        placement: str | Placement = "auto",
        timeout_s: float = CONNECT_TIMEOUT_S,
        decide: Decide | None = None,
        secret: Secret = None,
        max_ranks: int | None = None,
    ) -> Self:
        """Ranks of a torch.distributed group (default: the whole world). Collective over it.

        Any backend serves, gloo included: only one fixed-size tensor of bytes a rank is gathered, nothing is pickled,
        and the group is not used afterwards. The ranks may be on several machines: they connect over TCP and agree on
        who belongs to the group, but no rows cross machines yet; docs/several_machines.md has `decide` and `secret`.
        `device`: where x lives; "auto": the current GPU where torch sees one;
        default: the current GPU with a group of NCCL, else the CPU. `engine`: "auto", "cpu" or "nvlink". `placement`:
        "auto" binds Weft's own threads to cores near this rank's GPU, "process" the whole process and its memory, "off"
        nothing, a `weft.Placement` what it says; docs/placement.md. Taken back by `close`. `timeout_s`: for all ranks
        to call it and to connect. The gather itself can't be taken back: after a timeout use the group no more; torch
        may wait for the group's own timeout when the process ends.
        `max_ranks`: others may `join` later, up to so many ranks, on one machine and the cpu engine; None: nobody.

        Raises:
            InvalidArgument: an argument is not allowed (before the group is used: the call may be repeated), or the
                ranks asked for different engines.
            InvalidState: torch.distributed is not initialised, or this process is not in `group`.
            Unsupported: a rank on another machine can't be reached, or engine="nvlink" can't be.
            PeerTimeout: a rank did not come within `timeout_s`; of the gather, torch does not say which (`peers` is
                empty).
            PeerLost: a rank ended while the ranks connected.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise InvalidState(
                "torch.distributed is not initialised: call torch.distributed.init_process_group first, or use "
                "weft.Communicator.from_env() under torchrun, or weft.spawn"
            )
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise InvalidState("this process is not a member of the group: call from_process_group only on its members")
        is_nccl = "nccl" in dist.get_backend(group)
        where = torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
        if device is None and is_nccl:
            device = where

        def share(endpoint: bytes) -> list[bytes]:
            mine = torch.tensor(list(endpoint), dtype=torch.uint8, device=where)
            gathered = [torch.empty_like(mine) for _ in range(num_ranks)]
            start = time.monotonic()
            try:
                dist.all_gather(gathered, mine, group=group, async_op=True).wait(timedelta(seconds=timeout_s))
            except RuntimeError as error:
                if time.monotonic() - start < timeout_s:
                    raise
                text = f"rank {rank}: not all {num_ranks} ranks of the group called from_process_group within "
                raise PeerTimeout(
                    "connect", 0, (), f"{text}{timeout_s:g} s; raise timeout_s if that is too short"
                ) from error
            return [bytes(each.cpu().tolist()) for each in gathered]

        origin = "torch.distributed group"
        network = Network.make(decide or _decide_in(group), secret)
        return cls._connect(
            rank, num_ranks, share, device, origin, timeout_s, engine=engine, placement=placement, network=network,
            max_ranks=max_ranks,
        )  # fmt: skip

    @classmethod
    def from_allgather(
        cls,
        rank: int,
        num_ranks: int,
        allgather: Callable[[bytes], Sequence[bytes]],
        *,
        device: torch.device | str | int | None = None,
        engine: str = "auto",
        placement: str | Placement = "auto",
        timeout_s: float = CONNECT_TIMEOUT_S,
        max_ranks: int | None = None,
    ) -> Self:
        """Ranks that can gather bytes in a way of their own, such as mpi4py's `comm.allgather`. Collective.

        `allgather` is called once, with bytes of this rank, equally many on each, and returns those of all ranks, by
        rank; what it raises is raised here. It is not used afterwards. `device`: "auto": the current GPU where torch
        sees one; default: the CPU. `timeout_s`: to connect, once all are gathered. `engine`, `placement` and
        `max_ranks` as in `from_process_group`.

        Raises:
            InvalidArgument: an argument is not allowed (before `allgather` is called), or what it returned, or the
                ranks asked for different engines.
            Unsupported: the ranks are not on one machine and in one pid namespace, or engine="nvlink" can't be.
            PeerTimeout, PeerLost: a rank did not connect.
        """
        for name, value, most in (("num_ranks", num_ranks, MAX_CONTROL_RANKS), ("rank", rank, num_ranks)):
            least = int(name == "num_ranks")
            if type(value) is not int or not least <= value < most + least:
                raise InvalidArgument(f"{name} is {value!r}; allowed are {least} to {most - 1 + least}")
        if not callable(allgather):
            raise InvalidArgument(f"allgather is {allgather!r}; allowed is a function of bytes")
        return cls._connect(
            rank, num_ranks, lambda endpoint: list(allgather(endpoint)), device, "allgather", timeout_s, engine=engine,
            placement=placement, max_ranks=max_ranks,
        )  # fmt: skip

    @classmethod
    def from_env(
        cls,
        device: torch.device | str | int | None = None,
        *,
        engine: str = "auto",
        placement: str | Placement = "auto",
        timeout_s: float = CONNECT_TIMEOUT_S,
        decide: Decide | None = None,
        secret: Secret = None,
        max_ranks: int | None = None,
    ) -> Self:
        """Ranks started by torchrun, or by anything that sets its variables; without them a group of one rank.
        Collective.

        The ranks meet in the store at MASTER_ADDR:MASTER_PORT, which rank 0 hosts where torchrun does not. Needs no
        `init_process_group` and does not disturb one. What ended processes left in the store is not believed, so it
        works after a restart. device="cuda" is the GPU of LOCAL_RANK, "auto" the same where torch sees a GPU; default:
        the CPU. `timeout_s`: for all ranks to come and to connect. Ranks on several machines, `engine`, `placement`,
        `decide`, `secret` and `max_ranks` as in `from_process_group`.

        Raises:
            InvalidArgument: an argument is not allowed, or RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR or MASTER_PORT is
                missing or wrong (before anything is sent: the call may be repeated); or the ranks asked for different
                engines.
            InvalidState: another process came as this rank after this one.
            Unsupported: a rank on another machine can't be reached, or engine="nvlink" can't be.
            PeerTimeout: naming the ranks that did not come within `timeout_s`.
            PeerLost: a rank ended while the ranks connected.
        """
        found = env.torchrun(MAX_CONTROL_RANKS)
        place = found or env.Torchrun(0, 1, 0)
        origin = "one rank, torchrun's variables are not set" if found is None else "torchrun"
        if device in ("cuda", "auto") and torch.cuda.is_available():
            device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        kept: list[Store] = []

        def share(endpoint: bytes) -> list[bytes]:
            if place.num_ranks == 1:
                return [endpoint]
            endpoints, store = meet_by_env(place, endpoint, timeout_s)
            kept.append(store)
            return endpoints

        def decide_in_it(key: str, expected: str, desired: str) -> bytes | str:
            return by_store(kept[0])(key, expected, desired)

        network = Network.make(decide or decide_in_it, secret)
        comm = cls._connect(
            place.rank, place.num_ranks, share, device, origin, timeout_s, engine=engine, placement=placement,
            network=network if place.num_ranks > 1 else None, max_ranks=max_ranks,
        )  # fmt: skip
        comm._kept = list(kept) if hosts_store(place) else []
        return comm

    @classmethod
    def _connect(
        cls,
        rank: int,
        num_ranks: int,
        share: Callable[[bytes], list[bytes]],
        device: torch.device | str | int | None,
        origin: str,
        timeout_s: float = CONNECT_TIMEOUT_S,
        *,
        engine: str = "auto",
        placement: str | Placement = "auto",
        network: Network | None = None,
        max_ranks: int | None = None,
    ) -> Self:
        """Connect processes: `share` is given this rank's endpoint and returns those of all ranks. With a `network`
        they may be on several machines.

        Whatever can be refused here is refused before the first peer hears of this rank, so the call may be repeated.
        """
        wanted = local.check_placement(placement)
        if max_ranks is not None and (type(max_ranks) is not int or not num_ranks <= max_ranks <= MAX_RANKS):
            raise InvalidArgument(f"max_ranks is {max_ranks!r}; allowed are None and {num_ranks} to {MAX_RANKS}")
        deadline = time.monotonic() + positive_seconds("timeout_s", timeout_s)
        native = _load.native()
        where = device_of(device)
        facts = look(where, engine)
        mine = local.resolve(wanted, local_rank=rank, num_local_ranks=num_ranks, device=where)
        listener = native.Listener() if network is None else native.Listener(True, network.interface, network.port)
        endpoints = share(listener.endpoint())
        lengths = [len(each) if isinstance(each, bytes) else -1 for each in endpoints]
        if len(endpoints) != num_ranks or any(length != ENDPOINT_BYTES for length in lengths):
            raise InvalidArgument(
                f"the endpoints of {num_ranks} ranks were expected, {ENDPOINT_BYTES} bytes each; got lengths "
                f"{lengths}: do all ranks run the same version of Weft?"
            )
        left_s = max(deadline - time.monotonic(), _LEAST_CONNECT_S)
        if network is None:
            connected = native.Communicator.connect(rank, endpoints, listener, left_s, max_ranks=max_ranks or 0)
        else:
            decider = native.Decider()
            connected = native.Communicator.connect(
                rank, endpoints, listener, left_s, decider=decider, secret=network.secret, max_ranks=max_ranks or 0
            )
            near = [each for each in range(num_ranks) if connected.is_near(each)]
            if len(near) < num_ranks:
                serve(decider, network.decide)  # ends with the communicator
                mine = local.resolve(wanted, local_rank=near.index(rank), num_local_ranks=len(near), device=where)
        return cls(connected, where, origin, facts, placement=mine)

    @classmethod
    def _local(
        cls,
        native: _native.Communicator,
        device: torch.device | str | int | None = None,
        *,
        engine: str = "auto",
        placement: Placement | None = None,
    ) -> Self:
        """A rank that is a thread of this process; `placement` (resolved) binds this thread alone."""
        try:
            where = device_of(device)
            facts = look(where, engine)
        except BaseException:
            native.close()
            raise
        return cls(native, where, _THREADS, facts, placement=placement)

    def _choose(self, facts: Facts) -> Choice:
        """Tell the peers what is here and decide, as they do. A failure closes the native communicator."""
        try:
            mine = json.dumps(facts.to_json()).encode()
            told = self._native.exchange(_ENGINE_TAG, mine, CONNECT_TIMEOUT_S)
            ranks = list(self._native.active_ranks)
            far = [rank for rank in ranks if not self._native.is_near(rank)]
            choice = choose_engine({rank: Facts.from_json(json.loads(told[rank])) for rank in ranks}, far)
            if self._native.is_open and choice.engine == "nvlink":
                raise Unsupported("max_ranks on the nvlink engine", "ranks that come and go", 'engine="cpu"')
            return choice
        except BaseException:
            self._native.close()
            raise


def _decide_in(group: torch.distributed.ProcessGroup | None) -> Decide:
    """In the group's own store, which is kept: the group may be destroyed before the first question."""
    import torch.distributed.distributed_c10d as c10d

    store = c10d._get_process_group_store(group or c10d._get_default_group())
    found: list[Decide] = []

    def decide(key: str, expected: str, desired: str) -> bytes | str:
        if not found:
            found.append(of_group(store))
        return found[0](key, expected, desired)

    return decide


def device_of(device: torch.device | str | int | None) -> torch.device:
    """The device that a user has named."""
    if device == "auto":
        device = "cuda" if torch.cuda.device_count() else "cpu"
    if device is None:
        return torch.device("cpu")
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        text = f'device is {device!r}; allowed are "auto", "cpu", "cuda", "cuda:N" and None'
        raise InvalidArgument(text) from error
    if wanted.type == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)
    if wanted.type != "cpu":
        raise Unsupported(
            f"device {wanted}", "no such device in torch here", '"cpu", or a CUDA device that torch can see'
        )
    return wanted
