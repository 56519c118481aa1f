"""Checks of the tensors that users pass to ExpertParallel, before anything is sent. Pure functions; torch.compile
traces them. As in weft/call/check.py every refusal names the argument, the value given and what is allowed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.call.shape import Shape
from weft.call.spec import DTYPE_CODES, RANK_MAJOR, Call
from weft.call.tensors import plain
from weft.errors import InvalidArgument, Unsupported
from weft.handle import Handle
from weft.limits import FP8_HIDDEN_MULTIPLE, ROW_MULTIPLE_BYTES, max_row_bytes
from weft.quantized import Quantized

__all__ = [
    "as_bytes",
    "check_apart",
    "check_like",
    "check_out",
    "check_place",
    "check_side",
    "check_topk",
    "check_weights_dtype",
    "check_x",
    "is_read_by_column",
    "plain_out",
    "shown",
]

_ID_DTYPES = (torch.int64, torch.int32)
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STRIDED = torch.strided


def check_x(ep: Shape, x: Any, quantize: Any, is_repeated: bool) -> tuple[Tensor, Tensor | None]:
    """Data and scales of x as the engine reads them."""
    if isinstance(x, Quantized):
        return _check_quantized(ep, x, quantize)
    if not isinstance(x, Tensor):
        raise InvalidArgument(f"x is a {type(x).__name__}; a tensor [T, {ep.hidden}] or a weft.Quantized is expected")
    shape = x.shape
    if len(shape) != 2 or shape[1] != ep.hidden:
        raise InvalidArgument(f"x has shape {list(x.shape)}; allowed is [T, {ep.hidden}]")
    if x.dtype != ep.dtype and not (is_repeated and x.dtype in DTYPE_CODES):
        raise InvalidArgument(f"x has dtype {x.dtype}; allowed is that of this ExpertParallel, {ep.dtype}")
    check_place("x", x, ep)
    if quantize is not None:
        if ep.hidden % FP8_HIDDEN_MULTIPLE:
            raise Unsupported(
                f"quantize={quantize!r} with hidden={ep.hidden}",
                f"hidden {ep.hidden}",
                f"a multiple of {FP8_HIDDEN_MULTIPLE}",
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise Unsupported(
                f"quantize={quantize!r} of an x that requires grad",
                "no gradient of FP8 rows",
                "x.detach(), or quantize=None",
            )
    return x, None


def _check_quantized(ep: Shape, x: Quantized, quantize: Any) -> tuple[Tensor, Tensor | None]:
    data, scales = x.data, x.scales
    if quantize is not None:
        raise InvalidArgument(f"quantize is {quantize!r} with an x that is quantised already; allowed is None")
    if not isinstance(data, Tensor) or data.dim() != 2 or data.element_size() != 1:
        raise InvalidArgument(f"x.data is {shown(data)}; allowed is a tensor [T, B] of a dtype of one byte")
    num_tokens, row_bytes = data.shape
    if scales is not None and (not isinstance(scales, Tensor) or scales.dim() != 2 or scales.shape[0] != num_tokens):
        raise InvalidArgument(f"x.scales is {shown(scales)}; allowed is None or a tensor [{num_tokens}, S]")
    if row_bytes == 0 or row_bytes % ROW_MULTIPLE_BYTES:
        raise InvalidArgument(f"x.data has rows of {row_bytes} bytes; allowed are multiples of {ROW_MULTIPLE_BYTES}")
    if scales is not None:
        row_bytes += scales.shape[1] * scales.element_size()
    if row_bytes > max_row_bytes(ep.hidden):
        raise InvalidArgument(
            f"x has rows of {row_bytes} bytes, scales included; allowed are 4 * hidden = {max_row_bytes(ep.hidden)}"
        )
    check_place("x.data", data, ep)
    if scales is not None:
        check_place("x.scales", scales, ep)
        scales = None if scales.shape[1] == 0 else scales if is_read_by_column(ep, scales) else as_bytes(scales)
    return as_bytes(data), scales


def is_read_by_column(ep: Shape, scales: Tensor) -> bool:
    """Whether column-major scales may reach the engine as they are."""
    if type(scales) is not Tensor or scales.is_contiguous() or scales.requires_grad or torch.compiler.is_compiling():
        return False
    num_tokens = scales.shape[0]
    lies_by_column = scales.stride(0) == 1 and scales.stride(1) >= num_tokens > 0
    return ep.engine == "nvlink" and scales.element_size() == 4 and lies_by_column


def as_bytes(rows: Tensor) -> Tensor:
    """[T, bytes of a row]; column-major ones are copied. Without rows the strides may be any.

    What engines can read where it lies keeps its dtype: they ask for no more than its size, and a view takes time.
    """
    is_plain = type(rows) is Tensor and not rows.requires_grad and not torch.compiler.is_compiling()
    if is_plain and rows.is_contiguous() and rows.data_ptr() % ROW_MULTIPLE_BYTES == 0 and rows.stride(1) == 1:
        return rows
    if rows.is_contiguous() and rows.stride(1) == 1:
        return rows if rows.dtype == torch.uint8 else rows.view(torch.uint8)
    if rows.shape[0] == 0:
        return rows.new_empty((0, rows.shape[1] * rows.element_size()), dtype=torch.uint8)
    flat = rows.contiguous().view(-1)  # the stride of a single column may be any
    return flat.view(torch.uint8).view(rows.shape[0], rows.shape[1] * rows.element_size())


def check_topk(ep: Shape, topk_idx: Any, topk_weights: Any, data: Tensor) -> Tensor | None:
    """The weights in fp32."""
    # No text is made before it is needed: torch.compile would take its numbers for constants.
    if not isinstance(topk_idx, Tensor):
        raise InvalidArgument(f"topk_idx is {shown(topk_idx)}; a tensor [T, {ep.top_k}], or a handle, is expected")
    shape = topk_idx.shape
    if len(shape) != 2 or shape[0] != data.shape[0] or shape[1] != ep.top_k:
        allowed = f"[{data.shape[0]}, {ep.top_k}]"
        raise InvalidArgument(f"topk_idx has shape {list(topk_idx.shape)}; allowed is [T, top_k] = {allowed}")
    if topk_idx.dtype not in _ID_DTYPES:
        raise InvalidArgument(f"topk_idx has dtype {topk_idx.dtype}; allowed are torch.int32 and torch.int64")
    check_place("topk_idx", topk_idx, ep)
    if topk_weights is None:
        return None
    if not isinstance(topk_weights, Tensor):
        raise InvalidArgument(f"topk_weights is {shown(topk_weights)}; a tensor [T, {ep.top_k}] or None is expected")
    if topk_weights.shape != shape:
        allowed = str(list(topk_idx.shape))
        raise InvalidArgument(
            f"topk_weights has shape {list(topk_weights.shape)}; allowed is that of topk_idx, {allowed}"
        )
    check_weights_dtype(topk_weights)
    check_place("topk_weights", topk_weights, ep)
    return topk_weights.float()  # exact


def check_weights_dtype(topk_weights: Tensor) -> None:
    """Of a dispatch: what becomes fp32 without rounding."""
    if topk_weights.dtype not in _WEIGHT_DTYPES:
        allowed = "torch.float32, torch.bfloat16 or torch.float16"
        raise InvalidArgument(f"topk_weights has dtype {topk_weights.dtype}; allowed is {allowed}")


def plain_out(out: Any) -> Any:
    """As `plain`."""
    if isinstance(out, Tensor) and not torch.compiler.is_compiling() and out.is_neg():
        raise InvalidArgument("out is a negative view; allowed is a tensor that can be written as it lies")
    return plain(out, "out")


def check_side(ep: Shape, side: Any, call: Call, lead: list[int]) -> None:
    """`lead`: shape of the rows without their last dimension."""
    shapes = (lead, [*lead, ep.top_k]) if call.layout == RANK_MAJOR else (lead,)
    check_like("side", side, shapes, (torch.float32,), ep)
    if side.requires_grad and torch.is_grad_enabled():
        raise Unsupported("gradients of side", "a side that requires grad", "side.detach()")


def check_out(y: Tensor, handle: Handle, bias: Tensor | None, out: Tensor) -> None:
    """Strides, and whether gradients are tracked."""
    if not out.is_contiguous():
        raise InvalidArgument(f"out has strides {list(out.stride())}; allowed is a contiguous tensor")
    needs_grad = y.requires_grad or handle.tie.requires_grad or out.requires_grad
    if torch.is_grad_enabled() and (needs_grad or (bias is not None and bias.requires_grad)):
        raise InvalidArgument("out is given while gradients are tracked; allowed under torch.no_grad() only")


def check_apart(out: Tensor, **inputs: Tensor | None) -> None:
    """Peers read the inputs while `out` is written. Traced calls fill a tensor of their own."""
    out_begin = out.data_ptr()
    out_end = out_begin + out.nbytes
    for name, read in inputs.items():
        if read is None:
            continue
        begin = read.data_ptr()
        end = begin + read.nbytes
        if begin < out_end and out_begin < end and read.nbytes and out.nbytes:
            raise InvalidArgument(
                f"out lies at {out_begin:#x} to {out_end:#x} and overlaps {name} at {begin:#x} to {end:#x}; allowed is "
                f"memory that {name} does not use"
            )


def check_like(
    name: str, tensor: Any, shapes: tuple[list[int], ...], dtypes: tuple[torch.dtype, ...], ep: Shape
) -> None:
    """One of these shapes and dtypes."""
    if not isinstance(tensor, Tensor):
        raise InvalidArgument(f"{name} is {shown(tensor)}; a tensor or None is expected")
    if list(tensor.shape) not in shapes:
        raise InvalidArgument(f"{name} has shape {list(tensor.shape)}; allowed: {' or '.join(map(str, shapes))}")
    if tensor.dtype not in dtypes:
        raise InvalidArgument(
            f"{name} has dtype {tensor.dtype}; allowed: {' or '.join(map(str, dict.fromkeys(dtypes)))}"
        )
    check_place(name, tensor, ep)


def check_place(name: str, tensor: Tensor, ep: Shape) -> None:
    """Dense, and on the device of the communicator."""
    if tensor.device == ep.device and tensor.layout is _STRIDED:
        return
    if tensor.layout != torch.strided:
        raise InvalidArgument(f"{name} has layout {tensor.layout}; allowed is a dense tensor, torch.strided")
    if tensor.device != ep.device:
        raise InvalidArgument(f"{name} is on {tensor.device}; allowed is the device of the communicator, {ep.device}")


def shown(value: Any) -> str:
    """Of a refusal: what was given."""
    return f"a tensor {list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)
