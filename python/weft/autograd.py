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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from weft.call.gradients import bias_gradient
from weft.call.received import Received
from weft.call.runner import Runner
from weft.call.spec import LEAST_COLUMNS, RANK_MAJOR, Call, rows_shape
from weft.call.tensors import plain
from weft.errors import InvalidState
from weft.log import logger

__all__ = ["Plans", "combine", "dispatch", "dispatch_again"]

_numbers = itertools.count()


class Plans(NamedTuple):
    """What a collective call of a backward needs of a handle; nothing of it is tracked by autograd."""

    send_plan: Tensor
    recv_plan: Tensor
    tie: Tensor
    sizes: Tensor
    rows_shape: tuple[int, ...]


class _Record:
    """A recorded call: whether its backward has run, and what is left of it in torch's graph."""

    def __init__(self, calls: Runner) -> None:
        self.calls, self.epoch = calls, calls.comm.epoch
        self.is_done = False  # a backward has run
        self.node: weakref.ref[Any] | None = None
        self.hook: RemovableHandle | None = None
        self.number = next(_numbers)

    @property
    def is_over(self) -> bool:
        """A backward has run, or can't any more: its handle is of an older epoch."""
        return self.is_done or self.epoch != self.calls.comm.epoch

    def __del__(self) -> None:
        if self.hook is not None:
            self.hook.remove()


class _Sent(_Record):
    """One recorded dispatch, first or repeated: what its backward needs, and whether it has run."""

    def __init__(
        self,
        calls: Runner,
        call: Call,
        x: Tensor,
        x_is_tracked: bool,
        has_weights: bool,
        repeated: _Sent | None = None,
    ) -> None:
        super().__init__(calls)
        self.call = call  # as called; backwards use call.in_backward()
        self.num_tokens, self.hidden, self.dtype = x.shape[0], x.shape[1], x.dtype
        self.x_is_tracked, self.has_weights = x_is_tracked, has_weights
        self.received: Received | None = None  # from the node to `dispatch`, which takes it out
        self.plans: Plans  # set by the node, like the next
        self.weights: Tensor
        self.topk_idx: Tensor | None = None  # rank_major, likewise
        self.first: _Sent | None = None  # whose routing this repeats: it has the weights
        if repeated is not None:
            self.first = repeated.first or repeated
        self.family: list[weakref.ref[_Sent | _Summed]] = []  # of a first dispatch: what was made of its handle
        self.early: Tensor | None = None  # gradient of x, until the hook on x takes it
        self.gradients: list[Tensor | None] = [None, None]  # of x and of the weights, as far as they are known
        self.collects = False  # a nested backward is to end at our node and leave its gradients here
        self.source: GradientEdge | None = None  # of the tensor that has the hook

    def add(self, grad_x: Tensor | None, grad_weights: Tensor | None) -> None:
        """Add to the gradients at the received rows and weights."""
        for idx, grad in enumerate((grad_x, grad_weights)):
            if grad is not None:
                mine = self.gradients[idx]
                self.gradients[idx] = grad if mine is None else mine + grad

    def adopt(self, record: _Sent | _Summed) -> None:
        """`record` was made of our handle."""
        family = (self.first or self).family
        family[:] = [each for each in family if each() is not None]
        family.append(weakref.ref(record))

    def relatives(self) -> list[_Sent | _Summed]:
        """All that live of our family, the first dispatch too."""
        first = self.first or self
        found = [reference() for reference in first.family]
        return [first, *(record for record in found if record is not None)]

    def run_newer(self, number: int) -> None:
        """What of the family is newer than `number` and not visited, newest first, as on ranks that use it."""
        newer = [record for record in self.relatives() if record.number > number and _is_unvisited(record)]
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
        self.calls.unused[:] = [record for record in self.calls.unused if _dispatch_of(record) is not self]
        if not (self.x_is_tracked or self.has_weights):
            return None, None
        grad, side = self.calls.combine(
            self.call.in_backward(),
            self._rows(grad_x),
            None,
            *self.plans[:3],
            bias=None,
            side=self._side(grad_weights) if self.has_weights else None,
            num_tokens=self.num_tokens,
        )
        return grad if self.x_is_tracked else None, side if self.has_weights else None

    def _rows(self, grad: Tensor | None) -> Tensor:
        if grad is not None and self.x_is_tracked:
            return grad.contiguous()
        lead = rows_shape(self.weights, self.call.layout)
        if self.x_is_tracked:
            return torch.zeros((*lead, self.hidden), dtype=self.dtype, device=self.weights.device)
        return torch.zeros((*lead, LEAST_COLUMNS), dtype=torch.float32, device=self.weights.device)

    def _side(self, grad: Tensor | None) -> Tensor:
        if grad is None:
            return torch.zeros_like(self.weights)
        return self.calls.side_of_picks(grad.contiguous(), self.topk_idx)


class _Summed(_Record):
    """One recorded combine: what its backward needs, and whether it has run."""

    def __init__(self, sent: _Sent | None, calls: Runner, call: Call, clear_tail: bool, plans: Plans) -> None:
        super().__init__(calls)
        self.sent, self.call, self.clear_tail, self.plans = sent, call, clear_tail, plans
        self.shape: tuple[int, int] = (0, 0)
        self.dtype = torch.float32
        self.y: Tensor | None = None
        self.y_version = 0
        self.weights: Tensor | None = None
        self.edge: GradientEdge | None = None  # of the expert output

    def run_backward(self, grad: Tensor | None, y: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Our call: gradients of the expert output and of the received weights."""
        self.is_done = True
        if grad is None:
            grad = torch.zeros(self.shape, dtype=self.dtype, device=self.calls.device)
        rows, _ = self.calls.dispatch_again(
            self.call.in_backward(), grad.contiguous(), None, *self.plans, self.shape[0], self.clear_tail
        )
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
        if self.edge is None or self.sent is None:
            return
        dispatches = [record for record in self.sent.relatives() if isinstance(record, _Sent)]
        ends = _ends_between(self.edge.node, self.sent, dispatches)
        if ends:
            for each in dispatches:
                each.collects = True
            try:
                torch.autograd.backward([self.edge], [grad_y.to(self.dtype)], retain_graph=True, inputs=ends)
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
    calls: Runner,
    call: Call,
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    quantize: int,
) -> tuple[Received, _Sent]:
    """A first dispatch with gradients for x or topk_weights."""
    x_is_tracked = x.requires_grad and not quantize
    sent = _Sent(calls, call, x, x_is_tracked, topk_weights is not None)
    rows, weights, tie = _Dispatch.apply(x, scales, topk_idx, topk_weights, None, quantize, sent)
    received = _known(sent.received)._replace(x=rows, topk_weights=weights, tie=tie)
    sent.received = None
    _watch(sent, x if x_is_tracked else _known(topk_weights))
    return received, sent


def dispatch_again(
    calls: Runner, call: Call, x: Tensor, plans: Plans, weights: Tensor, repeated: _Sent | None
) -> tuple[Tensor, Tensor, _Sent]:
    """A repeated dispatch with gradients for x: its rows, the tie of its own handle, its record. `repeated`: that of
    the handle."""
    sent = _Sent(calls, call, x, True, False, repeated)
    sent.plans, sent.weights = plans, weights.detach()
    rows, _, tie = _Dispatch.apply(x, None, None, None, plans, 0, sent)
    if sent.first is not None:
        sent.first.adopt(sent)
    _watch(sent, x)
    return rows, tie, sent


def combine(
    calls: Runner,
    call: Call,
    y: Tensor,
    weights: Tensor | None,
    plans: Plans,
    sent: _Sent | None,
    bias: Tensor | None,
    side: Tensor | None,
    num_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Combine with gradients for y, the received weights and bias, or only to lead on to those of the dispatch."""
    detached = plans._replace(tie=plans.tie.detach())
    record = _Summed(sent, calls, call, call.capacity >= 0, detached)
    record.shape, record.dtype = (num_tokens, y.shape[-1]), y.dtype
    out: tuple[Tensor, Tensor] = _Combine.apply(y, weights, plans.tie, bias, side, record)
    if sent is not None:
        sent.adopt(record)
    if y.requires_grad:
        record.edge = get_gradient_edge(y)
        weak = weakref.ref(record)
        record.hook = y.register_hook(lambda grad: _expert_output_is_complete(weak, grad))
    return out


def _watch(sent: _Sent, tensor: Tensor) -> None:
    weak = weakref.ref(sent)
    sent.source = get_gradient_edge(tensor)
    sent.calls.comm.recorded[sent.number] = sent
    sent.hook = tensor.register_hook(lambda grad: _input_is_complete(weak, grad))


# ---- nodes and hooks


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scales: Tensor | None,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        plans: Plans | None,
        quantize: int,
        sent: _Sent,
    ) -> tuple[Tensor, Tensor, Tensor]:
        clear_tail = sent.call.capacity >= 0
        calls = sent.calls
        if plans is None:
            received = calls.dispatch(sent.call, x, scales, _known(topk_idx), topk_weights, quantize, clear_tail)
            rows, weights, tie = received.x, received.topk_weights, received.tie.clone()
            sent.received = received
            sent.weights = weights.detach()
            sent.topk_idx = received.topk_idx if sent.call.layout == RANK_MAJOR else None
            lead = rows_shape(weights, sent.call.layout)
            sent.plans = Plans(received.send_plan, received.recv_plan, tie.detach(), received.sizes, lead)
        else:
            rows, _ = calls.dispatch_again(sent.call, x, None, *plans, x.shape[0], clear_tail)
            weights, tie = rows.new_empty(0, dtype=torch.float32), plans.tie.clone()
        ctx.mark_non_differentiable(*([] if sent.x_is_tracked else [rows]), *([] if sent.has_weights else [weights]))
        ctx.set_materialize_grads(False)
        ctx.sent, ctx.keeper = sent, _Keeper(sent)
        sent.node = weakref.ref(ctx)
        return rows, weights, tie

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor | None, grad_weights: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
        sent: _Sent = ctx.sent
        with sent.calls.comm.telling_peers():
            sent.add(plain(grad_x, "the gradient of the rows"), plain(grad_weights, "the gradient of the weights"))
            grad, side = (None, None) if sent.collects else sent.run_backward()
        return grad, None, None, side, None, None, None


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
    ) -> tuple[Tensor, Tensor]:
        out, side_out = record.calls.combine(record.call, y, weights, *record.plans[:3], bias, side, record.shape[0])
        if weights is not None:
            record.weights = weights.detach()
            if ctx.needs_input_grad[1]:
                ctx.save_for_backward(y)
                if not _has_saved_tensor_hooks():
                    record.y, record.y_version = y.detach(), y._version
        ctx.mark_non_differentiable(side_out)
        ctx.set_materialize_grads(False)
        ctx.bias = None if bias is None else (bias.dim(), bias.dtype)
        ctx.record, ctx.keeper = record, _Keeper(record)
        record.node = weakref.ref(ctx)
        return out, side_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
        record: _Summed = ctx.record
        with record.calls.comm.telling_peers():
            grad = plain(grad, "the gradient of the result of combine")
            saved = ctx.saved_tensors  # asked for once only: torch.utils.checkpoint recomputes the layer for it
            y = saved[0] if saved else None
            if record.sent is not None:
                record.sent.run_newer(record.number)
            grad_y, grad_weights = record.run_backward(grad, y)
        grad_bias = None if ctx.bias is None or grad is None else bias_gradient(grad, *ctx.bias)
        return grad_y, grad_weights, torch.zeros_like(record.plans.tie), grad_bias, None, None


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
        each for each in list(sent.calls.comm.recorded.values()) if not each.is_over and each.source == sent.source
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


def _has_saved_tensor_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


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
