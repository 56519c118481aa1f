"""What a dispatch would send, counted without one: local, and a single kernel on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from weft import _load, engine

__all__ = ["count_picks"]


def count_picks(topk_idx: Tensor, num_experts: int, num_ranks: int, *, runs_kernels: bool) -> tuple[Tensor, ...]:
    """How many picks each expert has, how many tokens each rank, and which ranks a token goes to. Local; on a GPU on
    the current stream, where the host does not wait.

    Args:
        topk_idx: int32 or int64 [T, K]; ids out of range count nowhere.
        num_experts: E, a multiple of num_ranks, R.
        runs_kernels: of tensors on a GPU: Weft's kernel may be used; else they are copied to the host and back.

    Returns:
        int32 [R], a token counts once a rank; int32 [E]; bool [T, R].
    """
    given = topk_idx if topk_idx.device.type == "cpu" or runs_kernels else topk_idx.cpu()
    ids, device = given.contiguous(), given.device
    counts = torch.zeros(num_experts + num_ranks, dtype=torch.int32, device=device)
    experts, ranks = counts[:num_experts], counts[num_experts:]
    in_rank = torch.empty((len(ids), num_ranks), dtype=torch.bool, device=device)
    gpu, stream = None, 0
    if ids.is_cuda:
        gpu, stream = engine.driver_gpu(device.index), torch.cuda.current_stream(device).cuda_stream
    _load.native().count_picks(
        gpu, stream, len(ids), ids.shape[1], num_experts, num_ranks, ids.dtype == torch.int64, ids.data_ptr(),
        experts.data_ptr(), ranks.data_ptr(), in_rank.data_ptr(),
    )  # fmt: skip
    return ranks.to(topk_idx.device), experts.to(topk_idx.device), in_rank.to(topk_idx.device)
