"""Weft's calls as operators of torch.library: what torch.compile sees.

- `weft::dispatch` sends and gives a ticket; `weft::receive` gives the results of the ticket. Two operators, because
  Inductor (torch 2.13) can't place an operator that has both an ordered effect and several results of unknown size.
- `weft::dispatch_again` sends other rows with the routing of a handle: its result has a known shape, as torch.compile
  needs in a backward graph.
- `weft::combine`.

The effects of all but receive are ordered: the compiler may neither drop nor swap them, because every rank must take
part in each, in the same order, even if it does not use the result. Their gradients are in weft/call/gradients.py. The
eager path does not come through here; `weft.autograd` does the same with objects that torch.compile can't trace.

Arguments are tensors and numbers: the ExpertParallel is found by its token (weft/call/runner.py), `call` are the
`numbers` of a `Call` (weft/call/spec.py).
"""

# check: allow-in-file function-size: the schema of an operator is a flat list

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.call.plan import Plan
from weft.call.received import Received
from weft.call.runner import Runner, by_token
from weft.call.spec import MASKED, RANK_MAJOR, call_of_numbers, rows_shape
from weft.handle import Handle
from weft.routing import traces

__all__ = ["combine", "dispatch", "dispatch_again", "receive"]


# ---- dispatch


@torch.library.custom_op("weft::dispatch", mutates_args=())
def dispatch(
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    token: Tensor,
    call: Sequence[int],
    deadline_s: float,
    quantize: int,
    clear_tail: bool,
) -> Tensor:
    """A ticket (int64 [1]) for `receive`."""
    calls = by_token(token)
    with calls.comm.telling_peers():
        key = ("first", *call, deadline_s, x.dtype, x.shape[1], *_like(scales), topk_idx.dtype, quantize, clear_tail)
        plan = calls.plans.get(key)
        if plan is None:
            its = call_of_numbers(call, deadline_s)
            plan = calls.first_plan(its, x, calls.scales_of(its, scales), quantize, topk_idx, clears_tail=clear_tail)
            calls.kept(key, plan)
        rows, out_scales, handle = calls.run(plan, None, x, scales, topk_idx, topk_weights)
        if traces._recorders:
            traces._note(topk_idx, topk_weights, calls.comm.rank, calls.experts.num_ids)
    no_floats, no_ids = calls._no_floats, topk_idx.new_empty(0)
    received = Received(
        rows, no_floats if out_scales is None else out_scales, no_ids if handle.idx is None else handle.idx,
        handle.weights, handle.sizes, handle.send_plan, handle.recv_plan, handle.tie,
    )  # fmt: skip
    return torch.tensor([calls.results.put(received)], dtype=torch.int64, device="cpu")


def _like(tensor: Tensor | None) -> tuple[Any, ...]:
    """What a plan knows of it."""
    return (None,) if tensor is None else (tensor.dtype, tensor.shape[1], tensor.stride(), tensor.is_contiguous())


@dispatch.register_fake
def _dispatch_fake(
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    token: Tensor,
    call: Sequence[int],
    deadline_s: float,
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
    call: Sequence[int],
    deadline_s: float,
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
    call: Sequence[int],
    deadline_s: float,
    quantize: int,
) -> tuple[Tensor, ...]:
    layout, _, capacity, *_ = call
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
        token.new_empty(3),
    )


_SCALE_DTYPES = {1: torch.float32, 2: torch.uint8, 3: torch.float32}


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
    call: Sequence[int],
    deadline_s: float,
    clear_tail: bool,
    quantize: int,
) -> tuple[Tensor, Tensor]:
    """(x, scales). `weights` received before are read for their shape alone: it gives the number of rows."""
    calls = by_token(tie)
    with calls.comm.telling_peers():
        if calls.has_map and call[8]:  # counts_dropped: no backward
            calls.check_map(tie)
        key = ("again", *call, deadline_s, x.dtype, x.shape[1], *_like(scales), quantize, clear_tail)
        plan = calls.plans.get(key)
        if plan is None:
            its = call_of_numbers(call, deadline_s)
            plan = calls.kept(
                key, calls.again_plan(its, x, calls.scales_of(its, scales), quantize, clears_tail=clear_tail)
            )
        handle = _handle(calls, plan, x.shape[0], send_plan, recv_plan, weights, sizes, tie)
        rows, out_scales, _ = calls.run(plan, tie, x, scales, handle)
        return _own(calls, rows, out_scales)


def _handle(calls: Runner, plan: Plan, num_tokens: int, *routing: Tensor) -> Handle:
    """`routing`: send plan, receive plan, weights, sizes and tie."""
    send_plan, recv_plan, weights, sizes, tie = routing
    return Handle(send_plan, recv_plan, weights, None, sizes, calls.num_local_experts, tie, num_tokens, plan.call)


@dispatch_again.register_fake
def _dispatch_again_fake(
    x: Tensor,
    scales: Tensor | None,
    weights: Tensor,
    send_plan: Tensor,
    recv_plan: Tensor,
    tie: Tensor,
    sizes: Tensor,
    call: Sequence[int],
    deadline_s: float,
    clear_tail: bool,
    quantize: int,
) -> tuple[Tensor, Tensor]:
    rows = rows_shape(weights, call[0])
    out_scales = x.new_empty(0, dtype=torch.float32)
    if quantize:
        out_scales = x.new_empty((*rows, (x.shape[1] + 127) // 128), dtype=_SCALE_DTYPES[quantize])
    elif scales is not None:
        out_scales = x.new_empty((*rows, scales.shape[1] * scales.element_size()), dtype=torch.uint8)
    dtype = torch.uint8 if quantize or x.element_size() == 1 else x.dtype
    return x.new_empty((*rows, x.shape[1]), dtype=dtype), out_scales


def _own(calls: Runner, rows: Tensor, other: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of an operator: its outputs are new tensors, an absent one an empty tensor."""
    return rows, calls._no_floats.new_empty(0) if other is None else other


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
    call: Sequence[int],
    deadline_s: float,
    weighted: bool,
    clear_tail: bool,
) -> tuple[Tensor, Tensor]:
    """(y [T, H], side [T, K] or empty). `clear_tail` is for the backward: gradients of rows without data are zero."""
    calls = by_token(tie)
    with calls.comm.telling_peers():
        of_bias = None if bias is None else (bias.dtype, bias.dim())
        key = ("combine", *call, deadline_s, y.dtype, y.shape[-1], weighted, side is None, of_bias)
        plan = calls.plans.get(key)
        if plan is None:
            its, has_side = call_of_numbers(call, deadline_s), side is not None
            plan = calls.combine_plan(its, y, weighted=weighted, has_side=has_side, bias=bias)
            calls.kept(key, plan)
        handle = _handle(calls, plan, num_tokens, send_plan, recv_plan, weights, sizes, tie)
        rows, side_out, _ = calls.run(plan, tie, y, handle, bias, side)
        return _own(calls, rows, side_out)


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
    call: Sequence[int],
    deadline_s: float,
    weighted: bool,
    clear_tail: bool,
) -> tuple[Tensor, Tensor]:
    side_shape = (0,) if side is None else (num_tokens, top_k)
    return y.new_empty((num_tokens, y.shape[-1])), y.new_empty(side_shape, dtype=torch.float32)


# ---- order of effects


def _order_effects() -> None:
    """Declare the three operators' effects ordered, by the name the installed torch has for it."""
    from torch._higher_order_ops import effects

    ordered = effects._EffectType.ORDERED
    for op in (dispatch, dispatch_again, combine):
        if hasattr(op, "register_effect"):
            op.register_effect(ordered)
        else:
            effects._register_effectful_op(op._opoverload, ordered)


_order_effects()
