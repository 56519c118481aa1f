"""Calls that are looked at instead of being made, by torch.compile or a mode that makes fakes: through the operators of
weft/call/ops.py.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.call import check, ops, tensors
from weft.call.options import CombineOptions, DispatchOptions
from weft.call.received import Received
from weft.call.runner import Runner
from weft.call.scales import by_column
from weft.call.shape import Shape
from weft.call.spec import QUANTIZE_CODES, RANK_MAJOR
from weft.handle import Dispatched, Handle
from weft.quantized import typed

__all__ = ["combine", "dispatch"]


def dispatch(
    calls: Runner, shape: Shape, checked: tuple[Any, ...], handle: Handle | None, options: DispatchOptions
) -> Dispatched:
    """`checked`: what check_dispatch gives."""
    check.check_absent(options)
    call, x, data, scales, topk_idx, topk_weights = checked
    code = QUANTIZE_CODES[options.quantize]
    has_tracked = (data.requires_grad and not code) or (topk_weights is not None and topk_weights.requires_grad)
    is_tracked = torch.is_grad_enabled() and has_tracked
    if call.is_staged:
        check.check_staged(True, is_tracked)
    clears_tail, numbers = is_tracked and call.capacity >= 0, (call.numbers, call.deadline_s)
    if handle is not None:
        inputs = tensors.faked((
            data, scales, handle.weights, handle.send_plan, handle.recv_plan, handle.tie, handle.sizes
        ))  # fmt: skip
        rows, out_scales = ops.dispatch_again(*inputs, *numbers, clears_tail, code)
        out_scales = by_column(out_scales, call.scale_dtype)
        given = typed(rows, out_scales, x, code, call.scale_dtype)
        return Dispatched(given, handle.repeated(handle.tie, None), calls.overflow, calls.last.event, calls)
    inputs = tensors.faked((data, scales, topk_idx, topk_weights, calls.name), has_new_sizes=True)
    ticket = ops.dispatch(*inputs, *numbers, code, clears_tail)
    of_object = (shape.num_ranks, shape.num_local_experts, calls.plans_on_device)
    received = Received(*ops.receive(ticket, *inputs, *of_object, *numbers, code))
    rows, row_scales, out_idx, weights, sizes, send_plan, recv_plan, tie = received
    row_scales = by_column(row_scales, call.scale_dtype)
    made = Handle(
        send_plan, recv_plan, weights, out_idx if call.layout == RANK_MAJOR else None, sizes, shape.num_local_experts,
        tie, topk_idx.shape[0], call,
    )  # fmt: skip
    given = typed(rows, row_scales, x, code, call.scale_dtype)
    return Dispatched(given, made, calls.overflow, calls.last.event, calls)


def combine(
    calls: Runner, shape: Shape, checked: tuple[Any, ...], given_out: Any, handle: Handle, options: CombineOptions
) -> Any:
    """`checked`: what check_combine gives; `given_out`: the `out` that the caller knows."""
    call, y, side, bias, out = checked
    if side is not None and call.layout == RANK_MAJOR:
        side = side.unsqueeze(1).expand(-1, shape.top_k) if side.dim() == 1 else side
        side = calls.side_of_picks(side, handle)
    is_tracked = torch.is_grad_enabled() and (
        y.requires_grad or handle.tie.requires_grad or (bias is not None and bias.requires_grad)
    )
    if call.is_staged:
        check.check_staged(True, is_tracked)
    inputs = tensors.faked((
        y, handle.weights, handle.send_plan, handle.recv_plan, handle.tie, handle.sizes, bias, side
    ))  # fmt: skip
    total, side_out = ops.combine(
        *inputs, shape.top_k, handle.num_tokens, call.numbers, call.deadline_s, options.weighted,
        is_tracked and call.capacity >= 0,
    )  # fmt: skip
    if out is not None:
        out.copy_(total)
    parts = [total if given_out is None else given_out]
    if side is not None:
        parts.append(side_out)
    if options.async_op:
        parts.append(calls.last.event)
    return parts[0] if len(parts) == 1 else tuple(parts)
