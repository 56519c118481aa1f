"""Guards against a release of NCCL whose headers NVRTC refuses, or lays out in another way than nvcc.

.ci/long puts the wheels into build/nccl: NCCL's by version, CUDA's headers unpacked in `cuda`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import nvrtc
import pytest
from test_nvrtc_nodes import source_of

from weft.scaleout import headers, nccl

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "build/nccl"
CUDA = WHEELS / "cuda/nvidia/cu13/include"
RELEASES = ("2.30.7", "2.31.2", "2.32.3")
NEWEST = RELEASES[-1]
GIN = 3  # as weft::Route
BACKENDS = ("PROXY", "GDAKI", "GPI", "EFA_GDA")
FOLDERS = [f"--include-path={folder}" for folder in (ROOT / "include", CUDA, CUDA / "cccl")]
OPTIONS = ["--std=c++20", "--device-as-default-execution-space", "--fmad=false", "--ptxas-options=-v", *FOLDERS]

_STRUCT = re.compile(r"^(?:typedef )?(struct|union)((?: __attribute__\(\(.*?\)\))*) ?(\w*) *\{", re.MULTILINE)
_FIELD = re.compile(r"^\s+[\w ]+[ *](\w+)(?:\[[^\]]*\])*;", re.MULTILINE)
_MOVE = re.compile(r"^\s*mov\.(?:b|u)64\s+(%\w+), (\d+);", re.MULTILINE)
_STORE = re.compile(r"^\s*st\.global\.(?:b|u)64\s+\[%\w+(?:\+(\d+))?\], (%?\w+);", re.MULTILINE)


def wheel(release: str) -> Path:
    found = sorted((WHEELS / release).glob("*.whl"))
    if not found:
        pytest.skip(f"no wheel of NCCL {release} in {WHEELS}")
    return found[0]


@pytest.fixture(scope="session", params=RELEASES)
def include(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release's headers as they came."""
    folder = tmp_path_factory.mktemp(request.param)
    with zipfile.ZipFile(wheel(request.param)) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if "/include/" in name])
    return folder / "nvidia/nccl/include"


def compiled(source: str, include: Path, backend: str, architecture: str) -> nvrtc.Compiled:
    enabled = [f"-DNCCL_GIN_{each}_ENABLE={int(each == backend)}" for each in BACKENDS]
    options = [*OPTIONS, f"--include-path={include}", f"--gpu-architecture={architecture}", *enabled]
    return nvrtc.compile_source(headers.PROLOGUE + source, options)


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
@pytest.mark.parametrize("backend", ["PROXY", "GDAKI"])
def test_the_rail_compiles(include: Path, backend: str, architecture: str, tmp_path: Path) -> None:
    source = Path(__file__).with_name("rail_gin_kernel.cu").read_text(encoding="utf-8")
    found = compiled(source, headers.prepare(include, tmp_path), backend, architecture)
    assert re.findall(r"Compiling entry function '(\w+)'", found.log) == ["rail_gin"]
    assert "warning" not in found.log


def layout_source(include: Path, backend: str) -> tuple[list[str], str]:
    """Sizes, alignments and places of plain fields as expressions, and a kernel that stores their values."""
    asked = []
    for file in sorted((include / "nccl_device/gin" / backend.lower()).rglob("*.h")):
        if not file.name.startswith("doca_gpunetio_verbs") and not file.name.endswith("_host_common.h"):
            continue
        text = file.read_text(encoding="utf-8")
        for found in _STRUCT.finditer(text):
            depth, end = 1, found.end()
            while depth > 0:
                depth += (text[end] == "{") - (text[end] == "}")
                end += 1
            tail = re.match(r"\s*(?:__attribute__\s*\(\(.*?\)\)\s*)*(\w+)\s*;", text[end:])
            kind = f"{found[1]} {found[3]}" if found[3] else tail[1] if tail else ""
            if not kind or "template" in text[: found.start()].rsplit("\n", 2)[-2]:
                continue
            asked += [f"sizeof({kind})", f"alignof({kind})"]
            body = text[found.end() : end - 1]
            if "{" not in body and "}" not in body:
                asked += [f"(char*)&(({kind}*)out)->{field} - (char*)out" for field in _FIELD.findall(body)]
    stores = "".join(f"  out[{idx}] = {each};\n" for idx, each in enumerate(asked))
    kernel = f'extern "C" __global__ void layouts(unsigned long long* out) {{\n{stores}}}\n'
    return asked, f"#include <nccl.h>\n#include <nccl_device.h>\n{kernel}"


def answers(ptx: str) -> list[int]:
    text = ptx[ptx.index(".entry layouts(") :]
    numbers = dict(_MOVE.findall(text))
    stores = {int(at or 0): numbers.get(value, value) for at, value in _STORE.findall(text)}
    assert sorted(stores) == [8 * idx for idx in range(len(stores))]
    return [int(stores[at]) for at in sorted(stores)]


def by_nvcc(source: str, include: Path, folder: Path) -> list[int]:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    (folder / "layouts.cu").write_text(source, encoding="utf-8")
    places = [f"-I{each}" for each in (include, CUDA / "cccl")]
    command = [nvcc, "-std=c++20", "-arch=sm_90", "-ptx", *places, "-DNCCL_GIN_EFA_GDA_ENABLE=0", "layouts.cu"]
    subprocess.run(command, cwd=folder, check=True)
    return answers((folder / "layouts.ptx").read_text(encoding="utf-8"))


def test_the_program_of_the_lab_compiles(include: Path, tmp_path: Path) -> None:
    """It runs on GPUs alone."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    places = [f"-I{each}" for each in (ROOT / "include", include, CUDA, CUDA / "cccl")]
    command = [nvcc, "-std=c++20", "-arch=sm_90", "-c", *places, "-DNCCL_GIN_EFA_GDA_ENABLE=0", "-o", "gin_rings.o"]
    subprocess.run([*command, str(ROOT / "lab" / "nic" / "gin_rings.cu")], cwd=tmp_path, check=True)


# Of weft.nccl's structs and NCCL's: sizes, and the places of fields that are read or set.
PAIRS = {
    ("Properties", "ncclCommProperties_t"): {
        "version": "version",
        "has_device_api": "deviceApiSupport",
        "gin_type": "ginType",
        "num_lsa_teams": "nLsaTeams",
        "railed_gin_type": "railedGinType",
    },
    ("Requirements", "ncclDevCommRequirements_t"): {
        "version": "version",
        "num_contexts": "ginContextCount",
        "num_signals": "ginSignalCount",
        "num_counters": "ginCounterCount",
        "connection": "ginConnectionType",
        "traffic_class": "ginTrafficClass",
        "needs_strong_signals": "ginStrongSignalsRequired",
        "needs_address_signals": "ginVaSignalsRequired",
    },
}
NEWER = {
    "Properties": {"has_gin": "ginSupport", "comm_bytes": "devCommRuntimeVersionSize"},
    "Requirements": {"gin_type": "ginType", "is_for_own_release": "useRuntimeVersion"},
}


def test_structs_of_the_engine_are_those_of_nccl(include: Path, tmp_path: Path) -> None:
    """Which is built without NCCL's headers."""
    has_host = (include / "nccl_device/host.h").is_file()
    lines = ["#include <nccl.h>", f"#include <nccl_device/{'host' if has_host else 'core'}.h>"]
    lines += ['#include "engine/nvlink/nccl_abi.h"', "using namespace weft::nccl;"]
    lines += ["static_assert(kMagic == NCCL_API_MAGIC && sizeof(UniqueId) == sizeof(ncclUniqueId));"]
    lines += ["static_assert(kUndefined == NCCL_CONFIG_UNDEF_INT && kWindowSymmetric == NCCL_WIN_COLL_SYMMETRIC);"]
    lines += ["static_assert(static_cast<int>(Connection::kRail) == NCCL_GIN_CONNECTION_RAIL);"]
    lines += ["static_assert(static_cast<int>(Connection::kFull) == NCCL_GIN_CONNECTION_FULL);"]
    lines += ["static_assert(static_cast<int>(GinType::kGdaki) == NCCL_GIN_TYPE_GDAKI);"]
    is_newer = "ginCustomStride" in "".join(path.read_text() for path in (include / "nccl_device").glob("*.h"))
    for (own, theirs), same in PAIRS.items():
        size = f"{own.lower()}_bytes(NCCL_VERSION_CODE)"
        lines += [f"static_assert({size} == sizeof({theirs}));"]
        for name, other in (same | (NEWER[own] if is_newer else {})).items():
            lines += [f"static_assert(offsetof({own}, {name}) == offsetof({theirs}, {other}));"]
    (tmp_path / "abi.cc").write_text("\n".join(lines) + "\n", encoding="utf-8")
    places = [f"-I{each}" for each in (ROOT / "src", ROOT / "include", include, CUDA, CUDA / "cccl")]
    command = ["g++", "-std=c++20", "-w", "-fsyntax-only", *places, "abi.cc"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize("backend", ["PROXY", "GDAKI"])
def test_kernels_with_nodes_compile(include: Path, backend: str, tmp_path: Path) -> None:
    """As windows render them, with what WEFT_NETWORK=nccl puts in front."""
    folder = headers.prepare(include, tmp_path)
    for name in (
        "dispatch rank_major, plain, int64 ids",
        "combine rank_major from the heap, domains of 2",
        "small dispatch masked, fp8, int64 ids, sends",
        "small combine rank_major, domains of 2",
    ):
        source = source_of(name).replace("<weft::Route>(2)", f"<weft::Route>({GIN})")
        kernel = f'#include "weft/transport/rail_gin.cuh"\n{source}'
        assert compiled(kernel, folder, backend, "sm_90").cubin, name


@pytest.mark.parametrize(("backend", "least"), [("PROXY", 9), ("GDAKI", 74)])
def test_structs_lie_where_nvcc_lays_them(include: Path, backend: str, least: int, tmp_path: Path) -> None:
    asked, source = layout_source(include, backend)
    assert len(asked) >= least
    expected = by_nvcc(source, include, tmp_path)
    found = answers(compiled(source, headers.prepare(include, tmp_path / "cache"), backend, "sm_90").ptx)
    assert dict(zip(asked, found, strict=True)) == dict(zip(asked, expected, strict=True))


def test_attributes_that_stay_behind_are_seen(include: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison finds what the rewrite is there for."""
    asked, source = layout_source(include, "GDAKI")
    monkeypatch.setattr(headers, "_move_attributes", lambda text: text)
    found = answers(compiled(source, headers.prepare(include, tmp_path / "cache"), "GDAKI", "sm_90").ptx)
    assert dict(zip(asked, found, strict=True)) != dict(zip(asked, by_nvcc(source, include, tmp_path), strict=True))


def test_a_wheel_on_disk_becomes_the_copy_that_is_used(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    copy = nccl.fetch(cache, str(wheel(NEWEST)))
    assert copy.version == nccl.PINNED
    assert copy.include is not None
    assert (copy.include / "nccl_device.h").is_file()
    assert nccl.find(cache) == copy
    code = f"import ctypes; ctypes.CDLL({str(copy.library)!r})\n"
    code += f"from weft.scaleout import nccl; print(nccl.find({cache!r}))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("NCCL 2.32.3 (of this process, ")
