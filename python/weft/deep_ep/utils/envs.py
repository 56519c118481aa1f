"""How DeepEP's tests start their ranks, and what they ask about the machine."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from weft import env
from weft.deep_ep.ranks import known_ranks, ranks_of

__all__ = [
    "check_fast_rdma_atomic_support",
    "check_nvlink_connections",
    "check_torch_deterministic",
    "dist_print",
    "get_global_seed",
    "get_local_seed",
    "get_logical_domain_size",
    "get_nvlink_gbs",
    "get_physical_domain_size",
    "get_rdma_gbs",
    "init_dist",
    "init_seed",
]

_NVLINK_GBS = 450.0
_state = {"local_rank": 0, "seed": 0, "local_seed": 0}


def init_seed(seed: int) -> None:
    """Seed torch, numpy and random with `seed` and this rank."""
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    _state["seed"], _state["local_seed"] = seed, seed * 10007 + rank
    torch.manual_seed(_state["local_seed"])
    np.random.seed(_state["local_seed"] % (1 << 32))
    random.seed(_state["local_seed"])


def get_global_seed() -> int:
    """Of `init_seed`."""
    return _state["seed"]


def get_local_seed() -> int:
    """What this rank was seeded with."""
    return _state["local_seed"]


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, Any]:
    """(rank, number of ranks, group of all). MASTER_ADDR, MASTER_PORT; WORLD_SIZE and RANK count machines.

    With CUDA: NCCL, and the default device becomes cuda. Without: gloo. The default dtype becomes bf16.
    """
    import torch.distributed as dist

    address, port, num_machines, machine = env.launched()
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        "nccl" if has_cuda else "gloo",
        init_method=f"tcp://{address}:{port}",
        world_size=num_machines * num_local_ranks,
        rank=machine * num_local_ranks + local_rank,
    )
    torch.set_default_dtype(torch.bfloat16)
    if has_cuda:
        torch.set_default_device("cuda")
    _state["local_rank"] = local_rank
    init_seed(seed)
    return dist.get_rank(), dist.get_world_size(), dist.new_group(list(range(dist.get_world_size())))


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Print, rank after rank, or on the first of a machine alone. Collective."""
    import torch.distributed as dist

    if once_in_node:
        if _state["local_rank"] == 0:
            print(s, flush=True)  # noqa: T201
        dist.barrier()
        return
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            print(s, flush=True)  # noqa: T201
        dist.barrier()


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """(nodes, ranks of a node). Local where there is a buffer of the group, else collective.

    Raises:
        NotSupported: as `ElasticBuffer`.
    """
    found = known_ranks(group)
    if found is None:
        found = ranks_of(group)
        found.release()
    nodes = found.nodes.even("get_physical_domain_size", "use nodes of one size")
    return nodes.num_nodes, nodes.size


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """As `get_physical_domain_size`; without `allow_hybrid_mode` (1, R)."""
    num_nodes, size = get_physical_domain_size(group)
    return (num_nodes, size) if allow_hybrid_mode else (1, num_nodes * size)


def check_nvlink_connections(group: Any) -> None:
    """Nothing: Weft looks when it chooses its engine."""


def check_torch_deterministic() -> bool:
    """Whether torch was asked for deterministic algorithms."""
    return torch.are_deterministic_algorithms_enabled()


def get_nvlink_gbs() -> float:
    """GB/s in one direction of a recent GPU; `weft doctor --measure` measures."""
    return _NVLINK_GBS


def get_rdma_gbs() -> float:
    """0: there is no network."""
    return 0.0


def check_fast_rdma_atomic_support() -> bool:
    """False: there is no network."""
    return False
