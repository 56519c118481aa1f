"""`BufferHandle`: the routing of a dispatch of V1 `Buffer`, a tuple whose items are made when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import torch
from torch import Tensor

if TYPE_CHECKING:
    from weft.deep_ep.nodes import Nodes
    from weft.expert_parallel import ExpertParallel
    from weft.handle import Dispatched

__all__ = ["BufferHandle"]

_LEN_OF_ONE_NODE = 6
_OF_ONE_NODE, _OF_NODES = (None,) * _LEN_OF_ONE_NODE, (None,) * 10


class BufferHandle(tuple):  # type: ignore[type-arg]
    """Of a dispatch: in one node a tuple of six, else of ten.

    Six: rank_prefix_matrix int32 [R, R], of which column `rank` is known: rows here from the sources up to i. Two
    channel matrices, which Weft has none of (int32 [R, 0]). recv_src_idx int32 [N]: token of each row on its source.
    is_token_in_rank bool [T, R]. send_head, none (int32 [T, 0]).

    Ten: is_token_in_rank. Matrices of channels, none: of nodes int32 [nodes, 0], of ranks [R, 0], received ones of
    nodes [nodes, 0]. recv_rdma_rank_prefix_sum int32 [nodes]: rows here from the nodes up to i (in DeepEP those that
    this rank forwards). Received ones of ranks [R, 0]. recv_gbl_rank_prefix_sum int32 [R]: rows here from the sources
    up to i. recv_src_meta int32 [N, 2]: source rank and token of each row. Two heads, none (int32 [T, 0], [N, 0]).
    """

    buffer: Any
    ep: ExpertParallel
    dispatched: Dispatched
    nodes: Nodes
    is_token_in_rank: Tensor | None
    widths: set[int]  # of rows that went along it

    def __new__(
        cls, buffer: Any, ep: ExpertParallel, dispatched: Dispatched, in_rank: Tensor | None, num_columns: int,
        nodes: Nodes,
    ) -> BufferHandle:  # fmt: skip
        """`in_rank` as it was given to dispatch; `dispatched` without rows."""
        self = super().__new__(cls, _OF_ONE_NODE if nodes.num_nodes == 1 else _OF_NODES)
        self.buffer, self.ep, self.dispatched, self.nodes = buffer, ep, dispatched, nodes
        self.is_token_in_rank, self.widths = in_rank, {num_columns}
        return self

    def _none(self, length: int) -> Tensor:
        return torch.zeros((length, 0), dtype=torch.int32, device=self.ep.device)

    def _in_rank(self) -> Tensor:
        if self.is_token_in_rank is not None:
            return self.is_token_in_rank
        return torch.zeros((self.dispatched.handle.num_tokens, 0), dtype=torch.bool, device=self.ep.device)

    def _item(self, idx: int) -> Tensor:
        num_ranks, num_tokens = self.ep.num_ranks, self.dispatched.handle.num_tokens
        if len(self) != _LEN_OF_ONE_NODE:
            return self._item_of_ten(idx)
        if idx == 0:
            matrix = torch.full((num_ranks, num_ranks), -1, dtype=torch.int32, device=self.ep.device)
            matrix[:, self.ep.comm.rank] = self.dispatched.offsets[1:]
            return matrix
        if idx == 3:
            return self.dispatched.sources().token
        if idx == 4:
            return self._in_rank()
        return self._none(num_tokens if idx == 5 else num_ranks)

    def _item_of_ten(self, idx: int) -> Tensor:
        nodes, until = self.nodes, self.dispatched.offsets[1:]
        if idx == 0:
            return self._in_rank()
        if idx in (1, 3):
            return self._none(nodes.num_nodes)
        if idx == 4:
            return until[[min((node + 1) * nodes.size, nodes.num_ranks) - 1 for node in range(nodes.num_nodes)]]
        if idx == 6:
            return until.clone()
        if idx == 7:
            rank, token, _ = self.dispatched.sources()
            return torch.stack([rank, token], dim=1)
        if idx == 8:
            return self._none(self.dispatched.handle.num_tokens)
        return self._none(self.dispatched.handle.rows_shape[0] if idx == 9 else nodes.num_ranks)

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
        return f"deep_ep.Buffer handle({self.dispatched.handle})"
