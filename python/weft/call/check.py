"""Checks of what users pass to calls of ExpertParallel, before anything is sent. Pure functions; torch.compile traces
them. The options are checked in check_options.py, tensors in check_tensors.py, the constructor in check_constructor.py.

Every refusal names the argument, the value given and what is allowed.
"""

# check: allow-in-file function-size: one parameter for each argument of the public call

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.call.check_options import combine_call, first_call, form_of, repeated_call
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
from weft.call.options import MAX_TOKENS_PER_RANK, CombineOptions, DispatchOptions
from weft.call.scales import word_dtype
from weft.call.shape import Shape
from weft.call.spec import DTYPE_CODES, Call
from weft.call.tensors import is_traced, plain
from weft.errors import InvalidArgument, Unsupported
from weft.handle import Dispatched, Handle
from weft.limits import LAYOUTS, ROW_MULTIPLE_BYTES
from weft.quantized import Quantized

__all__ = [
    "check_absent",
    "check_combine",
    "check_dispatch",
    "check_dispatched",
    "check_owner_weights",
    "check_received_weights",
    "check_staged",
]


def check_dispatch(
    ep: Shape, x: Any, topk_idx: Any, topk_weights: Any, handle: Any, options: DispatchOptions
) -> tuple[Call, Any, Tensor, Tensor | None, Any, Any]:
    """The call as native codes; x, its rows and their scales, topk_idx and topk_weights as the engine reads them."""
    x, topk_idx, topk_weights = _plain_rows(x), plain(topk_idx, "topk_idx"), plain(topk_weights, "topk_weights")
    form = "bytes" if isinstance(x, Quantized) else form_of(x, options.quantize)
    if handle is not None:
        call = repeated_call(ep, form, _of_handle(handle), options)
        if topk_idx is not None or topk_weights is not None:
            raise InvalidArgument(
                "topk_idx or topk_weights is given beside handle; allowed is one of the two: a handle has its routing"
            )
        num_tokens, most = handle.num_tokens, handle.num_tokens
    else:
        call = first_call(ep, form, options)
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


def _column_dtype(x: Tensor | Quantized, quantize: str | None, scales: Tensor | None) -> torch.dtype:
    """Of the column-major scales that a dispatch gives."""
    if quantize is not None:
        return torch.int32 if quantize == "fp8_ue8m0" else torch.float32
    if scales is None or isinstance(x, Tensor) or x.scales is None:
        raise InvalidArgument(
            "scale_layout is 'column_major' with rows that have no scales; allowed is 'row_major', or quantize= or a "
            "weft.Quantized with scales"
        )
    return word_dtype(x.scales.dtype)


def check_combine(
    ep: Shape, y: Any, handle: Any, side: Any, bias: Any, out: Any, options: CombineOptions
) -> tuple[Call, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The call as native codes; expert_output, side, bias and out as the engine reads them."""
    y, side, bias = plain(y, "expert_output"), plain(side, "side"), plain(bias, "bias")
    out = plain_out(out)
    call = combine_call(ep, form_of(y, options.wire), _of_handle(handle), options)
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


def check_received_weights(ep: Shape) -> None:
    """Of a combine by pick that is given no weights."""
    if ep.engine != "cpu":
        raise Unsupported(
            "order='pick' with the weights received", f"the {ep.engine} engine", "weights=, or weighted=False"
        )


# One kernel: of floats and ids above -1, the floats; else 0.
_zero_if_absent = torch.ops.aten.threshold_backward.default


def check_owner_weights(
    ep: Shape, others: tuple[Any, ...], handle: Any, given: tuple[Any, Any], options: CombineOptions
) -> tuple[Tensor, Tensor | None]:
    """Weights that combine is given by the tokens' owner, and ids or None, as the engine reads them. `others`: its
    other tensors."""
    weights, ids = given
    if weights is None:
        raise InvalidArgument("topk_idx is given without weights; allowed beside weights= alone")
    if options.order != "pick":
        raise InvalidArgument(f"weights are given with order={options.order!r}; allowed with order='pick' alone")
    if not options.weighted:
        raise InvalidArgument("weighted is False and weights are given; allowed is one of them")
    _of_handle(handle)
    weights, ids, shape = plain(weights, "weights"), plain(ids, "topk_idx"), [handle.num_tokens, ep.top_k]
    for name, each in (("weights", weights), ("topk_idx", ids)):
        if not isinstance(each, Tensor) and not (each is None and name == "topk_idx"):
            raise InvalidArgument(f"{name} is {shown(each)}; a tensor {shape} is expected")
    check_like("weights", weights, (shape,), (torch.float32, torch.bfloat16, torch.float16), ep)
    if ids is not None:
        check_like("topk_idx", ids, (shape,), (torch.int64, torch.int32), ep)
    tensors = [each for each in (*others, weights, ids, handle.tie) if isinstance(each, Tensor)]
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        raise Unsupported("weights= of combine with gradients", "inputs that require grad", "weights given to dispatch")
    if is_traced(*tensors):
        raise Unsupported("weights= of combine in compiled code", "a traced call", "a call outside")
    place = torch.device("cpu") if ep.engine == "cpu" else weights.device
    # Of a staged call the half that receives reads them, and the caller may overwrite what it gave before.
    is_copied = options.staged and ids is None
    weights = weights.detach().to(device=place, dtype=torch.float32, copy=is_copied).contiguous()
    if ids is None:
        return weights, None
    ids = ids.to(device=place).contiguous()
    return (_zero_if_absent(weights, ids, -1), None) if options.staged else (weights, ids)


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
