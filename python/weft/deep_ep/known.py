"""Calls like one that was made before: a buffer's method asks the native module for them at once. What is not known
there goes the long way, with its checks; so does every first one."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from weft.call.options import CombineOptions, DispatchOptions
from weft.call.room import NeedsRoom

if TYPE_CHECKING:
    from weft.deep_ep.layers import Layers, ShapeOf
    from weft.expert_parallel import ExpertParallel

__all__ = ["Known", "along", "sum_of", "weighted_sum_of"]


def _values(kind: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    """As `ExpertParallel.dispatch` and `combine` list them."""
    made = kind(**options)
    return tuple(getattr(made, each.name) for each in fields(kind))


class Known:
    """A first dispatch: its window, and its options with each of `turns`, which are windows of the object."""

    __slots__ = ("about", "ask", "ep", "shape", "values")

    def __init__(
        self, ep: ExpertParallel, shape: ShapeOf, *, turns: int = 1, about: Any = None, **options: Any
    ) -> None:
        """`about`: what handles are told."""
        self.ep, self.shape, self.ask, self.about = ep, shape, ep._eager.known.dispatch, about
        self.values = tuple(_values(DispatchOptions, options | {"window": turn}) for turn in range(turns))

    def dispatch(self, layers: Layers, x: Any, topk_idx: Any, topk_weights: Any, turn: int = 0) -> Any:
        """The `Dispatched`; None: not known, and nothing is sent. As `Layers.run`, where a rank has too many tokens:
        all have larger windows behind it."""
        try:
            made = self.ask(self.values[turn], x, topk_idx, topk_weights, None)
        except NeedsRoom as need:
            layers.grow(self.shape, need.num_tokens)
            return None
        return None if type(made) is tuple else made


_sms_along = functools.cache(lambda num_sms: _values(DispatchOptions, {"num_sms": num_sms}))
_sms_of_sum = functools.cache(
    lambda num_sms, order: _values(CombineOptions, {"num_sms": num_sms, "weighted": False, "order": order})
)


def along(ep: ExpertParallel, x: Any, handle: Any, num_sms: int | None) -> Any:
    """The `Dispatched` of `ep.dispatch(x, handle=handle, num_sms=num_sms)`; None as in `Known.dispatch`."""
    made = ep._eager.known.dispatch(_sms_along(num_sms), x, None, None, handle)
    return None if type(made) is tuple else made


_window_of_sum = functools.cache(lambda window: _values(CombineOptions, {"window": window, "order": "pick"}))


def weighted_sum_of(ep: ExpertParallel, y: Any, handle: Any, weights: Any, ids: Any, out: Any) -> Any:
    """The sum of `ep.combine(y, handle, order="pick", weights=weights, topk_idx=ids, out=out)` in the window of the
    handle; None as in `Known.dispatch`."""
    made = ep._eager.known.combine(_window_of_sum(handle.call.window), y, handle, weights, ids, out)
    return None if type(made) is tuple else made


def sum_of(ep: ExpertParallel, y: Any, handle: Any, num_sms: int | None, order: str = "rank") -> Any:
    """The sum of `ep.combine(y, handle, weighted=False, order=order, num_sms=num_sms)`; None as in `Known.dispatch`."""
    made = ep._eager.known.combine(_sms_of_sum(num_sms, order), y, handle, None, None, None)
    return None if type(made) is tuple else made
