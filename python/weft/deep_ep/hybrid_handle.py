"""The handles of `HybridEPBuffer`: tuples of eleven or seven, whose items are made when they are asked for."""
# check: allow-in-file function-size: a field each

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import torch
from torch import Tensor

if TYPE_CHECKING:
    from weft.expert_parallel import ExpertParallel
    from weft.handle import Dispatched

__all__ = ["HybridHandle"]

_NUM_DISPATCHED, _ROUTING_MAP, _COUNTS, _OVERFLOW = 3, 4, 7, 10
_FIVE, _EIGHT = (None,) * 5, (None,) * 8  # items that are made when they are asked for


class HybridHandle(tuple):  # type: ignore[type-arg]
    """Items of dispatch_with_permute: three maps that Weft has none of (empty), num_dispatched_tokens int32 [1],
    local_expert_routing_map bool [n, L] (a line a token, from num_dispatched_tokens on False), two more such maps,
    tokens_per_expert int32 [L] (with their alignment), num_of_tokens_per_rank, config, overflow_flag int32 [1].
    Of dispatch: the first five, num_of_tokens_per_rank, config.
    """

    buffer: Any
    ep: ExpertParallel
    dispatched: Dispatched
    ids: Tensor  # [T, K] of this rank's tokens
    received: Tensor | None  # [N, K] local ids of the rows, where they are one a token
    widths: set[int]  # of rows that went along it

    def __new__(
        cls,
        buffer: Any,
        ep: ExpertParallel,
        dispatched: Dispatched,
        ids: Tensor,
        config: Any,
        *,
        expands: bool = False,
        received: Tensor | None = None,
        are_own: bool = False,
    ) -> HybridHandle:
        """Of rows by expert, or with `received` of rows by token. `are_own`: no caller has the ids, who may write to
        them."""
        num_tokens = dispatched.handle.num_tokens
        self = super().__new__(cls, (*_EIGHT, num_tokens, config, None) if expands else (*_FIVE, num_tokens, config))
        self.buffer, self.ep, self.dispatched = buffer, ep, dispatched
        self.ids, self.received, self.widths = ids if are_own else ids.clone(), received, set()
        return self

    @property
    def expands(self) -> bool:
        """Whether it is of dispatch_with_permute."""
        return self.received is None

    def columns(self, local_rank: int) -> Tensor:
        """int64 [N, K]: the experts of the rows by number in the node, -1 where the pick is another rank's."""
        received = self.received
        assert received is not None  # noqa: S101  # for mypy
        first = local_rank * self.ep.num_local_experts
        return torch.where(received >= 0, received.to(torch.int64) + first, -1)

    def _item(self, idx: int) -> Any:
        value = tuple.__getitem__(self, idx)
        if value is not None:
            return value
        if idx == _NUM_DISPATCHED:
            if not self.expands:
                return self.dispatched.num_rows.to(torch.int32).view(1)
            return self._lines().any(1).sum(dtype=torch.int32).view(1)
        if idx == _ROUTING_MAP:
            return self._lines()
        if idx == _COUNTS:
            offsets = self.dispatched.offsets
            return offsets[1:] - offsets[:-1]
        if idx == _OVERFLOW:
            return self.dispatched.dropped.view(1)
        return torch.zeros(0, dtype=torch.int32, device=self.ids.device)

    def _lines(self) -> Tensor:
        """bool [n, L]."""
        num_local, device = self.ep.num_local_experts, self.ids.device
        received = self.received
        if received is not None:
            columns = torch.where(received >= 0, received, num_local).to(torch.int64)
            table = torch.zeros((len(received), num_local + 1), dtype=torch.bool, device=device)
            return table.scatter_(1, columns, True)[:, :num_local].contiguous()
        rank, token, _ = self.dispatched.sources()
        names = torch.where(rank >= 0, rank.to(torch.int64) * self.ep.max_tokens_per_rank + token, 1 << 62)
        tokens, order = names.sort(stable=True)
        is_first = torch.cat([tokens.new_ones(1), (tokens[1:] != tokens[:-1]).to(tokens.dtype)])[: len(tokens)]
        offsets = self.dispatched.offsets
        expert = torch.searchsorted(offsets[1:].contiguous(), order.to(offsets.dtype), right=True)
        table = torch.zeros((len(names), num_local + 1), dtype=torch.bool, device=device)
        expert = torch.where(tokens < 1 << 62, expert, num_local).clamp(max=num_local)
        table[is_first.cumsum(0) - 1, expert] = True
        return table[:, :num_local].contiguous()

    @overload
    def __getitem__(self, idx: SupportsIndex) -> Any: ...
    @overload
    def __getitem__(self, idx: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, idx: Any) -> Any:
        found = range(len(self))[idx]
        return tuple(map(self._item, found)) if isinstance(found, range) else self._item(found)

    def __iter__(self) -> Iterator[Any]:
        return map(self._item, range(len(self)))

    def __repr__(self) -> str:
        return f"deep_ep.HybridEPBuffer handle({self.dispatched.handle})"
