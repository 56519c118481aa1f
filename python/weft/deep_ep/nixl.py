"""NIXL's dialect: a buffer to which ranks are connected, and from which they are removed, while it works.

docs/deep_ep.md has what each name means here.
"""
# check: allow-in-file function-size: parameters as in NIXL's DeepEP

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from weft import env
from weft.deep_ep.buffer import Buffer
from weft.deep_ep.errors import refused
from weft.deep_ep.layers import DEADLINE_S
from weft.deep_ep.nixl_meeting import MeetingPlace
from weft.deep_ep.ranks import Ranks
from weft.errors import InvalidArgument, InvalidState, PeerTimeout, rank_list
from weft.limits import MAX_RANKS

if TYPE_CHECKING:
    from weft.communicator import Communicator

__all__ = ["NixlBuffer", "nixl_buffer"]

_BACKENDS = ("nixl", "ipc", "none")
_LOOK_S = 0.002


class NixlBuffer(Buffer):
    """`Buffer` of V1 whose ranks come and go: `update_memory_buffers`, then `connect_ranks`.

    Low-latency calls take `num_experts` from those of the ranks up to the highest active one to those of all; experts
    of ranks that are not there are absent. Each such dispatch is a boundary, at which masks take effect. cpu engine.
    """

    enable_shrink = True

    def __init__(
        self,
        rank: int,
        low_latency_mode: bool = False,
        low_latency_nvlink_backend: str = "nixl",
        explicitly_destroy: bool = False,
        *,
        group: Any = None,
        comm: Any = None,
        tcp_store_group: Any = None,
        disable_ll_nvlink: bool = False,
        timeout_ms: int | None = None,
    ) -> None:
        if type(rank) is not int or not 0 <= rank < MAX_RANKS:
            raise InvalidArgument(f"rank is {rank!r}; allowed are 0 to {MAX_RANKS - 1}")
        if low_latency_nvlink_backend not in _BACKENDS:
            raise InvalidArgument(
                f"low_latency_nvlink_backend is {low_latency_nvlink_backend!r}; allowed are {', '.join(_BACKENDS)}"
            )
        if timeout_ms is not None and (type(timeout_ms) is not int or timeout_ms <= 0):
            raise InvalidArgument(f"timeout_ms is {timeout_ms!r}; allowed are None and milliseconds above 0")
        if comm is not None:
            raise refused("nixl_buffer(comm=)", "ranks of MPI can't come later", "use tcp_store_group=, or a file")
        self.rank, self.group, self.tcp_store_group = rank, group, tcp_store_group
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.num_nvl_bytes = self.num_rdma_bytes = 0
        self.nvshmem_qp_depth = 1024
        self.group_size = 0
        self._num_experts_per_rank = 0
        self._deadline_s = DEADLINE_S if timeout_ms is None else timeout_ms / 1000
        self._place: MeetingPlace | None = None
        self._is_over = False

    # ---- ranks

    def update_memory_buffers(
        self, num_ranks: int, num_experts_per_rank: int, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0
    ) -> None:
        """For up to `num_ranks` ranks, 1 to 64, with so many experts each; equal on all ranks. Sizes have no effect:
        windows are made when a shape is first used. Local.

        Raises:
            NotSupported: other numbers, once ranks are connected.
        """
        for name, value, most in (
            ("num_ranks", num_ranks, MAX_RANKS),
            ("num_experts_per_rank", num_experts_per_rank, 1 << 20),
        ):
            if type(value) is not int or not 1 <= value <= most:
                raise InvalidArgument(f"{name} is {value!r}; allowed are 1 to {most}")
        if not self._destroyed and (num_ranks, num_experts_per_rank) != (self.group_size, self._num_experts_per_rank):
            raise refused(
                "update_memory_buffers with other numbers of a buffer that has ranks", "slots are fixed",
                "give the most ranks at first: empty slots cost no memory",
            )  # fmt: skip
        self.group_size, self._num_experts_per_rank = num_ranks, num_experts_per_rank
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes

    def set_tcp_store_group(self, tcp_store_group: Any) -> None:
        """Meet in this store from now on."""
        self.tcp_store_group = tcp_store_group
        self._place = None
        if not self._destroyed:
            self._meeting().show(self.comm)
            self._ranks.allow_masks().was_let_go = self._meeting().was_let_go

    def connect_ranks(self, remote_ranks: Iterable[int], activate: bool = True) -> None:
        """Be one group with these ranks; this rank among them is ignored, those that are connected already too.

        The first ranks call it with each other, and become a group. Later each rank of it calls it with new ones, and
        each new one with all: it takes over what the group has, and comes in at the same place between two calls on all
        ranks. Waits for them, 300 s or WEFT_DEEP_EP_TIMEOUT_S; nobody else is disturbed.

        `activate=False`: connected, with all prepared, but masked until `update_mask_buffer(rank, False)`.

        Raises:
            InvalidArgument: no ranks below num_ranks; or the group has other numbers than this rank.
            InvalidState: before update_memory_buffers; or nothing says where ranks meet.
            PeerTimeout: naming who did not come; nothing has changed, and a rank that is new may call it again.
            NotSupported: nvlink engine.
        """
        self._raise_if_over("connect_ranks")
        if not self.group_size:
            raise InvalidState("connect_ranks: call update_memory_buffers first")
        wanted = sorted({*self._checked(remote_ranks), self.rank})
        timeout_s = env.deep_ep().timeout_s or 300.0
        if self._destroyed:
            self._enter(wanted, timeout_s, activate=activate)
        else:
            self._ranks.allow_masks().give_way(wanted if activate else ())
        if self.comm.is_member:
            self._take_in(wanted, timeout_s, activate=activate)

    def disconnect_ranks(self, remote_ranks: Iterable[int]) -> None:
        """Go on without these ranks, whether they live or not. Each rank that stays calls it, and waits for those; a
        rank that is removed calls it with itself among them or ends.

        What they still do reaches nobody; their calls raise `Evicted`. Memory is made anew. Others that are lost are
        left out as well. A rank that is masked, or connected and not activated, is removed alike.

        Raises:
            InvalidArgument: no ranks below num_ranks, or other ones on another rank. PeerTimeout: naming who did not
                come.
        """
        self._check_alive("remove_ranks")
        comm, gone = self.comm, self._checked(remote_ranks)
        if self.rank in gone:
            self._end()
            return
        masks = self._ranks.allow_masks()
        gone = [rank for rank in gone if rank in comm.active_ranks or rank in masks.masked]
        if not gone or not comm.is_member:
            return
        masks.give_way(gone)
        over = masks.incarnations_of_masked(gone)
        with self._meeting().agreed_removal(comm, gone, self._deadline_s):
            comm.recover(gone, spares=0, deadline_s=self._deadline_s)
        masks.let_go(gone, over)
        self._meeting().let_go(over)

    remove_ranks = disconnect_ranks

    # ---- calls

    def dispatch(self, x: Any, *args: Any, **named: Any) -> Any:
        """`low_latency_dispatch(x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, ...)` if it is called so;
        else `Buffer.dispatch(x, handle, ...)`."""
        is_few = "num_max_dispatch_tokens_per_rank" in named or (bool(args) and isinstance(args[0], Tensor))
        return self.low_latency_dispatch(x, *args, **named) if is_few else super().dispatch(x, *args, **named)

    def combine(self, x: Any, *args: Any, **named: Any) -> Any:
        """`low_latency_combine(x, topk_idx, topk_weights, handle, ...)` if it is called so; else
        `Buffer.combine(x, handle, ...)`."""
        is_few = "topk_idx" in named or (bool(args) and isinstance(args[0], Tensor))
        return self.low_latency_combine(x, *args, **named) if is_few else super().combine(x, *args, **named)

    ht_dispatch, ht_combine = Buffer.dispatch, Buffer.combine
    update_mask_buffer = Buffer.low_latency_update_mask_buffer
    query_mask_buffer = Buffer.low_latency_query_mask_buffer
    clean_mask_buffer = Buffer.low_latency_clean_mask_buffer
    get_next_combine_buffer = Buffer.get_next_low_latency_combine_buffer
    clean_buffer = Buffer.clean_low_latency_buffer
    get_rdma_size_hint = staticmethod(Buffer.get_low_latency_rdma_size_hint)
    get_low_latency_buffer_size_hint = staticmethod(Buffer.get_low_latency_rdma_size_hint)

    def barrier(self) -> None:
        """Wait on the host until every active rank is here. Collective."""
        self._check_alive("barrier")
        if self.comm.is_member:
            self._ranks.barrier(self._deadline_s)

    # ---- inside

    def _enter(self, wanted: list[int], timeout_s: float, *, activate: bool) -> None:
        deadline = time.monotonic() + timeout_s
        comm = self._meeting().enter(wanted, self.group_size, timeout_s)
        try:
            ranks = Ranks(comm, is_owner=True)
            ranks.num_users = 1
            ranks.allow_masks().was_let_go = self._meeting().was_let_go
        except BaseException:
            comm.close()
            raise
        self._open(ranks, deadline_s=self._deadline_s)
        try:
            if not comm.is_member:
                self._take_part(comm, deadline, activate=activate)
            self._meeting().show(comm)
        except BaseException:
            super()._end()  # as before: it may be connected later
            raise

    def _take_part(self, comm: Communicator, deadline: float, *, activate: bool) -> None:
        """Of a rank that has joined: make what the members have, and come in."""
        self._layers.catch_up(self._check_theirs)
        while True:
            try:
                comm.ready(deadline_s=_left(deadline))
                if not activate:
                    return
                if comm.boundary(_left(deadline)) is None:
                    raise PeerTimeout(
                        "connect_ranks", 0, (), f"rank {self.rank}: the group did not take this rank in in time"
                    )
                return
            except InvalidState:  # unless the members have made one more object
                if not self._layers.catch_up(self._check_theirs, wait_s=self._deadline_s):
                    raise

    def _check_theirs(self, arguments: dict[str, Any]) -> None:
        theirs = arguments["num_experts"] // self.group_size
        if arguments["heap_bytes"] and theirs != self._num_experts_per_rank:
            raise InvalidArgument(
                f"num_experts_per_rank is {self._num_experts_per_rank} on this rank, which joins, and {theirs} in the "
                "group. It must be equal on all ranks"
            )

    def _take_in(self, wanted: list[int], timeout_s: float, *, activate: bool) -> None:
        """Of a member. Who was removed while it was masked has to end before somebody comes in its place."""
        comm, masks = self.comm, self._ranks.allow_masks()
        missing = [rank for rank in wanted if rank not in comm.active_ranks]
        deadline = time.monotonic() + timeout_s
        while True:
            standby = comm.membership.standby
            late = [rank for rank in missing if masks.is_over(rank) or not (activate or rank in standby)]
            if not late:
                break
            if time.monotonic() > deadline:
                raise PeerTimeout("connect_ranks", 0, tuple(late), f"connect_ranks: {rank_list(late)} did not come")
            time.sleep(_LOOK_S)
        if not activate:
            masks.masked.update(missing)
        elif missing:
            comm.change(admit=missing, deadline_s=_left(deadline))

    def _meeting(self) -> MeetingPlace:
        if self._place is None:
            self._place = MeetingPlace(self.rank, self.tcp_store_group, self.group)
        return self._place

    def _checked(self, ranks: Iterable[int]) -> list[int]:
        listed = list(ranks) if isinstance(ranks, Iterable) else [-1]
        if any(type(rank) is not int or not 0 <= rank < self.group_size for rank in listed):
            raise InvalidArgument(f"remote_ranks is {ranks!r}; allowed are ranks, 0 to {self.group_size - 1}")
        return sorted(set(listed))

    def _slots(self, num_experts: int) -> tuple[int, int]:
        num_local = self._num_experts_per_rank
        least = max(self.comm.active_ranks) + 1
        num_ranks = num_experts // num_local
        if num_experts % num_local or not least <= num_ranks <= self.group_size:
            raise InvalidArgument(
                f"num_experts is {num_experts}; allowed are multiples of num_experts_per_rank = {num_local} from "
                f"{least * num_local}, up to the highest active rank, to {self.group_size * num_local}"
            )
        return self.group_size * num_local, num_ranks

    def _num_local(self, num_experts: int) -> int:
        if num_experts != self.group_size * self._num_experts_per_rank:
            raise InvalidArgument(
                f"num_experts is {num_experts}; allowed is that of all ranks, "
                f"{self.group_size * self._num_experts_per_rank}"
            )
        return self._num_experts_per_rank

    def _raise_if_over(self, what: str) -> None:
        if self._is_over:
            raise InvalidState(f"{what}: the buffer was destroyed; make a new one")

    def _check_alive(self, what: str) -> None:
        self._raise_if_over(what)
        if self._destroyed:
            raise InvalidState(f"{what}: no ranks are connected; call connect_ranks first")

    def _end(self) -> None:
        if not self._destroyed:
            self._meeting().hide()
        super()._end()
        self._is_over = True


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def nixl_buffer(
    rank: int,
    low_latency_mode: bool = False,
    low_latency_nvlink_backend: str = "nixl",
    explicitly_destroy: bool = False,
    **more: Any,
) -> NixlBuffer:
    """A `NixlBuffer` of the rank with this number; local. Which path rows take has no effect.

    `more`: `tcp_store_group`, a store of torch.distributed in which the ranks meet; `group`, whose store it is;
    `timeout_ms` of a call, 100 s if not given; `disable_ll_nvlink`, without effect. Without a store that of
    WEFT_DEEP_EP_STORE counts, else that of torch.distributed.
    """
    return NixlBuffer(rank, low_latency_mode, low_latency_nvlink_backend, explicitly_destroy, **more)
