"""`Shape`: what an ExpertParallel was made for, as far as checks of its calls need it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weft.communicator import Communicator
from weft.kernels.tuning import Table

if TYPE_CHECKING:
    from weft.call.plan import Planner

__all__ = ["Shape"]


@dataclass(eq=False)
class Shape:
    """Arguments of an ExpertParallel and what follows from them, fixed when it is made; tests set another `table`."""

    comm: Communicator
    engine: str
    device: torch.device
    dtype: torch.dtype
    num_ranks: int
    num_experts: int
    num_ids: int  # of experts in topk_idx: num_logical_experts, or num_experts
    top_k: int
    hidden: int
    max_tokens_per_rank: int
    num_windows: int
    deadline_s: float
    num_sms: int  # of a call that does not say
    has_num_sms: bool  # the user has said `num_sms`
    most_num_sms: int  # that a call may take; 0: the cpu engine takes none
    small_tokens: int  # most tokens of a rank in a small-batch call
    node_ranks: int  # 0: all are one node
    table: Table  # which kernels are faster, measured (weft/kernels/tuning.py)

    calls: Planner

    @property
    def tells_need(self) -> bool:
        """Whether more tokens than fit are told to the other ranks (NeedsRoom), not refused here."""
        return self.calls.tells_need

    @property
    def num_local_experts(self) -> int:
        """Experts of each rank."""
        return self.num_experts // self.num_ranks
