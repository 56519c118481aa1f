"""`Buffer` of DeepEP V1: dispatch and combine of many tokens; those of few are in low_latency.py."""
# check: allow-in-file function-size: parameters as in DeepEP

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.call.room import NeedsRoom
from weft.deep_ep.buffer_base import BufferBase
from weft.deep_ep.buffer_handle import BufferHandle
from weft.deep_ep.buffers.absent import absent
from weft.deep_ep.config import COMBINE, DISPATCH, Config, config_for
from weft.deep_ep.known import Known, along, sum_of
from weft.deep_ep.layers import ShapeOf, is_capturing
from weft.deep_ep.low_latency import LowLatency
from weft.deep_ep.rows import (
    Form,
    Sent,
    bare,
    check_first,
    check_rows,
    check_weights,
    form_of,
    looks_like_picks,
    send,
    stripped,
    sum_of_lanes,
    summed,
)
from weft.deep_ep.streams import collective_call, public_call
from weft.deep_ep.utils.event import EventHandle, EventOverlap
from weft.deep_ep.utils.math import aligned
from weft.engine import to_host
from weft.errors import InvalidArgument, InvalidState

if TYPE_CHECKING:
    from weft.handle import Dispatched

__all__ = ["Buffer", "BufferHandle", "bias_of"]


class Buffer(LowLatency, BufferBase):
    """DeepEP's V1 buffer over Weft's windows. Constructing is collective; so are dispatch and combine, not the layout.

    Attributes as the parameters, and rank, group_size, runtime. `group`: a torch.distributed group of any backend, or a
    `weft.Communicator`. What has no effect here is accepted.

    Raises:
        ValueError: neither group nor comm is given. NotSupported: enable_shrink, comm.
        As `weft.Communicator.from_process_group`.
    """

    num_sms = 20

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: FP8 is always there."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """The default of `get_dispatch_config` and `get_combine_config`: an even number."""
        if new_num_sms % 2:
            raise AssertionError(f"num_sms is {new_num_sms}; it must be even")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The tuned one of DeepEP for the largest known number of ranks that is not above; never raises."""
        return config_for(DISPATCH, num_ranks, Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """As `get_dispatch_config`."""
        return config_for(COMBINE, num_ranks, Buffer.num_sms)

    @staticmethod
    def capture() -> EventOverlap:
        """The current point of the current stream."""
        return EventOverlap(EventHandle())

    @public_call
    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """(num_tokens_per_rank int32 [R], num_tokens_per_rdma_rank int32 [nodes], None in one node,
        num_tokens_per_expert int32 [E], is_token_in_rank bool [T, R], event).

        Tokens count once a rank, once a node, picks once each; ids out of range nowhere. Local.
        """
        self._check_alive("get_dispatch_layout")
        num_ranks = self.group_size
        if topk_idx.dim() != 2 or topk_idx.dtype not in (torch.int64, torch.int32):
            raise InvalidArgument(
                f"topk_idx is {list(topk_idx.shape)} {topk_idx.dtype}; allowed is [T, K] int64 or int32"
            )
        self._num_local(num_experts)

        def work() -> tuple[Any, None]:
            from weft.call.count_picks import (
                count_picks,  # with all that a call needs: not when this module is imported
            )

            on_gpu = self._ranks.comm.engine == "nvlink"
            ranks, experts, in_rank = count_picks(topk_idx, num_experts, num_ranks, runs_kernels=on_gpu)
            by_node = None if self._nodes.num_nodes == 1 else self._nodes.tokens_by_node(in_rank)
            return (ranks, by_node, experts, in_rank), None

        values, event = self._streams.run(work, previous_event, async_finish, (topk_idx,))
        return (*values, event)

    @collective_call
    def dispatch(
        self,
        x: Any,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int] | None, Any, EventOverlap]:
        """(recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle, event). Collective.

        Rows by source rank, then token, one for each token that has a pick here; ids are local, -1 where the pick is
        another rank's. With a handle of this buffer: its routing again, (recv_x, None, None, None, None, event).
        Without topk_idx rows go by is_token_in_rank. num_worst_tokens = n: n rows, ids behind the last one -1, and the
        list is empty.

        Raises:
            InvalidArgument, InvalidState: as `weft.ExpertParallel.dispatch`; what was given does not go together.
        """
        self._check_alive("dispatch")
        num_sms = None if config is None else self._layers.num_sms(config.num_sms)
        is_here = previous_event is None and not async_finish
        if handle is None and is_here and not num_worst_tokens and num_tokens_per_rdma_rank is None:
            made = self._known_dispatch(
                x, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights, expert_alignment, num_sms
            )
            if made is not None:
                return made
        mine, r = None, None
        if handle is not None and topk_idx is None and topk_weights is None:
            mine = self._own(handle)
            r = along(mine.ep, x, mine.dispatched.handle, num_sms) if is_here else None
        if mine is not None and r is not None:
            mine.widths.add(mine.ep.hidden)
            return r.x, None, None, None, None, EventOverlap()
        form = form_of(x)
        if mine is not None:

            def again() -> tuple[Any, Any]:
                sent = send(mine.ep, form, handle=mine.dispatched.handle, num_sms=num_sms)
                mine.widths.add(form.num_columns)
                return sent.x, sent.dispatched

            recv_x, event = self._streams.run(again, previous_event, async_finish, x)
            return recv_x, None, None, None, None, event
        if handle is not None:
            raise InvalidArgument("topk_idx or topk_weights beside handle; allowed is one of the two")
        if num_tokens_per_expert is None or is_token_in_rank is None:
            raise InvalidArgument(
                "num_tokens_per_expert and is_token_in_rank are needed without a handle: get_dispatch_layout has them"
            )
        num_nodes = self._nodes.num_nodes
        if num_tokens_per_rdma_rank is not None and tuple(num_tokens_per_rdma_rank.shape) != (num_nodes,):
            raise InvalidArgument(
                f"num_tokens_per_rdma_rank is {list(num_tokens_per_rdma_rank.shape)}; allowed is [{num_nodes}]"
            )
        if (topk_idx is None) != (topk_weights is None):
            raise InvalidArgument("topk_idx and topk_weights are given both or neither; one is missing")
        if num_worst_tokens < 0 or (num_worst_tokens and topk_idx is None):
            raise InvalidArgument(f"num_worst_tokens is {num_worst_tokens}; allowed are 0, and with topk_idx more")
        if expert_alignment < 1:
            raise InvalidArgument(f"expert_alignment is {expert_alignment}; allowed are 1 and more")
        given = _Given(form, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights, expert_alignment)
        values, event = self._streams.run(
            lambda: self._first(given, num_worst_tokens, num_sms), previous_event, async_finish,
            (x, is_token_in_rank, topk_idx, topk_weights),
        )  # fmt: skip
        return (*values, event)

    def _known_dispatch(
        self, x: Any, in_rank: Any, per_expert: Any, topk_idx: Any, topk_weights: Any, alignment: int,
        num_sms: int | None,
    ) -> tuple[Any, ...] | None:  # fmt: skip
        """See Known: the result of `dispatch`, or None."""
        if in_rank is None or type(per_expert) is not Tensor or topk_weights is None or alignment < 1:
            return None
        known = self._layers.known.get((per_expert.numel(), num_sms))
        r = None if known is None else known.dispatch(self._layers, x, topk_idx, topk_weights)
        if known is None or r is None:
            return None
        rows, ep = r.x, known.ep
        ids, weights = r.handle._received()
        handle = BufferHandle(self, ep, stripped(r), in_rank, ep.hidden, self._nodes)
        counts = aligned(r.num_tokens_per_expert_list, alignment)
        return rows, ids, weights, counts, handle, EventOverlap()

    def _first(self, given: _Given, num_worst_tokens: int, num_sms: int | None) -> tuple[Any, Dispatched | None]:
        num_ranks = self.group_size
        num_experts = given.num_tokens_per_expert.numel()
        if num_experts == 0 or num_experts % num_ranks:
            raise InvalidArgument(
                f"num_tokens_per_expert has {num_experts} elements; allowed are multiples of the "
                f"number of ranks, {num_ranks}"
            )
        ids, weights = given.topk_idx, given.topk_weights
        if ids is None:  # K = R picks: an expert of each rank that is to have the token
            first_expert = torch.arange(num_ranks, dtype=torch.int64, device=given.in_rank.device)
            ids = torch.where(given.in_rank, first_expert * (num_experts // num_ranks), -1)
        form, device = given.form, self._ranks.device
        if not (form.is_plain and looks_like_picks(ids)):
            check_first(form, ids, weights, device)
        shape = ShapeOf(num_experts, ids.shape[1], form.hidden, form.dtype)
        num_tokens = form.data.shape[0]
        if num_worst_tokens and (is_capturing() or (self._ranks.device.type == "cuda" and self._layers.has(shape, 0))):
            check_first(form, ids, weights, device)
            ep = self._layers.get(shape, 0)  # the host waits for nobody: of too many tokens a later call tells
            try:
                sent = self._sent(ep, form, ids, weights, num_worst_tokens, num_sms)
            except NeedsRoom as need:
                raise InvalidArgument(
                    f"a rank has {need.num_tokens} tokens; allowed with num_worst_tokens are {ep.max_tokens_per_rank}, "
                    "which the ranks agreed on before: set WEFT_DEEP_EP_MAX_TOKENS, or call it first without "
                    "num_worst_tokens"
                ) from need
        else:
            ep, sent = self._layers.run(
                shape,
                num_tokens,
                lambda ep: self._sent(ep, form, ids, weights, num_worst_tokens, num_sms),
                lambda: check_first(form, ids, weights, device),
                has_capacity=num_worst_tokens > 0,
            )
        r = sent.dispatched
        if r is None:
            raise InvalidState("a first dispatch has a result")
        if form.is_plain and given.topk_weights is not None and not num_worst_tokens:
            self._layers.note_known((num_experts, num_sms), Known(ep, shape, num_sms=num_sms, host_counts=True))
        handle = BufferHandle(self, ep, bare(r), given.in_rank, form.num_columns, self._nodes)
        if given.topk_idx is None:
            return (sent.x, None, None, self._share(given), handle), r
        received = r.handle._received()  # no copies: no call of a buffer reads them again
        if not num_worst_tokens:
            return (sent.x, *received, aligned(r.num_tokens_per_expert_list, given.alignment), handle), r
        return (sent.x, *received, [], handle), r  # behind num_rows ids are -1

    def _sent(
        self, ep: Any, form: Form, ids: Tensor, weights: Tensor | None, num_worst_tokens: int, num_sms: int | None
    ) -> Sent:
        return send(
            ep, form, topk_idx=ids, topk_weights=weights, capacity=num_worst_tokens or None, num_sms=num_sms,
            host_counts=True,
        )  # fmt: skip

    def _share(self, given: _Given) -> list[int]:
        """Of this rank's experts: the sum over ranks of what they have counted."""
        total = self._ranks.gather_tensor(given.num_tokens_per_expert, self._layers.deadline_s).sum(0)
        num_local = total.numel() // self.group_size
        mine = to_host(total[self.rank * num_local : (self.rank + 1) * num_local]).tolist()
        return aligned(mine, given.alignment)

    @collective_call
    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """(combined_x [T, H], combined_topk_weights fp32 [T, K] or None, event). Collective.

        The plain sum of a token's rows, fp32 inside, plus the bias or both of two; with nodes first in each node,
        rounded to what travels, then nodes ascending. topk_weights fp32 [N, K]: every lane
        summed over all ranks that hold the token. H is that of the dispatch, or of a later one along this handle.

        Raises:
            InvalidArgument, InvalidState: as `weft.ExpertParallel.combine`.
        """
        self._check_alive("combine")
        mine = self._own(handle)
        num_sms = None if config is None else self._layers.num_sms(config.num_sms)
        ep, routing = mine.ep, mine.dispatched.handle
        is_bare = topk_weights is None and bias is None and previous_event is None and not async_finish
        if is_bare and ep.hidden in mine.widths:
            y = sum_of(ep, x, routing, num_sms)
            if y is not None:
                return y, None, EventOverlap()
        check_rows("x", x, mine.widths)
        if topk_weights is not None:
            if topk_weights.dim() != 2:
                raise InvalidArgument(f"topk_weights is {list(topk_weights.shape)}; allowed is [N, K]")
            num_rows, num_lanes = routing.rows_shape[0], topk_weights.shape[1]
            check_weights("topk_weights", topk_weights, (num_rows, num_lanes), ep.device)

        def work() -> tuple[Any, None]:
            if topk_weights is None or topk_weights.shape[1] != ep.top_k or ep.calls.has_nodes:
                y = summed(ep, routing, x, bias=bias_of(bias), num_sms=num_sms)
                weights = None if topk_weights is None else sum_of_lanes(ep, routing, topk_weights, num_sms=num_sms)
                return (y, weights), None
            side = topk_weights.to(torch.float32)
            pair = summed(ep, routing, x, bias=bias_of(bias), side=side, side_lanes="all", num_sms=num_sms)
            return pair, None

        values, event = self._streams.run(work, previous_event, async_finish, (x, topk_weights, bias))
        return (*values, event)

    def internode_dispatch(
        self,
        x: Any,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int] | None, Any, EventOverlap]:
        """As `dispatch`, which knows of nodes by itself."""
        found: tuple[Any, Tensor | None, Tensor | None, list[int] | None, Any, EventOverlap] = self.dispatch(
            x, handle, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert, topk_idx,
            topk_weights, expert_alignment, 0, config, previous_event, async_finish, allocate_on_comm_stream,
        )  # fmt: skip
        return found

    def internode_combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """As `combine`, which knows of nodes by itself."""
        found: tuple[Tensor, Tensor | None, EventOverlap] = self.combine(
            x, handle, topk_weights, bias, config, previous_event, async_finish, allocate_on_comm_stream
        )
        return found

    dispatch_pcie = absent("dispatch_pcie", ("rows over PCIe to other machines", "use dispatch"))

    def _own(self, handle: Any) -> BufferHandle:
        if not isinstance(handle, BufferHandle):
            raise InvalidArgument(f"handle is {type(handle)!r}; the handle of a dispatch of this buffer is expected")
        if handle.buffer is not self:
            raise InvalidState("the handle is of another buffer; a call needs the buffer that made it")
        return handle


class _Given:
    """What a first dispatch was given, beside how it runs."""

    def __init__(
        self, form: Form, in_rank: Tensor, num_tokens_per_expert: Tensor, topk_idx: Tensor | None,
        topk_weights: Tensor | None, alignment: int,
    ) -> None:  # fmt: skip
        self.form, self.in_rank, self.num_tokens_per_expert = form, in_rank, num_tokens_per_expert
        self.topk_idx, self.topk_weights, self.alignment = topk_idx, topk_weights, alignment


def bias_of(bias: Any) -> Tensor | None:
    """None, one, or the fp32 sum of two."""
    if isinstance(bias, (tuple, list)):
        given = [each for each in bias if each is not None]
        if len(given) > 2:
            raise InvalidArgument(f"bias has {len(given)} tensors; allowed are None, one, or two")
        if len(given) == 2:
            both: Tensor = given[0].to(torch.float32) + given[1].to(torch.float32)
            return both
        bias = given[0] if given else None
    found: Tensor | None = bias
    return found
