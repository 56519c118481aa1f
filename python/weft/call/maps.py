"""Routing maps: which experts a token goes to as a row of bools, in place of a list of ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft import _load, engine
from weft.call.check_tensors import check_place, check_weights_dtype, shown
from weft.call.shape import Shape
from weft.call.tensors import plain
from weft.errors import InvalidArgument

__all__ = ["checked_picks", "picks_of_map"]

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def checked_picks(ep: Shape, routing_map: Tensor, probs: Any) -> tuple[Tensor, Tensor | None]:
    """`picks_of_map` of what users pass to a dispatch of `ep`.

    Raises:
        InvalidArgument: types, devices or shapes do not fit.
    """
    routing_map, probs = plain(routing_map, "topk_idx"), plain(probs, "topk_weights")
    check_place("topk_idx", routing_map, ep)
    if probs is not None:
        if not isinstance(probs, Tensor):
            raise InvalidArgument(f"topk_weights is {shown(probs)}; a tensor [T, {ep.num_ids}] or None is expected")
        check_weights_dtype(probs)
        check_place("topk_weights", probs, ep)
    return picks_of_map(routing_map, probs, ep.num_ids, ep.top_k, runs_kernels=ep.engine == "nvlink")


def picks_of_map(
    routing_map: Tensor, probs: Tensor | None, num_experts: int, top_k: int, *, runs_kernels: bool
) -> tuple[Tensor, Tensor | None]:
    """bool [T, E] and weights [T, E] or None -> ids int64 [T, K], ascending, -1 behind them, and their weights [T, K].

    Of a row with more than K experts the first K are taken, and one of them becomes E, which is out of range: the call
    counts it as a bad id. On a GPU on the current stream, where the host does not wait: one kernel with `runs_kernels`;
    some of torch without it, in compiled code and where gradients flow to `probs`.

    Raises:
        InvalidArgument: shapes do not fit.
    """
    if routing_map.dim() != 2 or routing_map.shape[1] != num_experts:
        raise InvalidArgument(f"topk_idx is a map {list(routing_map.shape)}; allowed is [T, {num_experts}] of bools")
    if probs is not None and probs.shape != routing_map.shape:
        raise InvalidArgument(
            f"topk_weights is {list(probs.shape)} beside a map; allowed is {list(routing_map.shape)}, a weight a bool"
        )
    given = [routing_map] if probs is None else [routing_map, probs]
    if all(_is_plain(each, runs_kernels=runs_kernels) for each in given):
        return _in_one_pass(routing_map, probs, num_experts, top_k)
    width = min(top_k, num_experts)
    values, order = routing_map.to(torch.uint8).sort(dim=1, descending=True, stable=True)
    is_pick, order = values[:, :width] != 0, order[:, :width]
    ids = torch.where(is_pick, order, -1)
    weights = None if probs is None else torch.where(is_pick, probs.gather(1, order), 0.0)
    if width < num_experts:
        is_full = values[:, width : width + 1] != 0
        ids = torch.cat([torch.where(is_full, num_experts, ids[:, :1]), ids[:, 1:]], dim=1)
    if width < top_k:
        ids = torch.nn.functional.pad(ids, (0, top_k - width), value=-1)
        weights = None if weights is None else torch.nn.functional.pad(weights, (0, top_k - width))
    return ids, weights


def _is_plain(each: Tensor, *, runs_kernels: bool) -> bool:
    """Whether the native module may read its memory, and nobody looks at what is done with it."""
    if torch.compiler.is_compiling() or type(each) is not Tensor:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if (each.requires_grad and torch.is_grad_enabled()) or each.is_neg():
        return False
    lies_here = each.device.type == "cpu" or (each.is_cuda and runs_kernels)
    return lies_here and each.dtype in (torch.bool, *_WEIGHT_DTYPES)


def _in_one_pass(
    routing_map: Tensor, probs: Tensor | None, num_experts: int, top_k: int
) -> tuple[Tensor, Tensor | None]:
    chosen, device = routing_map.contiguous(), routing_map.device
    ids = torch.empty((len(chosen), top_k), dtype=torch.int64, device=device)
    given = weights = None
    if probs is not None:
        given, weights = probs.contiguous(), torch.empty((len(chosen), top_k), dtype=probs.dtype, device=device)
    gpu, stream = None, 0
    if chosen.is_cuda:
        gpu, stream = engine.driver_gpu(device.index), torch.cuda.current_stream(device).cuda_stream
    _load.native().picks_of_map(
        gpu, stream, len(chosen), num_experts, top_k, 4 if given is None else given.element_size(), chosen.data_ptr(),
        0 if given is None else given.data_ptr(), ids.data_ptr(), 0 if weights is None else weights.data_ptr(),
    )  # fmt: skip
    return ids, weights
