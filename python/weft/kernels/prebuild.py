"""Compiles the kernels of a shape ahead of time, for any architecture, without a GPU: `weft cache prebuild`.

The native module derives a kernel's configuration from a call's spec, here as in a real call, so what is compiled
here is found there by its content.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from weft import _load
from weft.call.options import ORDERS
from weft.errors import InvalidArgument
from weft.kernels import cache as kernel_cache
from weft.kernels import paths as kernel_paths
from weft.kernels.tuning import DEFAULT, default_num_sms
from weft.limits import LAYOUTS, MAX_SMALL_TOKENS, QUANTIZE_GROUP
from weft.machine import where

__all__ = ["ARCHITECTURES", "Built", "KernelShape", "call_source", "compile_all", "kernels", "prebuild"]

# Shared memory that a block may have (CUDA programming guide, technical specifications per compute capability).
ARCHITECTURES = {"sm_90": 227 << 10, "sm_100": 227 << 10, "sm_103": 227 << 10, "sm_120": 99 << 10}
_CODES = {"bf16": (1, 2), "fp16": (2, 2), "fp32": (3, 4)}  # code of the native module, bytes
_BYTES = 0
# As they are, quantised in the call (three ways), quantised before.
ROWS = ("plain", "fp8", "fp8_ue8m0", "fp8_pow2", "fp8 rows")
ROUTINGS = ("int64 ids", "int32 ids", "handle")
HALVES = ("", "sends", "receives")  # of a small batch: the whole, and what staged calls launch one after the other


@dataclass(frozen=True, kw_only=True)
class KernelShape:
    """What is compiled into kernels: arguments of ExpertParallel, SMs of calls and of small batches, the layouts."""

    ranks: int = 4
    experts: int = 256
    top_k: int = 8
    hidden: int = 7168
    tokens: int = 4096  # max_tokens_per_rank
    dtype: str = "bf16"
    num_sms: int | None = None  # None: what Weft takes by itself
    small_num_sms: tuple[int, ...] = (DEFAULT.num_sms_else, *(num_sms for _, num_sms in DEFAULT.num_sms))
    layouts: tuple[str, ...] = LAYOUTS
    sum_domain: int = 0  # of ExpertParallel; 0: none
    order: str = "rank"  # of combines

    def num_sms_of(self, op: str, layout: str) -> int:
        """Of a large call."""
        return default_num_sms(op, layout) if self.num_sms is None else self.num_sms

    def __post_init__(self) -> None:
        for layout in self.layouts:
            if layout not in LAYOUTS:
                raise InvalidArgument(f"layout={layout!r}: allowed are {', '.join(LAYOUTS)}")
        if self.experts % self.ranks:
            raise InvalidArgument(f"experts={self.experts}: must be a multiple of ranks={self.ranks}")


@dataclass(frozen=True)
class Built:
    """One kernel: its name in words, the architecture, seconds it took (next to none if it was in the cache), those of
    a CPU, which other load does not change, and bytes.
    """

    name: str
    arch: str
    seconds: float
    cpu_seconds: float
    num_bytes: int


def kernels(shape: KernelShape, shared_bytes: int) -> Iterator[tuple[str, str]]:
    """Name and source of every kernel that calls of this shape may need."""
    for layout, rows, routing in itertools.product(shape.layouts, ROWS, ROUTINGS):
        name = f"dispatch {layout}, {rows}, {routing}"
        yield name, dispatch_source(shape, layout, rows, routing, shared_bytes)
    for num_sms in shape.small_num_sms:
        of_few = dataclasses.replace(shape, small_num_sms=(num_sms,))
        for name, source in _small_dispatch_kernels(of_few, shared_bytes):
            yield name if num_sms == shape.small_num_sms[0] else f"{name}, {num_sms} SMs", source
    yield from _combine_kernels(shape, shared_bytes)
    yield from _small_combine_kernels(shape)
    yield "place rows", _load.native().render_place_rows()
    yield "stage rows", _load.native().render_stage_rows()
    yield "unload", _load.native().render_unload()
    yield "gradients", _load.native().render_gradients()
    yield "count picks", _load.native().render_count_picks()
    yield "picks of map", _load.native().render_picks_of_map()
    yield "need room", _load.native().render_need_room()


def _small_dispatch_kernels(shape: KernelShape, shared_bytes: int) -> Iterator[tuple[str, str]]:
    for layout, rows, routing, half in itertools.product(shape.layouts, ROWS, ROUTINGS, HALVES):
        name = f"small dispatch {layout}, {rows}, {routing}"
        if not (half and routing == "int32 ids"):
            source = small_dispatch_source(shape, layout, rows, routing, shared_bytes, half)
            yield f"{name}, {half}" if half else name, source
            if rows != "plain" and half != "sends":
                name = f"small dispatch {layout}, {rows} by column, {routing}"
                source = small_dispatch_source(shape, layout, rows, routing, shared_bytes, half, by_column=True)
                yield f"{name}, {half}" if half else name, source


def dispatch_source(shape: KernelShape, layout: str, rows: str, routing: str, shared_bytes: int) -> str:
    """The kernel of a dispatch; `rows` is one of ROWS, `routing` one of ROUTINGS."""
    source: str = _load.native().render_dispatch(
        _dispatch_spec(shape, layout, rows, routing), **_window(shape), shared_bytes=shared_bytes
    )
    return source


def small_dispatch_source(
    shape: KernelShape,
    layout: str,
    rows: str,
    routing: str,
    shared_bytes: int,
    half: str = "",
    *,
    by_column: bool = False,
) -> str:
    """The kernel of a dispatch of at most MAX_SMALL_TOKENS tokens; as `dispatch_source`. `half`: one of HALVES;
    `by_column`: scales of the result."""
    spec = _dispatch_spec(
        shape, layout, rows, routing, scale_word_bytes=4 if by_column else 0, num_blocks=shape.small_num_sms[0],
        sends=half != "receives", receives=half != "sends",
    )  # fmt: skip
    window = _window(shape)
    window["max_tokens"] = min(window["max_tokens"], MAX_SMALL_TOKENS)
    source: str = _load.native().render_small_dispatch(spec, **window, shared_bytes=shared_bytes)
    return source


def _dispatch_spec(shape: KernelShape, layout: str, rows: str, routing: str, **fields: Any) -> Any:
    code, item = _CODES[shape.dtype]
    fields = {"num_blocks": shape.num_sms_of("dispatch", layout), **fields}
    if rows == "fp8 rows":
        code, item = _BYTES, 1
        fields["scale_row_bytes"] = -(-shape.hidden // QUANTIZE_GROUP) * 4
    return _load.native().DispatchSpec(
        layout=LAYOUTS.index(layout), hidden=shape.hidden, dtype=code, row_bytes=shape.hidden * item,
        quantize={"fp8": 1, "fp8_ue8m0": 2, "fp8_pow2": 3}.get(rows, 0), topk_is_int64=routing != "int32 ids",
        cached=routing == "handle", **fields,
    )  # fmt: skip


def _window(shape: KernelShape) -> dict[str, int]:
    return {
        "num_ranks": shape.ranks,
        "num_experts": shape.experts,
        "top_k": shape.top_k,
        "max_tokens": shape.tokens,
    }


def _combine_kernels(shape: KernelShape, shared_bytes: int) -> Iterator[tuple[str, str]]:
    """Only rank_major rows in their own type may be pulled, from the heap."""
    for layout, wire, side in _combine_forms(shape):
        may_be_pulled = layout == "rank_major" and (wire is None or shape.sum_domain > 0)
        for has_push in (False, True) if may_be_pulled else (True,):
            where = "" if has_push else " from the heap"
            form = f"{_wire_name(shape, wire)}{', side' if side else ''}"
            name = f"combine {_layout_name(layout)}{_order_name(shape)}{where}, {form}"
            yield name, combine_source(shape, layout, wire, shared_bytes, has_push=has_push, has_side=side)


def _small_combine_kernels(shape: KernelShape) -> Iterator[tuple[str, str]]:
    """Whole calls, and the two halves of staged ones."""
    for layout, wire, side in _combine_forms(shape):
        for half in HALVES:
            form = f"{_wire_name(shape, wire)}{', side' if side else ''}"
            name = f"small combine {_layout_name(layout)}{_order_name(shape)}, {form}"
            yield f"{name}, {half}" if half else name, small_combine_source(shape, layout, wire, half, has_side=side)


def _combine_forms(shape: KernelShape) -> Iterator[tuple[str, str | None, bool]]:
    """Layout, wire and whether side values come along; expert_major and masked share their kernels."""
    by_expert = [name for name in shape.layouts if name != "rank_major"]
    layouts = [name for name in shape.layouts if name == "rank_major"] + by_expert[:1]
    if shape.order == "pick":  # of rows as they are
        layouts = by_expert[:1]
    for layout, wire, side in itertools.product(layouts, (None, "fp8")[: 1 + (shape.order != "pick")], (False, True)):
        if wire is None or shape.hidden % 16 == 0:
            yield layout, wire, side


def _layout_name(layout: str) -> str:
    return layout if layout == "rank_major" else "by expert"


def _order_name(shape: KernelShape) -> str:
    return "" if shape.order == "rank" else f" by {shape.order}"


def _wire_name(shape: KernelShape, wire: str | None) -> str:
    if shape.sum_domain == 0:
        return wire or "plain"
    return f"domains of {shape.sum_domain}" + (f" in {wire}" if wire else "")


def combine_source(
    shape: KernelShape, layout: str, wire: str | None, shared_bytes: int, *, has_push: bool, has_side: bool = False
) -> str:
    """The kernel of a combine; `has_push`: of rows that the owners of the tokens do not pull."""
    source: str = _load.native().render_combine(
        _combine_spec(shape, layout, wire, has_side=has_side),
        num_ranks=shape.ranks,
        num_experts=shape.experts,
        top_k=shape.top_k,
        has_push=has_push,
        shared_bytes=shared_bytes,
    )
    return source


def small_combine_source(
    shape: KernelShape, layout: str, wire: str | None, half: str = "", *, has_side: bool = False
) -> str:
    """The kernel of a combine of a small batch; `half` of a staged one: sends, receives."""
    spec = _combine_spec(shape, layout, wire, has_side=has_side, sends=half != "receives", receives=half != "sends")
    source: str = _load.native().render_small_combine(
        spec, num_ranks=shape.ranks, num_experts=shape.experts, top_k=shape.top_k
    )
    return source


def _combine_spec(shape: KernelShape, layout: str, wire: str | None, **fields: bool) -> Any:
    return _load.native().CombineSpec(
        layout=LAYOUTS.index(layout), hidden=shape.hidden, num_blocks=shape.num_sms_of("combine", layout),
        dtype=_CODES[shape.dtype][0], wire_is_fp8=wire == "fp8", sum_domain=shape.sum_domain,
        order=ORDERS.index(shape.order), **fields,
    )  # fmt: skip


def call_source(
    shape: KernelShape,
    layout: str,
    arch: str,
    *,
    is_small: bool,
    rows: str | None = None,
    routing: str = ROUTINGS[0],
    wire: str | None = None,
    has_push: bool = True,
) -> str:
    """The kernel of a dispatch of `rows`, one of ROWS, or (None) of a combine. `is_small`: one for small batches.

    Raises:
        Unsupported: the shape fits no SM of `arch`.
    """
    shared_bytes = ARCHITECTURES[arch]
    if rows is not None:
        of_dispatch = small_dispatch_source if is_small else dispatch_source
        return of_dispatch(shape, layout, rows, routing, shared_bytes)
    if is_small:
        return small_combine_source(shape, layout, wire)
    return combine_source(shape, layout, wire, shared_bytes, has_push=has_push)


def prebuild(shape: KernelShape, archs: Sequence[str], folder: str, jobs: int | None = None) -> tuple[list[Built], int]:
    """Compile all kernels of a shape into `folder`; returns them and how many of them were there already.

    Raises:
        InvalidArgument: an architecture that Weft does not know.
        Unsupported: no NVRTC, or the shape fits no SM.
        CompileError: NVRTC refused a kernel.
    """
    for arch in archs:
        if arch not in ARCHITECTURES:
            raise InvalidArgument(f"arch={arch!r}: allowed are {', '.join(ARCHITECTURES)}")
    wanted = [(arch, *kernel) for arch in archs for kernel in kernels(shape, ARCHITECTURES[arch])]
    before = len(kernel_cache.entries(folder))
    built = compile_all(wanted, folder, jobs)
    num_new = len(kernel_cache.entries(folder)) - before  # more if another process writes too
    return built, max(len(built) - num_new, 0)


def compile_all(wanted: Sequence[tuple[str, str, str]], folder: str, jobs: int | None = None) -> list[Built]:
    """Compile (architecture, name, source) each into `folder`, `jobs` at once (None: a CPU each)."""
    paths = kernel_paths.compiler_paths(cache=folder)

    def compiled(arch: str, name: str, source: str) -> Built:
        start, cpu_start = time.perf_counter(), time.thread_time()
        cubin = _load.native().compile_kernel(source, arch=arch, **paths)
        return Built(name, arch, time.perf_counter() - start, time.thread_time() - cpu_start, len(cubin))

    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        done: list[Built] = []
        for built in pool.map(lambda job: compiled(*job), wanted):
            done.append(built)
            where.say(f"{len(done)} of {len(wanted)} kernels, {built.name}, {built.arch}")
        return done
