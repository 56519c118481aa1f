"""`ExpertParallel`: dispatch and combine for one shape of MoE layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from weft.handle import Dispatched, Handle

if TYPE_CHECKING:
    from weft.communicator import Communicator
    from weft.quantized import Quantized

__all__ = ["ExpertParallel"]


class ExpertParallel:
    def __init__(
        self,
        comm: Communicator,
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens_per_rank: int,
        dtype: torch.dtype = torch.bfloat16,
        num_sms: int | None = None,
        deadline_s: float = 100.0,
        heap_bytes: int | None = None,
        num_windows: int = 1,
    ) -> None:
        raise NotImplementedError

    def dispatch(
        self,
        x: torch.Tensor | Quantized,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        handle: Handle | None = None,
        layout: str = "rank_major",
        alignment: int = 1,
        quantize: str | None = None,
        capacity: int | None = None,
        max_tokens: int | None = None,
        num_sms: int | None = None,
        deadline_s: float | None = None,
        mode: str = "auto",
        staged: bool = False,
        async_op: bool = False,
        window: int = 0,
    ) -> Dispatched:
        raise NotImplementedError

    def combine(
        self,
        expert_output: torch.Tensor,
        handle: Handle,
        *,
        weighted: bool = True,
        side: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        wire: str | None = None,
        num_sms: int | None = None,
        deadline_s: float | None = None,
        mode: str = "auto",
        staged: bool = False,
        async_op: bool = False,
        window: int = 0,
    ) -> Any:
        raise NotImplementedError

    def empty_output(self, dispatched: Dispatched) -> torch.Tensor:
        raise NotImplementedError

    def warmup(self) -> None:
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
