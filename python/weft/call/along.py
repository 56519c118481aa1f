"""Floats of the tokens' owners beside the rows of a dispatch that repeats a routing: in the same call, as scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.call.check_tensors import check_like
from weft.call.options import DispatchOptions
from weft.call.shape import Shape
from weft.call.tensors import is_traced, plain
from weft.errors import InvalidArgument, Unsupported
from weft.handle import Handle
from weft.quantized import Quantized

if TYPE_CHECKING:
    from weft.call.eager import Eager
    from weft.handle import Dispatched

__all__ = ["dispatch"]

_WORD = 4


def dispatch(eager: Eager, shape: Shape, x: Any, handle: Any, side: Any, values: tuple[Any, ...]) -> Dispatched:
    """`Eager.dispatch` of x and side [T, K] along a handle; `Dispatched.words` has what arrived."""
    data, scales, side = _checked(shape, x, handle, side, DispatchOptions(*values))
    words = [each.view(torch.int32) for each in (scales, side) if each is not None]
    sent = Quantized(data.detach().view(torch.uint8), torch.cat(words, dim=1))
    r = eager.dispatch(sent, None, None, handle, values)
    assert isinstance(r.x, Quantized)  # noqa: S101  # for mypy
    rows, got = r.x.data, r.x.scales
    assert got is not None  # noqa: S101  # for mypy
    num_scales = got.shape[-1] - side.shape[1]
    received: Any = rows.view(data.dtype)
    if isinstance(x, Quantized):
        mine = None if scales is None else got[..., :num_scales].view(scales.dtype)
        received = Quantized(received, mine)
    r.__dict__.update(x=received, words=got[..., num_scales:])
    return r


def _checked(
    shape: Shape, x: Any, handle: Any, side: Any, options: DispatchOptions
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Rows, their scales, and side in fp32."""
    if not isinstance(handle, Handle):
        raise InvalidArgument(
            "side is given without a handle, or beside topk_idx; allowed beside a handle: a first dispatch has weights"
        )
    if options.quantize is not None or options.scale_layout != "row_major":
        raise InvalidArgument("side with quantize or column-major scales; allowed are rows as they are given")
    num_tokens = handle.num_tokens
    side = plain(side, "side")
    if not isinstance(side, Tensor):
        raise InvalidArgument(f"side is {side!r}; a tensor {[num_tokens, shape.top_k]} is expected")
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    check_like("side", side, ([num_tokens, shape.top_k],), kinds, shape)
    data, scales = (x.data, x.scales) if isinstance(x, Quantized) else (x, None)
    data, scales = plain(data, "x"), plain(scales, "x.scales")
    if not isinstance(data, Tensor) or data.dim() != 2 or len(data) != num_tokens:
        given = list(data.shape) if isinstance(data, Tensor) else repr(type(data))
        raise InvalidArgument(f"x is {given}; allowed beside side is [{num_tokens}, ...], the tokens of the handle")
    if scales is not None and (scales.dim() != 2 or len(scales) != num_tokens or scales.element_size() != _WORD):
        raise InvalidArgument(f"x.scales is {list(scales.shape)} {scales.dtype}; allowed beside side are 4 bytes each")
    if is_traced(data, scales, side, handle.tie):
        raise Unsupported("side= of dispatch in compiled code", "a traced call", "a call outside")
    if torch.is_grad_enabled() and any(each.requires_grad for each in (data, side)):
        raise Unsupported("side= of dispatch with gradients", "inputs that require grad", "torch.no_grad()")
    return data.contiguous(), None if scales is None else scales.contiguous(), side.detach().float().contiguous()
