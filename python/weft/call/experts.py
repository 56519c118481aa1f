"""`Experts`: which expert ids an ExpertParallel takes, and where they are; with a map of logical experts or without.

The rule by which a pick gets its replica is in docs/protocols/expert-map.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.call.expert_map import ExpertMap
from weft.errors import InvalidArgument

__all__ = ["Experts"]

_Tables = tuple[Tensor | None, Tensor]
_Kept = tuple[ExpertMap | None, tuple[int, ...], _Tables]  # the map and the active ranks for which the tables are


class Experts:
    """Of one ExpertParallel on one rank. `number`: of the map that is installed, 0 without one; handles have it."""

    def __init__(
        self, rank: int, num_ranks: int, num_experts: int, num_logical_experts: int | None, active: tuple[int, ...]
    ) -> None:
        self._rank, self._num_local = rank, num_experts // num_ranks
        self.num_experts = num_experts
        self.num_ids = num_experts if num_logical_experts is None else num_logical_experts
        self.number = 0
        self.map: ExpertMap | None = None
        self._kept: _Kept | None = None
        if num_logical_experts is not None:
            there = active if num_logical_experts <= self._num_local * len(active) else None
            self.install(ExpertMap.spread(num_logical_experts, num_experts, num_ranks, there))

    def check(self, expert_map: object) -> ExpertMap:
        """A map that may be installed here.

        Raises:
            InvalidArgument: it is none, or of another number of logical experts, or has ids that are no experts.
        """
        if not isinstance(expert_map, ExpertMap):
            raise InvalidArgument(f"expert_map is {expert_map!r}; a weft.ExpertMap is expected")
        if self.map is None:
            raise InvalidArgument("expert_map is given to an ExpertParallel without num_logical_experts")
        if expert_map.num_logical_experts != self.num_ids:
            raise InvalidArgument(
                f"expert_map has {expert_map.num_logical_experts} logical experts; allowed is that of this "
                f"ExpertParallel, {self.num_ids}"
            )
        most = int(expert_map._replicas.max())
        if most >= self.num_experts:
            raise InvalidArgument(
                f"expert_map has the physical id {most}; allowed are -1 to num_experts - 1 = {self.num_experts - 1}"
            )
        return expert_map

    def install(self, expert_map: ExpertMap) -> None:
        """From now on picks go by it. Local: that all ranks do so between the same two calls is the caller's part."""
        self.map, self._kept = expert_map, None
        self.number += 1

    def uncovered(self, active: tuple[int, ...]) -> tuple[int, ...]:
        """Ids of experts that no active rank has, ascending."""
        return tuple((~self._tables(active)[1]).nonzero().flatten().tolist())

    def table(self, active: tuple[int, ...]) -> Tensor | None:
        """What a dispatch reads (src/engine/cpu/expert_table.h), None without a map. Whoever reads it by its address
        holds it meanwhile: a thread that asks for other ranks replaces the one that is kept here."""
        return self._tables(active)[0]

    def renormalized(self, topk_idx: Tensor, weights: Tensor | None, active: tuple[int, ...]) -> Tensor | None:
        """Weights [T, K] in fp32; those of a token of which picks are absent, scaled so that the sum stays. Gradients
        flow."""
        covered = self._tables(active)[1]
        if bool(covered.all()):
            return weights
        if weights is None:
            weights = torch.ones(topk_idx.shape, dtype=torch.float32, device=topk_idx.device)
        ids = topk_idx.long()
        is_pick = (ids >= 0) & (ids < self.num_ids)
        is_kept = is_pick & covered.to(ids.device)[ids.clamp(0, self.num_ids - 1)]
        wanted, kept = weights.new_zeros(len(weights)), weights.new_zeros(len(weights))
        for k in range(weights.shape[1]):
            wanted = torch.where(is_pick[:, k], wanted + weights[:, k], wanted)
            kept = torch.where(is_kept[:, k], kept + weights[:, k], kept)
        is_scaled = (is_pick & ~is_kept).any(dim=1) & (kept != 0)
        scale = wanted / torch.where(is_scaled, kept, 1.0)
        return torch.where(is_scaled[:, None] & is_kept, weights * scale[:, None], weights)

    def _tables(self, active: tuple[int, ...]) -> _Tables:
        """What a dispatch reads, and which ids are covered, bool [num_ids]."""
        kept, expert_map = self._kept, self.map
        if kept is None or kept[0] is not expert_map or kept[1] != active:
            made = self._made(expert_map, torch.tensor(active, dtype=torch.int32, device="cpu"))
            self._kept = kept = (expert_map, active, made)
        return kept[2]

    def _made(self, expert_map: ExpertMap | None, active: Tensor) -> _Tables:
        if expert_map is None:
            slots = torch.arange(self.num_experts, dtype=torch.int32, device="cpu")
            return None, torch.isin(slots // self._num_local, active)
        replicas = expert_map._replicas
        place = torch.where(replicas < 0, -1, replicas // self._num_local)
        is_there = torch.isin(place, active)
        is_mine = is_there & (place == self._rank)
        is_choice = torch.where(is_mine.any(dim=1, keepdim=True), is_mine, is_there)
        counts = is_choice.sum(dim=1)
        first = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        digest = expert_map._digest.to_bytes(8, "little")
        halves = [int.from_bytes(digest[at : at + 4], "little", signed=True) for at in (0, 4)]
        head = torch.tensor([len(counts), *halves, 0], dtype=torch.int32, device="cpu")
        return torch.cat([head, first, replicas[is_choice]]), counts > 0
