"""Rows on their way: x in the forms that DeepEP takes, and what travels beside the rows or along a handle."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from weft.deep_ep.utils.math import as_bytes
from weft.errors import InvalidArgument
from weft.limits import max_row_bytes
from weft.quantized import Quantized

if TYPE_CHECKING:
    from weft.expert_parallel import ExpertParallel
    from weft.handle import Dispatched, Handle

__all__ = [
    "Form",
    "Sent",
    "along",
    "are_counts",
    "bare",
    "check_counts",
    "check_first",
    "check_picks",
    "check_rows",
    "check_weights",
    "form_of",
    "looks_like_picks",
    "send",
    "stripped",
    "sum_of_lanes",
    "summed",
]

_PLAIN = (torch.bfloat16, torch.float16, torch.float32)
_IDS = (torch.int64, torch.int32)
_ROW_MULTIPLE = 16


class Form(NamedTuple):
    """x taken apart: `data` [T, ...], `scales` of 4 bytes [T, S] or None; `hidden`, `dtype` of the window it takes."""

    data: Tensor
    scales: Tensor | None
    hidden: int
    dtype: torch.dtype
    is_plain: bool = False  # whether Weft knows it as rows of floats; else they are bytes
    parts: tuple[tuple[int, torch.dtype], ...] = ()  # of three parts: columns and dtype of the last two
    rest: Tensor | None = None  # the third; `send` packs it beside `scales`, on the stream of its work

    @property
    def num_columns(self) -> int:
        """H as the caller sees it: of the rows that come back, too."""
        return self.hidden if self.parts else self.data.shape[1]


class Sent(NamedTuple):
    """What arrived: `x` in the form that was sent, the words beside each row; None: x went along a handle in pieces."""

    x: Any
    side: Tensor | None
    dispatched: Dispatched | None


def bare(r: Dispatched) -> Dispatched:
    """The result without its rows, for a handle to keep: it would keep their memory."""
    return type(r)(_no_rows(), r.handle, r.overflow, r.event, r.calls)


def stripped(r: Dispatched) -> Dispatched:
    """The same result without its rows, where nobody else has it."""
    r.__dict__["x"] = _no_rows()
    return r


@functools.cache
def _no_rows() -> Tensor:
    with torch.inference_mode(False):  # of whoever asks first
        return torch.empty(0, dtype=torch.uint8, device="cpu")


def form_of(x: Any, name: str = "x") -> Form:
    """A tensor [T, H], (data [T, H] of one byte, scales [T, S] of four), or three parts of 4 bytes each.

    Raises:
        InvalidArgument: it is neither, or data is not contiguous.
    """
    if type(x) is Tensor and x.dtype in _PLAIN and x.dim() == 2 and x.is_contiguous():
        return Form(x, None, x.shape[1], x.dtype, True)
    if isinstance(x, (tuple, list)) and len(x) == 3:
        return _packed_form(x, name)
    is_pair = isinstance(x, (tuple, list)) and len(x) == 2
    data, scales = x if is_pair else (x, None)
    if not isinstance(data, Tensor) or data.dim() != 2 or not data.is_contiguous():
        raise InvalidArgument(
            f"{name} is {_said(data)}; allowed is a contiguous [T, H] tensor, or (data of one byte [T, H], scales)"
        )
    if scales is None:
        if data.dtype in _PLAIN:
            return Form(data, None, data.shape[1], data.dtype, True)
        row_bytes = data.shape[1] * data.element_size()
        return Form(data, None, -(-row_bytes // 16) * 8, torch.bfloat16)
    if data.element_size() != 1:
        raise InvalidArgument(f"{name}[0] is {_said(data)}; allowed beside scales are data of one byte, as FP8")
    if not isinstance(scales, Tensor) or scales.dim() != 2 or len(scales) != len(data) or scales.element_size() != 4:
        raise InvalidArgument(f"{name}[1] is {_said(scales)}; allowed are [T, S] fp32 or int32 scales")
    return Form(data, scales, data.shape[1], torch.bfloat16)


def _packed_form(x: Any, name: str) -> Form:
    """NVFP4 of hybrid-ep: int32 [T, H / 8] of eight values, int32 [T, H / 64] of four scales, fp32 [T, *]."""
    for number, each in enumerate(x):
        if not isinstance(each, Tensor) or each.dim() != 2 or len(each) != len(x[0]) or each.element_size() != 4:
            raise InvalidArgument(f"{name}[{number}] is {_said(each)}; allowed are [T, ...] of 4 bytes in three parts")
    parts = tuple((each.shape[1], each.dtype) for each in x[1:])
    return Form(x[0], x[1], 8 * x[0].shape[1], torch.bfloat16, False, parts, x[2])


def _packed(form: Form) -> Form:
    if form.scales is None or form.rest is None:
        return form
    words = torch.cat([each.contiguous().view(torch.int32) for each in (form.scales, form.rest)], dim=1)
    return form._replace(data=form.data.contiguous(), scales=words, rest=None)


def _said(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(type(value))
    return f"{list(value.shape)} {value.dtype}{'' if value.is_contiguous() else ', not contiguous'}"


def check_first(
    form: Form, topk_idx: Any, topk_weights: Any, device: torch.device, name: str = "x", *, picks: bool = True
) -> None:
    """Of a first dispatch, before the first word goes to a peer: a rank that is refused here may call again.

    Raises:
        InvalidArgument: rows, ids or weights are not what a window takes.
    """
    for each in (form.data, form.scales, form.rest):
        if each is not None and each.device != device:
            raise InvalidArgument(f"{name} is on {each.device}; allowed is the device of the buffer, {device}")
    row_bytes = form.data.shape[1] * form.data.element_size()
    if row_bytes == 0 or row_bytes % _ROW_MULTIPLE:
        raise InvalidArgument(f"{name} has rows of {row_bytes} bytes; allowed are multiples of {_ROW_MULTIPLE}")
    num_scales = sum(each.shape[1] for each in (form.scales, form.rest) if each is not None)
    if row_bytes + 4 * num_scales > max_row_bytes(form.hidden):
        raise InvalidArgument(
            f"{name} has rows of {row_bytes} bytes with {num_scales} scales; allowed are {max_row_bytes(form.hidden)} "
            "bytes together"
        )
    if picks:
        check_picks(topk_idx, topk_weights, form.data.shape[0], device)


def looks_like_picks(topk_idx: Any) -> bool:
    """Whether it says by itself how many picks a token has: `check_picks` tells what else is wrong with it, and the
    object does, which is asked first where it is known."""
    return type(topk_idx) is Tensor and topk_idx.dim() == 2 and topk_idx.dtype in _IDS


def check_picks(topk_idx: Any, topk_weights: Any, num_tokens: int, device: torch.device) -> None:
    """Ids [T, K], and weights of their shape or None.

    Raises:
        InvalidArgument: they are not.
    """
    is_right = isinstance(topk_idx, Tensor) and topk_idx.dim() == 2 and topk_idx.shape[0] == num_tokens
    if not is_right or topk_idx.dtype not in _IDS or topk_idx.device != device:
        raise InvalidArgument(
            f"topk_idx is {_said(topk_idx)}; allowed is [{num_tokens}, K] int64 or int32 on {device}, T as x has it"
        )
    if topk_weights is not None:
        check_weights("topk_weights", topk_weights, topk_idx.shape, device)


def check_weights(name: str, weights: Any, shape: tuple[int, ...], device: torch.device) -> None:
    """Floats of a shape.

    Raises:
        InvalidArgument: they are not.
    """
    is_right = isinstance(weights, Tensor) and weights.shape == shape
    if not is_right or weights.dtype not in _PLAIN or weights.device != device:
        raise InvalidArgument(f"{name} is {_said(weights)}; allowed is {list(shape)} fp32, bf16 or fp16 on {device}")


def check_rows(name: str, x: Any, widths: set[int]) -> None:
    """Rows for a combine, as wide as those that came along the handle: the pieces in which others travel are as many as
    their width needs, and ranks that differ in it would wait for each other.

    Raises:
        InvalidArgument: they are not.
    """
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] not in widths:
        known = " or ".join(map(str, sorted(widths)))
        raise InvalidArgument(f"{name} is {_said(x)}; allowed is [N, {known}], as the rows dispatched with this handle")


def check_counts(name: str, counts: Any, num_experts: int, device: torch.device) -> None:
    """Counters of the local experts that a call adds to, or None; `num_experts` is E / R.

    Raises:
        InvalidArgument: they are not.
    """
    if not (counts is None or are_counts(counts, num_experts, device)):
        raise InvalidArgument(f"{name} is {_said(counts)}; allowed is [{num_experts}] int32 or int64 on {device}")


def are_counts(counts: Any, num_experts: int, device: torch.device) -> bool:
    """See check_counts."""
    is_right = isinstance(counts, Tensor) and counts.shape == (num_experts,) and counts.device == device
    return is_right and counts.dtype in _IDS


def send(
    ep: ExpertParallel, form: Form, *, side: Tensor | None = None, handle: Handle | None = None, **options: Any
) -> Sent:
    """`ep.dispatch` of x and, beside each row, `side` (int32 [T, P]): in the same call where a row has the room.

    With a `handle` x may be wider than the window's rows: it goes in pieces.
    """
    if side is None and form.is_plain and form.hidden == ep.hidden:
        plain = ep.dispatch(form.data, handle=handle, **options)
        return Sent(plain.x, None, plain)
    form = _packed(form)
    data = as_bytes(form.data)
    scales = None if form.scales is None else form.scales.contiguous().view(torch.int32)
    num_scales = 0 if scales is None else scales.shape[1]
    room = max_row_bytes(ep.hidden) - data.shape[1] - 4 * num_scales
    has_side = side is not None and 4 * side.shape[1] <= room
    r: Dispatched | None
    later = {name: options[name] for name in ("num_sms", "window", "deadline_s") if name in options}
    if handle is not None and room < 0:
        rows = along(ep, handle, data, **later)
        got = None if scales is None else along(ep, handle, as_bytes(scales), **later).view(torch.int32)
        r = None
    else:
        words = [each for each in (scales, side if has_side else None) if each is not None]
        beside = None if not words else words[0] if len(words) == 1 else torch.cat(words, dim=1)
        r = ep.dispatch(Quantized(data, beside), handle=handle, **_of_rows(options, beside))
        rows, got = _taken(r.x)
        handle = r.handle if handle is None else handle
    arrived = None
    if side is not None and has_side and r is not None and got is not None:
        arrived, got = got[..., num_scales:], got[..., :num_scales]
    elif side is not None:
        arrived = along(ep, handle, as_bytes(side), **later).view(torch.int32)
    value: Any = rows if rows.dtype == form.data.dtype else rows.view(form.data.dtype)
    if form.scales is not None and got is not None:
        is_by_row = options.get("scale_layout", "row_major") == "row_major"
        value = (value, (got.contiguous() if is_by_row else got).view(form.scales.dtype))
    if form.parts:
        split = value[1].split([width for width, _ in form.parts], dim=1)
        value = (value[0], *(each.contiguous().view(kind) for each, (_, kind) in zip(split, form.parts, strict=True)))
    return Sent(value, arrived, r)


def _of_rows(options: dict[str, Any], beside: Tensor | None) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "scale_layout" or beside is not None}


def _taken(x: Any) -> tuple[Tensor, Tensor | None]:
    return x.data, x.scales


def along(ep: ExpertParallel, handle: Handle | None, data: Tensor, **options: Any) -> Tensor:
    """uint8 [T, B] -> [rows..., B] along the routing of a handle, any B; in pieces where a row may not be so wide."""
    width = max_row_bytes(ep.hidden)
    num_bytes = data.shape[1]
    if num_bytes % 16:
        data = torch.nn.functional.pad(data, (0, -num_bytes % 16))
    pieces = []
    for start in range(0, data.shape[1], width):
        piece = Quantized(data[:, start : start + width].contiguous())
        pieces.append(_taken(ep.dispatch(piece, handle=handle, **options).x)[0])
    if not pieces:
        return data.new_empty((*handle.rows_shape, 0)) if handle is not None else data
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)
    return whole if whole.shape[-1] == num_bytes else whole[..., :num_bytes].contiguous()


def summed(ep: ExpertParallel, handle: Handle, x: Tensor, **options: Any) -> Any:
    """`ep.combine(x, weighted=False)` of rows of any width; with side= (y, side)."""
    width = ep.hidden
    if x.shape[-1] == width:
        return ep.combine(x, handle, weighted=False, **options)
    bias, side = options.pop("bias", None), options.pop("side", None)
    lanes = options.pop("side_lanes", "own")
    num_columns = x.shape[-1]
    pieces: list[Tensor] = []
    values = None
    for start in range(0, max(1, num_columns), width):
        part = x[..., start : start + width]
        missing = width - part.shape[-1]
        part = torch.nn.functional.pad(part, (0, missing)).contiguous()
        more = None if bias is None else torch.nn.functional.pad(bias[..., start : start + width], (0, missing))
        asked_side = side if start == 0 else None
        found = ep.combine(
            part, handle, weighted=False, bias=None if more is None else more.contiguous(), side=asked_side,
            side_lanes="own" if asked_side is None else lanes, **options,
        )  # fmt: skip
        if asked_side is not None:
            found, values = found
        pieces.append(found)
    y = (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1))[:, :num_columns].contiguous()
    return y if side is None else (y, values)


def sum_of_lanes(ep: ExpertParallel, handle: Handle, values: Tensor, **options: Any) -> Tensor:
    """fp32 [N, K] of a rank_major handle -> [T, K]: every lane summed over all ranks that hold the token."""
    found: Tensor = summed(ep, handle, values.to(torch.float32), **options)
    return found
