"""Nodes of a group: ranks that reach each other by load and store. Machines, or runs of ranks of one, as
WEFT_DEEP_EP_NODE_RANKS has them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from weft.deep_ep.errors import refused
from weft.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weft.communicator import Communicator

__all__ = ["Network", "Nodes", "nodes_of", "runs_of"]


class Network(NamedTuple):
    """What a buffer asks of the network between machines, which Weft does not have yet: on one it has no effect.
    `service_level` 0 to 15, None: the usual one. `num_qps`: most channels of a rank."""

    service_level: int | None
    num_qps: int


@dataclass(frozen=True)
class Nodes:
    """Ranks 0 to size - 1, size to 2 size - 1 and so on; the last node may have fewer. `rank` is this one."""

    rank: int
    num_ranks: int
    size: int

    @cached_property
    def num_nodes(self) -> int:
        """DeepEP's RDMA ranks, scale-out ranks or nodes."""
        return -(-self.num_ranks // self.size)

    @cached_property
    def node(self) -> int:
        """Of this rank."""
        return self.rank // self.size

    @cached_property
    def idx(self) -> int:
        """Of this rank in its node."""
        return self.rank % self.size

    @cached_property
    def node_ranks(self) -> int | None:
        """As `weft.ExpertParallel` takes it; None where all are one node."""
        return self.size if self.num_nodes > 1 else None

    def even(self, what: str, instead: str) -> Nodes:
        """These.

        Raises:
            NotSupported: the last has fewer ranks, and `what` has one number for all.
        """
        if self.num_ranks % self.size:
            last = self.num_ranks % self.size
            why = f"nodes of {self.size} ranks and a last one of {last}, where its numbers are those of equal ones"
            raise refused(what, why, instead)
        return self

    def tokens_by_node(self, is_token_in_rank: Tensor) -> Tensor:
        """bool [T, R] -> int32 [N]: tokens that go to each node; on the device that they are on."""
        missing = self.num_nodes * self.size - self.num_ranks
        whole = torch.nn.functional.pad(is_token_in_rank, (0, missing))
        return whole.view(len(whole), self.num_nodes, self.size).any(2).sum(0, dtype=torch.int32)


def runs_of(machines: Iterable[Iterable[int]], num_ranks: int) -> int:
    """How many ranks a node has, of the ranks that each machine has.

    Raises:
        NotSupported: no runs of equal length, of which the last alone may be shorter.
    """
    found = sorted({tuple(sorted(each)) for each in machines})
    size = len(found[0])
    wanted = [tuple(range(first, min(first + size, num_ranks))) for first in range(0, num_ranks, size)]
    if found != wanted:
        raise refused(
            f"a group with the machines {', '.join(str(list(each)) for each in found)}",
            "ranks of a machine that are no run, or machines of several sizes other than a smaller last one",
            "start equally many ranks on each machine, and number them machine by machine",
        )
    return size


def nodes_of(comm: Communicator, asked: int = 0, name: str = "WEFT_DEEP_EP_NODE_RANKS") -> Nodes:
    """The machines of the ranks; on one machine runs of `asked` ranks, as `name` has it (0, or as many as there are:
    one node). Collective where the ranks are on several machines.

    Raises:
        NotSupported: as `runs_of`; several nodes among ranks that are GPUs of one machine.
        InvalidArgument: `asked` for other nodes than the machines are.
    """
    rank, num_ranks = comm.rank, comm.num_ranks
    where = comm.topology
    if where.scaleout:
        told = comm.gather(json.dumps(where.scaleup).encode())
        size = runs_of((json.loads(each) for each in told.values()), num_ranks)
        if asked not in (0, size):
            raise InvalidArgument(f"{name} is {asked}; allowed is {size}, the ranks of a machine, or not to set it")
        return Nodes(rank, num_ranks, size)
    size = asked if 0 < asked < num_ranks else num_ranks
    if size < num_ranks and comm.engine == "nvlink":
        raise refused(f"{name}={asked}", "nodes on one machine are for the cpu engine", "do not set it on GPUs")
    return Nodes(rank, num_ranks, size)
