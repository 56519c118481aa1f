"""GPU windows without GPUs, for tests of call/gpu_calls.py: `_native.GpuWindow` acted out on host memory.

What a window's kernels would do is taken from weft.reference; what the calls hand to it (addresses, sizes, plans) is
read through the addresses. Ranks are threads that meet at a barrier.
"""

# check: allow file-size: one window, acted out

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
import weft.call.streams
from pool import RankFailed, RankState
from weft import Quantized, reference
from weft.call.streams import WindowStreams
from weft.call.window import Window, WindowSpec
from weft.communicator import Communicator
from weft.engine import Choice
from weft.handle import ROUTING

DTYPES = {0: torch.uint8, 1: torch.bfloat16, 2: torch.float16, 3: torch.float32}
LAYOUTS = ("rank_major", "expert_major", "masked")
QUANTIZE = (None, "fp8", "fp8_ue8m0")
POISON = 0xFB
SMALL = ("sizes", "send_plan", "recv_plan", "out_weights", "out_ids")  # as in ROUTING
OUT = {"x": "out_x", "scales": "out_scales", "topk_idx": "out_ids", "topk_weights": "out_weights"}


def both(spec: Any, buffers: Any) -> Any:
    """The fields of a spec and of buffers."""
    names = {name: each for each in (spec, buffers) for name in dir(each) if not name.startswith("_")}
    return SimpleNamespace(**{name: getattr(each, name) for name, each in names.items()})


def at(address: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor at an address; bulk copies want 16 bytes."""
    num_bytes = int(torch.Size(shape).numel()) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    assert address, "no address"
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(tuple(shape))


def aligned(address: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    assert address % 16 == 0, "bulk copies want addresses that are multiples of 16"
    return at(address, shape, dtype)


@dataclass
class Hub:
    """What the ranks of one test share."""

    num_ranks: int
    barrier: threading.Barrier
    told: dict[int, Any]
    routings: dict[int, reference.Routing]
    numbers: Iterator[int]
    small: set[int]  # routings of small batches
    dropped: dict[tuple[int, int], int]  # by routing and rank

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Everybody's value, by rank."""
        self.told[rank] = value
        self.barrier.wait(30)
        values = [self.told[each] for each in range(self.num_ranks)]
        self.barrier.wait(30)
        return values


class SimulatedRouting:
    """What a dispatch makes beside its rows."""

    def __init__(self, *tensors: Tensor | None) -> None:
        self._tensors = dict(zip(ROUTING, tensors, strict=True))

    def tensor(self, name: str, from_dlpack: Callable[[Any], Tensor]) -> Tensor | None:
        return self._tensors[name]

    @property
    def places(self) -> tuple[int, int, int, int, int]:
        sizes, send_plan, recv_plan, weights = (self._tensors[name] for name in ROUTING[:4])
        length = 0 if recv_plan is None else recv_plan.numel()
        addresses = [0 if each is None else each.data_ptr() for each in (sizes, send_plan, recv_plan, weights)]
        return (*addresses[:3], length, addresses[3])  # type: ignore[return-value]


class SimulatedWindow:
    """One rank's window. Every third result finds no room in the heap; with heap_bytes=0 none does."""

    id = 1

    def __init__(self, hub: Hub, comm: Communicator, spec: WindowSpec) -> None:
        self.hub, self.comm, self.rank, self.spec = hub, comm, comm.rank, spec
        self.num_calls = 0
        self.staged: dict[str, Tensor] | None = None
        self.sent: Any = None  # by the first half of a call
        self.half: Any = None  # that call
        self.made: dict[str, Tensor] = {}  # the send plan, in the heap
        self.num_small = 0
        self.bad_ids: tuple[int, int, int] | None = None

    def _has_room(self) -> bool:
        self.num_calls += 1
        return self.spec.heap_bytes > 0 and (self.num_calls + self.rank) % 3 != 0

    # ---- dispatch

    def _rows(self, args: Any, told: Sequence[Any] = ()) -> Tensor | Quantized:
        dtype = DTYPES[args.dtype]
        columns = args.row_bytes // dtype.itemsize
        wire_bytes = args.hidden if args.quantize else args.row_bytes
        scale_bytes = -(-args.hidden // 128) * (4, 4, 1)[args.quantize] if args.quantize else args.scale_row_bytes
        assert wire_bytes + scale_bytes + 256 <= self.spec.landing_row_bytes + 256 * (scale_bytes == 0), "too wide"
        data = aligned(args.x, (args.num_tokens, columns), dtype).clone()
        if args.dtype != 0:
            return data
        if not args.scale_row_bytes:
            return Quantized(data)
        shape = (args.num_tokens, args.scale_row_bytes)
        if args.scale_stride == 0:
            return Quantized(data, at(args.scales, shape, torch.uint8).clone())
        assert args.is_small or args.layout == 0, "read in bulk, or row by row"
        num_words, ld = args.scale_row_bytes // 4, args.scale_stride // 4
        columns = at(args.scales, ((num_words - 1) * ld + args.num_tokens,), torch.int32)
        words = columns.as_strided((args.num_tokens, num_words), (1, ld)).contiguous()
        return Quantized(data, words.view(torch.uint8).view(shape))

    def dispatch(self, spec: Any, buffers: Any) -> Any:
        """As the kernel: rows of all ranks, and for a first dispatch plans, counts and ids."""
        return self._dispatch(both(spec, buffers))

    def _dispatch(self, args: Any) -> Any:
        assert self.staged is None, "unload comes first"
        self.made = {}
        if not args.sizes:
            if not self._has_room():
                return SimpleNamespace(has_begun=False)
            self._make_send_plan(args)
        if self._begins(args):
            rows = self._rows(args)
            self.sent = (rows,) if args.cached else self._taken(args, rows)
        if not args.receives:
            self.half = functools.partial(self._dispatch, args)
            return SimpleNamespace(in_heap=False, result_rows=-1)
        sent, self.sent = self.sent, None
        return self._again(args, *sent) if args.cached else self._first(args, *sent)

    def receive(self, stream: int) -> None:
        """The other half of what has sent."""
        half, self.half = self.half, None
        half.args[0].sends, half.args[0].receives = False, True
        half()

    def dispatch_first(
        self,
        spec: Any,
        stream: int,
        num_tokens: int,
        x: int,
        scales: int,
        topk_idx: int,
        topk_weights: int,
        overflow: int,
        from_dlpack: Callable[[Any], Tensor],
        sizes: int = 0,
        send_plan: int = 0,
    ) -> tuple[Any, ...] | None:
        """`dispatch`, with buffers as numbers."""
        buffers = weft._native.DispatchBuffers(
            stream=stream, num_tokens=num_tokens, x=x, scales=scales, topk_idx=topk_idx, topk_weights=topk_weights,
            overflow=overflow, sizes=sizes, send_plan=send_plan,
        )  # fmt: skip
        result = self.dispatch(spec, buffers)
        if not result.has_begun:
            return None
        rows, row_scales, out_idx, out_weights, *plans = result.tensors(from_dlpack)
        return result.in_heap, result.result_rows, rows, row_scales, SimulatedRouting(*plans, out_weights, out_idx)

    def together(self, wanted: list[tuple[tuple[int, ...], int]]) -> list[tuple[tuple[int, ...], int]]:
        """What dispatch_small takes from the heap."""
        return wanted

    def dispatch_small(
        self,
        spec: Any,
        wanted: list[tuple[tuple[int, ...], int]],
        stream: int,
        num_tokens: int,
        x: int,
        scales: int,
        topk_idx: int,
        topk_weights: int,
        overflow: int,
        room: int,
        out_x: int,
        out_scales: int,
    ) -> tuple[int, SimulatedRouting] | None:
        """A small batch, whose sizes, plans, weights and ids are made here."""
        made = self.empty_together(wanted, stream, torch._C._from_dlpack)
        if made is None:
            return None
        places = dict(zip(SMALL, (each.data_ptr() for each in made), strict=True))
        buffers = weft._native.DispatchBuffers(
            stream=stream, num_tokens=num_tokens, x=x, scales=scales, topk_idx=topk_idx, topk_weights=topk_weights,
            overflow=overflow, num_rows=room, out_x=out_x, out_scales=out_scales, **places,
        )  # fmt: skip
        num_rows = self.dispatch(spec, buffers).result_rows
        if spec.capacity >= 0:
            return -1, SimulatedRouting(*made)
        sizes, send_plan, recv_plan, weights, idx = made
        return num_rows, SimulatedRouting(sizes, send_plan, recv_plan, weights[:num_rows], idx[:num_rows])

    def dispatch_again(
        self,
        spec: Any,
        stream: int,
        num_tokens: int,
        x: int,
        scales: int,
        overflow: int,
        sizes: int,
        send_plan: int,
        recv_plan: int,
        recv_plan_len: int,
        num_rows: int,
        out_x: int,
        out_scales: int,
        from_dlpack: Callable[[Any], Tensor],
    ) -> tuple[Any, ...]:
        """The same with the routing of a handle."""
        buffers = weft._native.DispatchBuffers(
            stream=stream, num_tokens=num_tokens, x=x, scales=scales, overflow=overflow, sizes=sizes,
            send_plan=send_plan, recv_plan=recv_plan, recv_plan_len=recv_plan_len, num_rows=num_rows, out_x=out_x,
            out_scales=out_scales,
        )  # fmt: skip
        result = self.dispatch(spec, buffers)
        made = (None, None) if spec.is_small else result.tensors(from_dlpack)[:2]
        return (result.in_heap, *made, 0, 0)

    def _make_send_plan(self, args: Any) -> None:
        """And the sizes."""
        assert not any((args.is_small, args.cached)), "the caller has memory for it"
        num_local = self.spec.num_experts // self.hub.num_ranks
        sizes = torch.full((num_local + (num_local if args.layout else self.hub.num_ranks) + 2,), -7, dtype=torch.int32)
        args.sizes = sizes.data_ptr()
        self.made["sizes"] = sizes
        length = weft._native.gpu_send_plan_len(args.num_tokens, self.spec.top_k, self.hub.num_ranks, args.layout)
        plan = self.made["send_plan"] = torch.full((length,), -7, dtype=torch.int32)
        args.send_plan = plan.data_ptr()

    def _begins(self, args: Any) -> bool:
        """As Window::check_half, and what a small batch may be."""
        assert (self.sent is None) == args.sends, "halves of staged calls are not in turn"
        if args.is_small:
            assert args.max_tokens <= self.spec.small_tokens, "too many tokens for the slots"
            self.num_small += args.sends
        else:
            assert args.sends == args.receives, "small batches alone have halves"
        return bool(args.sends)

    def _taken(self, args: Any, rows: Tensor | Quantized) -> tuple[Any, ...]:
        num_tokens, top_k = args.num_tokens, self.spec.top_k
        ids = at(args.topk_idx, (num_tokens, top_k), _ids_dtype(args)).clone()
        self._look_for_bad_ids(ids)
        weights = torch.ones(ids.shape)
        if args.topk_weights:
            weights = at(args.topk_weights, ids.shape, torch.float32).clone()
        return rows, ids, weights

    def _first(self, args: Any, rows: Tensor | Quantized, ids: Tensor, weights: Tensor) -> Any:
        num_tokens, top_k = args.num_tokens, self.spec.top_k
        told = self.hub.exchange(self.rank, (rows, ids, weights))
        layout = LAYOUTS[args.layout]
        results = reference.dispatch(
            [each[0] for each in told],
            [each[1] for each in told],
            [each[2] for each in told],
            num_experts=self.spec.num_experts,
            layout=layout,
            alignment=args.alignment,
            quantize=QUANTIZE[args.quantize],
            capacity=None if args.capacity < 0 else args.capacity,
        )
        (number, *_) = self.hub.exchange(self.rank, next(self.hub.numbers) if self.rank == 0 else None)
        self.hub.routings[number] = results[0].routing
        if args.is_small:
            self.hub.small.add(number)
        mine = results[self.rank]
        self._write_sizes(args, mine)
        self.hub.dropped[number, self.rank] = int(mine.overflow)
        plan_len = weft._native.gpu_recv_plan_len(self.spec.max_tokens, top_k, self.hub.num_ranks, args.layout)
        recv_plan = torch.full((plan_len,), number, dtype=torch.int32)
        send_len = weft._native.gpu_send_plan_len(num_tokens, top_k, self.hub.num_ranks, args.layout)
        at(args.send_plan, (send_len,), torch.int32).fill_(number)
        parts = {**_parts(mine.x), "topk_weights": mine.topk_weights}
        if mine.topk_idx is not None:
            parts["topk_idx"] = mine.topk_idx.to(_ids_dtype(args))
        for part in parts.values():  # the kernel leaves what lies behind the last row as it was
            if layout != "masked":
                part[int(mine.num_rows) :].view(torch.uint8).fill_(POISON)
            else:
                for rows, number in zip(part, mine.num_tokens_per_expert.tolist(), strict=True):
                    rows[number:].view(torch.uint8).fill_(POISON)
        parts["recv_plan"] = recv_plan
        num_rows = int(torch.Size(mine.routing.row_shape[self.rank]).numel())
        return self._result(args, parts, num_rows)

    def _look_for_bad_ids(self, ids: Tensor) -> None:
        flat = ids.flatten()
        bad = ((flat < -1) | (flat >= self.spec.num_experts)).nonzero()
        if len(bad):
            self.bad_ids = (len(bad), int(flat[bad[0]]), int(bad[0]))

    def _write_sizes(self, args: Any, mine: reference.Dispatched) -> None:
        sizes = torch.cat([mine.num_tokens_per_expert, mine.offsets, mine.num_rows.view(1)])
        at(args.sizes, sizes.shape, torch.int32).copy_(sizes)
        at(args.overflow, (), torch.int64).add_(mine.overflow)

    def _routing(self, args: Any) -> reference.Routing:
        number = int(at(args.recv_plan, (1,), torch.int32))
        is_of_small = number in self.hub.small
        assert args.is_small or not is_of_small, "plans that only small batches understand"
        if args.num_tokens:
            assert int(at(args.send_plan, (1,), torch.int32)) == number, "plans of two handles"
        return self.hub.routings[number]

    def _again(self, args: Any, rows: Tensor | Quantized) -> Any:
        routing = self._routing(args)
        num_rows = int(torch.Size(routing.row_shape[self.rank]).numel())
        assert args.num_rows == num_rows, "the host must know the rows of a handle"
        if routing.layout != "rank_major":  # the kernel finds the holes by them
            counts = at(args.sizes, (self.spec.num_experts // self.hub.num_ranks,), torch.int32)
            here = [(each >= 0).sum() for each in [routing.rows[self.rank]]]
            assert int(counts.sum()) == int(here[0]), "counts are those of the first dispatch"
        if args.overflow:
            number = int(at(args.recv_plan, (1,), torch.int32))
            at(args.overflow, (), torch.int64).add_(self.hub.dropped[number, self.rank])
        told = self.hub.exchange(self.rank, rows)
        moved = reference.repeat_dispatch(told, routing, quantize=QUANTIZE[args.quantize])[self.rank]
        return self._result(args, _parts(moved), num_rows)

    def _result(self, args: Any, parts: dict[str, Tensor], num_rows: int) -> Any:
        if args.is_small:
            return self._small_result(args, parts, num_rows)
        names = ("x", "scales", "topk_idx", "topk_weights", "sizes", "send_plan", "recv_plan")
        has_room = self._has_room()
        if not has_room:
            self.staged = parts
        made = self.made | ({name: part.clone() for name, part in parts.items()} if has_room else {})

        def tensors(from_dlpack: Callable[[Any], Tensor]) -> tuple[Tensor | None, ...]:
            exported = {name: torch.utils.dlpack.to_dlpack(part) for name, part in made.items()}
            return tuple(from_dlpack(exported[name]) if name in exported else None for name in names)

        return SimpleNamespace(tensors=tensors, has_begun=True, in_heap=has_room, result_rows=num_rows)

    def _small_result(self, args: Any, parts: dict[str, Tensor], num_rows: int) -> Any:
        """Into the caller's tensors, which may have more rows."""
        assert num_rows <= args.num_rows
        for name, part in parts.items():
            address = getattr(args, OUT.get(name, name))
            if name == "scales" and args.scale_word_bytes:
                part = _columns(part, args.scale_word_bytes)
            (aligned if name == "x" else at)(address, part.shape, part.dtype).copy_(part)
        return SimpleNamespace(in_heap=False, result_rows=num_rows)

    def unload(self, to: Any) -> None:
        """Copy what was staged to where the caller wants it."""
        staged, self.staged = self.staged, None
        assert staged is not None, "nothing to unload"
        if "recv_plan" not in staged:
            assert to.recv_plan, "a repeated dispatch unloads by its handle's plan"
        for name, part in staged.items():
            at(getattr(to, OUT.get(name, name)), part.shape, part.dtype).copy_(part)

    # ---- combine

    def gradients(
        self, stream: int, dtype: int, hidden: int, num_rows: int, rows: int, y: int, weights: int, out: int, dots: int
    ) -> None:
        """As the kernel, but for the order of the sum."""
        grads, scale = aligned(rows, (num_rows, hidden), DTYPES[dtype]).float(), at(weights, (num_rows,), torch.float32)
        if y:
            others = aligned(y, (num_rows, hidden), DTYPES[dtype]).double()
            at(dots, (num_rows,), torch.float32).copy_((grads.double() * others).sum(-1))
        aligned(out, (num_rows, hidden), DTYPES[dtype]).copy_(grads * scale[:, None])

    def combine(self, spec: Any, buffers: Any) -> None:
        """As the kernel; in rank_major side values of all rows of a token are added, whose picks they may be."""
        self._combine(both(spec, buffers))

    def _combine(self, args: Any) -> None:
        assert self.staged is None, "unload comes first"
        self.num_calls += 1
        if self._begins(args):
            self.sent = self._contributed(args)
        if args.receives:
            sent, self.sent = self.sent, None
            self._sum(args, *sent)
        else:
            self.half = functools.partial(self._combine, args)

    def combine_rows(
        self,
        spec: Any,
        stream: int,
        num_tokens: int,
        y: int,
        num_rows: int,
        weights: int,
        send_plan: int,
        recv_plan: int,
        recv_plan_len: int,
        out: int,
        bias: int,
        side: int,
        side_out: int,
    ) -> None:
        """`combine`, with buffers as numbers."""
        buffers = weft._native.CombineBuffers(
            stream=stream, num_tokens=num_tokens, y=y, num_rows=num_rows, weights=weights, send_plan=send_plan,
            recv_plan=recv_plan, recv_plan_len=recv_plan_len, out=out, bias=bias, side=side, side_out=side_out,
        )  # fmt: skip
        self.combine(spec, buffers)

    def _contributed(self, args: Any) -> tuple[Any, ...]:
        dtype, layout = DTYPES[args.dtype], LAYOUTS[args.layout]
        if args.is_small:
            wire_bytes = args.hidden + -(-args.hidden // 128) * 4 if args.wire_is_fp8 else args.hidden * dtype.itemsize
            assert wire_bytes <= self.spec.landing_row_bytes, "contributions do not fit the slots"
        routing = self._routing(args)
        y = aligned(args.y, (args.num_rows, args.hidden), dtype).clone()
        weights = at(args.weights, (args.num_rows,), torch.float32).clone() if args.weights else None
        side = None
        if args.has_side:
            shape = (args.num_rows, self.spec.top_k) if layout == "rank_major" else (args.num_rows,)
            side = at(args.side, shape, torch.float32).clone()
        return routing, y, weights, side

    def _sum(
        self, args: Any, routing: reference.Routing, y: Tensor, weights: Tensor | None, side: Tensor | None
    ) -> None:
        dtype = DTYPES[args.dtype]
        bias = None
        if args.bias:
            bias_shape = (args.num_tokens, args.hidden) if args.bias_is_2d else (args.hidden,)
            bias = aligned(args.bias, bias_shape, torch.float32 if args.bias_is_fp32 else dtype).clone()
        told = self.hub.exchange(self.rank, (y, weights, side, bias))
        ys, all_weights, sides, biases = (list(each) for each in zip(*told, strict=True))
        is_weighted = any(each is not None for each in all_weights)  # a rank without rows has no address to give
        if is_weighted:
            given = [torch.empty(0) if each is None else each for each in all_weights]
            shaped = [each.view(w.shape) for each, w in zip(given, routing.weights, strict=True)]
            routing = replace(routing, weights=tuple(shaped))
        sums = reference.combine(
            [each.view(*shape, args.hidden) for each, shape in zip(ys, routing.row_shape, strict=True)],
            routing,
            weighted=is_weighted,
            biases=biases,
            wire="fp8" if args.wire_is_fp8 else None,
        )
        aligned(args.out, (args.num_tokens, args.hidden), dtype).copy_(sums[self.rank])
        if args.has_side:
            out = at(args.side_out, (args.num_tokens, self.spec.top_k), torch.float32)
            out.copy_(self._sides(routing, sides))

    def _sides(self, routing: reference.Routing, sides: list[Tensor]) -> Tensor:
        begin = sum(routing.num_tokens[: self.rank])
        total = torch.zeros((routing.num_tokens[self.rank], self.spec.top_k))
        for rank, side in enumerate(sides):
            rows = routing.rows[rank][begin : begin + len(total)]
            if routing.layout == "rank_major":
                token = (rows >= 0).any(dim=1)
                total[token] += side[rows[token].amax(dim=1)]
            else:
                token, k = (rows >= 0).nonzero(as_tuple=True)
                total[token, k] += side[rows[token, k]]
        return total

    # ---- the rest

    def empty(self, shape: list[int], dtype: int, stream: int) -> Any:
        """Now and then."""
        if not self._has_room():
            return None
        return torch.utils.dlpack.to_dlpack(torch.full(shape, 0, dtype=DTYPES[dtype]))

    def empty_together(
        self, wanted: list[tuple[tuple[int, ...], int]], stream: int, from_dlpack: Callable[[Any], Tensor]
    ) -> list[Tensor] | None:
        """Now and then."""
        if not self._has_room():
            return None
        dtypes = {3: torch.float32, 4: torch.int32, 5: torch.int64}
        made = [torch.full(shape, -7, dtype=dtypes[code]) for shape, code in wanted]
        return [from_dlpack(torch.utils.dlpack.to_dlpack(each)) for each in made]

    def check(self) -> None:
        assert self.staged is None

    def take_bad_ids(self) -> tuple[int, int, int] | None:
        found, self.bad_ids = self.bad_ids, None
        return found

    def barrier(self, deadline_s: float) -> None:
        self.comm.meet(deadline_s)

    def stats(self) -> dict[str, Any]:
        return {
            "heap_used": 0,
            "heap_peak": 0,
            "num_staged": 0,
            "num_small": self.num_small,
            "wait_us": [0.0] * self.hub.num_ranks,
        }

    def close(self) -> None: ...


def _ids_dtype(args: Any) -> torch.dtype:
    return torch.int64 if args.topk_is_int64 else torch.int32


def _columns(scales: Tensor, word_bytes: int) -> Tensor:
    """The memory of column-major scales, padding included."""
    if scales.element_size() == 1 and word_bytes != 4:
        scales = scales.contiguous().view({2: torch.int16, 8: torch.int64}[word_bytes])
    columns = reference._column_major(scales)
    return torch.empty(0, dtype=columns.dtype).set_(columns.untyped_storage())


def _parts(rows: Tensor | Quantized) -> dict[str, Tensor]:
    if isinstance(rows, Tensor):
        return {"x": rows}
    scales = rows.scales
    if scales is not None and scales.dtype != torch.float32:
        scales = scales.view(torch.uint8)
    parts = {"x": rows.data.view(torch.uint8)}
    return parts if scales is None else {**parts, "scales": scales}


class Stream:
    """A stream on which everything has happened."""

    cuda_stream = 0

    def query(self) -> bool:
        return True

    def wait_stream(self, other: Any) -> None: ...

    def record_event(self) -> Any:
        return SimpleNamespace(query=lambda: True, wait=lambda stream: None, synchronize=lambda: None)


class SimulatedRanks:
    """`run` as that of `Pool`, on ranks whose windows are simulated."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        stream = Stream()
        patch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "set_stream", lambda stream: None)
        patch.setattr(torch.cuda, "current_device", lambda: None)
        patch.setattr(torch.cuda.nvtx, "range_push", lambda name: 0)
        patch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
        patch.setattr(weft.call.streams, "own_stream", lambda device: Stream())
        patch.setattr(weft.call.streams, "give_back_stream", lambda stream: None)

    def run(
        self,
        num_ranks: int,
        function: Callable[[RankState, Any], Any],
        args: Sequence[Any],
        *,
        may_die: Collection[int] = (),
    ) -> list[Any]:
        hub = Hub(num_ranks, threading.Barrier(num_ranks), {}, {}, itertools.count(1), set(), {})

        def work(comm: weft.Communicator) -> Any:
            try:
                comm._choice = Choice("nvlink", "simulated", 64, 132)
                comm._new_window = lambda spec, deadline_s: _window(hub, comm, spec)  # type: ignore[method-assign]
                return function(RankState(comm.rank, {num_ranks: comm}, num_ranks), args[comm.rank])
            except BaseException:
                hub.barrier.abort()
                raise

        outcomes = weft.spawn(work, num_ranks, device="cpu", isolation="thread", on_failure="return")
        failed = [f"rank {rank}: {each!r}" for rank, each in enumerate(outcomes) if isinstance(each, BaseException)]
        if failed:
            raise RankFailed("\n".join(failed))
        return outcomes


def _window(hub: Hub, comm: Communicator, spec: WindowSpec) -> Window:
    window = Window(SimulatedWindow(hub, comm, spec), 1, spec.max_tokens, WindowStreams(comm.device))
    comm._windows[spec] = window
    comm._all_windows.add(window)
    return window
