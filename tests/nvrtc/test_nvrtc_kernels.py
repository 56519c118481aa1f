"""Guards against kernels that do not compile, spill, or lost bulk copies or an order: no GPU is needed to see that.

The sources are those of `weft cache prebuild`, which are those of real calls: all of the reference shape (BF16,
H = 7168, 4 ranks, K = 8), so each layout, kind of rows, routing, half, with side values and without. Of other shapes
only what `is_wanted` takes: no halves, side values or scales by column there, few dispatches that make FP8, and few
widths. What is `if constexpr` for another width is not compiled, and may spill.
"""

import functools
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import orders
import pytest
import sass
import test_nvrtc_orders

from weft import _load
from weft.kernels import prebuild
from weft.kernels.prebuild import KernelShape
from weft.limits import LAYOUTS, MAX_SMALL_TOKENS

ARCHITECTURES = ("sm_90", "sm_100")
GROUP = 16  # kernels that one thread compiles and disassembles together
SHAPES = {
    "bf16": KernelShape(),
    "fp16, 8 ranks": KernelShape(ranks=8, experts=64, top_k=6, hidden=2880, dtype="fp16", num_sms=8, tokens=1000),
    "fp32, 2 ranks": KernelShape(ranks=2, experts=32, top_k=2, hidden=272, dtype="fp32", num_sms=3, tokens=192),
    "16 ranks, K = 40": KernelShape(ranks=16, top_k=40, tokens=1024),
    "H = 5120": KernelShape(experts=160, hidden=5120),
    "last pick": KernelShape(order="last_pick"),
    "pick": KernelShape(order="pick"),
    "domains": KernelShape(sum_domain=2),
    "domains, fp32": KernelShape(ranks=16, sum_domain=8, dtype="fp32", hidden=2880, tokens=192),
}
OF_MANY = (  # of the shape of 16 ranks
    "dispatch rank_major, plain, int64 ids",
    "dispatch expert_major, fp8, int64 ids",
    "combine rank_major, fp8",
    "combine by expert, plain",
    "small dispatch masked, fp8, int64 ids",
    "small combine by expert, plain",
)
# Quantised before: bytes of a row, and of its scales.
ROWS = {"NVFP4": (3584, 448), "odd scales": (1008, 7), "FP8 of H = 3072": (3072, 96)}


def is_wanted(shape: str, name: str) -> bool:
    """All kernels of the first shape, except those for other numbers of SMs. Of fp8_pow2, which differs from fp8_ue8m0
    only in the scale that is stored, first dispatches with int64 ids that are whole or receive. Of the next two shapes
    some of what depends on widths. The second has rows that are no whole number of the units in which FP8 is made; it
    has no dispatch of FP8, the third no other.
    """
    if name.endswith(" SMs"):  # the same code with another constant
        return False
    if shape == "bf16":
        return "fp8_pow2" not in name or ("int64 ids" in name and not name.endswith("sends"))
    if shape.startswith("16 ranks"):
        return name in OF_MANY
    if shape == "H = 5120":  # whose row is cut into three units, of which one is shorter
        return name == "combine rank_major, fp8"
    if shape.startswith("domains") or "pick" in shape:
        return name.startswith(("combine", "small combine")) and not name.endswith(("sends", "receives"))
    if name.endswith(("sends", "receives")) or "by column" in name or "side" in name:
        return False
    is_fp16 = shape.startswith("fp16")
    if name.startswith(("combine", "small combine")):
        return is_fp16 or "fp8" in name
    return ("int32" in name and "fp8" not in name) if is_fp16 else "fp8," in name and "handle" in name


def dispatch_of_rows(rows: str, *, is_small: bool) -> str:
    """A dispatch by expert of one of ROWS, of the first shape else: `weft cache prebuild` has none."""
    native, shape = _load.native(), SHAPES["bf16"]
    args = native.DispatchSpec()
    args.layout, args.topk_is_int64 = LAYOUTS.index("expert_major"), True
    args.num_blocks = shape.small_num_sms[0] if is_small else shape.num_sms_of("dispatch", "expert_major")
    args.row_bytes, args.scale_row_bytes = ROWS[rows]
    source: str = (native.render_small_dispatch if is_small else native.render_dispatch)(
        args,
        num_ranks=shape.ranks,
        num_experts=shape.experts,
        top_k=shape.top_k,
        max_tokens=MAX_SMALL_TOKENS if is_small else shape.tokens,
        shared_bytes=prebuild.ARCHITECTURES["sm_90"],
    )
    return source


def wanted_sources() -> Iterator[tuple[str, str, str]]:
    """Shape, name and source; the same for each of ARCHITECTURES, whose SMs have as much shared memory."""
    for shape, values in SHAPES.items():
        for name, source in prebuild.kernels(values, prebuild.ARCHITECTURES["sm_90"]):
            if is_wanted(shape, name):
                yield shape, name, source
    for rows in ROWS:
        yield rows, "dispatch expert_major, int64 ids", dispatch_of_rows(rows, is_small=False)
        yield rows, "small dispatch expert_major, int64 ids", dispatch_of_rows(rows, is_small=True)


SOURCES = {(arch, shape, name): source for arch in ARCHITECTURES for shape, name, source in wanted_sources()}


def is_long(case: tuple[str, str, str]) -> bool:
    """All but one or two of each kind, of the first shape; for sm_100 all but some of these. .ci/long has all."""
    arch, shape, name = case
    quick = (*test_nvrtc_orders.KINDS, *OF_MANY) if arch == "sm_90" else test_nvrtc_orders.OFTEN
    return shape != "bf16" or name not in quick


@functools.cache
def compilations(*, of_long: bool) -> dict[tuple[str, str, str], tuple["Future[list[sass.Kernel]]", int]]:
    """Started at once: NVRTC compiles in threads. Each is one of a group, by its index there."""
    pool = ThreadPoolExecutor(2)
    found = {}
    for arch in ARCHITECTURES:
        cases = [case for case in SOURCES if case[0] == arch and is_long(case) == of_long]
        for begin in range(0, len(cases), GROUP):
            group = cases[begin : begin + GROUP]
            made = pool.submit(sass.compiled_kernels, [SOURCES[case] for case in group], arch)
            found.update({case: (made, idx) for idx, case in enumerate(group)})
    return found


# 8 bytes, in a shape at the edge of what registers hold. The list may only shrink.
KNOWN_SPILLS = {("sm_90", "16 ranks, K = 40", "small dispatch masked, fp8, int64 ids")}


@pytest.mark.parametrize(
    ("arch", "shape", "name"),
    [pytest.param(*case, id=" / ".join(case), marks=[pytest.mark.long] if is_long(case) else []) for case in SOURCES],
)
def test_kernel_has_no_spills_copies_in_bulk_and_keeps_orders(arch: str, shape: str, name: str) -> None:
    """Spilled registers or rows copied by threads cost a third of the bandwidth and fail no other test; nor does a lost
    order (test_nvrtc_orders.py has what that looks like).
    """
    case = (arch, shape, name)
    group, idx = compilations(of_long=is_long(case))[case]
    kernel = group.result()[idx]
    moves_rows = not name.startswith(("unload", "gradients", "place", "stage", "small", "count", "picks", "need"))
    stores_in_bulk = "from the heap" not in name and not orders.stores_by_threads(name)
    found = sass.problems(
        kernel,
        loads_in_bulk=moves_rows,
        stores_in_bulk=moves_rows and stores_in_bulk,
        adds_exact_products="combine" in name and "fp8" in name,
        lets_next_begin=name.startswith("small") and not name.endswith("sends"),
    )
    if case in KNOWN_SPILLS:
        found = [problem for problem in found if not problem.startswith(("spills or a stack frame", "local memory"))]
    assert found == []
    assert orders.unmet(name, kernel.compiled.ptx) == {}


def test_every_kernel_is_looked_at() -> None:
    """A kernel that no case renders would be in no build but a user's."""
    folder = sass.INCLUDE / "weft" / "kernels"
    headers = {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.cuh")}
    sources = [source for _, source in prebuild.kernels(KernelShape(), 227 << 10)]
    rendered = set(re.findall(r'#include "weft/kernels/([\w/]+)\.cuh"', " ".join(sources)))
    entries = {header for header in headers if "/" not in header or header.endswith("entry")}
    assert entries - {"domains", "nodes", "numbers", "post", "records", "route", "words"} == rendered | {"link_limit"}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("is_pull", [False, True])
def test_link_kernels(arch: str, is_pull: bool) -> None:
    """What a limit is measured with must do the same kind of copies."""
    source = _load.native().render_link_limit(row_bytes=7168, is_pull=is_pull)
    (kernel,) = sass.compiled_kernels([source], arch)
    assert sass.problems(kernel, loads_in_bulk=is_pull, stores_in_bulk=not is_pull, begins_early=False) == []


SPILLS = """extern "C" __global__ void weft_kernel(int* out, const int* __restrict__ in, int n) {
  int kept[64];
  for (int i = 0; i < n; ++i) kept[in[i] & 63] = i;
  out[0] = kept[n];
  float* sum = reinterpret_cast<float*>(out + 1);
  *sum = __fmaf_rn(*sum, 2.0f, 1.0f);
}
"""


def test_the_inspection_sees_what_it_looks_for() -> None:
    """A kernel with each of the faults is refused for each of them."""
    (kernel,) = sass.compiled_kernels([SPILLS], "sm_90")
    found = " ".join(sass.problems(kernel, loads_in_bulk=True, stores_in_bulk=True))
    for fault in (
        "stack frame",
        "local memory",
        "read-only cache",
        "multiply-add",
        "no bulk load",
        "no bulk store",
        "in front",
    ):
        assert fault in found
