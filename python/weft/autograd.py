"""Gradients of the eager path.

The backward of combine is a dispatch of its handle, the backward of dispatch a combine. Both are collective, so both
must run on every rank, in the same order, whatever the user's code does with the results there:

- *A rank's experts are skipped* (no rows, or an `if`): the handle carries a `tie`, an output of dispatch that combine
  takes as an input, so the graph leads from one to the other without the experts.
- *A result is not used on a rank* (a dropped layer, `h = x` in place of `h = x + y`): autograd never visits these
  nodes. Hooks notice: the hook on the expert output runs the missing backward of combine; the hook on x, called when
  the gradient of x is otherwise complete, runs whatever is missing of the pair, with a zero gradient for y. The
  experts of this rank so get their gradients from the tokens of other ranks.
- *A handle is repeated*: its dispatches and combines are one family, which the record of the first dispatch keeps.
  Autograd visits nodes newest first. So when it comes to one of them, newer ones of the family that it has not visited,
  and is not going to, are not used here; they run first, as on ranks that use them.

What a call leaves for its backward is in weft/call/records.py.

Limits (docs/semantics.md): x, or else topk_weights, requires grad on every rank or on none; a backward that leads to x
but not through the results, before their own, counts as one that does not use them, so it is run on every rank or on
none; a result unused on one rank is not noticed inside torch.compile, nor where x gets no gradient at all; under
torch.utils.checkpoint it is noticed, but its weights get no gradient; no double backward.
"""

# check: allow-in-file function-size: forward of an autograd.Function takes a flat list

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.call.gradients import bias_gradient
from weft.call.plan import Plan
from weft.call.records import Keeper, Sent, Summed
from weft.call.runner import Runner
from weft.call.tensors import plain
from weft.errors import Error, InvalidArgument
from weft.handle import Handle
from weft.log import logger

__all__ = ["combine", "dispatch", "dispatch_again"]


def _known(value: Any) -> Any:
    """A field that the forward has filled."""
    return value


# ---- forward


def dispatch(
    calls: Runner, plan: Plan, x: Tensor, scales: Tensor | None, topk_idx: Tensor, topk_weights: Tensor | None
) -> tuple[Tensor, Tensor | None, Handle]:
    """A first dispatch with gradients for x or topk_weights: rows, scales and the handle."""
    x_is_tracked = x.requires_grad and not plan.quantize
    sent = Sent(calls, plan, x, x_is_tracked, topk_weights is not None)
    rows, weights, tie = (_Dispatch.apply if torch._C._are_functorch_transforms_active() else _dispatch_node)(
        x, scales, topk_idx, topk_weights, None, sent
    )
    calls.comm.recorded[sent.number] = weakref.ref(sent)
    _hook(sent, x if x_is_tracked else _known(topk_weights), _input_is_complete)
    row_scales, sent.scales = sent.scales, None
    handle = object.__new__(Handle)
    handle.__dict__.update(sent.handle.__dict__, tie=tie, sent=sent, weights=weights)
    return rows, row_scales, handle


def dispatch_again(calls: Runner, plan: Plan, x: Tensor, handle: Handle) -> tuple[Tensor, Handle]:
    """A repeated dispatch with gradients for x: its rows, and a handle with its own tie and record."""
    sent = Sent(calls, plan, x, True, False, handle.sent)
    rows, _, tie = (_Dispatch.apply if torch._C._are_functorch_transforms_active() else _dispatch_node)(
        x, None, None, None, _untracked(handle), sent
    )
    if sent.first is not None:
        sent.first.adopt(sent)
    calls.comm.recorded[sent.number] = weakref.ref(sent)
    _hook(sent, x, _input_is_complete)
    return rows, handle._changed(tie=tie, sent=sent)


def combine(
    calls: Runner, plan: Plan, y: Tensor, handle: Handle, bias: Tensor | None, side: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Combine with gradients for y, the received weights and bias, or only to lead on to those of the dispatch."""
    sent: Sent | None = handle.sent
    weights = handle.weights if plan.weighted else None
    if weights is not None and weights.requires_grad and y.is_inference():
        raise InvalidArgument(
            "expert_output was made under torch.inference_mode(), and gradients of the weights need it; give its "
            ".clone(), made outside"
        )
    record = Summed(sent, calls, plan, _untracked(handle), y.dtype)
    out: tuple[Tensor, Tensor | None] = (
        _Combine.apply if torch._C._are_functorch_transforms_active() else _combine_node
    )(y, weights, handle.tie, bias, side, record)
    if sent is not None:
        sent.adopt(record)
    if y.requires_grad:
        _hook(record, y, _expert_output_is_complete)
    return out


def _untracked(handle: Handle) -> Handle:
    """Without the graph that leads to its dispatch."""
    if handle.sent is not None:
        known: Handle = handle.sent.handle
        return known
    weights = handle.__dict__.get("weights")  # not asked for yet: nobody tracks them
    if not (handle.tie.requires_grad or (weights is not None and weights.requires_grad)):
        return handle
    return handle._changed(tie=handle.tie.detach(), weights=handle.weights.detach())


def _hook(record: Sent | Summed, tensor: Tensor, hook: Callable[..., Tensor | None]) -> None:
    """`hook(weak reference to record, gradient)` when the gradient of `tensor` is complete."""
    node = tensor.grad_fn
    if node is None:  # a leaf
        above = tensor.view_as(tensor).grad_fn
        node = above.next_functions[0][0] if above is not None else None
    elif isinstance(node, torch._C._FunctionBase):  # which the object that Python has of it does not keep
        record.owner = tensor.view_as(tensor).grad_fn
    record.source = (node, tensor.output_nr)
    record.hook = tensor.register_hook(functools.partial(hook, weakref.ref(record)))


# ---- nodes and hooks


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scales: Tensor | None,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        handle: Handle | None,
        sent: Sent,
    ) -> tuple[Tensor, Tensor, Tensor]:
        calls = sent.calls
        if handle is None:
            rows, sent.scales, made = calls.run(sent.plan, None, x, scales, topk_idx, topk_weights)
            known, tie = made.__dict__, made.tie.clone()
            routing = known.get("made")
            weights = made.weights if routing is None else routing.tensor("topk_weights", torch._C._from_dlpack)
            known["weights"], sent.handle = weights.detach(), made
        else:
            rows, _, _ = calls.run(sent.plan, handle.tie, x, None, handle)
            weights, tie, sent.handle = rows.new_empty(0, dtype=torch.float32), handle.tie.clone(), handle
        if not (sent.x_is_tracked and sent.has_weights):
            untracked = ([] if sent.x_is_tracked else [rows]) + ([] if sent.has_weights else [weights])
            ctx.mark_non_differentiable(*untracked)
        ctx.materialize_grads = False
        ctx.sent, ctx.keeper = sent, Keeper()
        ctx.keeper.record = sent
        sent.node = weakref.ref(ctx)
        return rows, weights, tie

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor | None, grad_weights: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
        sent: Sent = ctx.sent
        try:  # as comm.telling_peers()
            if grad_x is not None:
                sent.add(0, _plain(grad_x, "the gradient of the rows"))
            if grad_weights is not None:
                sent.add(1, _plain(grad_weights, "the gradient of the weights"))
            grad, side = (None, None) if sent.collects else sent.run_backward()
        except Error as error:
            sent.calls.comm.note_refusal(error)
            raise
        return grad, None, None, side, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weights: Tensor | None,
        tie: Tensor,
        bias: Tensor | None,
        side: Tensor | None,
        record: Summed,
    ) -> tuple[Tensor, Tensor | None]:
        out, side_out, _ = record.calls.run(record.plan, record.handle.tie, y, record.handle, bias, side)
        if weights is not None:
            record.weights = weights.detach()
            if ctx.needs_input_grad[1]:
                ctx.save_for_backward(y)
                if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
                    record.y, record.y_version = y.detach(), y._version
        if side_out is not None:
            ctx.mark_non_differentiable(side_out)
        ctx.materialize_grads = False
        ctx.bias = None if bias is None else (bias.dim(), bias.dtype)
        ctx.record, ctx.keeper = record, Keeper()
        ctx.keeper.record = record
        record.node = weakref.ref(ctx)
        return out, side_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
        record: Summed = ctx.record
        try:  # as comm.telling_peers()
            if grad is not None:
                grad = _plain(grad, "the gradient of the result of combine")
            saved = ctx.saved_tensors  # asked for once only: torch.utils.checkpoint recomputes the layer for it
            y = saved[0] if saved else None
            if record.sent is not None:
                record.sent.run_newer(record.number)
            grad_y, grad_weights = record.run_backward(grad, y)
        except Error as error:
            record.calls.comm.note_refusal(error)
            raise
        grad_bias = None if ctx.bias is None or grad is None else bias_gradient(grad, *ctx.bias)
        return grad_y, grad_weights, torch.zeros_like(record.handle.tie), grad_bias, None, None


# `apply` without what it does for transforms of torch.func.
_dispatch_node: Any = super(torch.autograd.Function, _Dispatch).apply
_combine_node: Any = super(torch.autograd.Function, _Combine).apply


def _plain(grad: Tensor, name: str) -> Tensor:
    """As `plain`, which most are."""
    try:
        if type(grad) is Tensor and not grad.is_neg() and grad.layout is torch.strided and grad.data_ptr():
            return grad
    except RuntimeError:  # it has no memory: told below
        pass
    given: Tensor = plain(grad, name)
    if given.layout is not torch.strided:
        raise InvalidArgument(f"{name} has layout {given.layout}; allowed is a dense tensor, torch.strided")
    return given


def _expert_output_is_complete(weak: weakref.ref[Summed], grad: Tensor) -> Tensor | None:
    """Hook on an expert output: its other users are through. If combine is not among those visited, run it now."""
    record = weak()
    if record is None or record.is_over:
        return None
    with record.calls.comm.telling_peers():
        return grad + record.run_for_unused()


def _input_is_complete(weak: weakref.ref[Sent], grad: Tensor | None) -> Tensor | None:
    """Hook on x (or topk_weights): the rest of the backward has come to it. If dispatch has not run, run it now."""
    sent = weak()
    if sent is None or sent.collects or grad is None:  # a nested backward, which ends at our node, looks beyond it
        return None
    if sent.is_done:
        missing, sent.early = sent.early, None
        return None if missing is None else grad + missing
    # Several dispatches of one tensor may be missing; the first of their hooks runs them all, newest first, as the
    # backward of the other ranks comes to them.
    alike = [
        each
        for reference in list(sent.calls.comm.recorded.values())
        if (each := reference()) is not None and not each.is_over and each.source == sent.source
    ]
    for each in sorted(alike, key=lambda each: each.number, reverse=True):
        missing = _missing_gradient(each)
        grad = grad if missing is None else grad + missing
    return grad


def _missing_gradient(sent: Sent) -> Tensor | None:
    if sent.is_done:
        early, sent.early = sent.early, None
        return early
    with sent.calls.comm.telling_peers():
        grad_x, grad_weights = sent.run_backward()
    if not sent.x_is_tracked:
        return grad_weights
    if grad_weights is not None and bool(grad_weights.any()):
        logger.warning(
            "a gradient of topk_weights is lost on rank %d: the results of this dispatch are not used here, but "
            "another rank has a loss on the weights it received",
            sent.calls.comm.rank,
        )
    return grad_x
