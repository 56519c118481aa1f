"""Is what Weft is made of there, and does it fit together: Python, torch, driver, NVRTC, the native module."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from weft.machine.child import NATIVE, ask
from weft.machine.doctor.model import Answer, Check, Facts, fail, ok, skip, warn

__all__ = ["CHECKS"]

_RECORDED = "a recording: says nothing of this process"
_MIN_PYTHON = (3, 10)
_MIN_TORCH = (2, 10)
_MIN_DRIVER = (12, 4)  # of CUDA
_TORCH_WHEELS = ((13, 0), (12, 8), (12, 6))  # CUDA versions that torch's wheels are built for

# In a child: a library that does not load must not take the table down. nvrtcVersion says what it compiles for.
_NVRTC = """
import ctypes, json
from cuda.pathfinder import load_nvidia_dynamic_lib
path = load_nvidia_dynamic_lib("nvrtc").abs_path
major, minor = ctypes.c_int(), ctypes.c_int()
ctypes.CDLL(path).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
print(json.dumps([major.value, minor.value]))
"""


def _version(text: str | None) -> tuple[int, ...]:
    """The leading numbers of a version."""
    match = re.match(r"\d+(\.\d+)*", text or "")
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _text(version: Iterable[int]) -> str:
    return ".".join(map(str, version))


def _python(facts: Facts) -> Iterable[Answer]:
    if not facts.live:
        return [skip(_RECORDED)]
    have = sys.version_info[:3]
    if have[:2] < _MIN_PYTHON:
        need = _text(_MIN_PYTHON)
        return [fail(f"Python {_text(have)}; needed is {need} or later", fix=f"python{need} -m venv .venv")]
    return [ok(f"Python {_text(have)}")]


def _torch_cuda() -> str | None:
    """The CUDA version that torch/version.py names, None for a build without; torch is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8", errors="replace")
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def _torch(facts: Facts) -> Iterable[Answer]:
    if not facts.live:
        return [skip(_RECORDED)]
    try:
        have = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return [fail("torch is not installed", fix="pip install 'torch>=2.10'")]
    if _version(have)[:2] < _MIN_TORCH:
        return [fail(f"torch {have}; needed is {_text(_MIN_TORCH)} or later", fix="pip install -U 'torch>=2.10'")]
    try:
        cuda = _torch_cuda()
    except OSError as error:
        return [fail(f"torch {have} is damaged: {error.strerror}", fix="pip install --force-reinstall torch")]
    if facts.gpus and cuda is None:
        return [
            warn(
                f"torch {have} is built without CUDA, and there are {len(facts.gpus)} GPUs",
                cost="the GPUs are not used at all",
                fix="pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130",
            )
        ]
    return [ok(f"torch {have}, " + (f"CUDA {cuda}" if cuda else "without CUDA") + " (not imported)")]


def _driver(facts: Facts) -> Iterable[Answer]:
    system = facts.machine.system
    if not facts.gpus:
        return [skip("no GPU")]
    if system.driver is None:
        return [fail("there are GPUs and no NVIDIA driver answers", fix="nvidia-smi  # and see its message")]
    found = f"driver {system.driver}" + (f", CUDA up to {system.cuda_driver}" if system.cuda_driver else "")
    built_for = _version(_torch_cuda()) if facts.live else ()
    supported = _version(system.cuda_driver)
    if built_for and supported and built_for[0] > supported[0]:
        wheel = next((version for version in _TORCH_WHEELS if version <= supported), None)
        fix = "update the driver"
        if wheel:
            tag = "".join(map(str, wheel))
            fix = f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu{tag}"
        return [fail(f"{found}; torch is built for CUDA {_text(built_for)}", cost="no GPU can be used", fix=fix)]
    if supported and supported < _MIN_DRIVER:
        cost = "tokens on GPUs are copied through host memory"
        return [
            fail(f"{found}; the nvlink engine needs {_text(_MIN_DRIVER)} or later", cost=cost, fix="update the driver")
        ]
    return [ok(found)]


def _nvrtc(facts: Facts) -> Iterable[Answer]:
    if not facts.live:
        return [skip(_RECORDED)]
    if not facts.gpus:
        return [skip("no GPU: nothing is compiled")]
    version = ask(_NVRTC)
    if not isinstance(version, list):
        return [fail(f"NVRTC can't be loaded: {version.get('error')}", fix="pip install nvidia-cuda-nvrtc")]
    supported = _version(facts.machine.system.cuda_driver)
    if supported and version[0] > supported[0]:
        fix = f"pip install 'nvidia-cuda-nvrtc=={supported[0]}.*'"
        return [fail(f"NVRTC {_text(version)} is newer than the driver's CUDA {_text(supported)}", fix=fix)]
    return [ok(f"NVRTC {_text(version)}")]


def _native(facts: Facts) -> Iterable[Answer]:
    from weft._version import __version__

    if not facts.live:
        return [skip(_RECORDED)]
    answer = ask(NATIVE)
    if "error" in answer:
        return [fail(f"weft._native does not load: {answer['error']}", fix="pip install --force-reinstall weft")]
    if answer.get("version") != __version__:
        found = f"weft._native is version {answer.get('version')}, the package {__version__}"
        return [fail(found, fix="pip install --force-reinstall weft")]
    return [ok(f"weft._native {__version__}, compiler {answer.get('compiler')}")]


CHECKS = (
    Check("software", "python", "Weft's package needs it.", _python),
    Check("software", "torch", "Tensors and process groups are torch's; every torch from 2.10 on serves.", _torch),
    Check("software", "driver", "A torch of a newer CUDA major version than the driver's can't start.", _driver),
    Check("software", "nvrtc", "Kernels are compiled at first use, by NVRTC; there is no other compiler.", _nvrtc),
    Check("software", "native-module", "Ranks can't run without it.", _native),
)
