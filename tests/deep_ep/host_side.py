"""Buffers for cases whose tensors are in host memory: on a GPU what goes into a call travels there, and what comes out
of it travels back, so that one case serves every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import weft
from weft import deep_ep
from weft.deep_ep.buffer_handle import BufferHandle
from weft.deep_ep.buffers.elastic_handle import EPHandle
from weft.deep_ep.hybrid_handle import HybridHandle
from weft.deep_ep.low_latency_handle import LowLatencyHandle

_HANDLES = (BufferHandle, EPHandle, HybridHandle, LowLatencyHandle)
always = [False]  # also where the tensors of a rank are in host memory: to test this module


def buffer(group: Any, *args: Any, **named: Any) -> Any:
    """As `deep_ep.Buffer`."""
    return _seen(deep_ep.Buffer(group, *args, **named))


def elastic(group: Any, *args: Any, **named: Any) -> Any:
    """As `deep_ep.ElasticBuffer`."""
    return _seen(deep_ep.ElasticBuffer(group, *args, **named))


def hybrid(group: Any, *args: Any, **named: Any) -> Any:
    """As `deep_ep.HybridEPBuffer`."""
    return _seen(deep_ep.HybridEPBuffer(group, *args, **named))


def on_gpu(comm: weft.Communicator) -> bool:
    """Whether kernels run the calls, on a real GPU or an emulated one."""
    return comm.engine == "nvlink"


def _seen(made: Any) -> Any:
    device = made._ranks.device
    return made if device.type == "cpu" and not always[0] else HostSide(made, device)


def _copied(tensor: Tensor, device: Any) -> Tensor:
    """With the strides that it has."""
    source = tensor.detach()
    made = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=device)
    for each in (source, made):
        if each.is_cuda:  # see weft.engine.to_host
            torch.cuda.current_stream(each.device).synchronize()
    return made.copy_(source)


def _bits(tensor: Tensor) -> Tensor:
    return _copied(tensor, "cpu").contiguous().view(-1).view(torch.uint8)


class HostHandle:
    """A handle whose items and attributes are in host memory."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return _home(getattr(self.inner, name))

    def __getitem__(self, idx: Any) -> Any:
        return _home(self.inner[idx])

    def __iter__(self) -> Iterator[Any]:
        return map(_home, self.inner)

    def __len__(self) -> int:
        return len(self.inner)


def _home(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _copied(value, "cpu")
    return tuple(map(_home, value)) if type(value) is tuple else value


class HostSide:
    """A buffer as its caller in host memory sees it. What an argument's memory holds after a call is there as well."""

    def __init__(self, made: Any, device: torch.device) -> None:
        self._made, self._device = made, device
        self._handles: dict[int, HostHandle] = {}
        self._shown: list[tuple[Tensor, Tensor]] = []  # what the caller writes to, and what the buffer reads

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._made, name)
        if not callable(found) or name == "group":
            return _home(found)

        def call(*args: Any, **named: Any) -> Any:
            return _Call(self, name, found).run(args, named)

        return call

    def handle(self, inner: Any) -> HostHandle:
        """The same for the same."""
        return self._handles.setdefault(id(inner), HostHandle(inner))


class _Call:
    def __init__(self, side: HostSide, name: str, function: Callable[..., Any]) -> None:
        self._side, self._name, self._function = side, name, function
        self._sent: list[tuple[Tensor, Tensor, Tensor]] = []  # the caller's, that on the device, its bits before
        self._got: list[tuple[Tensor, Tensor]] = []

    def run(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        for host, device in self._side._shown:
            device.copy_(host)
        found = self._function(*map(self._out, args), **{name: self._out(each) for name, each in named.items()})
        parts = found if type(found) is tuple else (found,)
        for each in parts:
            if isinstance(each, deep_ep.EventOverlap):
                each.current_stream_wait()
        back = self._back(found)
        if self._name == "get_next_low_latency_combine_buffer":
            self._side._shown.append((back, found))
        self._fill()
        return back

    def _out(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            for host, device, _ in self._sent:
                if host is value:
                    return device
            made = _copied(value, self._side._device)
            self._sent.append((value, made, _bits(made)))
            return made
        if isinstance(value, HostHandle):
            return value.inner
        return type(value)(map(self._out, value)) if type(value) in (tuple, list) else value

    def _back(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            for host, device, _ in self._sent:
                if device is value:
                    return host
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
            self._got.append((made, value))
            return made
        if isinstance(value, _HANDLES):
            return self._side.handle(value)
        if type(value) is tuple:
            return tuple(map(self._back, value))
        return self._hook(value) if callable(value) and not isinstance(value, deep_ep.EventOverlap) else value

    def _hook(self, function: Callable[[], None]) -> Callable[[], None]:
        def hook() -> None:
            function()
            self._fill()

        return hook

    def _fill(self) -> None:
        """What is on the device by now."""
        for host, device in self._got:
            host.copy_(_copied(device, "cpu"))
        for number, (host, device, before) in enumerate(self._sent):
            after = _bits(device)
            if not torch.equal(before, after):
                host.copy_(_copied(device, "cpu"))
                self._sent[number] = (host, device, after)
