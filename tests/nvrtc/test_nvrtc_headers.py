"""Guards against headers that g++ takes and the GPU compilers refuse, and against lost orders in the compiled code.

Running on x86 can't see a missing release or acquire, so the code itself is read (docs/protocols/mutants.md).
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sass import nvdisasm

ROOT = Path(__file__).resolve().parents[2]
KERNEL = Path(__file__).with_name("headers_kernel.cu")
ARCHITECTURES = ["sm_90", "sm_100"]
# The flags of docs/semantics.md: no fused multiply-add, no flush of subnormals.
OPTIONS = ["--std=c++20", "--fmad=false", f"--include-path={ROOT / 'include'}", "--ptxas-options=-v"]
KERNELS = ["exchange_counts", "send_one", "wait_one", "follow_progress", "convert", "place"]


def load_nvrtc() -> ModuleType:
    """Import the neighbour file nvrtc.py (the tests are no package)."""
    path = Path(__file__).with_name("nvrtc.py")
    spec = importlib.util.spec_from_file_location("weft_test_nvrtc", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


nvrtc = load_nvrtc()
_compiled: dict[tuple[str, ...], Any] = {}


def compiled(architecture: str, *definitions: str) -> Any:
    """Compile the kernel file once per architecture and set of definitions."""
    key = (architecture, *definitions)
    if key not in _compiled:
        options = [*OPTIONS, f"--gpu-architecture={architecture}", *(f"-D{name}" for name in definitions)]
        _compiled[key] = nvrtc.compile_source(KERNEL.read_text(), options)
    return _compiled[key]


def ptx_of(ptx: str, kernel: str) -> str:
    """Return the text of one kernel's entry."""
    start = ptx.index(f".entry {kernel}(")
    end = ptx.find(".entry", start + 6)
    return ptx[start : end if end > 0 else None]


HOST_ONLY = {"weft/config/fields.h"}  # says so in its first lines: it reads names out of what the compiler says


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_shared_header_compiles(architecture):
    headers = sorted(str(path.relative_to(ROOT / "include")) for path in (ROOT / "include/weft").rglob("*.h"))
    assert set(headers) > HOST_ONLY
    headers = [header for header in headers if header not in HOST_ONLY]
    source = "".join(f'#include "{header}"\n' for header in headers) + "__global__ void nothing() {}\n"
    result = nvrtc.compile_source(source, [*OPTIONS, f"--gpu-architecture={architecture}"])
    assert "warning" not in result.log


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_without_warning_spill_or_stack(architecture):
    result = compiled(architecture)
    assert result.cubin[:4] == b"\x7fELF"
    assert "warning" not in result.log
    assert set(re.findall(r"Compiling entry function '(\w+)'", result.log)) == set(KERNELS)
    figures = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", result.log)
    assert len(figures) >= len(KERNELS)
    assert set(figures) == {("0", "0", "0")}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_orders_are_in_the_ptx(architecture):
    ptx = compiled(architecture).ptx
    exchange = ptx_of(ptx, "exchange_counts")
    assert "st.release.sys.global.b64" in exchange
    assert "ld.acquire.sys.global.b64" in exchange
    assert "atom.acquire.sys.global.cas.b64" in exchange
    assert "ld.relaxed.sys.global.b64" in exchange  # the abort word
    assert "%globaltimer" in exchange
    progress = ptx_of(ptx, "follow_progress")
    assert "st.release.sys.global.b64" in progress
    assert "ld.acquire.sys.global.b64" in progress


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_forbidden_in_the_ptx(architecture):
    ptx = compiled(architecture).ptx
    assert ".nc" not in ptx  # ld.global.nc may return what an earlier operation left
    assert ".local" not in ptx
    assert not re.search(r"\bfma\.", ptx)
    assert ".ftz" not in ptx
    assert "wait_group.read" not in ptx


def accesses(*definitions: str) -> tuple[list[str], list[str]]:
    """Return the memory instructions of send_one and of wait_one, in order, without their types."""
    ptx = compiled("sm_90", *definitions).ptx
    found = [re.findall(r"\b((?:st|ld)\.[\w.]*?global)\.", ptx_of(ptx, kernel)) for kernel in ("send_one", "wait_one")]
    return found[0], found[1]


def test_payload_before_header_and_header_before_payload():
    send, wait = accesses()
    assert send == ["st.global", "st.release.sys.global"]
    assert "ld.acquire.sys.global" in wait
    assert wait[-2:] == ["ld.global", "st.global"]  # the payload is read last, by a plain load, not .nc


@pytest.mark.parametrize(
    ("mutant", "send"),
    [
        ("HEADER_FIRST", ["st.release.sys.global", "st.global"]),
        ("RELAXED_SEND", ["st.global", "st.relaxed.sys.global"]),
        ("RELAXED_WAIT", None),
    ],
)
def test_the_inspection_sees_mutants(mutant, send):
    seen_send, seen_wait = accesses(f"WEFT_MUTANT_{mutant}")
    if send is not None:
        assert seen_send == send
    else:
        assert "ld.acquire.sys.global" not in seen_wait


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_machine_code(architecture, tmp_path):
    path = tmp_path / "headers.cubin"
    path.write_bytes(compiled(architecture).cubin)
    code = subprocess.run([nvdisasm(), "-c", str(path)], check=True, capture_output=True, text=True).stdout
    assert re.search(r"\bST(G)?\.E\.64\.STRONG\.SYS", code), "the header is not stored at system scope"
    assert re.search(r"\bLD(G)?\.E\.64\.STRONG\.SYS", code), "the header is not loaded at system scope"
    assert "MEMBAR" in code, "no fence before a header"
    assert ".CONSTANT" not in code, "a load through the read-only cache"
    assert not re.search(r"\b(LDL|STL)\b", code), "local memory"
    convert = re.split(r"\.section\s+\.text\.", code.split("\n.text.convert:")[1])[0]
    assert "FADD" in convert
    assert "FFMA" not in convert, "a fused multiply-add in the conversions"


def test_nvrtc_is_the_pinned_one_or_later():
    assert nvrtc.version() >= (13, 0)


def test_a_broken_source_shows_its_log():
    with pytest.raises(nvrtc.CompileFailedError, match="no_such_name"):
        nvrtc.compile_source("__global__ void f() { no_such_name(); }", OPTIONS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvcc_takes_the_same_headers(architecture, tmp_path):
    nvcc = shutil.which("nvcc")
    if not nvcc:
        pytest.skip("nvcc is not installed")
    command = [nvcc, f"-arch={architecture}", "-std=c++20", "--fmad=false", "-I", str(ROOT / "include"), "-cubin"]
    command += ["-o", str(tmp_path / "headers.cubin"), str(KERNEL)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "headers.cubin").stat().st_size > 0
