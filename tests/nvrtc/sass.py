"""What ptxas made of a kernel: its figures, and the machine code through nvdisasm."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import nvrtc
import pytest
from cuda import pathfinder

INCLUDE = Path(__file__).parents[2] / "include"


def options(arch: str) -> list[str]:
    """The flags that src/jit/compiler.cc compiles with."""
    return [f"--gpu-architecture={arch}", f"--include-path={INCLUDE}", "--std=c++20", "--fmad=false", "-default-device"]


def compiled_kernel(source: str, arch: str) -> nvrtc.Compiled:
    """Compile as Weft does, with ptxas's figures in the log."""
    return nvrtc.compile_source(source, [*options(arch), "--ptxas-options=-v"])


def nvdisasm() -> str:
    """Find nvdisasm from its wheel or on the PATH, or skip."""
    try:
        found = pathfinder.find_nvidia_binary_utility("nvdisasm")
    except Exception:
        found = None
    found = found or shutil.which("nvdisasm")
    if not found:
        pytest.skip("nvdisasm is not installed (wheel nvidia-cuda-nvdisasm)")
    return found


def disassembled(cubin: bytes) -> str:
    """The machine code as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([nvdisasm(), "-c", file.name], check=True, capture_output=True, text=True).stdout


def problems(
    compiled: nvrtc.Compiled,
    *,
    loads_in_bulk: bool,
    stores_in_bulk: bool,
    adds_exact_products: bool = False,
    begins_early: bool = True,
    lets_next_begin: bool = False,
) -> list[str]:
    """What must not be in a kernel that moves rows, or is missing from it; empty if all is well."""
    code = disassembled(compiled.cubin)
    found = []
    frames = set(
        re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", compiled.log)
    )
    if frames != {("0", "0", "0")}:
        found.append(f"spills or a stack frame: {sorted(frames)}")
    if local := sorted(set(re.findall(r"\b(?:LDL|STL)\b[.\w]*", code))):
        found.append(f"local memory: {local}")
    if "ld.global.nc" in compiled.ptx or ".CONSTANT" in code:
        found.append("a load through the read-only cache, which may return what an earlier operation left")
    ptx = compiled.ptx  # in the machine code a division is made of some, and exact
    if adds_exact_products:  # by ptx::add_exact_product
        ptx = re.sub(r"// begin inline asm.*?// end inline asm", "", ptx, flags=re.DOTALL)
    if re.search(r"\bfma\.", ptx):
        found.append("a fused multiply-add: other bits than the CPU's")
    if begins_early:  # see docs/protocols/nvlink-window.md, "Order of calls"
        touched = re.search(r"\b(?:LDG|STG|LD|ST|ATOMG?|REDG?|RED|UBLKCP|MEMBAR|CCTL)\b", code)
        if "ACQBULK" not in code or (touched and touched.start() < code.index("ACQBULK")):
            found.append("global memory before the kernel in front has ended")
    if ("PREEXIT" in code) != lets_next_begin:
        found.append("the next kernel may not begin early" if lets_next_begin else "the next kernel may begin early")
    if loads_in_bulk and "UBLKCP.S.G" not in code:
        found.append("no bulk load")
    if stores_in_bulk and "UBLKCP.G.S" not in code:
        found.append("no bulk store")
    return found
