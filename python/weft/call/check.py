"""Checks of what users pass to ExpertParallel, before anything is sent. Pure functions; torch.compile traces them.

Every refusal names the argument, the value given and what is allowed.
"""

# check: allow-in-file function-size: one parameter for each argument of the public call
# check: allow file-size: what users may pass, in one place

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.call.check_tensors import (
    check_apart,
    check_like,
    check_out,
    check_place,
    check_side,
    check_topk,
    check_x,
    plain_out,
    shown,
)
from weft.call.options import (
    MAX_TOKENS_PER_RANK,
    OPTIONS,
    ORDERS,
    CallOptions,
    CombineOptions,
    DispatchOptions,
    is_one_of,
)
from weft.call.scales import word_dtype
from weft.call.shape import Shape
from weft.call.spec import DTYPE_CODES, Call
from weft.call.tensors import is_traced, plain
from weft.communicator import Communicator
from weft.errors import InvalidArgument, Unsupported
from weft.handle import Dispatched, Handle
from weft.kernels.tuning import choose_num_sms, most_num_sms, prefers_small, suits_small
from weft.limits import (
    ACCEPTS,
    DTYPE_BYTES,
    FP8_HIDDEN_MULTIPLE,
    LAYOUTS,
    MAX_ALIGNMENT,
    ROW_MULTIPLE_BYTES,
    check_shape,
    default_heap_bytes,
    has_pick_slots,
)
from weft.quantized import Quantized

__all__ = [
    "QUANTIZE_CODES",
    "WIRE_CODES",
    "check_absent",
    "check_combine",
    "check_comm",
    "check_constructor",
    "check_dispatch",
    "check_dispatched",
    "check_min_ranks",
    "check_owner_weights",
    "check_received_weights",
    "check_staged",
]

QUANTIZE_CODES = {None: 0, "fp8": 1, "fp8_ue8m0": 2}
WIRE_CODES = {None: 0, "fp8": 1}
_OF_NODES = "the nvlink engine with node_ranks"
_OF_HANDLE = ("layout", "alignment", "capacity", "max_tokens")  # options that a handle has, too


def check_comm(comm: Any) -> None:
    """The argument of ExpertParallel without which there is nobody to tell of a refusal."""
    if not isinstance(comm, Communicator):
        raise InvalidArgument(f"comm is {comm!r}; a weft.Communicator is expected")


def check_constructor(comm: Communicator, dtype: Any, shape: dict[str, Any]) -> None:
    """The other arguments on this rank alone; the comparison between ranks comes after. `shape` has the name of the
    dtype."""
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgument(f"dtype is {dtype!r}; allowed: {', '.join(f'torch.{name}' for name in DTYPE_BYTES)}")
    if shape["deadline_s"] is None:
        raise InvalidArgument(f"deadline_s is None; allowed: {ACCEPTS['deadline_s'].allowed}")
    check_shape({"num_ranks": comm.num_ranks, **shape})
    _check_growth(comm, dtype, shape)
    if comm.engine == "nvlink" and shape["num_logical_experts"] is not None:
        raise Unsupported("num_logical_experts", "the nvlink engine", "the cpu engine, or physical ids in topk_idx")
    has_nodes = 0 < (shape["node_ranks"] or 0) < comm.num_ranks
    if comm.engine == "nvlink":
        _check_num_windows(comm._choice.rank_sms, shape["num_windows"], has_nodes=has_nodes)
        most = most_num_sms(comm.max_num_sms, comm._choice.rank_sms, shape["num_windows"], has_nodes=has_nodes)
        _check_num_sms(most, shape["num_windows"], shape["num_sms"])


def check_min_ranks(comm: Communicator, min_ranks: Any, num_experts: Any, num_logical_experts: Any) -> None:
    """Of the constructor; what depends on it is compared between ranks as num_experts."""
    if min_ranks is None:
        return
    if type(min_ranks) is not int or not 1 <= min_ranks <= comm.num_ranks:
        raise InvalidArgument(f"min_ranks is {min_ranks!r}; allowed are None and 1 to num_ranks = {comm.num_ranks}")
    if num_experts is not None or num_logical_experts is None:
        raise InvalidArgument(
            f"min_ranks is {min_ranks}; allowed is None unless num_logical_experts is given and num_experts is not"
        )


def _check_growth(comm: Communicator, dtype: Any, shape: dict[str, Any]) -> None:
    most, least = shape["max_heap_bytes"], shape["heap_bytes"]
    if most is None:
        return
    if comm.engine == "nvlink":
        raise Unsupported("max_heap_bytes", "the nvlink engine", "the cpu engine, or None")
    if least is None:
        sizes = (shape["top_k"], shape["hidden"], shape["max_tokens_per_rank"])
        least = default_heap_bytes(comm.num_ranks, *sizes, dtype)
    if most < least:
        raise InvalidArgument(f"max_heap_bytes is {most}; allowed are None and heap_bytes = {least} or more")


def check_dispatch(
    ep: Shape, x: Any, topk_idx: Any, topk_weights: Any, handle: Any, options: DispatchOptions
) -> tuple[Call, Any, Tensor, Tensor | None, Any, Any]:
    """The call as native codes; x, its rows and their scales, topk_idx and topk_weights as the engine reads them."""
    x, topk_idx, topk_weights = _plain_rows(x), plain(topk_idx, "topk_idx"), plain(topk_weights, "topk_weights")
    form = "bytes" if isinstance(x, Quantized) else _form(x, options.quantize)
    if handle is not None:
        call = _repeated_call(ep, form, _of_handle(handle), options)
        if topk_idx is not None or topk_weights is not None:
            raise InvalidArgument(
                "topk_idx or topk_weights is given beside handle; allowed is one of the two: a handle has its routing"
            )
        num_tokens, most = handle.num_tokens, handle.num_tokens
    else:
        call = _first_call(ep, form, options)
        num_tokens, most = -1, MAX_TOKENS_PER_RANK if ep.tells_need and not options.staged else call.max_tokens
    data, scales = check_x(ep, x, options.quantize, handle is not None)
    if data.shape[0] > most or (num_tokens >= 0 and data.shape[0] != num_tokens):
        allowed = f"0 to max_tokens = {most}" if num_tokens < 0 else f"{num_tokens}, the tokens of the handle"
        raise InvalidArgument(f"x has {data.shape[0]} tokens; allowed are {allowed}")
    if handle is None:
        topk_weights = check_topk(ep, topk_idx, topk_weights, data)
    if options.scale_layout != "row_major":
        dtype = _column_dtype(x, options.quantize, scales)
        call = replace(call, scale_dtype=dtype)
    return call, x, data, scales, topk_idx, topk_weights


def _plain_rows(x: Any) -> Any:
    if not isinstance(x, Quantized):
        return plain(x, "x")
    data, scales = plain(x.data, "x.data"), plain(x.scales, "x.scales")
    return x if data is x.data and scales is x.scales else Quantized(data, scales)


def _of_handle(handle: Any) -> Any:
    """The call that made it."""
    if isinstance(handle, Handle | Call):
        return handle.call if isinstance(handle, Handle) else handle
    raise InvalidArgument(f"handle is {handle!r}; the handle of a dispatch is expected")


def _form(rows: Any, quantize: Any) -> str:
    """How they travel, in the words of weft.kernels.tuning; what is no tensor is refused later."""
    if quantize is not None:
        return "quantized"
    return "wide" if isinstance(rows, Tensor) and rows.dtype == torch.float32 else "plain"


def _column_dtype(x: Tensor | Quantized, quantize: str | None, scales: Tensor | None) -> torch.dtype:
    """Of the column-major scales that a dispatch gives."""
    if quantize is not None:
        return torch.float32 if quantize == "fp8" else torch.int32
    if scales is None or isinstance(x, Tensor) or x.scales is None:
        raise InvalidArgument(
            "scale_layout is 'column_major' with rows that have no scales; allowed is 'row_major', or quantize= or a "
            "weft.Quantized with scales"
        )
    return word_dtype(x.scales.dtype)


def _first_call(ep: Shape, form: str, options: DispatchOptions) -> Call:
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


def _repeated_call(ep: Shape, form: str, of: Any, options: DispatchOptions) -> Call:
    """The `Call` for `dispatch(handle=...)`; `of`: the call that made the handle."""
    _check_options(ep, options, _OF_HANDLE)
    if options.absent != "drop":
        raise InvalidArgument(f"absent is {options.absent!r} beside handle, whose weights are there; allowed is 'drop'")
    _check_of(of, options)
    call = _call_of_handle(ep, of, "dispatch", form, options)
    return call if options.zero_holes else replace(call, zero_holes=False)


def _combine_call(ep: Shape, form: str, of: Any, options: CombineOptions) -> Call:
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


def check_received_weights(ep: Shape) -> None:
    """Of a combine by pick that is given no weights."""
    if ep.engine != "cpu":
        raise Unsupported(
            "order='pick' with the weights received", f"the {ep.engine} engine", "weights=, or weighted=False"
        )


def check_owner_weights(
    ep: Shape, others: tuple[Any, ...], handle: Any, weights: Any, options: CombineOptions
) -> Tensor:
    """Weights that combine is given by the tokens' owner, as the engine reads them. `others`: its other tensors."""
    if options.order != "pick":
        raise InvalidArgument(f"weights are given with order={options.order!r}; allowed with order='pick' alone")
    if not options.weighted:
        raise InvalidArgument("weighted is False and weights are given; allowed is one of them")
    _of_handle(handle)
    weights = plain(weights, "weights")
    if not isinstance(weights, Tensor):
        raise InvalidArgument(f"weights is {shown(weights)}; a tensor {[handle.num_tokens, ep.top_k]} is expected")
    check_like("weights", weights, ([handle.num_tokens, ep.top_k],), (torch.float32, torch.bfloat16, torch.float16), ep)
    tensors = [each for each in (*others, weights, handle.tie) if isinstance(each, Tensor)]
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        raise Unsupported("weights= of combine with gradients", "inputs that require grad", "weights given to dispatch")
    if is_traced(*tensors):
        raise Unsupported("weights= of combine in compiled code", "a traced call", "a call outside")
    place = torch.device("cpu") if ep.engine == "cpu" else weights.device
    # Of a staged call the half that receives reads them, and the caller may overwrite what it gave before.
    return weights.detach().to(device=place, dtype=torch.float32, copy=options.staged).contiguous()


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
    if _has_gpu_nodes(ep):
        if staged or mode == "latency":
            name = "staged=True" if staged else "mode='latency'"
            raise Unsupported(f"{name} between nodes", _OF_NODES, "mode='throughput' or 'auto', staged=False")
        return False
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


def check_combine(
    ep: Shape, y: Any, handle: Any, side: Any, bias: Any, out: Any, options: CombineOptions
) -> tuple[Call, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The call as native codes; expert_output, side, bias and out as the engine reads them."""
    y, side, bias = plain(y, "expert_output"), plain(side, "side"), plain(bias, "bias")
    out = plain_out(out)
    call = _combine_call(ep, _form(y, options.wire), _of_handle(handle), options)
    lead = list(handle.rows_shape)
    if not isinstance(y, Tensor):
        raise InvalidArgument(f"expert_output is {shown(y)}; a tensor {[*lead, ep.hidden]} is expected")
    if list(y.shape) != [*lead, ep.hidden]:
        raise InvalidArgument(
            f"expert_output has shape {list(y.shape)}; allowed is that of the handle's rows, {[*lead, ep.hidden]}"
        )
    if y.dtype not in DTYPE_CODES:
        raise InvalidArgument(f"expert_output has dtype {y.dtype}; allowed are {', '.join(map(str, DTYPE_CODES))}")
    if ep.hidden * y.element_size() % ROW_MULTIPLE_BYTES:
        raise InvalidArgument(
            f"expert_output has rows of {ep.hidden * y.element_size()} bytes; allowed are multiples of "
            f"{ROW_MULTIPLE_BYTES}"
        )
    check_place("expert_output", y, ep)
    if options.side_lanes == "all":
        call = replace(call, adds_side=True)
        if side is None or call.layout != LAYOUTS.index("rank_major"):
            given = "no side" if side is None else f"layout {LAYOUTS[call.layout]!r}"
            raise InvalidArgument(f"side_lanes is 'all' with {given}; allowed beside side values of 'rank_major' alone")
        if is_traced(y, side, bias, handle.tie):
            raise Unsupported("side_lanes='all' in compiled code", "a traced call", "a call outside")
    if side is not None:
        check_side(ep, side, call, lead)
    if bias is not None:
        check_like("bias", bias, ([handle.num_tokens, ep.hidden], [ep.hidden]), (y.dtype, torch.float32), ep)
    if out is not None:
        check_like("out", out, ([handle.num_tokens, ep.hidden],), (y.dtype,), ep)
        check_out(y, handle, bias, out)
        if not is_traced(y, side, bias, out):
            check_apart(out, expert_output=y, side=side, bias=bias)
    return call, y, side, bias, out


def _check_options(ep: Shape, options: CallOptions, not_these: tuple[str, ...] = ()) -> None:
    """Each by itself, and what both calls must satisfy together."""
    for name, accepts in OPTIONS[type(options)].items():
        value = getattr(options, name)
        if name not in not_these and name != "window" and not accepts.test(value):
            raise InvalidArgument(f"{name} is {value!r}; allowed: {accepts.allowed}")
    _check_num_sms(ep.most_num_sms, ep.num_windows, options.num_sms)
    if options.staged and options.async_op:
        raise InvalidArgument("async_op is True with staged=True; allowed is one of the two")
    window = options.window
    if not (isinstance(window, int) and not isinstance(window, bool) and 0 <= window < ep.num_windows):
        raise InvalidArgument(f"window is {window!r}; allowed are 0 to num_windows - 1 = {ep.num_windows - 1}")


def _has_gpu_nodes(ep: Shape) -> bool:
    return ep.engine == "nvlink" and ep.calls.has_nodes


def _check_num_windows(rank_sms: int, num_windows: int, *, has_nodes: bool) -> None:
    """On GPUs."""
    most = rank_sms // (1 + has_nodes)
    needs = "two SMs, one for the network between nodes" if has_nodes else "an SM"
    if num_windows <= most:
        return
    if most == 0:
        raise Unsupported("node_ranks", f"{rank_sms} SM for a rank", "two: fewer ranks on a GPU")
    raise InvalidArgument(
        f"num_windows is {num_windows}; allowed are 1 to {most} here: a call of each may run at once and needs "
        f"{needs}, and ranks that share a GPU share its SMs"
    )


def _check_num_sms(most: int, num_windows: int, num_sms: int | None) -> None:
    if num_sms is None or most == 0 or num_sms <= most:
        return
    raise InvalidArgument(
        f"num_sms is {num_sms} with num_windows = {num_windows}; allowed are 1 to {most} "
        "here: a call of each window may run at once, and ranks that share a GPU share its SMs"
    )


def check_staged(is_traced: bool, is_tracked: bool) -> None:
    """Of a staged call: nothing may come between the results and those who read them before they are there."""
    if is_tracked:
        raise Unsupported("staged=True with gradients", "inputs that require grad", "torch.no_grad(), or staged=False")
    if is_traced:
        raise Unsupported("staged=True in compiled code", "a traced call", "staged=False, or a call outside")


def check_absent(options: DispatchOptions) -> None:
    """Of a dispatch in compiled code, which would keep the membership that was there when it was compiled."""
    if options.absent != "drop":
        raise Unsupported(f"absent={options.absent!r} in compiled code", "a traced call", "a call outside")


def check_dispatched(dispatched: Any) -> None:
    """The argument of empty_output."""
    if not isinstance(dispatched, Dispatched):
        raise InvalidArgument(f"dispatched is {shown(dispatched)}; the result of a dispatch is expected")
