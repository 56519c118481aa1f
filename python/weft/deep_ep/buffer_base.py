"""What a V1 buffer is before it sends anything: its arguments, its ranks, its end."""
# check: allow-in-file function-size: parameters as in DeepEP

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from weft import env
from weft.deep_ep.ending import Ending
from weft.deep_ep.layers import DEADLINE_S, Layers
from weft.deep_ep.nodes import Network, Nodes
from weft.deep_ep.ranks import Ranks, ranks_of
from weft.deep_ep.streams import Streams
from weft.errors import InvalidArgument

__all__ = ["BufferBase", "Runtime"]

_SCRATCH_BYTES = 256


class Runtime:
    """What callers ask the native object of the original."""

    def __init__(self, ranks: Ranks, nodes: Nodes) -> None:
        self._ranks, self._nodes = ranks, nodes

    def is_available(self) -> bool:
        """True."""
        return True

    def get_num_rdma_ranks(self) -> int:
        """Nodes of the group."""
        return self._nodes.num_nodes

    def get_rdma_rank(self) -> int:
        """The node of this rank."""
        return self._nodes.node

    def get_local_device_id(self) -> int:
        """Of the GPU; 0 in host memory."""
        return self._ranks.device.index or 0


class BufferBase(Ending):
    """Constructor, attributes and end of `Buffer`."""

    _streams: Streams
    enable_shrink = False

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        use_fabric: bool = False,
        allow_nvlink_for_normal_mode: bool = True,
        num_nvl_peers: int = 0,
    ) -> None:
        if not allow_nvlink_for_low_latency_mode:
            warnings.warn(
                "deep_ep: allow_nvlink_for_low_latency_mode=False has no effect: Weft has no other path", stacklevel=2
            )
        self.group = group
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.enable_shrink = enable_shrink
        self.nvshmem_qp_depth = 1024
        if type(num_qps_per_rank) is not int or num_qps_per_rank < 1:
            raise InvalidArgument(f"num_qps_per_rank is {num_qps_per_rank!r}; allowed are 1 and more")
        self.network = Network(env.service_level("NVSHMEM_IB_SL"), num_qps_per_rank)
        self._open(ranks_of(group, comm, can_mask=enable_shrink), heap_bytes=num_nvl_bytes)
        if self._masks is not None:
            self._masks.is_automatic = True

    def _open(self, ranks: Ranks, *, heap_bytes: int = 0, deadline_s: float = DEADLINE_S) -> None:
        """From here on there are ranks, of which this buffer is a user, and something to give back."""
        self._ranks = ranks
        self.rank, self.group_size = ranks.rank, ranks.num_ranks
        self._nodes = ranks.nodes
        with ranks.released_on_error():
            self._layers = Layers(ranks, heap_bytes=heap_bytes, deadline_s=deadline_s)
        self.runtime: Runtime | None = Runtime(ranks, self._nodes)
        self._streams = Streams(ranks.device)
        self._scratch: Tensor | None = None
        self._num_dispatches = 0  # low-latency ones that have ended
        self._masks = ranks.masks if self.enable_shrink else None
        self._destroyed = False

    def _slots(self, num_experts: int) -> tuple[int, int]:
        """Of a low-latency call: experts that the windows are for, and ranks for whose rows there is room."""
        self._num_local(num_experts)
        return num_experts, self.group_size

    def _num_local(self, num_experts: int) -> int:
        """Experts of a rank.

        Raises:
            InvalidArgument: `num_experts` is no multiple of the number of ranks.
        """
        if num_experts <= 0 or num_experts % self.group_size:
            raise InvalidArgument(
                f"num_experts is {num_experts}; allowed are multiples of the number of ranks, {self.group_size}"
            )
        return num_experts // self.group_size

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> Tensor:
        """A private scratch tensor, 256 bytes if `size` is None: what is written to it harms nothing."""
        self._check_alive("get_local_buffer_tensor")
        shape = (_SCRATCH_BYTES // dtype.itemsize,) if size is None else tuple(size)
        self._scratch = torch.zeros(shape, dtype=dtype, device=self._ranks.device)
        return self._scratch

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream of calls with `async_finish` or a previous event.

        Raises:
            Unsupported: the tokens are in host memory.
        """
        return self._streams.stream

    def destroy(self) -> None:
        """Give everything back. Local, never waits for a peer; may be called twice.

        Raises:
            InvalidState: another thread is inside a call; nothing was given back, call it again afterwards.
            AssertionError: the buffer was made without explicitly_destroy=True.
        """
        self._destroy()
