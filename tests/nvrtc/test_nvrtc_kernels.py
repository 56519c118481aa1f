"""Guards against kernels that do not compile, spill, or lost their bulk copies: no GPU is needed to see that."""

import re
from pathlib import Path

import nvrtc
import pytest

INCLUDE = Path(__file__).parents[2] / "include"
ENTRY = """#include "weft/kernels/{kernel}.cuh"
constexpr weft::{config}KernelConfig kConfig{{{fields}}};
extern "C" __global__ void __launch_bounds__(weft::kernels::{threads}, 1)
    weft_kernel(const __grid_constant__ weft::kernels::{config}KernelArgs args) {{
  weft::kernels::{kernel}<kConfig>(args);
}}
"""
DISPATCH = (
    ".num_ranks={ranks}, .num_experts=256, .top_k={top_k}, .num_blocks=16, .row_bytes={row}, "
    ".scale_row_bytes={scales}, .num_stages=14, .num_groups=128, .topk_is_int64={wide}"
)
COMBINE = ".num_ranks={ranks}, .num_blocks=16, .hidden=7168, .chunk=1792, .num_stages=6, .dtype=weft::Dtype::{dtype}"
CASES = [
    ("dispatch", DISPATCH.format(ranks=4, top_k=8, row=14336, scales=0, wide=1)),
    ("dispatch", DISPATCH.format(ranks=8, top_k=8, row=7168, scales=224, wide=1)),
    ("dispatch", DISPATCH.format(ranks=2, top_k=6, row=4096, scales=0, wide=0)),
    ("combine", COMBINE.format(ranks=4, dtype="kBf16")),
    ("combine", COMBINE.format(ranks=8, dtype="kFp16")),
    ("combine", COMBINE.format(ranks=2, dtype="kFp32")),
]


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize(("kernel", "fields"), CASES)
def test_kernel_compiles_without_spills_and_copies_in_bulk(kernel: str, fields: str, arch: str) -> None:
    """Spilled registers or rows copied by threads cost a third of the bandwidth and fail no other test."""
    source = ENTRY.format(
        kernel=kernel, config=kernel.capitalize(), fields=fields, threads=f"k{kernel.capitalize()}Threads"
    )
    options = [f"--gpu-architecture={arch}", f"-I{INCLUDE}", "--std=c++20", "--fmad=false", "-default-device"]
    compiled = nvrtc.compile_source(source, [*options, "--ptxas-options=-v"])
    assert re.search(r"\b0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", compiled.log), compiled.log
    assert "cp.async.bulk" in compiled.ptx
    assert "st.release.sys" in compiled.ptx
    assert "ld.global.nc" not in compiled.ptx
