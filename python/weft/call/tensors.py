"""What of a caller's tensors can be handed to the native module, for every way into a call: `plain` and `address`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from weft.errors import InvalidArgument, Unsupported

__all__ = ["address", "faked", "is_traced", "plain", "stands_alone"]

_PLAIN = (Tensor, torch.nn.Parameter)
_TRACED = (FakeTensor, FunctionalTensor)  # operators of torch.library take them
_ASYNC = "torch.distributed._functional_collectives"
_MODES = torch._C._TorchDispatchModeKey


def plain(value: Any, name: str) -> Any:
    """The tensor that an argument of a call stands for, with memory of its own; what is no tensor, as it is.

    The result of an asynchronous functional collective is waited for. Subclasses that only add methods become plain
    tensors. Tensors that are traced (FakeTensor, torch.compile) stay as they are.

    Raises:
        InvalidArgument: it has no plain memory: a DTensor or another tensor that is made of other tensors, one inside
            of torch.func, one whose storage was freed.
    """
    if not isinstance(value, Tensor) or torch.compiler.is_compiling() or isinstance(value, _TRACED):
        return value
    kind = type(value)
    if kind not in _PLAIN:
        value = _unwrapped(value, name)
    if value.layout is not torch.strided or value.is_meta:  # refused by what looks at layouts and devices
        return value
    if value.is_nested:
        raise InvalidArgument(f"{name} is a nested tensor; give its .values()")
    is_batched = torch._C._functorch.is_legacy_batchedtensor(value)  # is_grads_batched
    if is_batched or torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise InvalidArgument(f"{name} belongs to a transform of torch.func; call Weft outside of vmap, grad and jvp")
    if value.is_neg():
        value = value.resolve_neg()
    if value.data_ptr() == 0 and value.numel() > 0:
        raise InvalidArgument(f"{name} has no memory: its storage was freed, or it is a symbolic zero; give a tensor")
    return value


def _unwrapped(value: Any, name: str) -> Any:
    """An instance of a subclass as the plain tensor that it is or waits for."""
    collectives = sys.modules.get(_ASYNC)
    if collectives is not None and isinstance(value, collectives.AsyncCollectiveTensor):
        return _Waited.apply(value) if value.requires_grad else value.trigger_wait()  # type: ignore[no-untyped-call]
    if isinstance(value, (UninitializedBuffer, UninitializedParameter)):
        raise InvalidArgument(f"{name} is a {type(value).__name__}, which has no shape yet; initialise it first")
    if torch._C._dispatch_keys(value).has(torch._C.DispatchKey.Python):
        kind = type(value).__name__
        way_out = ".to_local()" if hasattr(value, "to_local") else "the plain tensors that it is made of"
        raise InvalidArgument(f"{name} is a {kind}; give {way_out}")
    return value.as_subclass(Tensor)


class _Waited(torch.autograd.Function):
    """The result of an asynchronous collective, tracked."""

    @staticmethod
    def forward(ctx: Any, value: Any) -> Tensor:
        waited: Tensor = value.trigger_wait()
        return waited.view_as(waited)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def is_traced(*values: Any) -> bool:
    """Whether a call is looked at instead of being made: by torch.compile, or by a mode that makes fakes or a graph.

    The operators of torch.library serve such a call."""
    if torch.compiler.is_compiling() or any(isinstance(value, _TRACED) for value in values):
        return True
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    return any(torch._C._get_dispatch_mode(key) is not None for key in (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL))


def stands_alone() -> bool:
    """Whether neither a dispatch mode nor a transform of torch.func is active: tensors are what they seem to be."""
    if torch._C._len_torch_dispatch_stack() > 0:
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


def faked(values: Iterable[Any], *, has_new_sizes: bool = False) -> list[Any]:
    """What a traced call hands to an operator: with fakes among them, or in FakeTensorMode, all tensors are fakes.
    `has_new_sizes`: its results have sizes that the inputs do not tell.

    Raises:
        Unsupported: new sizes in a FakeTensorMode that can't have any.
    """
    values = list(values)
    mode = None if torch.compiler.is_compiling() else torch._guards.detect_fake_mode(values)
    if mode is None:
        return values
    if has_new_sizes and mode.shape_env is None:
        raise Unsupported("dispatch in FakeTensorMode", "no ShapeEnv", "FakeTensorMode(shape_env=ShapeEnv())")
    return [
        mode.from_tensor(value) if isinstance(value, Tensor) and not isinstance(value, _TRACED) else value
        for value in values
    ]


def address(tensor: Tensor | None) -> int:
    """Of its memory, 0 for none.

    Raises:
        InvalidArgument: it should have memory and has none: a dispatch mode replaces the tensors that a call makes.
    """
    if tensor is None:
        return 0
    found: int = tensor.data_ptr()
    if found == 0 and tensor.numel() > 0:
        raise InvalidArgument(
            f"a tensor of the call is a {type(tensor).__name__} without memory; call Weft outside of the torch "
            "dispatch mode that makes it"
        )
    return found
