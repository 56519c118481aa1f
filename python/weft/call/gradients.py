"""Gradients of the operators of weft/call/ops.py: the backward of combine is a dispatch of its handle, that of dispatch
a combine. `weft.autograd` does the same for eager calls, and shares the formulas.
"""

# check: allow-in-file function-size: the schema of an operator is a flat list

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.call.ops import combine, dispatch_again, receive
from weft.call.received import Received
from weft.call.runner import by_token
from weft.call.spec import LEAST_COLUMNS, RANK_MAJOR, numbers_in_backward, rows_shape

__all__ = ["bias_gradient", "gradients"]


def _receive_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    received = Received(*output)
    ctx.mark_non_differentiable(
        *(part for part in output if part is not received.tie and not part.is_floating_point()),
        *([received.scales] if received.scales.is_floating_point() else []),
    )
    _, x, _, topk_idx, topk_weights, *_ = inputs
    plans = (received.send_plan, received.recv_plan, received.tie)
    is_rank_major_on_gpu = inputs[8] and inputs[9][0] == RANK_MAJOR
    topk_idx_here = received.topk_idx if is_rank_major_on_gpu else None
    ctx.save_for_backward(*plans, received.topk_weights, received.sizes, topk_idx_here)
    ctx.num_tokens, ctx.top_k = topk_idx.shape[0], topk_idx.shape[1]
    ctx.x_is_differentiable = x.is_floating_point() and received.x.is_floating_point()
    ctx.has_weights = topk_weights is not None
    ctx.hidden = x.shape[1]
    ctx.call, ctx.deadline_s = numbers_in_backward(inputs[9]), inputs[10]


def _receive_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    received = Received(*gradients)  # type: ignore[arg-type]
    send_plan, recv_plan, tie, weights, sizes, topk_idx = ctx.saved_tensors
    layout = ctx.call[0]
    rows = received.x
    if not ctx.x_is_differentiable:
        rows = weights.new_zeros((*rows_shape(weights, layout), LEAST_COLUMNS))
    side = received.topk_weights if ctx.has_weights else None
    if side is not None and topk_idx is not None:
        side = side.masked_fill(topk_idx < 0, 0)  # Runner.side_of_picks
    grad_x, grad_weights = combine(
        rows,
        weights,
        send_plan,
        recv_plan,
        tie,
        sizes,
        None,
        side,
        ctx.top_k,
        ctx.num_tokens,
        ctx.call,
        ctx.deadline_s,
        False,
        False,
    )
    return (
        None,
        grad_x if ctx.x_is_differentiable else None,
        None,
        None,
        grad_weights if ctx.has_weights else None,
        *[None] * 7,
    )


def _dispatch_again_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, scales = output
    ctx.mark_non_differentiable(scales, *([] if rows.is_floating_point() else [rows]))
    x, _, weights, send_plan, recv_plan, tie, sizes, call, deadline_s, _, _ = inputs
    ctx.save_for_backward(weights, send_plan, recv_plan, tie, sizes)
    ctx.num_tokens, ctx.call, ctx.deadline_s = x.shape[0], numbers_in_backward(call), deadline_s


def _dispatch_again_backward(ctx: Any, grad_x: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    weights, send_plan, recv_plan, tie, sizes = ctx.saved_tensors
    grad, _ = combine(
        grad_x, weights, send_plan, recv_plan, tie, sizes, None, None, 1, ctx.num_tokens, ctx.call, ctx.deadline_s,
        False, False,
    )  # fmt: skip
    return (grad, *[None] * 10)


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(output[1])
    y, weights, send_plan, recv_plan, tie, sizes, bias, _, _, _, call, deadline_s, weighted, clear_tail = inputs
    ctx.uses_weights = weighted and call[0] != RANK_MAJOR
    ctx.save_for_backward(y if ctx.uses_weights else None, weights, send_plan, recv_plan, tie, sizes)
    ctx.bias = None if bias is None else (bias.dim(), bias.dtype)
    ctx.call, ctx.deadline_s, ctx.clear_tail = numbers_in_backward(call), deadline_s, clear_tail


def _combine_backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    y, weights, send_plan, recv_plan, tie, sizes = ctx.saved_tensors
    rows, _ = dispatch_again(
        grad.contiguous(),
        None,
        weights,
        send_plan,
        recv_plan,
        tie,
        sizes,
        ctx.call,
        ctx.deadline_s,
        ctx.clear_tail,
        0,
    )
    grad_y, grad_weights = gradients(rows, y, weights, tie) if ctx.uses_weights else (rows, None)
    grad_bias = None if ctx.bias is None else bias_gradient(grad, *ctx.bias)
    # The tie's gradient, zero as it is, makes the backward of dispatch wait for this one and run on every rank.
    return grad_y, grad_weights, None, None, torch.zeros_like(tie), None, grad_bias, *[None] * 7


@torch.library.custom_op("weft::gradients", mutates_args=())
def gradients(rows: Tensor, y: Tensor, weights: Tensor, tie: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of a weighted combine at this rank's rows (`Runner.gradients`); nothing is sent."""
    grad_y, grad_weights = by_token(tie).gradients(rows, y, weights)
    assert grad_weights is not None  # noqa: S101  for mypy: there is a y
    return grad_y, grad_weights


@gradients.register_fake
def _gradients_fake(rows: Tensor, y: Tensor, weights: Tensor, tie: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), weights.new_empty(weights.shape)


def bias_gradient(grad: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """A bias [H] is added to every token of this rank: its gradient is the sum in fp32."""
    return grad.to(dtype) if dim == 2 else grad.float().sum(0).to(dtype)


receive.register_autograd(_receive_backward, setup_context=_receive_setup)
dispatch_again.register_autograd(_dispatch_again_backward, setup_context=_dispatch_again_setup)
combine.register_autograd(_combine_backward, setup_context=_combine_setup)
