"""`ElasticBuffer` of DeepEP V2."""
# check: allow file-size: one class, much of it parameters
# check: allow-in-file function-size: parameters as in DeepEP

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft import env
from weft.deep_ep.buffer import bias_of
from weft.deep_ep.buffer_base import Runtime
from weft.deep_ep.buffers.absent import HINT_MULTIPLE, Absent
from weft.deep_ep.buffers.elastic_handle import About, EPHandle
from weft.deep_ep.ending import Ending
from weft.deep_ep.errors import refused
from weft.deep_ep.expanded import lane_of, words_of
from weft.deep_ep.known import Known, sum_of
from weft.deep_ep.layers import Layers, ShapeOf
from weft.deep_ep.nodes import Network, Nodes
from weft.deep_ep.ranks import ranks_of
from weft.deep_ep.rows import (
    Form,
    are_counts,
    bare,
    check_counts,
    check_first,
    check_rows,
    check_weights,
    form_of,
    looks_like_picks,
    send,
    stripped,
    summed,
)
from weft.deep_ep.streams import Streams, collective_call
from weft.deep_ep.utils.event import EventHandle, EventOverlap
from weft.deep_ep.utils.math import align
from weft.errors import InvalidArgument, InvalidState
from weft.limits import adds_by_pick
from weft.limits import memory as memory_of

__all__ = ["EPHandle", "ElasticBuffer"]

_GUESSED_TOPK = 8


class ElasticBuffer(Absent, Ending):
    """DeepEP's V2 buffer over Weft's windows. Constructing, dispatch, combine and barrier are collective.

    Attributes as the parameters, and rank_idx, num_ranks, runtime; num_rdma_ranks and num_nvlink_ranks, nodes and ranks
    of one; num_scaleout_ranks and num_scaleup_ranks, the same, without allow_hybrid_mode 1 and R; `network`: what is
    kept for the network between machines. Sizes that are not given come with the calls. What has no effect here is
    accepted.

    Raises:
        NotSupported: num_cpu_bytes; nodes of several sizes. InvalidArgument: sl_idx, or EP_OVERRIDE_RDMA_SL which
            counts in its place, is not 0 to 15; num_allocated_qps is below 0. As `Buffer`.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        if num_cpu_bytes:
            raise refused(f"ElasticBuffer(num_cpu_bytes={num_cpu_bytes})", "memory on the host", "leave it 0")
        level = env.service_level("EP_OVERRIDE_RDMA_SL")
        self.network = _network(sl_idx if level is None else level, num_allocated_qps, 65 if allow_hybrid_mode else 17)
        self._ranks = ranks_of(group)
        self.group = group
        self.rank_idx, self.num_ranks = self._ranks.rank, self._ranks.num_ranks
        with self._ranks.released_on_error():
            physical = self._ranks.nodes.even("ElasticBuffer", "use nodes of one size")
        self._nodes = physical if allow_hybrid_mode else Nodes(self.rank_idx, self.num_ranks, self.num_ranks)
        self.num_rdma_ranks, self.num_nvlink_ranks = physical.num_nodes, physical.size
        self.num_scaleout_ranks, self.num_scaleup_ranks = self._nodes.num_nodes, self._nodes.size
        self.scaleout_rank_idx, self.scaleup_rank_idx = self._nodes.node, self._nodes.idx
        self.num_max_tokens_per_rank, self.hidden, self.num_topk = num_max_tokens_per_rank, hidden, num_topk
        num_results = int(num_bytes is None)  # sizes may come with the calls
        if num_bytes is None:
            with self._ranks.released_on_error():
                num_bytes = _size_hint(self.num_ranks, max(1, num_max_tokens_per_rank), max(8, hidden), num_topk)
        self.num_bytes = num_bytes
        self.num_allocated_qps = self.network.num_qps
        self.allow_hybrid_mode, self.allow_multiple_reduction = allow_hybrid_mode, allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.deterministic, self.explicitly_destroy = deterministic, explicitly_destroy
        self.nccl_comm_handle = None
        self.runtime: Runtime | None = Runtime(self._ranks, physical)
        with self._ranks.released_on_error():
            seconds = float(min(num_cpu_timeout_secs, num_gpu_timeout_secs))
            self._layers = Layers(
                self._ranks, heap_bytes=num_bytes, deadline_s=seconds, nodes=self._nodes, num_results=num_results
            )
        self._streams = Streams(self._ranks.device)
        self._destroyed = False

    # ---- what it is

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes of Weft's window and heap, a multiple of 2 MiB; for 8 picks a token if num_topk is 0. Local."""
        return _size_hint(_num_ranks(group), num_max_tokens_per_rank, hidden, num_topk)

    def get_theoretical_num_sms(
        self,
        num_experts: int | None,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """SMs that Weft takes by itself: even, at least 4. Never raises."""
        most = self._ranks.comm.max_num_sms or 16
        return max(4, min(16, most) // 2 * 2)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """What `num_qps` may be: most channels of a call, once there is a network."""
        wanted = num_sms * 16 + 1 if self.allow_hybrid_mode else min(num_sms, 9)
        return min(wanted, self.num_allocated_qps)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(nodes, ranks of a node)."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(nodes, ranks of a node); without allow_hybrid_mode (1, R), and rows go from rank to rank."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    @staticmethod
    def capture() -> EventHandle:
        """The current point of the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """As `Buffer.get_comm_stream`."""
        return self._streams.stream

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """The ranks meet: on the communication stream or the current one, on the cpu engine on the host. Collective."""
        self._check_alive("barrier")
        has_cuda = self._ranks.device.type == "cuda"
        if with_cpu_sync and has_cuda:
            torch.cuda.synchronize()

        def work() -> tuple[None, None]:
            self._ranks.barrier(self._layers.deadline_s)
            return None, None

        before = EventHandle() if use_comm_stream and sequential and has_cuda else None
        self._streams.run(work, before, False)
        if with_cpu_sync and has_cuda:
            torch.cuda.synchronize()

    # ---- the two calls

    @collective_call
    def dispatch(
        self,
        x: Any,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """(recv_x, recv_topk_idx, recv_topk_weights, handle, event). Collective.

        Rows one a token by source rank, or with do_expand one a pick by local expert, groups at multiples of
        expert_alignment. do_cpu_sync (default without a handle): exact sizes, the host waits; else the worst case, with
        rows behind the last one undefined. With a handle: its routing; topk_weights go along.

        Raises:
            InvalidArgument, InvalidState: as `weft.ExpertParallel.dispatch`; what was given does not go together.
        """
        self._check_alive("dispatch")
        if num_qps or type(num_qps) is not int:
            self._check_qps(num_qps)
        key = None
        if handle is None and previous_event is None and previous_event_before_epilogue is None:
            most = num_max_tokens_per_rank or self.num_max_tokens_per_rank
            key = num_experts, most, expert_alignment, num_sms, do_cpu_sync, do_expand, do_zero_padding
            like = None if async_with_compute_stream else self._layers.known.get(key)
            stats = cumulative_local_expert_recv_stats
            if like is not None and (stats is None or are_counts(stats, like.ep.num_local_experts, like.ep.device)):
                r = like.dispatch(self._layers, x, topk_idx, topk_weights)
                if r is not None and topk_idx is not None:
                    rows, ep = r.x, like.ep
                    if stats is not None:
                        stats.add_(r.handle._counts())
                    made = EPHandle(self, ep, stripped(r), topk_idx, like.about, ep.hidden, copy=do_handle_copy)
                    beside = self._beside(r, made, has_weights=topk_weights is not None)
                    return rows, *beside, made, EventOverlap()
        form = form_of(x)
        before = previous_event
        if previous_event_before_epilogue is not None:
            before = (previous_event, previous_event_before_epilogue)
        by_column = use_tma_aligned_col_major_sf and form.scales is not None
        scale_layout = "column_major" if by_column else "row_major"
        options: dict[str, Any] = {"scale_layout": scale_layout, "num_sms": self._layers.num_sms(num_sms)}
        if handle is not None:
            known = self._own(handle)
            if topk_idx is not None:
                raise InvalidArgument("topk_idx beside handle; allowed is one of the two")
            if do_cpu_sync:
                raise InvalidArgument(
                    "do_cpu_sync is True with a handle, whose sizes are known; allowed are None, False"
                )
            if topk_weights is not None:
                shape = (known.dispatched.handle.num_tokens, known.ep.top_k)
                check_weights("topk_weights", topk_weights, shape, known.ep.device)
            options |= {"zero_holes": do_zero_padding} if known.do_expand else {}
            num_local = known.ep.num_local_experts
            work: Callable[[], tuple[Any, Any]] = lambda: self._again(known, form, topk_weights, options)  # noqa: E731
        else:
            if topk_idx is None or num_experts is None:
                raise InvalidArgument("topk_idx and num_experts are needed without a handle; one is missing")
            most = num_max_tokens_per_rank or self.num_max_tokens_per_rank
            if most <= 0:
                raise InvalidArgument("num_max_tokens_per_rank is given neither here nor to the constructor")
            if not (form.is_plain and looks_like_picks(topk_idx)):
                check_first(form, topk_idx, topk_weights, self._ranks.device)
            if topk_idx.shape[0] > most:
                raise InvalidArgument(f"topk_idx is {list(topk_idx.shape)}; allowed is [T, K] with T up to {most}")
            is_exact = do_cpu_sync is None or bool(do_cpu_sync)  # DeepEP's tests give 0 and 1
            about = About(most, expert_alignment or 1, is_exact, num_sms, do_expand)
            given = _Given(form, topk_idx, topk_weights, num_experts, about)
            given.device, given.copy, given.key = self._ranks.device, do_handle_copy, key
            options |= {"zero_holes": do_zero_padding} if do_expand else {}
            num_local = num_experts // self.num_ranks
            work = lambda: self._first(given, options)  # noqa: E731

        stats = cumulative_local_expert_recv_stats
        if stats is not None:
            check_counts("cumulative_local_expert_recv_stats", stats, num_local, self._ranks.device)
            work = _counting(work, stats)
        values, event = self._streams.run(work, before, async_with_compute_stream, (x, topk_idx, topk_weights, stats))
        return (*values, event)

    def _shape(self, given: _Given) -> ShapeOf:
        return ShapeOf(given.num_experts, given.topk_idx.shape[1], given.form.hidden, given.form.dtype)

    def _layer(self, given: _Given) -> Any:
        most = max(given.about.max_tokens, self.num_max_tokens_per_rank)
        return self._layers.get(self._shape(given), most, 0, given.check)

    def _sent(self, ep: Any, given: _Given, options: dict[str, Any]) -> tuple[Any, Any]:
        """Rows, and their result."""
        try:
            sent = send(ep, given.form, topk_idx=given.topk_idx, topk_weights=given.topk_weights, **options)
        except InvalidArgument:
            given.check()
            raise
        if sent.dispatched is None:
            raise InvalidState("a first dispatch has a result")
        return sent.x, sent.dispatched

    def _first(self, given: _Given, options: dict[str, Any]) -> tuple[Any, Any]:
        about, ep = given.about, self._layer(given)
        top_k, num_local, worst = ep.top_k, ep.num_local_experts, self.num_ranks * about.max_tokens
        if about.do_expand:
            worst = align(worst * min(top_k, num_local) + (about.alignment - 1) * num_local, about.alignment)
            options |= {"layout": "expert_major", "alignment": about.alignment}
        options |= {"capacity": None if about.is_exact else worst, "max_tokens": about.max_tokens, "host_counts": True}
        rows, r = self._sent(ep, given, options)
        if given.key is not None and given.form.is_plain:
            self._layers.note_known(given.key, Known(ep, self._shape(given), about=about, **options))
        handle = EPHandle(self, ep, bare(r), given.topk_idx, about, given.form.num_columns, copy=given.copy)
        return (rows, *self._beside(r, handle, has_weights=given.topk_weights is not None), handle), r

    def _beside(self, r: Any, handle: EPHandle, *, has_weights: bool) -> tuple[Tensor | None, Tensor | None]:
        """The ids and weights that the caller gets of a first dispatch; no combine of a buffer reads them."""
        routing = r.handle
        if handle.do_expand:
            return None, routing.weights if has_weights else None
        ids, weights = routing._received()
        handle.ids = ids  # kept for calls along the handle: the caller's are another copy
        return ids.clone(), weights if has_weights else None

    def _again(
        self, known: EPHandle, form: Form, topk_weights: Tensor | None, options: dict[str, Any]
    ) -> tuple[Any, Any]:
        ep, routing = known.ep, known.dispatched.handle
        sent = send(ep, form, side=words_of(topk_weights), handle=routing, **options)
        known.widths.add(form.num_columns)
        weights = None
        if sent.side is not None and known.ids is not None:
            weights = torch.where(known.ids >= 0, sent.side.contiguous().view(torch.float32), 0.0)
        elif sent.side is not None:
            pick = known.dispatched.sources().pick
            assert pick is not None  # noqa: S101  # for mypy
            weights = lane_of(sent.side, pick)
        ids = None if known.ids is None else known.ids.clone()
        return (sent.x, ids, weights, known), sent.dispatched

    @collective_call
    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """(combined_x [T, H], combined_topk_weights fp32 [T, K] or None, event). Collective.

        The plain sum of a token's rows, fp32 inside, and the bias or both of two. Expanded: a rank's rows of a token
        are summed and rounded first, unless the buffer has allow_multiple_reduction=False: then all are added in fp32
        and rounded once. The bias comes first, then ranks by their last pick, or else picks by k; of several nodes
        first in each node, rounded, too, unless the buffer has allow_multiple_reduction=False, then nodes ascending.
        topk_weights [rows, K], expanded [rows]: of each pick what its rank gives.

        Raises:
            InvalidArgument: topk_weights with an expanded handle and allow_multiple_reduction=False. As `dispatch`.
        """
        self._check_alive("combine")
        if num_qps or type(num_qps) is not int:
            self._check_qps(num_qps)
        known = self._own(handle)
        once = known.do_expand and not self.allow_multiple_reduction
        if once and topk_weights is not None:
            raise InvalidArgument("topk_weights with an expanded handle need allow_multiple_reduction=True")
        ep, routing = known.ep, known.dispatched.handle
        is_here = previous_event is None and previous_event_before_epilogue is None and not async_with_compute_stream
        # Sums that are not the last ones stay in fp32.
        is_wide = once or (not self.allow_multiple_reduction and self.num_scaleout_ranks > 1)
        options: dict[str, Any] = {"num_sms": self._layers.num_sms(num_sms or known.num_sms)}
        if is_here and not is_wide and topk_weights is None and bias is None and ep.hidden in known.widths:
            y = sum_of(ep, x, routing, options["num_sms"], "last_pick")
            if y is not None:
                return y, None, EventOverlap()
        check_rows("x", x, known.widths)

        def work() -> tuple[Any, None]:
            more = bias_of(bias)
            is_by_pick = once and adds_by_pick(ep, routing)
            options["order"] = "pick" if is_by_pick else "last_pick"
            rows = x
            if is_wide and not is_by_pick:
                rows, more = x.to(torch.float32), None if more is None else more.to(torch.float32)
            if topk_weights is None:
                return (summed(ep, routing, rows, bias=more, **options).to(x.dtype), None), None
            y, lanes = summed(ep, routing, rows, bias=more, side=topk_weights.to(torch.float32), **options)
            return (y.to(x.dtype), lanes), None

        before = previous_event
        if previous_event_before_epilogue is not None:
            before = (previous_event, previous_event_before_epilogue)
        values, event = self._streams.run(work, before, async_with_compute_stream, (x, topk_weights, bias))
        return (*values, event)

    # ---- its end

    def destroy(self) -> None:
        """As `Buffer.destroy`."""
        self._destroy()

    def _check_qps(self, num_qps: int) -> None:
        if type(num_qps) is not int or not 0 <= num_qps <= self.num_allocated_qps:
            raise InvalidArgument(
                f"num_qps is {num_qps!r}; allowed are 0 to num_allocated_qps, {self.num_allocated_qps}"
            )

    def _own(self, handle: Any) -> EPHandle:
        if not isinstance(handle, EPHandle):
            raise InvalidArgument(f"handle is {type(handle)!r}; the EPHandle of a dispatch is expected")
        if handle.buffer is not self:
            raise InvalidState("the handle is of another buffer; a call needs the buffer that made it")
        return handle


class _Given:
    """What a first dispatch was given, beside how it runs."""

    device: torch.device
    copy = True
    key: Any = None  # of a call that may be known from now on

    def __init__(
        self,
        form: Form,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        num_experts: int,
        about: About,
    ) -> None:
        self.form, self.topk_idx, self.topk_weights = form, topk_idx, topk_weights
        self.num_experts, self.about = num_experts, about

    def check(self) -> None:
        """See check_first."""
        check_first(self.form, self.topk_idx, self.topk_weights, self.device)


def _counting(work: Callable[[], tuple[Any, Any]], stats: Tensor) -> Callable[[], tuple[Any, Any]]:
    """`work`, and what it has brought added to `stats`."""

    def counted() -> tuple[Any, Any]:
        values, dispatched = work()
        stats.add_(values[3].dispatched.handle._counts())
        return values, dispatched

    return counted


def _network(sl_idx: int, num_allocated_qps: int, usual_qps: int) -> Network:
    if type(sl_idx) is not int or not 0 <= sl_idx <= env.MAX_SERVICE_LEVEL:
        raise InvalidArgument(f"sl_idx is {sl_idx!r}; allowed are 0 to {env.MAX_SERVICE_LEVEL}")
    if type(num_allocated_qps) is not int or num_allocated_qps < 0:
        raise InvalidArgument(f"num_allocated_qps is {num_allocated_qps!r}; allowed are 0 and more")
    return Network(sl_idx, num_allocated_qps or usual_qps)


def _num_ranks(group: Any) -> int:
    return int(group.num_ranks if hasattr(group, "num_ranks") else group.size())


def _size_hint(num_ranks: int, max_tokens: int, hidden: int, num_topk: int) -> int:
    top_k = num_topk or _GUESSED_TOPK
    engine = "nvlink" if torch.cuda.is_available() else "cpu"
    heap = max_tokens * max(num_ranks, top_k) * (2 * hidden + 8 * top_k)
    num_bytes = memory_of(num_ranks, num_ranks, top_k, align(hidden, 8), max_tokens, heap_bytes=heap, engine=engine)[
        "windows_bytes"
    ]
    return align(num_bytes, HINT_MULTIPLE)
