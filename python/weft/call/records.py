"""What a call with gradients leaves for its backward, on any path of the user's code (weft/autograd.py says which).

Who owns what: a node owns its record (`Sent` of a dispatch, `Summed` of a combine), hooks hold records weakly, so no
cycle runs through torch's C++ nodes, which no collector could free. When a node dies before its backward, the case of
the unused result, its record moves to `Runner.unused`, which holds at most MAX_UNUSED: what forwards without a
backward leave behind is bounded by that.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from weft.call.plan import Plan
from weft.call.runner import Runner
from weft.call.spec import LEAST_COLUMNS
from weft.errors import InvalidState
from weft.handle import Handle
from weft.log import logger

__all__ = ["Keeper", "Record", "Sent", "Summed"]

_numbers = itertools.count()
_MOST_DEAD = 16  # references to records that may be gone


class Record:
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
        return self.is_done or self.epoch != self.calls.comm._native.epoch

    def __del__(self) -> None:
        if not hasattr(self, "calls"):  # an exception ended what was making it
            return
        self.calls.comm.recorded.pop(self.number, None)
        if self.hook is not None:
            self.hook.remove()


class Sent(Record):
    """One recorded dispatch, first or repeated: what its backward needs, and whether it has run."""

    def __init__(
        self, calls: Runner, plan: Plan, x: Tensor, x_is_tracked: bool, has_weights: bool, repeated: Sent | None = None
    ) -> None:
        self.calls, self.epoch, self.number = calls, calls.comm._native.epoch, next(_numbers)
        self.plan = plan  # of the call; backwards use its `call.in_backward()`
        self.num_tokens, self.hidden, self.dtype = x.shape[0], x.shape[1], x.dtype
        self.x_is_tracked, self.has_weights = x_is_tracked, has_weights
        self.handle: Handle  # set by the node: what a collective call of a backward needs, nothing of it tracked
        self.scales: Tensor | None = None  # from the node to `dispatch`, which takes them out
        self.first: Sent | None = None  # whose routing this repeats: it has the weights
        if repeated is not None:
            self.first = repeated.first or repeated
        self.family: list[weakref.ref[Sent | Summed]] = []  # of a first dispatch: what was made of its handle
        self.early: Tensor | None = None  # gradient of x, until the hook on x takes it
        self.gradients: list[Tensor | None] = [None, None]  # of x and of the weights, as far as they are known
        self.collects = False  # a nested backward is to end at our node and leave its gradients here

    def add(self, idx: int, grad: Tensor) -> None:
        """Add to the gradient at the received rows (0) or weights (1)."""
        mine = self.gradients[idx]
        self.gradients[idx] = grad if mine is None else mine + grad

    def adopt(self, record: Sent | Summed) -> None:
        """`record` was made of our handle."""
        family = (self.first or self).family
        if len(family) >= _MOST_DEAD:
            family[:] = [each for each in family if each() is not None]
        family.append(weakref.ref(record))

    def relatives(self) -> list[Sent | Summed]:
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
            if isinstance(record, Summed):
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
        rows = grad_x.contiguous() if grad_x is not None and self.x_is_tracked else self._no_rows()
        side = self._side(grad_weights) if self.has_weights else None
        plan = self.plan.back
        if plan is None:
            plan = self.plan.back = self.calls.combine_plan(
                self.plan.call.in_backward(), rows, weighted=False, has_side=self.has_weights
            )
        grad, side, _ = self.calls.run(plan, self.handle.tie, rows, self.handle, None, side)
        return grad if self.x_is_tracked else None, side if self.has_weights else None

    def _no_rows(self) -> Tensor:
        lead, device = self.handle.rows_shape, self.calls.device
        if self.x_is_tracked:
            return torch.zeros((*lead, self.hidden), dtype=self.dtype, device=device)
        return torch.zeros((*lead, LEAST_COLUMNS), dtype=torch.float32, device=device)

    def _side(self, grad: Tensor | None) -> Tensor:
        if grad is None:
            return torch.zeros_like(self.handle.weights)
        return self.calls.side_of_picks(grad.contiguous(), self.handle)


class Summed(Record):
    """One recorded combine: what its backward needs, and whether it has run."""

    def __init__(self, sent: Sent | None, calls: Runner, plan: Plan, handle: Handle, dtype: torch.dtype) -> None:
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
        if self.sent is not None and grad_weights is not None:
            (self.sent.first or self.sent).add(1, grad_weights)
        return grad_y

    def run_unvisited(self) -> None:
        """Neither the result nor the expert output was used: run the experts' backward too, down to the dispatches."""
        grad_y = self.run_for_unused()
        if self.hook is None or self.sent is None:
            return
        dispatches = [record for record in self.sent.relatives() if isinstance(record, Sent)]
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


class Keeper:
    """Lives in a node, which sets `record`. If the node dies before its backward, what it stands for was not used here:
    keep the record."""

    record: Sent | Summed | None = None

    def __del__(self) -> None:
        record = self.record
        if record is None or sys.is_finalizing():
            return
        calls = record.calls
        is_recomputation = torch._C._current_graph_task_id() != -1  # torch.utils.checkpoint, inside a backward
        if record.is_over or is_recomputation or calls.closed or calls.comm.broken:
            return
        calls.unused.append(record)
        del calls.unused[: -calls.MAX_UNUSED]


def _dispatch_of(record: Any) -> Any:
    return record if isinstance(record, Sent) else record.sent


def _is_unvisited(record: Sent | Summed) -> bool:
    """It has not run, and this backward is not on its way to it."""
    node = None if record.node is None else record.node()
    return not (record.is_over or (node is not None and torch._C._will_engine_execute_node(node)))


def _drop(weak: weakref.ref[Sent]) -> None:
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


# ---- the graph of the experts


def _ends_between(start: Any, sent: Sent, dispatches: list[Sent]) -> list[Any]:
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


def _walk(start: Any, dispatches: list[Sent], closed: set[Any]) -> tuple[set[Any], dict[Sent, Any]]:
    """All nodes from `start` on, not beyond those of `dispatches`, which come second, nor into `closed`."""
    seen: set[Any] = set()
    ends: dict[Sent, Any] = {}
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
