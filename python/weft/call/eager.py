"""Eager calls of an ExpertParallel: each goes along a plan, which its arguments and options find.

The key has all that the checks of weft/call/check.py look at: types, shapes, strides, places, whether gradients are
tracked. So a plan that is found needs no check; what has no plan yet is checked, and refused or learnt. What may differ
between calls of one key, values, addresses, the number of tokens, is looked at in every call (weft/call/runner.py).

To make a key takes longer than a launch, so calls of plain tensors, which are most, are first looked for among the last
ones that look the same to the native module (src/bindings/known_calls.cc). It takes for known only what has such a key.
"""

# check: allow-in-file function-size: the arguments of a call pass through

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft import _load, autograd
from weft.call import check, traced
from weft.call.check_tensors import as_bytes, check_apart, is_read_by_column
from weft.call.event import Event
from weft.call.half import Staged
from weft.call.maps import checked_picks
from weft.call.options import VALUE_TYPES, CombineOptions, DispatchOptions, options_of
from weft.call.plan import Plan
from weft.call.runner import Runner
from weft.call.shape import Shape
from weft.call.spec import QUANTIZE_CODES, RANK_MAJOR
from weft.call.tensors import is_traced, plain
from weft.group.turns import Process
from weft.handle import Dispatched, Handle
from weft.quantized import Quantized
from weft.routing import traces

__all__ = ["Eager"]

_PLAIN = (Tensor, torch.nn.Parameter)
_num_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_EXCHANGE_API = "__dlpack_c_exchange_api__"  # of torch 2.10 and later: without it no call is known
_WORKS = ("_first", "_first_small", "_again", "_sum")  # methods of a Runner that the native module does without
_UNASKED = object()
_OF_FP8 = {1: torch.float32, 2: torch.float8_e8m0fnu, 3: torch.float32}  # scales, by the code of quantize


class _Weighted:
    """In place of Handle: calls whose weights are given."""


def _of_python(calls: Runner) -> dict[str, Any]:
    """What the native module needs to make known calls (src/bindings/call_maker.cc)."""
    return {
        "comm": calls.comm, "Handle": Handle, "Weighted": _Weighted, "Dispatched": Dispatched, "Quantized": Quantized,
        "Event": Event, "Process": Process, "Tensor": Tensor, "Plan": Plan, "torch_c": torch._C, "new": object.__new__,
        "num_modes": _num_modes, "transforms": _transforms, "is_profiled": torch.autograd._profiler_enabled,
        "recorders": traces._recorders, "quantized_of": _quantized,
        "works": tuple(getattr(type(calls), name, None) for name in _WORKS),
    }  # fmt: skip


class Eager:
    """The eager calls of one ExpertParallel."""

    def __init__(self, shape: Shape, calls: Runner) -> None:
        self._shape, self._calls = shape, calls
        self.known = _load.native().KnownCalls(getattr(Tensor, _EXCHANGE_API, None), calls.alignment)
        self.known.serve(calls, _of_python(calls))

    # ---- dispatch

    def dispatch(
        self, x: Any, topk_idx: Any, topk_weights: Any, handle: Any, values: tuple[Any, ...], found: Any = _UNASKED
    ) -> Dispatched:
        """See ExpertParallel; `values`: of its options; `found`: what `known` has said of this call, if it was asked,
        and has not made it."""
        if found is _UNASKED:
            found = self.known.dispatch(values, x, topk_idx, topk_weights, handle)
            if type(found) is Dispatched:
                return found
        rows: Any
        calls, stands_alone = self._calls, _num_modes() == 0 and _transforms() is None
        is_first = is_own = handle is None
        origin = lead = None
        data, scales = given = (x.data, x.scales) if type(x) is Quantized else (x, None)
        if type(handle) is Handle and topk_idx is None and topk_weights is None:
            known = handle.__dict__
            is_own, origin, lead = known["tie"] is calls.token, known["call"], (known["num_tokens"],)
        if found is not None:
            plan, num_tokens, places = found
        else:
            num_tokens, places = -1, ()
            if isinstance(topk_idx, Tensor) and topk_idx.dtype is torch.bool:
                topk_idx, topk_weights = checked_picks(self._shape, topk_idx, topk_weights)
            is_plain, key, plan = VALUE_TYPES.issuperset(map(type, values)), None, None
            options = options_of(DispatchOptions, *values) if is_plain else DispatchOptions(*values)
            if stands_alone:
                try:
                    of_scales = of_idx = of_weights = of_handle = None
                    num_tokens, *columns = data.shape
                    if scales is not None:
                        of_scales = (
                            type(scales), scales.dtype, scales.shape[0] == num_tokens, scales.shape[1:],
                            scales.stride(), scales.stride()[-1] >= num_tokens, scales.is_contiguous(),
                            scales.device, scales.layout, scales.requires_grad,
                        )  # fmt: skip
                    if topk_idx is not None:
                        of_idx = (
                            type(topk_idx), topk_idx.dtype, topk_idx.shape[0] == num_tokens, topk_idx.shape[1:],
                            topk_idx.device, topk_idx.layout,
                        )  # fmt: skip
                    if topk_weights is not None:
                        of_weights = (
                            type(topk_weights), topk_weights.dtype, topk_weights.shape[0] == num_tokens,
                            topk_weights.shape[1:], topk_weights.device, topk_weights.layout,
                            topk_weights.requires_grad,
                        )  # fmt: skip
                    if handle is not None:
                        of_handle = (handle.call, handle.num_tokens == num_tokens, type(handle.tie))
                    key = (
                        options, torch.is_grad_enabled(), type(x), type(data), data.dtype, *columns, data.device,
                        data.layout, data.requires_grad, data.is_contiguous(), of_scales, of_idx, of_weights, of_handle,
                    )  # fmt: skip
                    plan = calls.plans.get(key)
                    if plan is not None and num_tokens > plan.call.max_tokens:
                        plan = None
                except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # refused by the checks
                    key = None
            if plan is None:
                if self._check_owner("dispatch", handle) and key is not None:
                    return self.dispatch(x, topk_idx, topk_weights, handle, values)
                given = (*given, topk_idx, topk_weights)
                checked = check.check_dispatch(self._shape, x, topk_idx, topk_weights, handle, options)
                _, x, data, scales, topk_idx, topk_weights = checked
                tie = None if handle is None else handle.tie
                if is_traced(data, scales, topk_idx, topk_weights, tie):
                    return traced.dispatch(calls, self._shape, checked, handle, options)
                plan = self._kept(key, self._learn_dispatch(checked, handle, options), (*given, tie))
            else:
                if plan.may_be_known and is_own:
                    self._know(plan, values, type(x), origin, lead, (data, scales, topk_idx, topk_weights))
                if plan.as_bytes:
                    data = as_bytes(plain(data, "x.data"))
                    scales = None if scales is None or plan.no_scale_columns else plain(scales, "x.scales")
                    if scales is not None and not is_read_by_column(self._shape, scales):
                        scales = as_bytes(scales)
            if topk_weights is not None and topk_weights.dtype is not torch.float32:
                topk_weights = plain(topk_weights, "topk_weights").float()  # exact
            if calls.has_map and handle is not None:
                calls.check_map(handle.tie)
            if options.absent != "drop":
                topk_idx = plain(topk_idx, "topk_idx")
                topk_weights = calls.experts.renormalized(topk_idx, topk_weights, calls.comm.active_ranks)
        if plan.is_tracked:
            data = data.view(torch.uint8) if data.element_size() == 1 else data  # FP8 would be differentiable
            if handle is None:
                rows, row_scales, handle = autograd.dispatch(calls, plan, data, scales, topk_idx, topk_weights)
            else:
                row_scales, (rows, handle) = None, autograd.dispatch_again(calls, plan, data, handle)
        elif handle is None:
            rows, row_scales, handle = calls.run(
                plan, None, data, scales, topk_idx, topk_weights, num_tokens=num_tokens, places=places
            )
        else:
            rows, row_scales, _ = calls.run(
                plan, handle.tie, data, scales, handle, num_tokens=num_tokens, places=places
            )
        if traces._recorders and is_first:  # a call that has failed may come again
            topk_idx, topk_weights = plain(topk_idx, "topk_idx"), plain(topk_weights, "topk_weights")
            traces._note(topk_idx, topk_weights, calls.comm.rank, calls.experts.num_ids)
        if plan.data_dtype is not None:
            rows = _quantized(plan, plan.data_dtype, rows, row_scales)
        half = plan.window.half if plan.call.is_staged else None
        return Dispatched(rows, handle, calls.overflow, calls.last.event if half is None else half.event, calls, half)

    def _learn_dispatch(self, checked: tuple[Any, ...], handle: Handle | None, options: DispatchOptions) -> Plan:
        """The plan of arguments that are right."""
        call, x, data, scales, topk_idx, topk_weights = checked
        calls, quantize = self._calls, QUANTIZE_CODES[options.quantize]
        has_tracked = (data.requires_grad and not quantize) or (topk_weights is not None and topk_weights.requires_grad)
        is_tracked = torch.is_grad_enabled() and has_tracked
        if call.is_staged:
            check.check_staged(False, is_tracked)
        if is_tracked and not call.zero_holes:
            call = replace(call, zero_holes=True)
        call = calls.known(call)
        calls.alone("dispatch")
        given = (x.data, x.scales) if isinstance(x, Quantized) else (x, None)
        sent = data.view(torch.uint8) if is_tracked and data.element_size() == 1 else data
        words = calls.scales_of(call, scales)
        names = ("x.data" if isinstance(x, Quantized) else "x", "x.scales", "topk_idx", "topk_weights")
        if handle is None:
            plan = calls.first_plan(call, sent, words, quantize, topk_idx, clears_tail=is_tracked, names=names)
        else:
            plan = calls.again_plan(call, sent, words, quantize, clears_tail=is_tracked, names=names[:2])
        plan.is_tracked = is_tracked
        if quantize or isinstance(x, Quantized):
            plan.data_dtype = x.data.dtype if isinstance(x, Quantized) else torch.float8_e4m3fn
            plan.scale_dtype = _OF_FP8.get(quantize)
            if isinstance(x, Quantized) and x.scales is not None:
                plan.scale_dtype, plan.no_scale_columns = x.scales.dtype, x.scales.shape[1] == 0
            plan.scale_dtype = plan.scale_dtype if call.scale_dtype is None else call.scale_dtype
            if call.capacity >= 0 and not (plan.finishes or plan.parts):  # ordinary tensors are given as they are made
                dtypes = (plan.data_dtype, plan.scale_dtype)
                plan.rows = tuple(each.of(dtype) for each, dtype in zip(plan.rows, dtypes, strict=False))
        plan.as_bytes = data is not given[0] or scales is not given[1]
        are_read = topk_weights is None or topk_weights.dtype is torch.float32
        plan.may_be_known = are_read and options.absent == "drop" and self._may_be_known(plan)
        return plan

    # ---- combine

    def combine(
        self,
        y: Any,
        handle: Any,
        side: Any,
        bias: Any,
        out: Any,
        values: tuple[Any, ...],
        weights: Any = None,
        ids: Any = None,
        found: Any = None,
    ) -> Any:
        """See ExpertParallel; `values`: of its options; `found`: what `known` has said of this call, and has not made
        it; of one with side, bias or `out` None."""
        calls, stands_alone = self._calls, _num_modes() == 0 and _transforms() is None
        is_bare, kind = side is None and bias is None, Handle if weights is None else _Weighted
        if found is not None:
            plan, _, places = found
            more = () if weights is None else (None, weights, ids)
            tie, num_tokens = handle.tie, handle.num_tokens
            total, _, _ = calls.run(plan, tie, y, handle, None, None, *more, num_tokens=num_tokens, places=places)
            return (total, calls.last.event) if plan.call.is_async else total
        is_plain = VALUE_TYPES.issuperset(map(type, values))
        options = options_of(CombineOptions, *values) if is_plain else CombineOptions(*values)
        if weights is None and options.order == "pick" and options.weighted:
            check.check_received_weights(self._shape)
        if weights is not None or ids is not None:
            weights, ids = check.check_owner_weights(self._shape, (y, side, bias), handle, (weights, ids), options)
            if isinstance(out, torch.Tensor) and out.device == weights.device:
                check_apart(out, weights=weights, topk_idx=ids)
        key, plan, given_out = None, None, out
        if stands_alone:
            try:
                known = handle.__dict__
                tie, lead, num_tokens = known["tie"], known.get("lead") or handle.rows_shape, known["num_tokens"]
                of_side = of_bias = of_out = None
                if side is not None:
                    rank = len(lead)
                    of_side = (
                        type(side), side.dtype, side.shape[:rank] == lead, side.shape[rank:], side.device, side.layout,
                        side.requires_grad,
                    )  # fmt: skip
                if bias is not None:
                    shape = bias.shape if bias.dim() == 1 else (bias.shape[0] == num_tokens, bias.shape[1:])
                    of_bias = (type(bias), bias.dtype, shape, bias.device, bias.layout, bias.requires_grad)
                if out is not None:
                    of_out = (
                        type(out), out.dtype, out.shape[0] == num_tokens, out.shape[1:], out.device, out.layout,
                        out.requires_grad, out.is_contiguous(), out.is_neg(), out.numel() > 0 and out.data_ptr() == 0,
                    )  # fmt: skip
                key = (
                    options, torch.is_grad_enabled(), type(y), y.dtype, y.shape[:-1] == lead, y.shape[-1], y.device,
                    y.layout, y.requires_grad, type(tie), tie.requires_grad, known["call"], of_side,
                    of_bias, of_out,
                )  # fmt: skip
                plan = calls.plans.get(key)
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError):  # refused by the checks
                key = None
        if plan is None:
            if self._check_owner("combine", handle) and key is not None:
                return self.combine(y, handle, side, bias, out, values, weights, ids)
            given = (y, side, bias, out)
            checked = check.check_combine(self._shape, y, handle, side, bias, out, options)
            _, y, side, bias, out = checked
            if is_traced(y, side, bias, handle.tie):
                return traced.combine(calls, self._shape, checked, given_out, handle, options)
            plan = self._kept(key, self._learn_combine(checked, handle, options), (*given, handle.tie))
        else:
            if out is not None:
                check_apart(out, expert_output=y, side=side, bias=bias)
            if plan.may_be_known and is_bare and tie is calls.token:
                self._know(plan, values, kind, known["call"], lead, (y, None, None, None))
        call = plan.call
        if side is not None and call.layout == RANK_MAJOR:
            side = plain(side, "side")
            side = side.unsqueeze(1).expand(-1, self._shape.top_k) if side.dim() == 1 else side
            side = side if call.adds_side else calls.side_of_picks(side, handle)
        if bias is not None and call.is_staged:  # the caller may overwrite it before the half that receives reads it
            bias = plain(bias, "bias").clone()
        if plan.is_tracked:
            total, side_out = autograd.combine(calls, plan, y, handle, bias, side)
        elif out is None and weights is None:
            total, side_out, _ = calls.run(plan, handle.tie, y, handle, bias, side)
        else:
            total, side_out, _ = calls.run(plan, handle.tie, y, handle, bias, side, out, weights, ids)
        total = total if given_out is None else given_out
        if side is None and not options.async_op and not options.staged:
            return total
        parts = [total] if side is None else [total, side_out]
        if options.async_op:
            parts.append(calls.last.event)
        result = parts[0] if len(parts) == 1 else tuple(parts)
        return Staged(result, plan.window.half) if options.staged else result

    def _learn_combine(self, checked: tuple[Any, ...], handle: Handle, options: CombineOptions) -> Plan:
        call, y, side, bias, _ = checked
        is_tracked = torch.is_grad_enabled() and (
            y.requires_grad or handle.tie.requires_grad or (bias is not None and bias.requires_grad)
        )
        if call.is_staged:
            check.check_staged(False, is_tracked)
        self._calls.alone("combine")
        plan = self._calls.combine_plan(
            call, y, weighted=options.weighted, has_side=side is not None, bias=bias,
            names=("expert_output", "", "bias", "side"),
        )  # fmt: skip
        plan.is_tracked = is_tracked
        plan.may_be_known = side is None and bias is None and self._may_be_known(plan)
        return plan

    # ---- both

    def _know(
        self, plan: Plan, values: tuple[Any, ...], kind: Any, origin: Any, lead: Any, tensors: tuple[Any, ...]
    ) -> None:
        """From now on calls that look like this one go along `plan` at once."""
        if VALUE_TYPES.issuperset(map(type, values)) and all(each is None or type(each) in _PLAIN for each in tensors):
            most = plan.call.max_tokens if lead is None else None
            self.known.learn(values, kind, origin, lead, most, tensors, plan)

    def _may_be_known(self, plan: Plan) -> bool:
        """Whether nothing is done to the tensors of its calls on the way to the native module."""
        has_more = plan.is_tracked or plan.call.is_staged or bool(plan.parts)
        return not (has_more or self._calls.has_map or self._calls.is_elsewhere)

    def _kept(self, key: Any, plan: Plan, given: tuple[Any, ...]) -> Plan:
        """Not of tensors that stand for others."""
        is_known = key is not None and all(each is None or type(each) in _PLAIN for each in given)
        return self._calls.kept(key, plan) if is_known else plan

    def _check_owner(self, what: str, handle: Any) -> bool:
        """Before the arguments: another object's handle has other shapes. Whether there may be a plan after all: the
        handle, of a compiled dispatch, had a Call that no key has."""
        if not isinstance(handle, Handle) or is_traced(handle.tie):
            return False
        self._calls.check_tie(what, handle.tie)
        call = handle.call
        handle.__dict__["call"] = self._calls.known(call)
        return handle.call is not call


def _quantized(plan: Plan, data_dtype: torch.dtype, rows: Tensor, scales: Tensor | None) -> Quantized:
    """What the native module gave, in the dtypes that the caller knows."""
    dtype = plan.scale_dtype
    if dtype is not None and plan.no_scale_columns:  # nothing was sent
        scales = rows.new_empty((*rows.shape[:-1], 0), dtype=dtype)
    elif scales is not None and dtype is not None and scales.dtype is not dtype:
        scales = scales.view(dtype)
    return Quantized(rows if rows.dtype is data_dtype else rows.view(data_dtype), scales)
