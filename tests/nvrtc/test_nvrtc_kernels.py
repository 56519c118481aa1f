"""Guards against kernels that do not compile, spill, or lost their bulk copies: no GPU is needed to see that.

One case for each family of configurations: whatever is `if constexpr` in a kernel is compiled both ways.
"""

from dataclasses import dataclass

import nvrtc
import pytest
import sass

ENTRY = """#include "weft/kernels/{header}.cuh"
constexpr weft::{config} kConfig{{{fields}}};
extern "C" __global__ void __launch_bounds__(weft::kernels::{threads}, 1)
    weft_kernel(const __grid_constant__ weft::kernels::{args} args) {{
  weft::kernels::{header}<kConfig>(args);
}}
"""


@dataclass(frozen=True)
class Family:
    """A kernel and one configuration of it."""

    name: str
    kernel: str
    fields: str
    loads_in_bulk: bool = True
    stores_in_bulk: bool = True

    def source(self) -> str:
        words = self.kernel.title().replace("_", "")
        is_link = self.kernel == "link_limit"
        return ENTRY.format(
            header=self.kernel,
            config=f"kernels::{words}Config" if is_link else f"{words}KernelConfig",
            fields=self.fields,
            threads=f"k{words}Threads",
            args=f"{words}Args" if is_link else f"{words}KernelArgs",
        )


def dispatch(name: str, *, ranks: int = 4, top_k: int = 8, row: int = 14336, scales: int = 0, more: str = "") -> Family:
    fields = (
        f".num_ranks={ranks}, .num_experts=256, .top_k={top_k}, .num_blocks=16, .row_bytes={row}, "
        f".scale_row_bytes={scales}, .num_stages=14, .num_groups=128, {more}"
    )
    return Family(f"dispatch-{name}", "dispatch", fields)


def combine(name: str, *, ranks: int = 4, dtype: str = "kBf16", stores_in_bulk: bool = False) -> Family:
    fields = (
        f".num_ranks={ranks}, .num_blocks=16, .hidden=7168, .chunk=1792, .num_stages=6, .dtype=weft::Dtype::{dtype}"
    )
    return Family(f"combine-{name}", "combine", fields, stores_in_bulk=stores_in_bulk)


FAMILIES = [
    dispatch("bf16", more=".topk_is_int64=1"),
    dispatch("fp8", ranks=8, row=7168, scales=224, more=".topk_is_int64=1"),
    dispatch("int32-ids", ranks=2, top_k=6, row=4096, more=".topk_is_int64=0"),
    combine("bf16"),
    combine("fp16", ranks=8, dtype="kFp16"),
    combine("fp32", ranks=2, dtype="kFp32"),
    Family("link-push", "link_limit", ".row_bytes=14336, .num_stages=10", loads_in_bulk=False),
    Family("link-pull", "link_limit", ".row_bytes=14336, .num_stages=10, .is_pull=true", stores_in_bulk=False),
]


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_kernel_compiles_without_spills_and_copies_in_bulk(family: Family, arch: str) -> None:
    """Spilled registers or rows copied by threads cost a third of the bandwidth and fail no other test."""
    compiled = sass.compiled_kernel(family.source(), arch)
    assert sass.problems(compiled, loads_in_bulk=family.loads_in_bulk, stores_in_bulk=family.stores_in_bulk) == []
    if family.kernel in ("dispatch", "combine"):
        assert "st.release.sys" in compiled.ptx


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
    compiled = nvrtc.compile_source(SPILLS, [*sass.options("sm_90"), "--ptxas-options=-v"])
    found = " ".join(sass.problems(compiled, loads_in_bulk=True, stores_in_bulk=True))
    for fault in ("stack frame", "local memory", "read-only cache", "multiply-add", "no bulk load", "no bulk store"):
        assert fault in found
