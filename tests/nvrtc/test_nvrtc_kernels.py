"""Guards against kernels that do not compile, spill, or lost their bulk copies: no GPU is needed to see that.

The sources are those of `weft cache prebuild`, which are those of real calls: all of the reference shape, and some of
shapes with other widths. Whatever is `if constexpr` in a kernel is compiled both ways.
"""

import functools
import re
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import sass

from weft import _load, prebuild
from weft.prebuild import KernelShape

ARCHITECTURES = ("sm_90", "sm_100")
GROUP = 16  # kernels that one thread compiles and disassembles together
SHAPES = {
    "bf16": KernelShape(),
    "fp16, 8 ranks": KernelShape(ranks=8, experts=64, top_k=6, hidden=2880, dtype="fp16", num_sms=8, tokens=1000),
    "fp32, 2 ranks": KernelShape(ranks=2, experts=32, top_k=2, hidden=272, dtype="fp32", num_sms=3, tokens=192),
}


def is_wanted(shape: str, name: str) -> bool:
    """All of the first shape; of the others what depends on widths. The second has rows that are no whole number of the
    units in which FP8 is made.
    """
    if name.endswith(" SMs"):  # the same code with another constant
        return False
    if shape == "bf16":
        return True
    if name.endswith(("sends", "receives")) or "by column" in name or "side" in name:
        return False
    is_fp16 = shape.startswith("fp16")
    if name.startswith(("combine", "small combine")):
        return is_fp16 or "fp8" in name
    return ("int32" in name and "fp8" not in name) if is_fp16 else "fp8," in name and "handle" in name


CASES = [
    (arch, shape, name)
    for arch in ARCHITECTURES
    for shape, values in SHAPES.items()
    for name, _ in prebuild.kernels(values, prebuild.ARCHITECTURES[arch])
    if is_wanted(shape, name)
]


@functools.cache
def compilations() -> dict[tuple[str, str, str], tuple["Future[list[sass.Kernel]]", int]]:
    """All of them, started at once: NVRTC compiles in threads. Each is one of a group, by its index there."""
    pool = ThreadPoolExecutor(2)
    sources = {
        (arch, shape, name): source
        for arch in ARCHITECTURES
        for shape, values in SHAPES.items()
        for name, source in prebuild.kernels(values, prebuild.ARCHITECTURES[arch])
        if is_wanted(shape, name)
    }
    found = {}
    for arch in ARCHITECTURES:
        cases = [case for case in sources if case[0] == arch]
        for begin in range(0, len(cases), GROUP):
            group = cases[begin : begin + GROUP]
            made = pool.submit(sass.compiled_kernels, [sources[case] for case in group], arch)
            found.update({case: (made, idx) for idx, case in enumerate(group)})
    return found


@pytest.mark.parametrize(("arch", "shape", "name"), CASES, ids=[" / ".join(case) for case in CASES])
def test_kernel_compiles_without_spills_and_copies_in_bulk(arch: str, shape: str, name: str) -> None:
    """Spilled registers or rows copied by threads cost a third of the bandwidth and fail no other test."""
    group, idx = compilations()[arch, shape, name]
    kernel = group.result()[idx]
    moves_rows = not name.startswith(("unload", "small"))
    is_pulled = "from the heap" in name
    found = sass.problems(
        kernel,
        loads_in_bulk=moves_rows,
        stores_in_bulk=moves_rows and not is_pulled,
        adds_exact_products="combine" in name and "fp8" in name,
        lets_next_begin=name.startswith("small") and not name.endswith("sends"),
    )
    assert found == []
    if name != "unload":
        assert "st.release.sys" in kernel.compiled.ptx
    if name != "unload" and not name.endswith("sends"):
        assert "ld.acquire.sys" in kernel.compiled.ptx


def test_every_kernel_is_looked_at() -> None:
    """A kernel that no case renders would be in no build but a user's."""
    headers = {path.stem for path in (sass.INCLUDE / "weft" / "kernels").glob("*.cuh")}
    sources = [source for _, source in prebuild.kernels(KernelShape(), 227 << 10)]
    rendered = set(re.findall(r'#include "weft/kernels/(\w+)\.cuh"', " ".join(sources)))
    parts = {header for header in headers if any(header.startswith(f"{kernel}_") for kernel in rendered)}
    assert headers - {"words", "post"} == rendered | parts | {"link_limit"}


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
