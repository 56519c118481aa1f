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

Who owns what: a node owns its record (`_Sent` of a dispatch, `_Summed` of a combine), hooks hold records weakly, so no
cycle runs through torch's C++ nodes, which no collector could free. When a node dies before its backward, the case of
the unused result, its record moves to `Runner.unused`, which holds at most MAX_UNUSED: what forwards without a
backward leave behind is bounded by that.

Limits (docs/semantics.md): x, or else topk_weights, requires grad on every rank or on none; a backward that leads to x
but not through the results, before their own, counts as one that does not use them, so it is run on every rank or on
none; a result unused on one rank is not noticed inside torch.compile, nor where x gets no gradient at all; under
torch.utils.checkpoint it is noticed, but its weights get no gradient; no double backward.
"""

# check: allow-in-file function-size: forward of an autograd.Function takes a flat list
# check: allow file-size: the two backwards depend on each other and are read together

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from weft.call.gradients import bias_gradient
from weft.call.plan import Plan
from weft.call.runner import Runner
from weft.call.spec import LEAST_COLUMNS
from weft.call.tensors import plain
from weft.errors import Error, InvalidArgument, InvalidState
from weft.handle import Handle
from weft.log import logger

__all__ = ["combine", "dispatch", "dispatch_again"]

_numbers = itertools.count()
_MOST_DEAD = 16  # references to records that may be gone


class _Record:
    """A recorded call: whether its backward has run, and what is left of it in torch's graph."""

    calls: Runner
    epoch: int
    number: int
    is_done = False  # a backward has run
    node: weakref.ref[Any] | None = None
    hook: RemovableHandle | None = None
    source: tuple[Any, int] = (None, 0)  # node and number of what has the hook: x, or the expert output
    owner: Any = None  # keeps that node

    @property
    def is_over(self) -> bool:
        """A backward has run, or can't any more: its handle is of an older epoch."""
        return self.is_done or self.epoch != self.calls.comm.epoch

    def __del__(self) -> None:
        self.calls.comm.recorded.pop(self.number, None)
        if self.hook is not None:
            self.hook.remove()


class _Sent(_Record):
    """One recorded dispatch, first or repeated: what its backward needs, and whether it has run."""

    def __init__(
        self, calls: Runner, plan: Plan, x: Tensor, x_is_tracked: bool, has_weights: bool, repeated: _Sent | None = None
    ) -> None:
        self.calls, self.epoch, self.number = calls, calls.comm._native.epoch, next(_numbers)
        self.plan = plan  # of the call; backwards use its `call.in_backward()`
        self.num_tokens, self.hidden, self.dtype = x.shape[0], x.shape[1], x.dtype
        self.x_is_tracked, self.has_weights = x_is_tracked, has_weights
        self.handle: Handle  # set by the node: what a collective call of a backward needs, nothing of it tracked
        self.scales: Tensor | None = None  # from the node to `dispatch`, which takes them out
        self.first: _Sent | None = None  # whose routing this repeats: it has the weights
        if repeated is not None:
            self.first = repeated.first or repeated
        self.family: list[weakref.ref[_Sent | _Summed]] = []  # of a first dispatch: what was made of its handle
        self.early: Tensor | None = None  # gradient of x, until the hook on x takes it
        self.gradients: list[Tensor | None] = [None, None]  # of x and of the weights, as far as they are known
        self.collects = False  # a nested backward is to end at our node and leave its gradients here

    def add(self, grad_x: Tensor | None, grad_weights: Tensor | None) -> None:
        """Add to the gradients at the received rows and weights."""
        for idx, grad in enumerate((grad_x, grad_weights)):
            if grad is not None:
                mine = self.gradients[idx]
                self.gradients[idx] = grad if mine is None else mine + grad

    def adopt(self, record: _Sent | _Summed) -> None:
        """`record` was made of our handle."""
        family = (self.first or self).family
        if len(family) >= _MOST_DEAD:
            family[:] = [each for each in family if each() is not None]
        family.append(weakref.ref(record))

    def relatives(self) -> list[_Sent | _Summed]:
        """All that live of our family, the first dispatch too."""
        first = self.first or self
        found = [reference() for reference in first.family]
        return [first, *(record for record in found if record is not None)]

    def run_newer(self, number: int) -> None:
        """What of the family is newer than `number` and not visited, newest first, as on ranks that use it."""
        newer = []
        for reference in (self.first or self).family:
            record = reference()
            if record is not None and record.number > number and not record.is_done and _is_unvisited(record):
                newer.append(record)
        for record in sorted(newer, key=lambda record: record.number, reverse=True):
            if record.is_done:
                continue  # in the backward of the experts of another one
            if isinstance(record, _Summed):
                record.run_unvisited()
            else:
                record.early, _ = record.run_backward()
                torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_drop, weakref.ref(record)))

    def run_backward(self) -> tuple[Tensor | None, Tensor | None]:
        """Our call, behind what is newer: gradients of x and weights."""
        self.run_newer(self.number)
        (grad_x, grad_weights), self.gradients = self.gradients, [None, None]
        self.is_done = True
        if self.calls.unused:
            self.calls.unused[:] = [record for record in self.calls.unused if _dispatch_of(record) is not self]
        if not (self.x_is_tracked or self.has_weights):
            return None, None
        rows, side = self._rows(grad_x), self._side(grad_weights) if self.has_weights else None
        plan = self.plan.back
        if plan is None:
            plan = self.plan.back = self.calls.combine_plan(
                self.plan.call.in_backward(), rows, weighted=False, has_side=self.has_weights
            )
        grad, side, _ = self.calls.run(plan, self.handle.tie, rows, self.handle, None, side)
        return grad if self.x_is_tracked else None, side if self.has_weights else None

    def _rows(self, grad: Tensor | None) -> Tensor:
        if grad is not None and self.x_is_tracked:
            return grad.contiguous()
        lead, device = self.handle.rows_shape, self.calls.device
        if self.x_is_tracked:
            return torch.zeros((*lead, self.hidden), dtype=self.dtype, device=device)
        return torch.zeros((*lead, LEAST_COLUMNS), dtype=torch.float32, device=device)

    def _side(self, grad: Tensor | None) -> Tensor:
        if grad is None:
            return torch.zeros_like(self.handle.weights)
        return self.calls.side_of_picks(grad.contiguous(), self.handle)


class _Summed(_Record):
    """One recorded combine: what its backward needs, and whether it has run."""

    def __init__(self, sent: _Sent | None, calls: Runner, plan: Plan, handle: Handle, dtype: torch.dtype) -> None:
        self.calls, self.epoch, self.number = calls, calls.comm._native.epoch, next(_numbers)
        self.sent, self.plan, self.handle, self.dtype = sent, plan, handle, dtype  # nothing of the handle is tracked
        self.shape = (handle.num_tokens, plan.hidden)
        self.y: Tensor | None = None
        self.y_version = 0
        self.weights: Tensor | None = None

    def run_backward(self, grad: Tensor | None, y: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Our call: gradients of the expert output and of the received weights."""
        self.is_done = True
        if grad is None:
            grad = torch.zeros(self.shape, dtype=self.dtype, device=self.calls.device)
        plan = self.plan.back
        if plan is None:
            plan = self.plan.back = self.calls.again_plan(self.plan.call.in_backward(), grad, None, 0, clears_tail=True)
        rows, _, _ = self.calls.run(plan, self.handle.tie, grad, None, self.handle)
        return (rows, None) if self.weights is None else self.calls.gradients(rows, y, self.weights, in_place=True)

    def run_for_unused(self) -> Tensor:
        """Zero gradient for the result. That of the weights goes to the first dispatch, that of y is returned."""
        if self.y is not None and self.y._version != self.y_version:
            raise InvalidState("expert_output was changed in place after combine; gradients need its old values")
        grad_y, grad_weights = self.run_backward(None, self.y)
        if self.sent is not None:
            (self.sent.first or self.sent).add(None, grad_weights)
        return grad_y

    def run_unvisited(self) -> None:
        """Neither the result nor the expert output was used: run the experts' backward too, down to the dispatches."""
        grad_y = self.run_for_unused()
        if self.hook is None or self.sent is None:
            return
        dispatches = [record for record in self.sent.relatives() if isinstance(record, _Sent)]
        ends = _ends_between(self.source[0], self.sent, dispatches)
        if ends:
            for each in dispatches:
                each.collects = True
            try:
                torch.autograd.backward(
                    [GradientEdge(*self.source)], [grad_y.to(self.dtype)], retain_graph=True, inputs=ends
                )
            finally:
                for each in dispatches:
                    each.collects = False


class _Keeper:
    """Lives in a node. If the node dies before its backward, what it stands for was not used here: keep the record."""

    def __init__(self, record: _Sent | _Summed) -> None:
        self.record = record

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        record, calls = self.record, self.record.calls
        is_recomputation = torch._C._current_graph_task_id() != -1  # torch.utils.checkpoint, inside a backward
        if record.is_over or is_recomputation or calls.closed or calls.comm.broken:
            return
        calls.unused.append(record)
        del calls.unused[: -calls.MAX_UNUSED]


def _dispatch_of(record: Any) -> Any:
    return record if isinstance(record, _Sent) else record.sent


def _is_unvisited(record: _Sent | _Summed) -> bool:
    """It has not run, and this backward is not on its way to it."""
    node = None if record.node is None else record.node()
    return not (record.is_over or (node is not None and torch._C._will_engine_execute_node(node)))


def _known(value: Any) -> Any:
    """A field that the forward has filled."""
    return value


# ---- forward


def dispatch(
    calls: Runner, plan: Plan, x: Tensor, scales: Tensor | None, topk_idx: Tensor, topk_weights: Tensor | None
) -> tuple[Tensor, Tensor | None, Handle]:
    """A first dispatch with gradients for x or topk_weights: rows, scales and the handle."""
    x_is_tracked = x.requires_grad and not plan.quantize
    sent = _Sent(calls, plan, x, x_is_tracked, topk_weights is not None)
    rows, weights, tie = (_Dispatch.apply if torch._C._are_functorch_transforms_active() else _dispatch_node)(
        x, scales, topk_idx, topk_weights, None, sent
    )
    calls.comm.recorded[sent.number] = weakref.ref(sent)
    _hook(sent, x if x_is_tracked else _known(topk_weights), _input_is_complete)
    row_scales, sent.scales = sent.scales, None
    return rows, row_scales, sent.handle._changed(tie=tie, sent=sent, weights=weights)


def dispatch_again(calls: Runner, plan: Plan, x: Tensor, handle: Handle) -> tuple[Tensor, Handle]:
    """A repeated dispatch with gradients for x: its rows, and a handle with its own tie and record."""
    sent = _Sent(calls, plan, x, True, False, handle.sent)
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
    sent: _Sent | None = handle.sent
    weights = handle.weights if plan.weighted else None
    if weights is not None and weights.requires_grad and y.is_inference():
        raise InvalidArgument(
            "expert_output was made under torch.inference_mode(), and gradients of the weights need it; give its "
            ".clone(), made outside"
        )
    record = _Summed(sent, calls, plan, _untracked(handle), y.dtype)
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


def _hook(record: _Sent | _Summed, tensor: Tensor, hook: Callable[..., Tensor | None]) -> None:
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
        sent: _Sent,
    ) -> tuple[Tensor, Tensor, Tensor]:
        calls = sent.calls
        if handle is None:
            rows, sent.scales, made = calls.run(sent.plan, None, x, scales, topk_idx, topk_weights)
            weights, tie = made.weights, made.tie.clone()
            made.__dict__["weights"], sent.handle = weights.detach(), made
        else:
            rows, _, _ = calls.run(sent.plan, handle.tie, x, None, handle)
            weights, tie, sent.handle = rows.new_empty(0, dtype=torch.float32), handle.tie.clone(), handle
        if not (sent.x_is_tracked and sent.has_weights):
            untracked = ([] if sent.x_is_tracked else [rows]) + ([] if sent.has_weights else [weights])
            ctx.mark_non_differentiable(*untracked)
        ctx.materialize_grads = False
        ctx.sent, ctx.keeper = sent, _Keeper(sent)
        sent.node = weakref.ref(ctx)
        return rows, weights, tie

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor | None, grad_weights: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
        sent: _Sent = ctx.sent
        try:  # as comm.telling_peers()
            sent.add(_plain(grad_x, "the gradient of the rows"), _plain(grad_weights, "the gradient of the weights"))
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
        record: _Summed,
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
        ctx.record, ctx.keeper = record, _Keeper(record)
        record.node = weakref.ref(ctx)
        return out, side_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
        record: _Summed = ctx.record
        try:  # as comm.telling_peers()
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


def _plain(grad: Tensor | None, name: str) -> Tensor | None:
    """As `plain`, which most are."""
    try:
        if grad is None or (
            type(grad) is Tensor and not grad.is_neg() and grad.layout is torch.strided and grad.data_ptr()
        ):
            return grad
    except RuntimeError:  # it has no memory: told below
        assert grad is not None  # noqa: S101  for mypy
    given: Tensor = plain(grad, name)
    if given.layout is not torch.strided:
        raise InvalidArgument(f"{name} has layout {given.layout}; allowed is a dense tensor, torch.strided")
    return given


def _expert_output_is_complete(weak: weakref.ref[_Summed], grad: Tensor) -> Tensor | None:
    """Hook on an expert output: its other users are through. If combine is not among those visited, run it now."""
    record = weak()
    if record is None or record.is_over:
        return None
    with record.calls.comm.telling_peers():
        return grad + record.run_for_unused()


def _drop(weak: weakref.ref[_Sent]) -> None:
    """At the end of a backward: it has not come to the x of a dispatch that ran early."""
    sent = weak()
    early, rank = (None, -1) if sent is None else (sent.early, sent.calls.comm.rank)
    if sent is not None:
        sent.early = None
    if early is not None and bool(early.any()):
        logger.warning(
            "a gradient of x is lost on rank %d: the results of this repeated dispatch are not used here, but another "
            "rank has a loss on the rows it received",
            rank,
        )


def _input_is_complete(weak: weakref.ref[_Sent], grad: Tensor | None) -> Tensor | None:
    """Hook on x (or topk_weights): the rest of the backward has come to it. If dispatch has not run, run it now."""
    sent = weak()
    if sent is None or sent.collects or grad is None:  # a nested backward, which ends at our node, looks beyond it
        return None
    if sent.is_done:
        missing = _missing_gradient(sent)
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


def _missing_gradient(sent: _Sent) -> Tensor | None:
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


# ---- the graph of the experts


def _ends_between(start: Any, sent: _Sent, dispatches: list[_Sent]) -> list[Any]:
    """Where a backward from the expert output is to end: parameters on the way, and `dispatches`, `sent` among them.

    Ways that lead past the dispatch to what x was computed from are left out: they belong to earlier layers, whose
    backward is still to come.
    """
    nodes, dispatch_nodes = _walk(start, dispatches, set())
    end = dispatch_nodes.get(sent)
    if end is not None and any(node._sequence_nr() < end._sequence_nr() for node in nodes if not _leaf(node)):
        earlier: set[Any] = set()
        for above, _ in end.next_functions:
            if above is not None and not _leaf(above):
                earlier |= _walk(above, [], set())[0]
        if any(node in earlier for node in nodes if not _leaf(node)):
            nodes, dispatch_nodes = _walk(start, dispatches, {node for node in earlier if not _leaf(node)})
            logger.warning("experts of an unused result read earlier activations, which get no gradient of it")
    ends: list[Any] = [node.variable for node in nodes if _leaf(node)]
    return ends + [GradientEdge(node, 0) for node in dispatch_nodes.values()]


def _leaf(node: Any) -> bool:
    return hasattr(node, "variable")


def _walk(start: Any, dispatches: list[_Sent], closed: set[Any]) -> tuple[set[Any], dict[_Sent, Any]]:
    """All nodes from `start` on, not beyond those of `dispatches`, which come second, nor into `closed`."""
    seen: set[Any] = set()
    ends: dict[_Sent, Any] = {}
    stack = [start]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        record = getattr(node, "sent", None)
        if record is not None and record in dispatches:
            ends[record] = node
            continue
        if node in closed:
            continue
        seen.add(node)
        stack.extend(above for above, _ in node.next_functions)
    return seen, ends
