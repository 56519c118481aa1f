"""`HybridEPBuffer` of DeepEP's hybrid-ep branch: dispatch and combine, with rows by token or by expert."""
# check: allow file-size: one class, much of it parameters
# check: allow-in-file function-size: parameters as in DeepEP

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from weft import env
from weft.call.maps import picks_of_map
from weft.deep_ep.buffer_base import Runtime
from weft.deep_ep.ending import Ending
from weft.deep_ep.expanded import lane_of, words_of
from weft.deep_ep.host_counts import HostCounts
from weft.deep_ep.hybrid_handle import HybridHandle
from weft.deep_ep.known import Known, sum_of
from weft.deep_ep.layers import Layers, ShapeOf
from weft.deep_ep.nodes import Nodes, nodes_of
from weft.deep_ep.ranks import Ranks, ranks_of
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
    summed,
)
from weft.deep_ep.streams import collective_call
from weft.deep_ep.utils.math import aligned
from weft.engine import to_host
from weft.errors import InvalidArgument, InvalidState
from weft.limits import MAX_ALIGNMENT

if TYPE_CHECKING:
    from weft.expert_parallel import ExpertParallel

__all__ = ["HybridEPBuffer", "HybridEpConfigInstance", "indices_to_map"]


@dataclass
class HybridEpConfigInstance:
    """What the original compiles its kernels for. It has no effect here."""

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int
    num_of_ranks_per_node: int
    num_of_nodes: int = 1
    pad_multiple: int = 0
    use_fp8: bool = False

    def is_valid(self, fuse: bool = False) -> bool:
        """True."""
        return True


class _Routing(NamedTuple):
    """Ids [T, K], weights fp32 [T, K] or None, and E."""

    ids: Tensor
    weights: Tensor | None
    num_experts: int


def indices_to_map(
    topk_idx: Tensor, topk_weights: Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Tensor | None]:
    """Ids [T, K], -1 left out -> (bool [T, E], fp32 [T, E] or None), on their device."""
    ids = torch.where((topk_idx >= 0) & (topk_idx < num_of_experts), topk_idx, num_of_experts).to(torch.int64)
    chosen = torch.zeros((num_of_tokens, num_of_experts + 1), dtype=torch.bool, device=ids.device)
    chosen.scatter_(1, ids, True)
    probs = None
    if topk_weights is not None:
        probs = torch.zeros((num_of_tokens, num_of_experts + 1), dtype=torch.float32, device=ids.device)
        probs = probs.scatter_(1, ids, topk_weights.to(torch.float32))[:, :num_of_experts].contiguous()
    return chosen[:, :num_of_experts].contiguous(), probs


class HybridEPBuffer(Ending):
    """NVIDIA's buffer over Weft's windows. Constructing and the four calls are collective; all runs on the current
    stream. What has no effect here is accepted. It ends with its last reference.

    Attributes: group, rank, group_size, num_of_nodes, node_rank, local_rank (in its node),
    num_of_hybrid_ep_ranks_per_nvlink_domain (of a node; on the cpu engine the variable of that name says it), runtime,
    configurer.

    Raises:
        NotSupported: nodes of several sizes. As `Buffer`.
    """

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        self._ranks = ranks_of(group)
        self.group = group
        self.rank, self.group_size = self._ranks.rank, self._ranks.num_ranks
        with self._ranks.released_on_error():
            nodes = _nodes_of(self._ranks).even("HybridEPBuffer", "use nodes of one size")
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = nodes.size
        self.local_rank, self.node_rank, self.num_of_nodes = nodes.idx, nodes.node, nodes.num_nodes
        self.runtime = Runtime(self._ranks, nodes)
        self.use_fp8 = use_fp8
        self._config = HybridEpConfigInstance(
            hidden_dim, max_num_of_tokens_per_rank, num_local_experts, nodes.size, nodes.num_nodes, use_fp8=use_fp8
        )
        self.configurer = SimpleNamespace(buffer_config=self._config)
        with self._ranks.released_on_error():
            rows = 2 * max_num_of_tokens_per_rank * min(self.group_size, 8) * 2 * hidden_dim
            self._layers = Layers(self._ranks, heap_bytes=rows, nodes=nodes, num_results=2)
            self._sms = self._layers.num_sms(num_sms_dispatch_api), self._layers.num_sms(num_sms_combine_api)
        self._top_k: dict[int, int] = {}  # of routing maps, by E: the largest row seen
        self._on_host = HostCounts(self._ranks.device)
        self._destroyed = False

    def empty_jit_cache(self) -> None:
        """Nothing; `weft cache clear` empties Weft's."""

    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        pad_multiple: int | None = None,
        use_fp8: bool | None = None,
        fuse_permute_dispatch: bool = False,
        **kwargs: Any,
    ) -> HybridEpConfigInstance:
        """The constructor's values with those given in their place."""
        mine = self._config
        return HybridEpConfigInstance(
            mine.hidden_dim if hidden_dim is None else hidden_dim,
            max(mine.max_num_of_tokens_per_rank, num_of_tokens_per_rank or 0),
            mine.num_of_experts_per_rank if num_local_experts is None else num_local_experts,
            mine.num_of_ranks_per_node,
            mine.num_of_nodes,
            pad_multiple=pad_multiple or 0,
            use_fp8=mine.use_fp8 if use_fp8 is None else use_fp8,
        )

    # ---- rows by expert

    @collective_call
    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | Tensor | None = None,
        pad_multiple: int | None = None,
        handle: Any = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: Tensor | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Any]:
        """(rows, probs fp32 [rows] or None, scaling_factor or None, padded_tokens_per_expert int64 [L], handle).

        One row a pick, by local expert, groups at multiples of pad_multiple, holes zero. num_permuted_tokens = n: n
        rows; picks beyond them are dropped, and handle[-1] is not 0 then. non_blocking needs it, and the host does not
        wait. With a handle: its routing; probs or topk_weights go along.
        """
        self._check_alive("dispatch_with_permute")
        if num_dispatched_tokens is not None or use_host_meta is not None:
            warnings.warn(
                "deep_ep: num_dispatched_tokens has no effect; use non_blocking for use_host_meta", stacklevel=3
            )
        if use_host_meta is not None:
            non_blocking = not use_host_meta
        key = None
        if num_permuted_tokens is None and not non_blocking and handle is None and routing_map is None:
            key = num_of_experts, num_of_experts_per_rank, pad_multiple
            if scaling_factor is None and (probs is None or topk_weights is not None):
                known = self._layers.known.get(key)
                r = None if known is None else known.dispatch(self._layers, hidden, topk_idx, topk_weights)
                if known is not None and r is not None and topk_idx is not None:
                    rows, ep = r.x, known.ep
                    made = HybridHandle(self, ep, stripped(r), topk_idx, self._config, expands=True)
                    made.widths.add(ep.hidden)
                    weights = None if topk_weights is None else r.handle.weights
                    counts = aligned(r.num_tokens_per_expert_list, pad_multiple or 1)
                    return rows, weights, None, self._on_host.take(counts), made
        form = self._form(hidden, scaling_factor)
        if handle is not None:
            return self._permuted_again(self._own(handle, expands=True), form, (probs, topk_weights), non_blocking)
        alignment = pad_multiple or 1
        capacity = None if num_permuted_tokens is None else int(num_permuted_tokens)
        if not 1 <= alignment <= MAX_ALIGNMENT or (capacity is not None and capacity < 0):
            raise InvalidArgument(
                f"pad_multiple is {alignment}, num_permuted_tokens {capacity}; allowed are 1 to {MAX_ALIGNMENT}, "
                "and 0 or more"
            )
        if non_blocking and (capacity is None or capacity % alignment):
            raise AssertionError(
                f"num_permuted_tokens is {capacity} with non_blocking=True; it must be a multiple of "
                f"pad_multiple, {alignment}"
            )
        routing = self._routing(topk_idx, topk_weights, routing_map, probs, num_of_experts, num_of_experts_per_rank)

        options: dict[str, Any] = {
            "layout": "expert_major", "alignment": alignment, "capacity": capacity, "zero_holes": True,
            "num_sms": self._sms[0], "host_counts": True,
        }  # fmt: skip

        def dispatch(ep: ExpertParallel, picks: _Routing) -> Sent:
            return send(ep, form, topk_idx=picks.ids, topk_weights=picks.weights, **options)

        routing, ep, sent = self._sent(
            routing, routing_map, form, dispatch, non_blocking=non_blocking, has_capacity=capacity is not None
        )
        r = sent.dispatched
        if r is None:
            raise InvalidState("a first dispatch has a result")
        are_own = routing_map is not None
        made = HybridHandle(self, ep, bare(r), routing.ids, self._config, expands=True, are_own=are_own)
        made.widths.add(form.num_columns)
        if key is not None and form.is_plain:
            shape = ShapeOf(routing.num_experts, routing.ids.shape[1], form.hidden, form.dtype)
            self._layers.note_known(key, Known(ep, shape, **options))
        rows, scales = sent.x if isinstance(sent.x, tuple) else (sent.x, None)
        weights = None if routing.weights is None else r.handle.weights  # no combine of a buffer reads them
        return rows, weights, scales, self._padded(made, non_blocking), made

    def _permuted_again(
        self, known: HybridHandle, form: Form, given: tuple[Tensor | None, Tensor | None], non_blocking: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Any]:
        routing = known.dispatched.handle
        weights = _weights_again(known, *given)
        sent = send(
            known.ep, form, side=words_of(weights), handle=routing, zero_holes=True, num_sms=self._sms[0]
        )  # fmt: skip
        known.widths.add(form.num_columns)
        got, pick = None, None if sent.side is None else known.dispatched.sources().pick
        if sent.side is not None and pick is not None:
            got = lane_of(sent.side, pick)
        rows, scales = sent.x if isinstance(sent.x, tuple) else (sent.x, None)
        return rows, got, scales, self._padded(known, non_blocking), known

    def _padded(self, handle: HybridHandle, non_blocking: bool) -> Tensor:
        routing = handle.dispatched.handle
        if not non_blocking and routing.capacity is None:
            known = aligned(handle.dispatched.num_tokens_per_expert_list, routing.alignment)
            return self._on_host.take(known)
        offsets = handle.dispatched.offsets
        counts = (offsets[1:] - offsets[:-1]).to(torch.int64)
        if non_blocking or not counts.is_cuda:
            return counts
        return to_host(counts).pin_memory()

    @collective_call
    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: Any = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(token [T, H], probs fp32 [T, E] or None): the plain sum over a token's picks; probs [rows] go along."""
        self._check_alive("combine_with_unpermute")
        known = self._own(handle, expands=True)
        check_rows("hidden", hidden, known.widths)
        if probs is None:
            return self._sum(known, hidden), None
        token, lanes = summed(
            known.ep, known.dispatched.handle, hidden, side=probs.to(torch.float32), num_sms=self._sms[1]
        )
        return token, _dense(lanes, known.ids, known.ep.num_experts, is_sum=False)

    # ---- rows by token

    @collective_call
    def dispatch(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts: int | None = None,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: Any = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Any]:
        """(rows [N, H], probs fp32 [N, E of a node] or None, scaling_factor or None, handle of seven).

        One row a token that has a pick here, by source rank, then token. probs have the columns of the node's experts,
        and hold this rank's L, else 0.
        """
        self._check_alive("dispatch")
        form = self._form(hidden, scaling_factor)
        if handle is not None:
            known = self._own(handle, expands=False)
            weights = _weights_again(known, probs, topk_weights)
            sent = send(
                known.ep, form, side=words_of(weights), handle=known.dispatched.handle, num_sms=self._sms[0]
            )  # fmt: skip
            weights = None if sent.side is None else sent.side.contiguous().view(torch.float32)
        else:
            routing = self._routing(topk_idx, topk_weights, routing_map, probs, num_of_experts, None)
            routing, ep, sent = self._sent(
                routing, routing_map, form,
                lambda ep, picks: send(
                    ep, form, topk_idx=picks.ids, topk_weights=picks.weights, num_sms=self._sms[0]
                ),
                non_blocking=False,
            )  # fmt: skip
            r = sent.dispatched
            if r is None:
                raise InvalidState("a first dispatch has a result")
            are_own = routing_map is not None
            known = HybridHandle(self, ep, bare(r), routing.ids, self._config, received=r.handle.idx, are_own=are_own)
            weights = None if routing.weights is None else r.handle.weights
        known.widths.add(form.num_columns)
        dense = None
        if weights is not None and known.received is not None:
            dense = _dense(weights, known.columns(self.local_rank), self._num_columns(known))
        rows, scales = sent.x if isinstance(sent.x, tuple) else (sent.x, None)
        return rows, dense, scales, known

    @collective_call
    def combine(self, hidden: Tensor, probs: Tensor | None = None, handle: Any = None) -> tuple[Tensor, Tensor | None]:
        """(token [T, H], probs fp32 [T, E] or None): the plain sum of a token's rows, with this rank's columns of probs
        [N, E of a node]."""
        self._check_alive("combine")
        known = self._own(handle, expands=False)
        check_rows("hidden", hidden, known.widths)
        if probs is None:
            return self._sum(known, hidden), None
        columns = known.columns(self.local_rank)
        check_weights("probs", probs, (len(columns), self._num_columns(known)), known.ep.device)
        side = torch.where(columns >= 0, probs.to(torch.float32).gather(1, columns.clamp(min=0)), 0.0)
        token, lanes = summed(known.ep, known.dispatched.handle, hidden, side=side, num_sms=self._sms[1])
        return token, _dense(lanes, known.ids, known.ep.num_experts, is_sum=False)

    # ---- the rest

    def _form(self, hidden: Tensor, scaling_factor: Tensor | None) -> Form:
        if hidden.element_size() != 1:
            return form_of(hidden, "hidden")
        if scaling_factor is None:
            raise InvalidArgument(f"hidden is {hidden.dtype} without scaling_factor; FP8 rows have fp32 [T, H / 128]")
        return form_of((hidden, scaling_factor), "hidden")

    def _routing(
        self,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        routing_map: Tensor | None,
        probs: Tensor | None,
        num_of_experts: int | None,
        num_of_experts_per_rank: int | None,
    ) -> _Routing:
        """Of a map the ids are still to be made."""
        num_local = num_of_experts_per_rank or self._config.num_of_experts_per_rank
        num_experts = num_of_experts or num_local * self.group_size
        if routing_map is not None:
            if routing_map.dim() != 2 or routing_map.dtype != torch.bool:
                raise InvalidArgument(
                    f"routing_map is {list(routing_map.shape)} {routing_map.dtype}; allowed is bool [T, E]"
                )
            return _Routing(routing_map, probs, routing_map.shape[1])
        if topk_idx is None:
            raise InvalidArgument(
                "neither routing_map nor topk_idx is given; one of the two is needed without a handle"
            )
        if topk_weights is None and probs is not None:
            check_weights("probs", probs, (topk_idx.shape[0], num_experts), self._ranks.device)
            topk_weights = _weights_of(topk_idx, probs, None)
        return _Routing(topk_idx, topk_weights, num_experts)

    def _sent(
        self,
        routing: _Routing,
        routing_map: Tensor | None,
        form: Form,
        dispatch: Callable[[ExpertParallel, _Routing], Sent],
        *,
        non_blocking: bool,
        has_capacity: bool = False,
    ) -> tuple[_Routing, ExpertParallel, Sent]:
        """With ids, in a window that has the room: found in the call itself where it can be (Layers.run)."""
        if routing_map is not None or non_blocking:
            routing, ep = self._ready(routing, routing_map, form, non_blocking=non_blocking)
            return routing, ep, dispatch(ep, routing)

        def check() -> None:
            check_first(form, routing.ids, routing.weights, self._ranks.device, "hidden")

        if not (form.is_plain and looks_like_picks(routing.ids)):
            check()
        shape = ShapeOf(routing.num_experts, routing.ids.shape[1], form.hidden, form.dtype)
        most = max(form.data.shape[0], self._config.max_num_of_tokens_per_rank)
        ep, sent = self._layers.run(shape, most, lambda ep: dispatch(ep, routing), check, has_capacity=has_capacity)
        return routing, ep, sent

    def _ready(
        self, routing: _Routing, routing_map: Tensor | None, form: Form, *, non_blocking: bool
    ) -> tuple[_Routing, ExpertParallel]:
        """With ids, and a window for all ranks: they tell each other T and K, unless the host must not wait."""
        num_tokens, num_experts = form.data.shape[0], routing.num_experts
        device = self._ranks.device
        if routing_map is None:
            check_first(form, routing.ids, routing.weights, device, "hidden")
        else:
            check_first(form, None, None, device, "hidden", picks=False)
            if len(routing_map) != num_tokens or routing_map.device != device:
                raise InvalidArgument(
                    f"routing_map is {list(routing_map.shape)} on {routing_map.device}; allowed is [{num_tokens}, E] "
                    f"on {device}, T as hidden has it"
                )
            if routing.weights is not None:
                check_weights("probs", routing.weights, routing_map.shape, device)
        num_picks = 1 if routing_map is not None else routing.ids.shape[1]
        self._layers.check(ShapeOf(num_experts, num_picks, form.hidden, form.dtype), num_tokens)
        most = max(num_tokens, self._config.max_num_of_tokens_per_rank)
        top_k = routing.ids.shape[1]
        if routing_map is not None:
            top_k = self._top_k.get(num_experts, 0)
        if not non_blocking or top_k == 0:
            mine = top_k
            if routing_map is not None:
                mine = max(1, top_k, int(to_host(routing_map.sum(1).max())) if num_tokens else 1)
            told = self._ranks.gather([num_tokens, mine], self._layers.deadline_s)
            most = max(most, *(row[0] for row in told))
            if routing_map is not None:
                top_k = self._top_k[num_experts] = max(row[1] for row in told)
        if routing_map is not None:
            on_gpu = self._ranks.comm.engine == "nvlink"
            picks = picks_of_map(routing_map, routing.weights, num_experts, top_k, runs_kernels=on_gpu)
            routing = _Routing(*picks, num_experts)
        return routing, self._layers.get(ShapeOf(num_experts, top_k, form.hidden, form.dtype), most)

    def _sum(self, known: HybridHandle, hidden: Tensor) -> Tensor:
        ep, routing = known.ep, known.dispatched.handle
        y = sum_of(ep, hidden, routing, self._sms[1])
        found: Tensor = summed(ep, routing, hidden, num_sms=self._sms[1]) if y is None else y
        return found

    def _num_columns(self, handle: HybridHandle) -> int:
        """Experts of a node."""
        return handle.ep.num_local_experts * self.num_of_hybrid_ep_ranks_per_nvlink_domain

    def _own(self, handle: Any, *, expands: bool) -> HybridHandle:
        if not isinstance(handle, HybridHandle) or handle.expands != expands:
            made_by = "dispatch_with_permute" if expands else "dispatch"
            raise InvalidArgument(f"handle is {handle!r}; the handle of a {made_by} is expected")
        if handle.buffer is not self:
            raise InvalidState("the handle is of another buffer; a call needs the buffer that made it")
        return handle


def _nodes_of(ranks: Ranks) -> Nodes:
    """Those of the ranks, unless NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN has others and the engine is "cpu"."""
    asked = env.hybrid_node_ranks()
    if asked in (0, ranks.nodes.size) or ranks.comm.engine == "nvlink":
        return ranks.nodes
    return nodes_of(ranks.comm, asked, "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN")


def _weights_again(known: HybridHandle, probs: Tensor | None, topk_weights: Tensor | None) -> Tensor | None:
    """Of a call along a handle; checked, as nothing is sent yet."""
    num_tokens, top_k = known.ids.shape
    if probs is not None:
        check_weights("probs", probs, (num_tokens, known.ep.num_experts), known.ep.device)
    elif topk_weights is not None:
        check_weights("topk_weights", topk_weights, (num_tokens, top_k), known.ep.device)
    return _weights_of(known.ids, probs, topk_weights)


def _weights_of(ids: Tensor, probs: Tensor | None, topk_weights: Tensor | None) -> Tensor | None:
    """fp32 [T, K] of dense probs [T, E], or as they are given."""
    if probs is None:
        return None if topk_weights is None else topk_weights.to(torch.float32)
    is_pick = (ids >= 0) & (ids < probs.shape[1])
    found = probs.to(torch.float32).gather(1, torch.where(is_pick, ids, 0).to(torch.int64))
    return torch.where(is_pick, found, 0.0)


def _dense(lanes: Tensor, ids: Tensor, num_experts: int, *, is_sum: bool = True) -> Tensor:
    """[n, K] values of ids -> fp32 [n, E], 0 elsewhere. An expert that is picked twice has the sum, or the value that
    both picks have."""
    is_pick = (ids >= 0) & (ids < num_experts)
    columns = torch.where(is_pick, ids, num_experts).to(torch.int64)
    dense = torch.zeros((len(ids), num_experts + 1), dtype=torch.float32, device=lanes.device)
    scatter = dense.scatter_add_ if is_sum else dense.scatter_
    return scatter(1, columns, lanes.to(torch.float32))[:, :num_experts].contiguous()
