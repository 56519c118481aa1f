"""Checks of the options that users pass to a dispatch or a combine, and the `Call` that these make. Pure functions;
torch.compile traces them.

As in weft/call/check.py every refusal names the argument, the value given and what is allowed.
"""

# check: allow-in-file function-size: what the choice of kernels looks at

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.call.options import OPTIONS, ORDERS, CallOptions, CombineOptions, DispatchOptions, is_one_of
from weft.call.shape import Shape
from weft.call.spec import WIRE_CODES, Call
from weft.errors import InvalidArgument, Unsupported
from weft.kernels.tuning import choose_num_sms, prefers_small, suits_small
from weft.limits import FP8_HIDDEN_MULTIPLE, LAYOUTS, MAX_ALIGNMENT, has_pick_slots

__all__ = ["check_num_sms", "combine_call", "first_call", "form_of", "repeated_call"]

_OF_NODES = "the nvlink engine with node_ranks"
_OF_HANDLE = ("layout", "alignment", "capacity", "max_tokens")  # options that a handle has, too


def form_of(rows: Any, quantize: Any) -> str:
    """How they travel, in the words of weft.kernels.tuning; what is no tensor is refused later."""
    if quantize is not None:
        return "quantized"
    return "wide" if isinstance(rows, Tensor) and rows.dtype == torch.float32 else "plain"


def first_call(ep: Shape, form: str, options: DispatchOptions) -> Call:
    """Of a dispatch with a routing of its own."""
    _check_options(ep, options)
    layout, alignment, capacity, max_tokens = options.layout, options.alignment, options.capacity, options.max_tokens
    if alignment != 1 and layout != "expert_major":
        raise InvalidArgument(
            f"alignment is {alignment} with layout {layout!r}; allowed are 1 to {MAX_ALIGNMENT} with 'expert_major', "
            "else 1"
        )
    if layout == "masked" and capacity is None:
        raise InvalidArgument("capacity is None; layout 'masked' needs the number of rows an expert may receive")
    if max_tokens is None:
        max_tokens = ep.max_tokens_per_rank
    if max_tokens > ep.max_tokens_per_rank:
        raise InvalidArgument(
            f"max_tokens is {max_tokens}; allowed are 0 to max_tokens_per_rank = {ep.max_tokens_per_rank}"
        )
    if options.absent != "drop" and ep.engine != "cpu":
        raise Unsupported(f"absent={options.absent!r}", f"the {ep.engine} engine", "the cpu engine, or absent='drop'")
    if options.staged and capacity is None:
        raise InvalidArgument("capacity is None with staged=True; the number of rows is needed: the host does not wait")
    is_small = _is_small(ep, "dispatch", form, layout, max_tokens, options)
    if options.mode == "auto" and not options.staged and is_small:
        is_small = suits_small(ep, layout, capacity, max_tokens, options.num_sms)
    rows = -1 if capacity is None else capacity
    call = _new_call(ep, "dispatch", options, (LAYOUTS.index(layout), alignment, rows, max_tokens), is_small=is_small)
    if options.zero_holes and not options.host_counts:
        return call
    return replace(call, zero_holes=options.zero_holes, tells_counts=options.host_counts and capacity is None)


def repeated_call(ep: Shape, form: str, of: Any, options: DispatchOptions) -> Call:
    """The `Call` for `dispatch(handle=...)`; `of`: the call that made the handle."""
    _check_options(ep, options, _OF_HANDLE)
    if options.absent != "drop":
        raise InvalidArgument(f"absent is {options.absent!r} beside handle, whose weights are there; allowed is 'drop'")
    _check_of(of, options)
    call = _call_of_handle(ep, of, "dispatch", form, options)
    return call if options.zero_holes else replace(call, zero_holes=False)


def combine_call(ep: Shape, form: str, of: Any, options: CombineOptions) -> Call:
    """`of`: the call that made the handle."""
    _check_options(ep, options)
    wire = options.wire
    if wire is not None and ep.hidden % FP8_HIDDEN_MULTIPLE:
        raise Unsupported(
            f"wire={wire!r} with hidden={ep.hidden}", f"hidden {ep.hidden}", f"a multiple of {FP8_HIDDEN_MULTIPLE}"
        )
    _check_of(of, options)
    if options.order != "rank":
        _check_order(ep, of, options)
        if options.order == "pick" and options.mode == "auto" and not (options.staged or of.is_small):
            has_slots = has_pick_slots(ep.num_ranks, ep.top_k, ep.small_tokens, of.max_tokens)
            options = options if has_slots else replace(options, mode="throughput")
    if options.side_lanes == "all" and _has_gpu_nodes(ep):
        raise Unsupported("side_lanes='all' between nodes", _OF_NODES, "side_lanes='own'")
    call = _call_of_handle(ep, of, "combine", form, options)
    return replace(call, wire=WIRE_CODES[wire], order=ORDERS.index(options.order))


def _check_order(ep: Shape, of: Any, options: CombineOptions) -> None:
    """Of an order of additions that is not the default."""
    if _has_gpu_nodes(ep):
        raise Unsupported(f"order={options.order!r} between nodes", _OF_NODES, "order='rank'")
    if ep.engine != "cpu" and options.order == "last_pick" and ep.calls.has_domains:
        raise Unsupported("order='last_pick' with sum_domain", f"the {ep.engine} engine", "the cpu engine")
    if options.order == "pick" and of.layout == LAYOUTS.index("rank_major"):
        raise InvalidArgument(
            "order is 'pick' with layout 'rank_major', whose rows are sums of picks already; allowed are 'rank' and "
            "'last_pick'"
        )
    if options.order == "pick" and options.wire is not None:
        raise InvalidArgument(
            f"wire is {options.wire!r} with order='pick', whose rows travel as they are; allowed is None"
        )


def _is_small(
    ep: Shape,
    op: str,
    form: str,
    layout: str,
    max_tokens: int,
    options: CallOptions,
    of_small: bool = False,
) -> bool:
    """Whether the kernels for small batches do it. `of_small`: along a routing that only they understand."""
    mode, staged = options.mode, options.staged
    if staged and mode == "throughput":
        raise InvalidArgument("mode is 'throughput' with staged=True; allowed are 'auto' and 'latency'")
    if of_small:
        if mode == "throughput":
            raise InvalidArgument(
                "mode is 'throughput' with the handle of a small-batch dispatch; allowed are 'auto' and 'latency', or "
                "mode='throughput' in the dispatch too"
            )
        return True
    if mode == "latency" or staged:
        if max_tokens > ep.small_tokens:
            name = "staged is True" if mode == "auto" else "mode is 'latency'"
            raise InvalidArgument(
                f"{name} with max_tokens = {max_tokens}; allowed in a small-batch call are 0 to {ep.small_tokens}"
            )
        return True
    if _has_gpu_nodes(ep):
        return False  # between nodes nothing is measured that "auto" could go by
    return mode == "auto" and prefers_small(ep, op, layout, form, max_tokens)


def _check_of(of: Any, options: CallOptions) -> None:
    """What is given beside a handle."""
    if not isinstance(of, Call):
        raise InvalidArgument(f"handle is {of!r}; the handle of a dispatch is expected")
    if isinstance(options, DispatchOptions):
        for name, value, default, own in (
            ("layout", options.layout, "rank_major", LAYOUTS[of.layout]),
            ("alignment", options.alignment, 1, of.alignment),
            ("capacity", options.capacity, None, None if of.capacity < 0 else of.capacity),
            ("max_tokens", options.max_tokens, None, of.max_tokens),
        ):
            if not is_one_of(value, (default, own)):
                raise InvalidArgument(
                    f"{name} is {value!r} beside handle; allowed is that of the handle, {own!r}, or none"
                )
    if options.window != of.window:
        raise InvalidArgument(
            f"window is {options.window} with a handle of window {of.window}; allowed is that of the handle"
        )


def _call_of_handle(ep: Shape, of: Call, op: str, form: str, options: CallOptions) -> Call:
    """Of a combine, or of a dispatch that repeats the handle's routing."""
    is_small = _is_small(ep, op, form, LAYOUTS[of.layout], of.max_tokens, options, of.is_small)
    return _new_call(ep, op, options, (of.layout, of.alignment, of.capacity, of.max_tokens), is_small=is_small)


def _new_call(ep: Shape, op: str, options: CallOptions, rows: tuple[int, int, int, int], *, is_small: bool) -> Call:
    """`rows`: layout, alignment, capacity and max_tokens."""
    sms = choose_num_sms(ep, op, LAYOUTS[rows[0]], rows[3], options.num_sms, is_small=is_small)
    deadline = ep.deadline_s if options.deadline_s is None else float(options.deadline_s)
    return Call(*rows, deadline, options.window, sms, 0, options.async_op, is_small, options.staged)


def _check_options(ep: Shape, options: CallOptions, not_these: tuple[str, ...] = ()) -> None:
    """Each by itself, and what both calls must satisfy together."""
    for name, accepts in OPTIONS[type(options)].items():
        value = getattr(options, name)
        if name not in not_these and name != "window" and not accepts.test(value):
            raise InvalidArgument(f"{name} is {value!r}; allowed: {accepts.allowed}")
    check_num_sms(ep.most_num_sms, ep.num_windows, options.num_sms)
    if options.staged and options.async_op:
        raise InvalidArgument("async_op is True with staged=True; allowed is one of the two")
    window = options.window
    if not (isinstance(window, int) and not isinstance(window, bool) and 0 <= window < ep.num_windows):
        raise InvalidArgument(f"window is {window!r}; allowed are 0 to num_windows - 1 = {ep.num_windows - 1}")


def _has_gpu_nodes(ep: Shape) -> bool:
    return ep.engine == "nvlink" and ep.calls.has_nodes


def check_num_sms(most: int, num_windows: int, num_sms: int | None) -> None:
    """Of a call, or of all calls of an object. `most`: 0: the cpu engine takes none."""
    if num_sms is None or most == 0 or num_sms <= most:
        return
    raise InvalidArgument(
        f"num_sms is {num_sms} with num_windows = {num_windows}; allowed are 1 to {most} "
        "here: a call of each window may run at once, and ranks that share a GPU share its SMs"
    )
