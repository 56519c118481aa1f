"""`EPHandle`: the routing of a dispatch of `ElasticBuffer`, with its tables made when they are first read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from weft.deep_ep.utils.math import aligned
from weft.engine import to_host

if TYPE_CHECKING:
    from weft.expert_parallel import ExpertParallel
    from weft.handle import Dispatched

__all__ = ["About", "EPHandle"]

# Tables that are made from what a dispatch has brought, when somebody reads them; no rank waits for another.
_LATE = (
    "num_recv_tokens", "num_expanded_tokens", "psum_num_recv_tokens_per_scaleup_rank",
    "psum_num_recv_tokens_per_expert", "num_unaligned_recv_tokens_per_expert", "recv_src_metadata",
    "dst_buffer_slot_idx",
)  # fmt: skip


class About(NamedTuple):
    """What a dispatch was asked for."""

    max_tokens: int
    alignment: int
    is_exact: bool
    num_sms: int
    do_expand: bool


class EPHandle:
    """R ranks, L local experts, K picks a token, M = num_max_tokens_per_rank, N tokens received (each once).

    Attributes:
        do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: of the dispatch.
        topk_idx: [T, K], a copy unless do_handle_copy=False.
        num_recv_tokens: N, without sync R M. num_expanded_tokens: rows, of an expanded dispatch.
        num_recv_tokens_per_expert_list: aligned counts, Python ints; [] without sync.
        psum_num_recv_tokens_per_scaleup_rank: int32 [R], inclusive: tokens from the ranks up to i; the last is N.
            Between nodes of G ranks int32 [G]: from those of all nodes up to the i-th.
        psum_num_recv_tokens_per_expert: int32 [L]: inclusive sums of aligned counts; expanded: where each expert's rows
            end without their alignment.
        num_unaligned_recv_tokens_per_expert: int32 [L].
        recv_src_metadata: int32 [N, 2 + K] (without sync [R M, 2 + K]), a line a token: source rank * M + token, 0, and
            of each pick the row of the expanded result, -1 if it is not here or the dispatch was not expanded.
        dst_buffer_slot_idx: int32 [T, K]: this rank * M + number of the token among those that go to that rank; -1.
    """

    num_recv_tokens: int
    num_expanded_tokens: int
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    num_unaligned_recv_tokens_per_expert: Tensor
    recv_src_metadata: Tensor
    dst_buffer_slot_idx: Tensor

    token_metadata_at_forward = None
    channel_linked_list = None
    ids: Tensor | None = None  # not expanded: local ids received

    def __init__(
        self, buffer: Any, ep: ExpertParallel, dispatched: Dispatched, topk_idx: Tensor, about: About, width: int, *,
        copy: bool,
    ) -> None:  # fmt: skip
        """`dispatched` without rows, which have `width` columns."""
        self.buffer, self.ep, self.dispatched = buffer, ep, dispatched
        self.num_max_tokens_per_rank, self.expert_alignment, self.is_exact, self.num_sms, self.do_expand = about
        self.num_experts, self.widths = ep.num_experts, {width}  # of rows that went along it
        self.topk_idx = topk_idx.clone() if copy else topk_idx
        counts: list[int] = []
        if self.is_exact:
            counts = aligned(dispatched.num_tokens_per_expert_list, self.expert_alignment)
        self.num_recv_tokens_per_expert_list = counts

    def deterministic_sort(self, *args: Any, **named: Any) -> None:
        """Nothing: the order is always the same."""

    def __getattr__(self, name: str) -> Any:
        if name not in _LATE:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        with torch.no_grad():
            value = getattr(self, f"_make_{name}")()
        self.__dict__[name] = value
        return value

    def _make_num_recv_tokens(self) -> int:
        if not self.is_exact:
            return self.ep.num_ranks * self.num_max_tokens_per_rank
        if not self.do_expand:
            return int(self.dispatched.handle.rows_shape[0])
        return int(to_host(self.psum_num_recv_tokens_per_scaleup_rank[-1]).item())

    def _make_num_expanded_tokens(self) -> int:
        return int(self.dispatched.handle.rows_shape[0])

    def _make_num_unaligned_recv_tokens_per_expert(self) -> Tensor:
        return self.dispatched.num_tokens_per_expert.clone()

    def _make_psum_num_recv_tokens_per_expert(self) -> Tensor:
        counts = self.dispatched.num_tokens_per_expert
        if self.do_expand:
            return self.dispatched.offsets[:-1] + counts
        aligned = (counts + self.expert_alignment - 1) // self.expert_alignment * self.expert_alignment
        return aligned.cumsum(0, dtype=torch.int32)

    def _make_psum_num_recv_tokens_per_scaleup_rank(self) -> Tensor:
        if not self.do_expand:
            offsets = self.dispatched.offsets
            counts = offsets[1:] - offsets[:-1]
        else:
            is_first, tokens, _ = self._lines()
            ranks = torch.where(is_first, tokens // self.num_max_tokens_per_rank, self.ep.num_ranks)
            counts = torch.zeros(self.ep.num_ranks + 1, dtype=torch.int32, device=ranks.device)
            counts = counts.scatter_add_(0, ranks, torch.ones_like(ranks, dtype=torch.int32))[:-1]
        by_idx = counts.view(-1, self.buffer.num_scaleup_ranks).sum(0, dtype=torch.int32)
        return by_idx.cumsum(0, dtype=torch.int32)

    def _make_recv_src_metadata(self) -> Tensor:
        top_k, num_lines = self.ep.top_k, self.num_recv_tokens
        device = self.topk_idx.device
        table = torch.full((num_lines + 1, 2 + top_k), -1, dtype=torch.int32, device=device)
        table[:, 1] = 0
        if not self.do_expand:
            rank, token, _ = self.dispatched.sources()
            table[:num_lines, 0] = torch.where(rank >= 0, rank * self.num_max_tokens_per_rank + token, -1)
            return table[:num_lines]
        _, tokens, line = self._lines()
        order, codes = self._order, self._sorted_codes
        line = torch.where(codes >= 0, line, num_lines)
        table[line, 0] = tokens.to(torch.int32)
        table[line, 2 + codes.clamp(min=0) % top_k] = order.to(torch.int32)
        return table[:num_lines]

    def _lines(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the expanded rows by code: whether each is the first of its token, its token, and the token's line."""
        if "_order" not in self.__dict__:
            rank, token, pick = self.dispatched.sources()
            assert pick is not None  # noqa: S101  # for mypy
            codes = (rank.to(torch.int64) * self.num_max_tokens_per_rank + token) * self.ep.top_k + pick
            order = torch.where(rank >= 0, codes, 1 << 62).argsort(stable=True)
            self.__dict__["_order"] = order
            self.__dict__["_sorted_codes"] = torch.where(rank >= 0, codes, -1)[order]
        codes = self.__dict__["_sorted_codes"]
        tokens = torch.where(codes >= 0, codes // self.ep.top_k, -1)
        before = torch.cat([tokens.new_full((1,), -1), tokens[:-1]])
        is_first = (tokens != before) & (tokens >= 0)
        return is_first, tokens, is_first.cumsum(0) - 1

    def _make_dst_buffer_slot_idx(self) -> Tensor:
        ids = self.topk_idx.to(torch.int64)
        owners = torch.where((ids >= 0) & (ids < self.num_experts), ids // self.ep.num_local_experts, self.ep.num_ranks)
        goes = torch.zeros((len(ids), self.ep.num_ranks + 1), dtype=torch.int32, device=ids.device)
        goes.scatter_(1, owners, 1)
        number = goes.cumsum(0, dtype=torch.int32) - 1 + self.ep.comm.rank * self.num_max_tokens_per_rank
        return torch.where(owners < self.ep.num_ranks, number.gather(1, owners), -1)
