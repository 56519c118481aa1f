"""`ExpertParallel`: dispatch and combine for one shape of MoE layer. Checks of arguments are in weft/call/check.py.

Changes between calls are in weft/call/elastic.py, `check` and `stats` in reports.py, `close` in lifetime.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.call import along, check, check_constructor, traced, wrapped
from weft.call.eager import Eager
from weft.call.elastic import Elastic
from weft.call.lifetime import Lifetime
from weft.call.maps import checked_picks
from weft.call.opening import opened
from weft.call.options import CombineOptions, DispatchOptions
from weft.call.reports import Reports
from weft.call.warmup import run_all
from weft.communicator import Communicator
from weft.errors import Error, Unsupported
from weft.handle import Dispatched, Handle
from weft.limits import dtype_name
from weft.quantized import Quantized

__all__ = ["ExpertParallel"]


class ExpertParallel(Elastic, Reports, Lifetime):
    """Sends tokens to the ranks of their experts and brings the experts' outputs back.

    E experts, R ranks: expert e lives on rank e // (E / R). Constructing is collective: every rank passes equal
    arguments. Objects of equal shape on one communicator share their windows, so layers cost nothing. Use it as a
    context manager, or call `close`.

    Args:
        comm: the ranks.
        num_experts: E, a multiple of the number of ranks; None with num_logical_experts: the least that holds them all
            on `min_ranks` ranks.
        top_k: K, picks a token, 1 to 128; duplicates count each.
        hidden: H, values a row; a row is a multiple of 16 bytes (with FP8: H a multiple of 16).
        max_tokens_per_rank: most tokens a rank may dispatch in a call; memory and the order of ranks depend on it.
        dtype: of x: torch.bfloat16, float16 or float32. Expert outputs may have any of these.
        num_sms: SMs that a call uses on a GPU; None: 16, by expert 24 (dispatch) and 32 (combine), small batches 32 or
            64 or what a table says, fewer where ranks or many windows share a GPU. The cpu engine takes no notice.
        deadline_s: a call in which a peer does not take part ends after this many seconds with `PeerTimeout`.
        heap_bytes: receive memory, on a GPU taken from its memory here; None: 4 * max_tokens_per_rank * max(R, K) *
            (row bytes + 8 K). Results that find no room are copied to an ordinary tensor.
        num_logical_experts: N, any number from 1 to E: ids in topk_idx are logical, 0 to N - 1, and a `weft.ExpertMap`
            says which of the E physical experts holds each: at the beginning `ExpertMap.spread` over the active ranks,
            or all slots if these have no room; on a rank that joins the map of the members. Whatever else speaks of
            experts, received ids and counts too, means physical ones. None: ids are physical. cpu engine.
        num_windows: calls that may be in flight at once, each on its own `window`; on a GPU within the rank's SMs.
        sum_domain: d, 1 to R: combine and the gradient of x add up d ranks at a time, round, and add these sums
            (docs/semantics.md); None, 1 or R: no domains.
        min_ranks: with num_logical_experts and without num_experts: on as few ranks there shall be room for all logical
            experts, E = R x ceil(N / min_ranks); None: R.
        node_ranks: d, 1 to R: ranks 0 to d - 1, d to 2 d - 1 and so on are nodes, though on one machine. A row crosses
            to another node once, as it would over a network, and sums are those of sum_domain=d; no order="pick";
            None: one node (docs/protocols/rail.md). On GPUs the network is an SM more of each rank and window, or
            NCCL's (WEFT_NETWORK=nccl); "auto" chooses no small batches, and some is missing (docs/protocols/nodes.md).
        small_tokens: most tokens of a rank in small-batch and staged calls; None: 512. At most max_tokens_per_rank is
            taken. On a GPU each takes 2 R rows of window memory.
        traffic_class: 0 to 255, of what the object sends between nodes over NCCL's network: a service level on
            InfiniBand, a traffic class on RoCE. An object has queues of its own there, so one for long transfers and
            one for short ones keep apart (docs/scaleout.md). None: NCCL's. Other networks and engines take no notice.
        max_heap_bytes: up to which `resize` may let the heap grow: addresses are reserved, no memory; None: heap_bytes.
            cpu engine.
        name: by which a rank that joins finds this object among those of equal arguments, in whatever order it makes
            them; None: it makes them in the order of the members.

    Raises:
        InvalidArgument: an argument is not allowed (on this rank), or differs between ranks (on every rank).
        InvalidState: the communicator is closed, forked or busy.
        PeerTimeout, PeerLost: a rank did not take part.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        num_experts: int | None = None,
        top_k: int,
        hidden: int,
        max_tokens_per_rank: int,
        dtype: torch.dtype = torch.bfloat16,
        num_sms: int | None = None,
        deadline_s: float = 100.0,
        heap_bytes: int | None = None,
        num_windows: int = 1,
        num_logical_experts: int | None = None,
        sum_domain: int | None = None,
        max_heap_bytes: int | None = None,
        min_ranks: int | None = None,
        node_ranks: int | None = None,
        small_tokens: int | None = None,
        traffic_class: int | None = None,
        name: str | None = None,
    ) -> None:
        arguments = {
            "num_experts": num_experts,
            "top_k": top_k,
            "hidden": hidden,
            "max_tokens_per_rank": max_tokens_per_rank,
            "dtype": dtype_name(dtype),
            "num_sms": num_sms,
            "deadline_s": deadline_s,
            "heap_bytes": heap_bytes,
            "num_windows": num_windows,
            "num_logical_experts": num_logical_experts,
            "sum_domain": sum_domain,
            "max_heap_bytes": max_heap_bytes,
            "node_ranks": node_ranks,
            "small_tokens": small_tokens,
            "traffic_class": traffic_class,
            "name": name,
        }
        check_constructor.check_comm(comm)
        with comm.telling_peers():
            check_constructor.check_min_ranks(comm, min_ranks, num_experts, num_logical_experts)
            if num_experts is None and type(num_logical_experts) is int:
                arguments["num_experts"] = -(-num_logical_experts // (min_ranks or comm.num_ranks)) * comm.num_ranks
            check_constructor.check_constructor(comm, dtype, arguments)
        self.calls, self._shape = opened(comm, dtype, arguments)
        self.comm, self.dtype, self.device = comm, dtype, comm.device
        self.num_experts, self.top_k, self.hidden = self._shape.num_experts, top_k, hidden
        self.num_logical_experts, self.num_local_experts = num_logical_experts, self._shape.num_local_experts
        self.name, self._most_heap_bytes = name, max_heap_bytes or 0
        self.max_tokens_per_rank, self.num_windows, self.deadline_s = max_tokens_per_rank, num_windows, deadline_s
        self.small_tokens = self._shape.small_tokens
        self.num_ranks, self.num_sms = comm.num_ranks, self._shape.num_sms
        self._overflow = self.calls.overflow
        self._eager = Eager(self._shape, self.calls)
        wrapped.watch(self)

    # ---- the two calls

    def dispatch(
        self,
        x: Tensor | Quantized,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        handle: Handle | None = None,
        side: Tensor | None = None,
        layout: str = "rank_major",
        alignment: int = 1,
        quantize: str | None = None,
        scale_layout: str = "row_major",
        zero_holes: bool = True,
        absent: str = "drop",
        host_counts: bool = False,
        capacity: int | None = None,
        max_tokens: int | None = None,
        num_sms: int | None = None,
        deadline_s: float | None = None,
        mode: str = "auto",
        staged: bool = False,
        async_op: bool = False,
        window: int = 0,
    ) -> Dispatched:
        """Send every token to the ranks that hold its experts. Collective. Without `capacity` or a handle the host
        waits for the counts of the peers.

        On a GPU it runs on the current stream. Under graph capture `capacity` is required; heap memory of the result
        belongs to the window for good, ordinary tensors to the graph, and each replay overwrites them.

        Args:
            x: [T, H] of the object's dtype, or a `weft.Quantized` with data [T, B]. T from 0 to max_tokens; it may
                differ between ranks. Column-major scales of 4 bytes are read as they lie in rank_major and in small
                batches on GPUs; what else is not contiguous is copied first.
            topk_idx: [T, K] int32 or int64; -1: no expert. Ids out of range count as -1, and the next call raises (on a
                GPU the next dispatch without capacity). Or a map, bool [T, E], with topk_weights [T, E]: its ids
                ascending, on a GPU one kernel more; a row with more than K counts as an id out of range.
            topk_weights: [T, K] fp32, or bf16 or fp16, converted exactly; None: 1. Given on every rank or on none if
                gradients are wanted.
            handle: repeat its routing with this x (any of the three dtypes) in place of topk_idx and topk_weights.
            side: [T, K] fp32, bf16 or fp16 beside a handle: travels with the rows, in the same call; `r.side` has it.
                A row and 4 K bytes are at most 4 H bytes wide together. No gradients, not quantised, not compiled.
            layout: "rank_major" (one row a token and rank), "expert_major" (one row a pick, groups by expert) or
                "masked" ([L, C, H]). With a handle: its own, or the default.
            alignment: expert_major: groups start at multiples of it.
            quantize: "fp8", "fp8_ue8m0" or "fp8_pow2" (scales of UE8M0 as fp32): quantise rows on the way; None: don't.
            scale_layout: of the scales of the result: "row_major", or "column_major" as grouped FP8 GEMMs read them
                with TMA: strides (..., 1, ld), each column at a multiple of 16 bytes, UE8M0 packed four to an int32
                [..., N, ceil(S / 4)]. The kernels for small batches write them so; else it costs a small kernel. Rows
                without scales are refused. Ranks may differ, but those that are threads; a handle does not keep it.
            zero_holes: expert_major: rows between groups are zero; False: undefined, which saves the stores. Their
                weights are 0 anyway, and where gradients are tracked or torch.compile traces the call so are the rows.
                Ranks may differ, and a handle does not keep it.
            absent: picks whose expert no active rank has: "drop": nothing is added for them; "renormalize": the weights
                of the token's other picks are scaled so that their sum is that of all (docs/elasticity.md). Ranks may
                differ. cpu engine, not in compiled code.
            host_counts: the host learns `num_tokens_per_expert_list` with the number of rows, long before the call has
                ended on a GPU. Without capacity or a handle. Ranks may differ in it, but those that are threads.
            capacity: most rows (masked: rows an expert), equal on all ranks; exact sizes if None. Picks beyond it are
                dropped and counted in `overflow`; rows beyond `num_rows` are undefined, zero if gradients are tracked.
            max_tokens: most tokens of any rank in this call, equal on all ranks; None: max_tokens_per_rank.
            num_sms: SMs this call uses on a GPU, equal on all ranks; None: that of the object.
            deadline_s: of this call; None: that of the object.
            mode: "latency": the kernels for small batches, "throughput": the others, "auto": by max_tokens, layout and
                form of the rows; equal on all ranks, the bits are the same. Latency needs max_tokens of at most
                `small_tokens` of the object; its rows lie in ordinary tensors, `capacity` of them. The cpu engine has
                one way only.
            staged: send, and return at once; `r.wait()` receives, on any stream, before the next call on this window.
                Small-batch kernels only; needs `capacity`, and no gradients. The cpu engine receives in the call.
            async_op: on a GPU run on a stream of the window, which waits for the current one first; `r.event.wait()`
                before the result is used. On the cpu engine a call is complete when it returns.
            window: 0 to num_windows - 1, equal on all ranks. Calls with a handle need the window of the dispatch that
                made it.

        Returns:
            Dispatched. Its tensors are this caller's; x lies in the heap if there was room.

        Raises:
            InvalidArgument: refused before anything was sent; also the bad ids of an earlier dispatch.
            InvalidState: closed, busy in another thread, forked, or a handle of another object or epoch.
            Unsupported: FP8 with H not a multiple of 16, or gradients through FP8 rows.
            PeerTimeout, PeerLost: the communicator is broken until `comm.rebuild`.
        """
        values = (
            num_sms, deadline_s, mode, staged, async_op, window, quantize, layout, alignment, capacity, max_tokens,
            scale_layout, zero_holes, absent, host_counts,
        )  # fmt: skip
        if torch.compiler.is_dynamo_compiling():
            if side is not None:
                raise Unsupported("side= of dispatch in compiled code", "a traced call", "a call outside")
            if isinstance(topk_idx, Tensor) and topk_idx.dtype is torch.bool:
                with self.comm.telling_peers():
                    topk_idx, topk_weights = checked_picks(self._shape, topk_idx, topk_weights)
            options = DispatchOptions(*values)
            checked = check.check_dispatch(self._shape, x, topk_idx, topk_weights, handle, options)
            return traced.dispatch(self.calls, self._shape, checked, handle, options)
        try:  # as comm.telling_peers()
            if side is None:
                found = self._eager.known.dispatch(values, x, topk_idx, topk_weights, handle)
                if type(found) is Dispatched:
                    return found
                return self._eager.dispatch(x, topk_idx, topk_weights, handle, values, found)
            along_what = handle if topk_idx is None else None
            return along.dispatch(self._eager, self._shape, x, along_what, side, values)
        except Error as error:
            self.comm.note_refusal(error)
            raise

    def combine(
        self,
        expert_output: Tensor,
        handle: Handle,
        *,
        weighted: bool = True,
        weights: Tensor | None = None,
        topk_idx: Tensor | None = None,
        side: Tensor | None = None,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        wire: str | None = None,
        order: str = "rank",
        side_lanes: str = "own",
        num_sms: int | None = None,
        deadline_s: float | None = None,
        mode: str = "auto",
        staged: bool = False,
        async_op: bool = False,
        window: int = 0,
    ) -> Any:
        """Bring the experts' outputs back and sum them for each token. Collective.

        rank_major: the plain sum of a token's rows; the caller has applied the weights. expert_major and masked:
        sum over k of w[t, k] * y[t, k]. fp32 sums in a fixed order: the same bits every time (docs/semantics.md).

        Args:
            expert_output: rows in the layout of the dispatch, [N, H] or [L, C, H]; bf16, fp16 or fp32, equal on all
                ranks. A tensor of `empty_output` saves a copy.
            handle: of the dispatch; it may serve again.
            weighted: False: the plain sum in every layout.
            weights: [T, K] fp32, bf16 or fp16 of this rank's own tokens, with order="pick": in place of those that
                dispatch was given. A pick of weight 0 is absent, whatever its row holds. No gradients.
            topk_idx: [T, K] int64 or int32, beside weights: picks whose id is below 0 by now are absent, too, whatever
                their weights are. Other ids are those of the dispatch.
            side: fp32, a float a row ([N], [L, C]; rank_major [N] or [N, K]), summed per (t, k); given on all ranks or
                none. No gradients flow through it.
            side_lanes: "own": of each pick the value of the rank that has its expert. "all", rank_major alone: every
                lane is summed over all ranks that hold the token, ascending, whatever its id is there. Equal on all
                ranks; not in compiled code.
            bias: [T, H] or [H], in the dtype of the output or fp32; added as `order` says.
            out: [T, H] contiguous, to be filled and returned; not with gradients.
            wire: "fp8": what ranks contribute to a token travels as FP8 with a scale per 128 values; sums stay fp32
                (docs/semantics.md has the error). None: in the dtype of expert_output.
            order: of the additions, equal on all ranks. "rank": each rank sums its picks of a token and
                rounds, ranks are added ascending, the bias last. "last_pick": the bias first, then ranks by the last k
                that each has a pick of. "pick" (not rank_major): the bias, then every pick's row by itself, by k,
                rounded once: the bits do not depend on the number of ranks. More travels: a row a pick. On GPUs "pick"
                needs weights= or weighted=False, and top_k up to 32 in calls that are no small batch.
            mode: as in dispatch. The handle of a small-batch dispatch needs "auto" or "latency".
            staged: send, and return a `weft.Staged` at once; its `wait()` receives, on any stream, before the next call
                on this window, and returns y. As in dispatch.
            num_sms, deadline_s, async_op, window: as in dispatch.

        Returns:
            y [T, H] in the dtype of expert_output; with side (y, side [T, K] fp32). With async_op an `Event` follows.
            A token without experts gives bias, else 0.

        Raises:
            As dispatch; Unsupported: wire="fp8" with H not a multiple of 16.
        """
        if torch.compiler.is_dynamo_compiling():
            options = CombineOptions(
                num_sms, deadline_s, mode, staged, async_op, window, weighted, wire, order, side_lanes
            )  # fmt: skip
            if weights is not None or topk_idx is not None:
                raise Unsupported("weights= of combine in compiled code", "a traced call", "a call outside")
            if order == "pick" and weighted:
                check.check_received_weights(self._shape)
            checked = check.check_combine(self._shape, expert_output, handle, side, bias, out, options)
            return traced.combine(self.calls, self._shape, checked, out, handle, options)
        try:  # as comm.telling_peers()
            values = (num_sms, deadline_s, mode, staged, async_op, window, weighted, wire, order, side_lanes)
            found = None
            if side is None and bias is None:
                found = self._eager.known.combine(values, expert_output, handle, weights, topk_idx, out)
                if found is not None and type(found) is not tuple:
                    return found
            return self._eager.combine(expert_output, handle, side, bias, out, values, weights, topk_idx, found)
        except Error as error:
            self.comm.note_refusal(error)
            raise

    # ---- the rest

    def empty_output(self, dispatched: Dispatched) -> Tensor:
        """An uninitialised tensor for the expert outputs of `dispatched`: [N, H] or [L, C, H].

        In the heap of its window if there is room, else an ordinary tensor; combine takes both. Its dtype is that of
        the object. Local.

        Raises:
            InvalidState: closed, busy in another thread, forked, or the result of another object or epoch.
            Evicted: the others have gone on without this rank.
        """
        check.check_dispatched(dispatched)
        self.calls.raise_if_closed("empty_output")
        handle = dispatched.handle
        with self.comm.alone("empty_output"):
            self.comm._native.raise_if_evicted()
            self.calls.check_tie("empty_output", handle.tie)
            return self.calls.empty(handle.window, (*handle.rows_shape, self.hidden), self.dtype)

    def warmup(
        self,
        *,
        x: Tensor | Quantized | None = None,
        wire: str | None = None,
        weighted: bool = True,
        side: bool = False,
        topk_dtype: torch.dtype = torch.int64,
        output_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        """Prepare what the first calls would prepare, and wait for all ranks. Collective.

        On a GPU: compiles and loads the kernels of a dispatch with `options` (those of `dispatch`: layout, alignment,
        quantize, scale_layout, zero_holes, host_counts, capacity, max_tokens, num_sms, mode, staged; with async_op the
        window's stream, too) and ids of `topk_dtype`, its repetition and its combine, from the heap and of ordinary
        tensors, by running each without tokens. Takes the memory of one result and of two outputs meanwhile.

        Args:
            x: rows like those that calls will send, of which none is sent here; None: [T, H] in the object's dtype.
            wire, weighted: as in `combine`.
            side: there will be side values.
            output_dtype: of expert outputs, and of the gradients that are sent to them; None: the object's. Outputs of
                another dtype lie in ordinary tensors.

        Raises:
            As dispatch and combine. CompileError: a kernel could not be compiled.
        """
        with self.comm.telling_peers(), self.calls.alone("warmup"):
            for window in self.calls.windows:
                window.native.barrier(self.deadline_s)
        if self.comm.engine == "cpu":
            return
        run_all(
            self, x, options, wire=wire, weighted=weighted, has_side=side, topk_dtype=topk_dtype,
            output_dtype=output_dtype,
        )  # fmt: skip
        self.calls.wait()
