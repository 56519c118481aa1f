"""What ptxas made of a kernel: its figures, and the machine code through nvdisasm."""

import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import nvrtc
import pytest
from cuda import pathfinder

INCLUDE = Path(__file__).parents[2] / "include"
INSTRUCTION_BYTES = 16


def options(arch: str) -> list[str]:
    """The flags that src/jit/compiler.cc compiles with."""
    return [f"--gpu-architecture={arch}", f"--include-path={INCLUDE}", "--std=c++20", "--fmad=false", "-default-device"]


@dataclass(frozen=True)
class Kernel:
    """What NVRTC made of a source, and its machine code as text."""

    compiled: nvrtc.Compiled
    code: str


def compiled_kernels(sources: list[str], arch: str) -> list[Kernel]:
    """Compile as Weft does, with ptxas's figures in the log. They are disassembled in one go: nvdisasm takes half a
    second to start and a twentieth of one for each.
    """
    compiled = [nvrtc.compile_source(source, [*options(arch), "--ptxas-options=-v"]) for source in sources]
    texts = [instructions(each.cubin) for each in compiled]
    lines = disassembled(b"".join(texts), arch)
    found = []
    for each, text in zip(compiled, texts, strict=True):
        length = len(text) // INSTRUCTION_BYTES
        found.append(Kernel(each, "\n".join(lines[:length])))
        lines = lines[length:]
    return found


def nvdisasm() -> str:
    """Find nvdisasm, of the test extra or on the PATH. Fails without it: what it shows is not to go unseen."""
    try:
        found = pathfinder.find_nvidia_binary_utility("nvdisasm")
    except Exception:
        found = None
    found = found or shutil.which("nvdisasm")
    if not found:
        pytest.fail("nvdisasm is not installed; need: the wheel nvidia-cuda-nvdisasm, or `make test`")
    return found


def instructions(cubin: bytes) -> bytes:
    """The sections of an ELF file (64 bits) that hold code."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, number, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + idx * size) for idx in range(number)]
    code = b""
    for name, _, _, _, begin, length in sections:
        text = cubin[sections[names][4] + name :].split(b"\0", 1)[0]
        if text.startswith(b".text"):
            code += cubin[begin : begin + length]
    assert code
    return code


def disassembled(code: bytes, arch: str) -> list[str]:
    """One line an instruction."""
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(code)
        file.flush()
        command = [nvdisasm(), "--binary", arch.replace("sm_", "SM"), file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;$", text, flags=re.MULTILINE)
    assert len(lines) == len(code) // INSTRUCTION_BYTES, "nvdisasm's text is of another form"
    return lines


def problems(
    kernel: Kernel,
    *,
    loads_in_bulk: bool,
    stores_in_bulk: bool,
    adds_exact_products: bool = False,
    begins_early: bool = True,
    lets_next_begin: bool = False,
) -> list[str]:
    """What must not be in a kernel that moves rows, or is missing from it; empty if all is well."""
    compiled, code = kernel.compiled, kernel.code
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
