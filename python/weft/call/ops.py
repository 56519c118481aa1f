"""Weft's calls as operators of torch.library: what torch.compile sees.

- `weft::dispatch` sends and gives a ticket; `weft::receive` gives the results of the ticket. Two operators, because
  Inductor (torch 2.13) can't place an operator that has both an ordered effect and several results of unknown size.
- `weft::dispatch_again` sends other rows with the routing of a handle: its result has a known shape, as torch.compile
  needs in a backward graph.
- `weft::combine`.

The effects of all but receive are ordered: the compiler may neither drop nor swap them, because every rank must take
part in each, in the same order, even if it does not use the result. The eager path does not come through here;
`weft.autograd` does the same with objects that torch.compile can't trace.

Arguments are tensors and numbers: the ExpertParallel is found by its token (weft/call/runner.py).
"""

# check: allow-in-file function-size: the schema of an operator is a flat list
# check: allow file-size: a few operators with long schemas

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.call.received import Received
from weft.call.runner import by_token
from weft.call.spec import LEAST_COLUMNS, MASKED, RANK_MAJOR, call_of

__all__ = ["combine", "dispatch", "dispatch_again", "gradients", "receive"]


# ---- dispatch


@torch.library.custom_op("weft::dispatch", mutates_args=())
def dispatch(
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    token: Tensor,
    layout: int,
    alignment: int,
    capacity: int,
    max_tokens: int,
    deadline_s: float,
    window: int,
    num_sms: int,
    is_small: bool,
    quantize: int,
    clear_tail: bool,
) -> Tensor:
    """A ticket (int64 [1]) for `receive`."""
    call = call_of(layout, alignment, capacity, max_tokens, deadline_s, window, num_sms, is_small=is_small)
    calls = by_token(token)
    received = calls.dispatch(call, x, scales, topk_idx, topk_weights, quantize, clear_tail)
    return torch.tensor([calls.results.put(received)], dtype=torch.int64, device="cpu")


@dispatch.register_fake
def _dispatch_fake(
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    token: Tensor,
    layout: int,
    alignment: int,
    capacity: int,
    max_tokens: int,
    deadline_s: float,
    window: int,
    num_sms: int,
    is_small: bool,
    quantize: int,
    clear_tail: bool,
) -> Tensor:
    return token.new_empty(1, dtype=torch.int64)


@torch.library.custom_op("weft::receive", mutates_args=())
def receive(
    ticket: Tensor,
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    token: Tensor,
    num_ranks: int,
    num_local_experts: int,
    plans_on_device: bool,
    layout: int,
    alignment: int,
    capacity: int,
    max_tokens: int,
    deadline_s: float,
    window: int,
    num_sms: int,
    is_small: bool,
    quantize: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `weft.call.received.Received`, once a ticket. The inputs of dispatch are here for their
    gradients."""
    return by_token(token).results.take(int(ticket))


@receive.register_fake
def _receive_fake(
    ticket: Tensor,
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    token: Tensor,
    num_ranks: int,
    num_local_experts: int,
    plans_on_device: bool,
    layout: int,
    alignment: int,
    capacity: int,
    max_tokens: int,
    deadline_s: float,
    window: int,
    num_sms: int,
    is_small: bool,
    quantize: int,
) -> tuple[Tensor, ...]:
    new_size = torch.library.get_ctx().new_dynamic_size
    rows: tuple[Any, ...] = (new_size() if capacity < 0 else capacity,)
    if layout == MASKED:
        rows = (num_local_experts, capacity)
    top_k, num_columns = topk_idx.shape[1], x.shape[1]
    num_groups = num_ranks if layout == RANK_MAJOR else num_local_experts
    int32 = torch.int32
    out_scales = x.new_empty(0, dtype=torch.float32)
    if quantize:
        out_scales = x.new_empty((*rows, (num_columns + 127) // 128), dtype=_SCALE_DTYPES[quantize])
    elif scales is not None:
        out_scales = x.new_empty((*rows, scales.shape[1] * scales.element_size()), dtype=torch.uint8)
    is_bytes = bool(quantize) or x.element_size() == 1
    plans = x if plans_on_device else token
    return (
        x.new_empty((*rows, num_columns), dtype=torch.uint8 if is_bytes else x.dtype),
        out_scales,
        topk_idx.new_empty((*rows, top_k) if layout == RANK_MAJOR else (0,)),
        x.new_empty((*rows, top_k) if layout == RANK_MAJOR else rows, dtype=torch.float32),
        x.new_empty(num_local_experts + num_groups + 2, dtype=int32),
        plans.new_empty(new_size(), dtype=int32),
        plans.new_empty(new_size(), dtype=int32),
        token.new_empty(2),
    )


_SCALE_DTYPES = {1: torch.float32, 2: torch.uint8}


def _receive_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    received = Received(*output)
    ctx.mark_non_differentiable(
        *(part for part in output if part is not received.tie and not part.is_floating_point()),
        *([received.scales] if received.scales.is_floating_point() else []),
    )
    _, x, _, topk_idx, topk_weights, *_ = inputs
    plans = (received.send_plan, received.recv_plan, received.tie)
    is_rank_major_on_gpu = inputs[8] and inputs[9] == RANK_MAJOR
    topk_idx_here = received.topk_idx if is_rank_major_on_gpu else None
    ctx.save_for_backward(*plans, received.topk_weights, received.sizes, topk_idx_here)
    ctx.num_tokens, ctx.top_k = topk_idx.shape[0], topk_idx.shape[1]
    ctx.x_is_differentiable = x.is_floating_point() and received.x.is_floating_point()
    ctx.has_weights = topk_weights is not None
    ctx.hidden = x.shape[1]
    ctx.call = tuple(inputs[9:17])


def _receive_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    received = Received(*gradients)  # type: ignore[arg-type]
    send_plan, recv_plan, tie, weights, sizes, topk_idx = ctx.saved_tensors
    layout = ctx.call[0]
    rows = received.x
    if not ctx.x_is_differentiable:
        lead = weights.shape[:1] if layout != MASKED else weights.shape[:2]
        rows = weights.new_zeros((*lead, LEAST_COLUMNS))
    side = received.topk_weights if ctx.has_weights else None
    if side is not None and topk_idx is not None:
        side = side.masked_fill(topk_idx < 0, 0)  # NativeCalls.side_of_picks
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
        *ctx.call,
        0,
        False,
        False,
    )
    return (
        None,
        grad_x if ctx.x_is_differentiable else None,
        None,
        None,
        grad_weights if ctx.has_weights else None,
        *[None] * 13,
    )


# ---- dispatch_again


@torch.library.custom_op("weft::dispatch_again", mutates_args=())
def dispatch_again(
    x: Tensor,
    scales: Tensor | None,
    weights: Tensor,
    send_plan: Tensor,
    recv_plan: Tensor,
    tie: Tensor,
    sizes: Tensor,
    layout: int,
    alignment: int,
    capacity: int,
    max_tokens: int,
    deadline_s: float,
    window: int,
    num_sms: int,
    is_small: bool,
    clear_tail: bool,
    quantize: int,
    counts_dropped: bool = True,
) -> tuple[Tensor, Tensor]:
    """(x, scales). `weights` received before are read for their shape alone: it gives the number of rows."""
    call = call_of(
        layout, alignment, capacity, max_tokens, deadline_s, window, num_sms, is_small=is_small,
        counts_dropped=counts_dropped,
    )  # fmt: skip
    rows_shape = _rows_shape(weights, layout)
    return _own(
        by_token(tie).dispatch_again(
            call, x, scales, send_plan, recv_plan, tie, sizes, rows_shape, x.shape[0], clear_tail, quantize
        )
    )


@dispatch_again.register_fake
def _dispatch_again_fake(
    x: Tensor,
    scales: Tensor | None,
    weights: Tensor,
    send_plan: Tensor,
    recv_plan: Tensor,
    tie: Tensor,
    sizes: Tensor,
    layout: int,
    alignment: int,
    capacity: int,
    max_tokens: int,
    deadline_s: float,
    window: int,
    num_sms: int,
    is_small: bool,
    clear_tail: bool,
    quantize: int,
    counts_dropped: bool = True,
) -> tuple[Tensor, Tensor]:
    rows = _rows_shape(weights, layout)
    out_scales = x.new_empty(0, dtype=torch.float32)
    if quantize:
        out_scales = x.new_empty((*rows, (x.shape[1] + 127) // 128), dtype=_SCALE_DTYPES[quantize])
    elif scales is not None:
        out_scales = x.new_empty((*rows, scales.shape[1] * scales.element_size()), dtype=torch.uint8)
    dtype = torch.uint8 if quantize or x.element_size() == 1 else x.dtype
    return x.new_empty((*rows, x.shape[1]), dtype=dtype), out_scales


def _rows_shape(weights: Tensor, layout: int) -> tuple[int, ...]:
    return tuple(weights.shape[: 2 if layout == MASKED else 1])


def _dispatch_again_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, scales = output
    ctx.mark_non_differentiable(scales, *([] if rows.is_floating_point() else [rows]))
    x, _, weights, send_plan, recv_plan, tie, sizes, *call, _, _, _ = inputs
    ctx.save_for_backward(weights, send_plan, recv_plan, tie, sizes)
    ctx.num_tokens, ctx.call = x.shape[0], tuple(call)


def _dispatch_again_backward(ctx: Any, grad_x: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    weights, send_plan, recv_plan, tie, sizes = ctx.saved_tensors
    grad, _ = combine(
        grad_x, weights, send_plan, recv_plan, tie, sizes, None, None, 1, ctx.num_tokens, *ctx.call, 0, False, False
    )
    return (grad, *[None] * 17)


def _own(results: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Of an operator: its outputs are new tensors, while calls share empty ones."""
    rows, other = results
    return rows, other.clone() if other.numel() == 0 else other


# ---- combine


@torch.library.custom_op("weft::combine", mutates_args=())
def combine(
    y: Tensor,
    weights: Tensor,
    send_plan: Tensor,
    recv_plan: Tensor,
    tie: Tensor,
    sizes: Tensor,
    bias: Tensor | None,
    side: Tensor | None,
    top_k: int,
    num_tokens: int,
    layout: int,
    alignment: int,
    capacity: int,
    max_tokens: int,
    deadline_s: float,
    window: int,
    num_sms: int,
    is_small: bool,
    wire: int,
    weighted: bool,
    clear_tail: bool,
) -> tuple[Tensor, Tensor]:
    """(y [T, H], side [T, K] or empty). `clear_tail` is for the backward: gradients of rows without data are zero."""
    call = call_of(layout, alignment, capacity, max_tokens, deadline_s, window, num_sms, wire, is_small=is_small)
    used = weights if weighted and layout != RANK_MAJOR else None
    return _own(by_token(tie).combine(call, y, used, send_plan, recv_plan, tie, bias, side, num_tokens))


@combine.register_fake
def _combine_fake(
    y: Tensor,
    weights: Tensor,
    send_plan: Tensor,
    recv_plan: Tensor,
    tie: Tensor,
    sizes: Tensor,
    bias: Tensor | None,
    side: Tensor | None,
    top_k: int,
    num_tokens: int,
    layout: int,
    alignment: int,
    capacity: int,
    max_tokens: int,
    deadline_s: float,
    window: int,
    num_sms: int,
    is_small: bool,
    wire: int,
    weighted: bool,
    clear_tail: bool,
) -> tuple[Tensor, Tensor]:
    side_shape = (0,) if side is None else (num_tokens, top_k)
    return y.new_empty((num_tokens, y.shape[-1])), y.new_empty(side_shape, dtype=torch.float32)


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(output[1])
    y, weights, send_plan, recv_plan, tie, sizes, bias, _, _, _, *call, _, weighted, clear_tail = inputs
    ctx.uses_weights = weighted and call[0] != RANK_MAJOR
    ctx.save_for_backward(y if ctx.uses_weights else None, weights, send_plan, recv_plan, tie, sizes)
    ctx.bias = None if bias is None else (bias.dim(), bias.dtype)
    ctx.call, ctx.clear_tail = tuple(call), clear_tail


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
        *ctx.call,
        ctx.clear_tail,
        0,
        counts_dropped=False,
    )
    grad_y, grad_weights = gradients(rows, y, weights, tie) if ctx.uses_weights else (rows, None)
    grad_bias = None if ctx.bias is None else bias_gradient(grad, *ctx.bias)
    # The tie's gradient, zero as it is, makes the backward of dispatch wait for this one and run on every rank.
    return grad_y, grad_weights, None, None, torch.zeros_like(tie), None, grad_bias, *[None] * 14


@torch.library.custom_op("weft::gradients", mutates_args=())
def gradients(rows: Tensor, y: Tensor, weights: Tensor, tie: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of a weighted combine at this rank's rows (`NativeCalls.gradients`); nothing is sent."""
    grad_y, grad_weights = by_token(tie).gradients(rows, y, weights)
    assert grad_weights is not None  # noqa: S101  for mypy: there is a y
    return grad_y, grad_weights


@gradients.register_fake
def _gradients_fake(rows: Tensor, y: Tensor, weights: Tensor, tie: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), weights.new_empty(weights.shape)


def bias_gradient(grad: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """A bias [H] is added to every token of this rank: its gradient is the sum in fp32."""
    return grad.to(dtype) if dim == 2 else grad.float().sum(0).to(dtype)


# ---- registration


def _order_effects() -> None:
    """Declare the three operators' effects ordered, by the name the installed torch has for it."""
    from torch._higher_order_ops import effects

    ordered = effects._EffectType.ORDERED
    for op in (dispatch, dispatch_again, combine):
        if hasattr(op, "register_effect"):
            op.register_effect(ordered)
        else:
            effects._register_effectful_op(op._opoverload, ordered)


receive.register_autograd(_receive_backward, setup_context=_receive_setup)
dispatch_again.register_autograd(_dispatch_again_backward, setup_context=_dispatch_again_setup)
combine.register_autograd(_combine_backward, setup_context=_combine_setup)
_order_effects()
