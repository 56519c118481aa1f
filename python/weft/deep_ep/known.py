"""Calls like one that was made before: a buffer's method asks the native module for them at once. What is not known
there goes the long way, with its checks; so does every first one."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torch import Tensor

from weft.call.options import CombineOptions, DispatchOptions
from weft.call.room import NeedsRoom
from weft.deep_ep.rows import check_first, form_of, looks_like_picks
from weft.errors import InvalidArgument

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

    __slots__ = ("about", "ask", "ep", "options", "shape", "values")

    def __init__(
        self, ep: ExpertParallel, shape: ShapeOf, *, turns: int = 1, about: Any = None, **options: Any
    ) -> None:
        """`about`: what handles are told."""
        self.ep, self.shape, self.ask, self.about = ep, shape, ep._eager.known.dispatch, about
        self.options = options
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

    def half(self, x: Any, topk_idx: Any, topk_weights: Any, turn: int) -> Any:
        """Of a staged call the `Dispatched`, which has sent: of Weft's own call, for the native module makes none of
        these at once. None: it does not look like the first one, and nothing is sent."""
        ep, most = self.ep, self.options["max_tokens"]
        are_like = (
            type(x) is Tensor and x.dtype is self.shape.dtype and x.is_contiguous() and looks_like_picks(topk_idx)
        )
        if not are_like or x.shape[1:] != (ep.hidden,) or topk_idx.shape[1] != ep.top_k or topk_idx.shape[0] > most:
            return None
        try:
            return ep.dispatch(x, topk_idx, topk_weights, window=turn, **self.options)
        except InvalidArgument:
            check_first(form_of(x), topk_idx, topk_weights, ep.device)
            raise


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
