"""Low-latency calls of V1 `Buffer`: few tokens, rows by expert, weights given to combine by the tokens' owner."""
# check: allow file-size: one class, much of it parameters
# check: allow-in-file function-size: parameters as in DeepEP

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.deep_ep.buffer_base import BufferBase
from weft.deep_ep.errors import refused
from weft.deep_ep.known import Known, weighted_sum_of
from weft.deep_ep.layers import ShapeOf
from weft.deep_ep.low_latency_handle import LowLatencyHandle, source_ranks, weighted_rows
from weft.deep_ep.rows import (
    are_counts,
    bare,
    check_counts,
    check_first,
    check_picks,
    check_weights,
    form_of,
    looks_like_picks,
    stripped,
    summed,
)
from weft.deep_ep.streams import collective_call, run_without_gradients
from weft.deep_ep.utils.event import EventOverlap
from weft.deep_ep.waits import counted, counting_waits, row_of_waits
from weft.errors import InvalidArgument, InvalidState
from weft.limits import adds_by_pick
from weft.limits import memory as memory_of
from weft.log import logger

if TYPE_CHECKING:
    from weft.expert_parallel import ExpertParallel
    from weft.handle import Dispatched

__all__ = ["LowLatency"]

_GUESSED_TOPK = 8
_MOST_PICKS_A_RANK = 8


class LowLatency(BufferBase):
    """The low-latency half of `Buffer`."""

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that Weft's two windows of this shape take, for 8 picks a token. Local."""
        engine = "nvlink" if torch.cuda.is_available() else "cpu"
        room = room_of(num_max_dispatch_tokens_per_rank, _GUESSED_TOPK, num_ranks, engine)
        shape: dict[str, Any] = {
            "num_ranks": num_ranks, "num_experts": -(-num_experts // num_ranks) * num_ranks, "top_k": _GUESSED_TOPK,
            "hidden": -(-hidden // 8) * 8, "max_tokens_per_rank": room, "num_windows": 2, "small_tokens": max(1, room),
        }  # fmt: skip
        heap_bytes = 2 * shape["num_experts"] * num_max_dispatch_tokens_per_rank * shape["hidden"]
        return memory_of(**shape, heap_bytes=heap_bytes, engine=engine)["windows_bytes"]

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing has to be cleaned."""
        self._check_alive("clean_low_latency_buffer")

    @collective_call
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        topk_weights: Tensor | None = None,
        x_global_scale: Tensor | None = None,
        use_nvfp4: bool = False,
        use_ue8m0_for_sf: bool = False,
    ) -> tuple[Any, ...]:
        """(recv_x, recv_count, handle, event, hook). Collective.

        recv_x [L, R M, H] bf16, or with use_fp8 (e4m3, scales [L, R M, H / 128] by column; use_ue8m0: int32, four
        exponents a word). Rows of an expert are at its first recv_count places (int32 [L], valid after the hook).
        return_recv_hook: only send; `hook()` receives. With topk_weights seven: behind recv_count fp32 [L, R M], the
        weight of each row, and int32 [L, R M], its source rank. Statistics of waits are nanoseconds added to int64 [R],
        or to this rank's row of [R, R].

        Raises:
            InvalidArgument, InvalidState: as `weft.ExpertParallel.dispatch`. NotSupported: NVFP4.
        """
        self._check_alive("low_latency_dispatch")
        key = None
        if self._masks is None and not (async_finish or use_nvfp4):
            key = num_max_dispatch_tokens_per_rank, num_experts, use_fp8, round_scale, use_ue8m0, return_recv_hook
            if dispatch_wait_recv_cost_stats is None:
                stats = cumulative_local_expert_recv_stats
                found = self._known_low_latency(key, x, topk_idx, topk_weights, stats, has_hook=return_recv_hook)
                if found is not None:
                    return found
        if use_nvfp4:
            raise refused(
                "low_latency_dispatch(use_nvfp4=True)", "NVFP4 on the way", "use_fp8=True, or quantise before"
            )
        waits = None
        if dispatch_wait_recv_cost_stats is not None:
            waits = row_of_waits("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, self._ranks)
        if async_finish and return_recv_hook:
            raise InvalidArgument("async_finish and return_recv_hook are both True; allowed is one of the two")
        if use_ue8m0 and not round_scale:
            raise InvalidArgument("use_ue8m0 is True without round_scale; scales of exponents are rounded: set both")
        if not isinstance(x, Tensor) or x.dtype is not torch.bfloat16 or x.dim() != 2 or not x.is_contiguous():
            dtype = form_of(x).data.dtype
            raise InvalidArgument(f"x is {dtype}; allowed is bf16 (view other bits as bf16 with use_fp8=False)")
        max_tokens = num_max_dispatch_tokens_per_rank
        if self._masks is not None or not looks_like_picks(topk_idx):
            check_first(form_of(x), topk_idx, topk_weights, self._ranks.device)
        if topk_idx.shape[0] > max_tokens:
            raise InvalidArgument(
                f"x has {topk_idx.shape[0]} tokens; allowed are 0 to num_max_dispatch_tokens_per_rank = {max_tokens}"
            )
        num_slots, num_sources = self._slots(num_experts)
        if cumulative_local_expert_recv_stats is not None:
            check_counts(
                "cumulative_local_expert_recv_stats", cumulative_local_expert_recv_stats,
                num_slots // self.group_size, self._ranks.device,
            )  # fmt: skip
        shape = ShapeOf(num_slots, topk_idx.shape[1], x.shape[1], torch.bfloat16, "low_latency")
        quantize = None if not use_fp8 else "fp8_ue8m0" if use_ue8m0 else "fp8_pow2" if round_scale else "fp8"
        is_staged = return_recv_hook and self._masks is None  # a half could not be made again
        late: list[Callable[[], object]] = []
        known = None
        if self._masks is None:
            known = self._of_low_latency(
                shape, max_tokens, lambda: check_first(form_of(x), topk_idx, topk_weights, self._ranks.device)
            )

        # What is kept so that it can be sent again does not keep the buffer, and may outlive it.
        layers, turn = self._layers, self._layers.turn(shape)

        options: dict[str, Any] = {
            "layout": "masked", "capacity": num_sources * max_tokens, "max_tokens": max_tokens, "quantize": quantize,
            "scale_layout": "column_major" if use_fp8 else "row_major", "staged": is_staged,
        }  # fmt: skip

        def send(
            ep: ExpertParallel, data: Tensor, picks: Tensor, weights: Tensor | None, row: Tensor | None
        ) -> Dispatched:
            window = turn.next()
            with counting_waits(ep, window, row):
                try:
                    r = ep.dispatch(data, picks, weights, window=window, **options)
                except InvalidArgument:
                    check_first(form_of(data), picks, weights, ep.device)
                    raise
            turn.note(window)
            return r

        def call() -> tuple[ExpertParallel, Dispatched]:
            if self._masks is not None:
                self._masks.boundary(self, lambda: self._layers.catch_up(wait_s=self._layers.deadline_s))
            ep = self._of_low_latency(shape, max_tokens) if known is None else known
            return ep, send(ep, x, topk_idx, topk_weights, waits)

        def work() -> tuple[Any, Any]:
            windows = (lambda: self._layers.has(shape, max_tokens), lambda: self._layers.forget(shape))
            ep, r = call() if self._masks is None else self._masks.run(call, self._layers.deadline_s, windows)
            handle = LowLatencyHandle(self, ep, bare(r), max_tokens, is_by_pick=adds_by_pick(ep, r.handle))
            if key is not None and handle.is_by_pick:
                layers.note_known(key, Known(ep, shape, turns=2, about=(turn, max_tokens), **options))
            count = counts = r.handle.sizes[: ep.num_local_experts]
            if return_recv_hook:
                late.append(lambda: counted(ep, r.handle.window, waits, r.wait))
            if self._masks is not None or not handle.is_by_pick:  # else no call of a buffer reads them again
                count = torch.empty_like(counts)
                late.append(lambda: count.copy_(counts))
            if cumulative_local_expert_recv_stats is not None:
                late.append(lambda: cumulative_local_expert_recv_stats.add_(count))
            rows = r.x if isinstance(r.x, torch.Tensor) else (r.x.data, r.x.scales)
            if self._masks is not None:
                if self._masks.is_automatic:
                    copies = x.clone(), topk_idx.clone(), None if topk_weights is None else topk_weights.clone()
                    handle.again = lambda: send(ep, *copies, None)
                self._masks.note_dispatch(handle)
            beside = () if topk_weights is None else (r.topk_weights, source_ranks(handle, late))
            if not return_recv_hook:
                run_without_gradients(late)
            return (rows, count, beside, handle), r

        inputs = (x, topk_idx, topk_weights, cumulative_local_expert_recv_stats, waits)
        (rows, count, beside, handle), event = self._streams.run(work, None, async_finish, inputs)
        return rows, count, *beside, handle, event, _once(late) if return_recv_hook else None

    def _known_low_latency(
        self, key: Any, x: Any, topk_idx: Any, topk_weights: Any, stats: Any, *, has_hook: bool
    ) -> tuple[Any, ...] | None:
        """See Known: the result of `low_latency_dispatch`, or None."""
        layers = self._layers
        known = layers.known.get(key)
        if known is None:
            return None
        ep, (turn, max_tokens) = known.ep, known.about
        if stats is not None and not are_counts(stats, ep.num_local_experts, ep.device):
            return None
        window = turn.next()
        if has_hook:
            r = known.half(x, topk_idx, topk_weights, window)
        else:
            r = known.dispatch(layers, x, topk_idx, topk_weights, window)
        if r is None:
            return None
        turn.note(window)
        late: list[Callable[[], object]] = [r.wait] if has_hook else []
        handle = LowLatencyHandle(self, ep, bare(r) if has_hook else r, max_tokens, is_by_pick=True)
        count = r.handle._counts()  # no call of a buffer reads them again
        if stats is not None:
            late.append(lambda: stats.add_(count))
        rows = r.x if isinstance(r.x, torch.Tensor) else (r.x.data, r.x.scales)
        beside = () if topk_weights is None else (r.topk_weights, source_ranks(handle, late))
        if has_hook:
            return rows, count, *beside, handle, EventOverlap(), _once(late)
        stripped(r)
        for each in late:
            each()
        return rows, count, *beside, handle, EventOverlap(), None

    @collective_call
    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Any,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        overlap: bool = False,
        src_signals: Tensor | None = None,
        src_signal_expect_value: int = 0,
        *,
        packed_recv_count: Tensor | None = None,
        comp_signal: Tensor | None = None,
        block_m: int | None = None,
        threshold: int | None = None,
        num_sms: int | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        """(combined_x [T, H] bf16, event, hook). Collective.

        The sum over k with topk_idx[t, k] >= 0 of topk_weights[t, k] * row of (t, k), in fp32, rounded once; ids may
        have turned -1 since the dispatch, and a weight of 0 counts as that. Added by k; by rank on GPUs with more than
        eight times as many picks as ranks.
        zero_copy: of the rows in `get_next_low_latency_combine_buffer(handle)`. use_logfmt has no effect: rows travel
        as they are.
        """
        self._check_alive("low_latency_combine")
        if overlap or src_signals is not None or comp_signal is not None:
            raise refused(
                "low_latency_combine(overlap=True)", "signals of experts", "call it when the experts are done"
            )
        waits = None
        if combine_wait_recv_cost_stats is not None:
            waits = row_of_waits("combine_wait_recv_cost_stats", combine_wait_recv_cost_stats, self._ranks)
        if use_logfmt:
            if zero_copy:
                raise InvalidArgument("use_logfmt and zero_copy are both True; allowed is one of the two")
            logger.info("deep_ep: use_logfmt has no effect: rows travel as they are, which is more exact")
        if async_finish and return_recv_hook:
            raise InvalidArgument("async_finish and return_recv_hook are both True; allowed is one of the two")
        mine = self._own_low_latency(handle)
        ep, routing = mine.ep, mine.dispatched.handle
        is_bare = self._masks is None and waits is None and not (zero_copy or async_finish or return_recv_hook)
        if is_bare and mine.is_by_pick and topk_idx is not None and topk_weights is not None:
            y = weighted_sum_of(ep, x, routing, topk_weights, topk_idx, out)
            if y is not None:
                return y, EventOverlap(), None
        rows = mine.output if zero_copy else x
        if rows is None:
            raise InvalidState("zero_copy without get_next_low_latency_combine_buffer(handle), which has the rows")
        num_tokens = routing.num_tokens
        check_picks(topk_idx, None, num_tokens, ep.device)
        check_weights("topk_weights", topk_weights, topk_idx.shape, ep.device)
        if topk_idx.shape[1] != ep.top_k:
            raise InvalidArgument(f"topk_idx has {topk_idx.shape[1]} picks; allowed are {ep.top_k}, as in the dispatch")
        if out is not None:
            check_weights("out", out, (num_tokens, ep.hidden), ep.device)
            if out.dtype != torch.bfloat16:
                raise InvalidArgument(f"out is {out.dtype}; allowed is bf16")
        is_by_pick = mine.is_by_pick
        if not is_by_pick or self._masks is not None or type(rows) is not Tensor:
            check_weights("x", rows, (*routing.rows_shape, ep.hidden), ep.device)
        # fp32 rows, weighted where they are, have no slots: then the call does all of it, and the hook nothing
        is_staged = return_recv_hook and is_by_pick and routing.is_small and ep.comm.engine != "cpu"
        # The call itself writes to it, unless it may be made again when the caller uses that for something else.
        into = None
        if out is not None and is_by_pick and self._masks is None and _may_fill(out, rows):
            into = out
        elif is_staged:
            into = torch.empty((num_tokens, ep.hidden), dtype=torch.bfloat16, device=ep.device)
        journal = None if self._masks is None else self._masks.journal

        def send(given: Tensor, picks: Tensor, of_picks: Tensor, row: Tensor | None) -> Any:
            if journal is not None and journal.has_lost(mine):
                mine.dispatch_again()
            placed, routing = mine.placed(given), mine.dispatched.handle
            with counting_waits(ep, routing.window, row):
                if is_by_pick:
                    try:
                        return ep.combine(
                            placed, routing, order="pick", weights=of_picks, topk_idx=picks, out=into, staged=is_staged,
                            window=routing.window,
                        )  # fmt: skip
                    except InvalidArgument:
                        check_weights("x", placed, (*routing.rows_shape, ep.hidden), ep.device)
                        raise
                weighted = weighted_rows(mine, placed, picks, of_picks)
                return summed(ep, routing, weighted, window=routing.window)

        def work() -> tuple[Any, None]:
            masks = self._masks
            if masks is None:
                sent = send(rows, topk_idx, topk_weights, waits)
            else:
                sent = masks.run(lambda: send(rows, topk_idx, topk_weights, waits), self._layers.deadline_s)
                if masks.is_automatic:
                    kept = mine.copied(rows), topk_idx.clone(), topk_weights.clone()
                    masks.journal.note_combine(mine, lambda: send(mine.restored(kept[0]), *kept[1:], None))
                else:
                    masks.journal.note_combine(mine, None)
            if is_staged:
                return (sent, into if out is None else out), None
            return (sent, sent.to(torch.bfloat16) if out is None else out if out is sent else out.copy_(sent)), None

        inputs = (rows, topk_idx, topk_weights, out, waits)
        (sent, result), event = self._streams.run(work, None, async_finish, inputs)

        def receive() -> None:
            if not is_staged:
                return
            total = counted(ep, routing.window, waits, sent.wait)
            if total is not result:
                result.copy_(total)

        return result, event, _once([receive]) if return_recv_hook else None

    def get_next_low_latency_combine_buffer(self, handle: Any) -> Tensor:
        """bf16 [L, R M, H] for the rows of the next `low_latency_combine(zero_copy=True)` with this handle."""
        self._check_alive("get_next_low_latency_combine_buffer")
        mine = self._own_low_latency(handle)
        if mine.output is None:
            mine.output = mine.ep.empty_output(mine.dispatched)
        return mine.output

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Want a rank to take no part (`mask`), or to take part again. Local, returns at once; on one rank or several.

        The ranks agree while they work. From one of the next low-latency dispatches on it holds on all of them: picks
        of its experts are absent, and its tokens reach nobody; in its own calls it is alone. Nothing else changes.

        Raises:
            NotSupported: the buffer was made without enable_shrink=True.
            InvalidArgument: no rank, or this one.
        """
        self._check_alive("low_latency_update_mask_buffer")
        if self._masks is None:
            raise refused(
                "low_latency_update_mask_buffer", "the group has no masks", "make the buffer with enable_shrink=True"
            )
        self._masks.want(rank_to_mask, mask=mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Fill int32 [R]: 1 for a rank that takes no part in the calls of this one."""
        self._check_alive("low_latency_query_mask_buffer")
        lost = [int(rank not in self._ranks.comm.active_ranks) for rank in range(self.group_size)]
        mask_status.copy_(torch.tensor(lost, dtype=mask_status.dtype, device=mask_status.device))

    def low_latency_clean_mask_buffer(self) -> None:
        """Want all ranks that are masked and alive to take part again; as `low_latency_update_mask_buffer`. Without
        enable_shrink nothing has to be cleaned."""
        self._check_alive("low_latency_clean_mask_buffer")
        if self._masks is not None:
            self._masks.want_all()

    def _of_low_latency(
        self, shape: ShapeOf, max_tokens: int, check: Callable[[], object] | None = None
    ) -> ExpertParallel:
        room = room_of(max_tokens, shape.top_k, self.group_size, self._ranks.comm.engine)
        return self._layers.get(shape, room, 2 * shape.num_experts * max_tokens * shape.hidden, check)

    def _own_low_latency(self, handle: Any) -> LowLatencyHandle:
        if not isinstance(handle, LowLatencyHandle):
            raise InvalidArgument(f"handle is {type(handle)!r}; the handle of a low_latency_dispatch is expected")
        if handle.owner() is not self:
            raise InvalidState("the handle is of another buffer; a call needs the buffer that made it")
        return handle


def room_of(max_tokens: int, top_k: int, num_ranks: int, engine: str) -> int:
    """Tokens of a rank that a window for `max_tokens` has room for. On GPUs a row for each pick comes back to its
    token's owner, into slots for R tokens each: with more picks than ranks they must be more."""
    if engine == "cpu" or top_k > _MOST_PICKS_A_RANK * num_ranks:
        return max_tokens
    return max(max_tokens, -(-max_tokens * top_k // num_ranks))


def _may_fill(out: Tensor, rows: Tensor) -> bool:
    """Whether a combine of `rows` takes it as its `out`; else it is filled behind the call."""
    if out.dtype is not rows.dtype or not out.is_contiguous() or out.is_neg():
        return False
    begin, of_rows = out.data_ptr(), rows.data_ptr()
    return begin + out.nbytes <= of_rows or of_rows + rows.nbytes <= begin


def _once(functions: list[Callable[[], object]]) -> Callable[[], None]:
    """Calls them the first time alone."""
    left = [functions]

    def hook() -> None:
        if left:
            run_without_gradients(left.pop())

    return hook
