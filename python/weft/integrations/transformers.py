"""Expert parallelism of transformers over Weft: `DistributedConfig(ep_size=..., ep_implementation="weft")`.

Importing this module registers it. transformers 5.24 has the registry.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from weft.deep_ep.layers import Layers, ShapeOf
from weft.deep_ep.ranks import ranks_of
from weft.errors import Unsupported

__all__ = ["WeftEP"]


class WeftEP(EPImplementation):  # type: ignore[misc]  # transformers may not be installed where types are checked
    """Every token goes once to each rank that has experts for it, which runs them and sends their sum back.

    T may differ between ranks; windows grow with it. Made collectively over the expert group; so is each call.

    Raises:
        Unsupported: a tensor-parallel group of more than one rank, whose ranks hold the same batch.
    """

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        if tp_mesh.size() > 1:
            raise Unsupported(
                'ep_implementation="weft" with tensor parallelism',
                f"{tp_mesh.size()} ranks that hold the same batch",
                'tp_size=1, or ep_implementation="all_to_all"',
            )
        self._ranks = ranks_of(ep_mesh.get_group())
        self._layers = Layers(self._ranks, heap_bytes=0)
        self._kept: list[Any] = []  # a window closes with its object, and a backward may still need it

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H], [T, K], [T, K] -> [T, H], the weighted sum of the experts' outputs."""
        num_tokens, hidden = hidden_states.shape
        num_experts = self.num_local_experts * self._ranks.num_ranks
        shape = ShapeOf(num_experts, top_k_index.shape[1], hidden, hidden_states.dtype)
        x, weights = hidden_states.contiguous(), top_k_weights.to(torch.float32)
        ep, r = self._layers.run(shape, num_tokens, lambda ep: ep.dispatch(x, top_k_index, weights))
        if not self._kept or self._kept[-1] is not ep:
            self._kept.append(ep)
        rows, ids, weights = r.x, r.topk_idx, r.topk_weights.to(hidden_states.dtype)
        if ids is None or not isinstance(rows, Tensor):
            raise Unsupported("rows without local ids")
        if len(rows) == 0:  # the experts run all the same, so that hooks of their parameters do
            row = rows.sum(dim=0, keepdim=True)
            output = self.experts_forward(row, ids.new_zeros((1, 1)), weights.new_ones((1, 1)))[:0]
        else:
            local = torch.where(ids < 0, self.num_local_experts, ids)  # transformers' id of "not here"
            output = self.experts_forward(rows, local, weights)
        y: Tensor = ep.combine(output, r.handle)
        return y


EPImplementationInterface.register("weft", WeftEP)
