"""What a bug report needs to know about a machine: `weft collect-env`, `python -m weft.collect_env [--json]`.

Standard library only, and it never raises: a part that can't be read says so in its place. torch is not imported, the
native module and the driver are loaded in a child process, so none of them can take the report down. Nothing secret
is in it: no host or user name, no path, no address, no serial number; of the environment only documented variables
(weft.machine.redact).
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.machine.child import NATIVE, ask
from weft.machine.redact import VARIABLES, redact, redact_names, redact_variable

__all__ = ["collect", "lines", "main"]

_PACKAGES = (
    *("weft", "torch", "numpy", "triton", "typer", "rich", "click", "cuda-pathfinder", "cuda-bindings", "cuda-python"),
    *("nvidia-ml-py", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13", "nvshmem4py-cu13"),
    *(
        "deep-ep",
        "deep_gemm",
        "vllm",
        "sglang",
        "transformers",
        "megatron-core",
        "scikit-build-core",
        "nanobind",
        "cmake",
    ),
)
_KERNEL_MODULES = (
    *("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_peermem", "nv_peer_mem", "gdrdrv", "ib_core", "ib_uverbs"),
    *("mlx5_core", "mlx5_ib", "efa", "bnxt_re", "irdma", "rdma_rxe", "siw", "knem", "xpmem"),
)
_COMMAND_SECONDS = 10.0
_TORCH_SECONDS = 60.0
_DOCTOR_SECONDS = 30.0

# Run in a child process: a library that crashes on loading ends the child only.
_DRIVER_PROBE = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
version, count = ctypes.c_int(), ctypes.c_int(-1)
found = {"driver_status": cuda.cuDriverGetVersion(ctypes.byref(version)), "cuda_version": version.value}
found["init_status"] = cuda.cuInit(0)
if found["init_status"] == 0:
    found["count_status"] = cuda.cuDeviceGetCount(ctypes.byref(count))
    found["devices"] = count.value
print(json.dumps(found))
"""
_TORCH_PROBE = """
import json, torch
cuda = torch.cuda
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "cuda_available": cuda.is_available(),
    "devices": cuda.device_count(), "nccl": list(cuda.nccl.version()) if cuda.is_available() else None,
    "arch_list": cuda.get_arch_list(), "threads": torch.get_num_threads(),
    "distributed": torch.distributed.is_available()}))
"""

_DOCTOR_PROBE = """
import json, sys
from weft.machine.doctor import diagnose, facts_of
findings = [one for one in diagnose(facts_of(sys.argv[1])) if one.status in ("warn", "fail")]
print(json.dumps([f"{one.status}: {one.check}: {one.found}" for one in findings]))
"""


def collect(*, import_torch: bool = False, root: str = "/") -> dict[str, Any]:
    """Everything, by section; a section that can't be read is `{"error": text}`.

    Never raises. Takes a fraction of a second without `import_torch`, which adds what only the running torch knows
    (imported in a child process, up to a minute). `root` is where /proc, /sys and /etc are read.
    """
    base = Path(root)
    sections: dict[str, Callable[[], Any]] = {
        "weft": _weft,
        "python": _python,
        "packages": _packages,
        "torch": lambda: _torch(import_torch=import_torch),
        "system": lambda: _system(base),
        "cpu": lambda: _cpu(base),
        "memory": lambda: _memory(base),
        "limits": _limits,
        "gpu": lambda: _gpu(base),
        "network": lambda: _network(base),
        "kernel_modules": lambda: _kernel_modules(base),
        "environment": _environment,
        "doctor": lambda: _doctor(root),
    }
    return {name: _clean(_guarded(read)) for name, read in sections.items()}


def lines(report: Mapping[str, Any]) -> list[str]:
    """The report as text, a heading a section."""
    out: list[str] = []
    for section, content in report.items():
        out += ["", f"[{section}]", *_pairs(content, "")]
    return out[1:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report. Returns 0, also where parts of it could not be read."""
    parser = argparse.ArgumentParser(prog="python -m weft.collect_env", description="Facts for a bug report.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--import-torch", action="store_true", help="import torch too, in a process of its own")
    options = parser.parse_args(arguments)
    report = collect(import_torch=options.import_torch)
    text = json.dumps({"kind": "environment", **report}) if options.json else "\n".join(lines(report))
    if sys.stdout is None:  # it was closed before the start
        return 0
    try:
        sys.stdout.write(text.encode("ascii", "replace").decode() + "\n")
        sys.stdout.flush()
    except OSError:  # the reader went away; what is left is thrown away at exit without a complaint
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def _weft() -> dict[str, Any]:
    from weft._version import __version__

    folder = Path(__file__).parent
    return {
        "version": __version__,
        "source_tree": (folder.parents[1] / "pyproject.toml").is_file(),
        "native_files": sorted(entry.name for entry in folder.glob("_native*.so")),
        "native": ask(NATIVE),
    }


def _python() -> dict[str, Any]:
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "compiler": platform.python_compiler(),
        "platform": sysconfig.get_platform(),
        "virtual_environment": sys.prefix != sys.base_prefix,
        "conda": (Path(sys.prefix) / "conda-meta").is_dir(),
        "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    }


def _packages() -> dict[str, Any]:
    found = {name: _guarded(functools.partial(importlib.metadata.version, name), missing=None) for name in _PACKAGES}
    return {name: version for name, version in found.items() if version is not None}


def _torch(*, import_torch: bool) -> dict[str, Any]:
    """What torch/version.py says, without running it; with `import_torch` what the imported one says."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return {"installed": False}
    report: dict[str, Any] = {"installed": True}
    text = _read(Path(spec.origin).parent / "version.py") or ""
    for name in ("__version__", "cuda", "hip", "git_version", "debug"):
        match = re.search(rf"^{name}\b[^=\n]*=\s*(.+)$", text, re.MULTILINE)
        if match:
            report[name.strip("_")] = match[1].strip().strip("'\"")
    report["imported"] = ask(_TORCH_PROBE, seconds=_TORCH_SECONDS) if import_torch else "not tried: --import-torch"
    return report


def _system(base: Path) -> dict[str, Any]:
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', _read(base / "etc/os-release") or "", re.MULTILINE))
    return {
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "distribution": release.get("PRETTY_NAME"),
        "libc": " ".join(platform.libc_ver()),
        "container": _container(base),
        "virtual_machine": bool(re.search(r"\bhypervisor\b", _read(base / "proc/cpuinfo") or "")),
        "ptrace_scope": _read(base / "proc/sys/kernel/yama/ptrace_scope"),
        "root": os.geteuid() == 0,
    }


def _container(base: Path) -> str | None:
    for path, kind in ((".dockerenv", "docker"), ("run/.containerenv", "podman")):
        if (base / path).exists():
            return kind
    cgroup = _read(base / "proc/1/cgroup") or ""
    return next((kind for kind in ("kubepods", "docker", "lxc", "slurm") if kind in cgroup), None)


def _cpu(base: Path) -> dict[str, Any]:
    info = _read(base / "proc/cpuinfo") or ""
    status = _read(base / "proc/self/status") or ""
    nodes = base / "sys/devices/system/node"
    node_cpus = {entry.parent.name: _read(entry) for entry in sorted(nodes.glob("node[0-9]*/cpulist"))}
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    allowed = re.search(r"^Cpus_allowed_list:\s*(.*)$", status, re.MULTILINE)
    memory = re.search(r"^Mems_allowed_list:\s*(.*)$", status, re.MULTILINE)
    return {
        "model": model[1] if model else platform.processor() or None,
        "logical": os.cpu_count(),
        "sockets": len(set(re.findall(r"^physical id\s*:\s*(\d+)$", info, re.MULTILINE))) or None,
        "smt": _read(base / "sys/devices/system/cpu/smt/active"),
        "nodes": {name: cpus for name, cpus in node_cpus.items() if cpus},
        "allowed": allowed[1] if allowed else None,
        "allowed_nodes": memory[1] if memory else None,
        "quota": _first(base, ("sys/fs/cgroup/cpu.max", "sys/fs/cgroup/cpu/cpu.cfs_quota_us")),
        "governor": _read(base / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
    }


def _memory(base: Path) -> dict[str, Any]:
    wanted = ("MemTotal", "MemAvailable", "SwapTotal", "HugePages_Total", "HugePages_Free", "Hugepagesize")
    found = dict(re.findall(r"^(\w+):\s*(.+)$", _read(base / "proc/meminfo") or "", re.MULTILINE))
    report: dict[str, Any] = {name: found.get(name) for name in wanted}
    report["cgroup_limit"] = _first(base, ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"))
    report["transparent_huge_pages"] = _read(base / "sys/kernel/mm/transparent_hugepage/enabled")
    report["shm_bytes"] = _guarded(lambda: shutil.disk_usage(base / "dev/shm").total, missing=None)
    return report


def _limits() -> dict[str, Any]:
    names = {"locked_memory": "RLIMIT_MEMLOCK", "open_files": "RLIMIT_NOFILE", "processes": "RLIMIT_NPROC"}
    names |= {"address_space": "RLIMIT_AS", "core_file": "RLIMIT_CORE", "stack": "RLIMIT_STACK"}

    def text(limit: int) -> str:
        return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)

    return {
        name: " of ".join(text(limit) for limit in resource.getrlimit(getattr(resource, constant)))
        for name, constant in names.items()
    }


def _gpu(base: Path) -> dict[str, Any]:
    version = _read(base / "proc/driver/nvidia/version")
    report: dict[str, Any] = {"driver": redact(version.splitlines()[0]) if version else None}
    if base == Path("/"):
        report["cuda"] = ask(_DRIVER_PROBE)
    if base != Path("/") or not shutil.which("nvidia-smi"):
        return report | {"nvidia_smi": None}
    fields = "index,name,driver_version,memory.total,pci.bus_id,compute_mode,mig.mode.current,ecc.mode.current"
    fields += ",persistence_mode,pcie.link.gen.current,pcie.link.width.current"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    report["fields"] = fields
    report["gpus"] = redact(_command(query)).splitlines()
    report["matrix"] = redact(re.sub(r"\x1b\[[0-9;]*m", "", _command(["nvidia-smi", "topo", "-m"]))).splitlines()
    return report


def _network(base: Path) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for device in sorted((base / "sys/class/infiniband").glob("*")):
        ports = {}
        for port in sorted(device.glob("ports/*")):
            values = {name: _read(port / name) for name in ("state", "phys_state", "rate", "link_layer")}
            gids = [_read(entry) for entry in sorted(port.glob("gids/*"))]
            values["gids"] = str(sum(bool(gid and gid.strip("0:")) for gid in gids))  # a GID holds an address
            types = {_read(entry) for entry in sorted(port.glob("gid_attrs/types/*"))} - {None}
            ports[port.name] = values | {"gid_types": ", ".join(sorted(str(kind) for kind in types))}
        names = ("fw_ver", "hca_type", "node_type")
        report[device.name] = {name: _read(device / name) for name in names} | {"ports": ports}
    report["uverbs"] = len(list((base / "dev/infiniband").glob("uverbs*")))
    return report


def _kernel_modules(base: Path) -> dict[str, Any]:
    loaded = {line.split()[0] for line in (_read(base / "proc/modules") or "").splitlines() if line.split()}
    modules = base / "sys/module"
    there = [name for name in _KERNEL_MODULES if name in loaded or (modules / name).is_dir()]
    return {name: _read(modules / name / "version") or "loaded" for name in there}


def _environment() -> dict[str, Any]:
    from weft.env import set_among

    return {name: redact_variable(name, value) for name, value in sorted(set_among(VARIABLES).items())}


def _doctor(root: str) -> Any:
    """What `weft doctor` complains of, unmeasured; it loads the driver's libraries, so in a child process."""
    complaints = ask(_DOCTOR_PROBE, arguments=[root], seconds=_DOCTOR_SECONDS)
    return [redact(text) for text in complaints] or ["nothing to mend"] if isinstance(complaints, list) else complaints


def _command(words: list[str]) -> str:
    ended = subprocess.run(
        words, capture_output=True, text=True, errors="replace", timeout=_COMMAND_SECONDS, check=False
    )
    return ended.stdout if ended.returncode == 0 else f"failed ({ended.returncode}): {ended.stdout or ended.stderr}"


def _guarded(read: Callable[[], Any], **otherwise: Any) -> Any:
    """What `read` returns; where it raises, `missing` if that is given, else the error."""
    try:
        return read()
    except Exception as error:  # noqa: BLE001  a report with a hole is better than none
        return otherwise["missing"] if otherwise else {"error": redact(f"{type(error).__name__}: {error}")[:500]}


def _read(path: Path) -> str | None:
    """The text of a file without blanks at its ends; None where it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):
        return None


def _first(base: Path, paths: Sequence[str]) -> str | None:
    return next((text for path in paths if (text := _read(base / path)) is not None), None)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return redact_names(value)
    if isinstance(value, Mapping):
        return {str(key): _clean(part) for key, part in value.items()}
    return [_clean(part) for part in value] if isinstance(value, list) else value


def _pairs(content: Any, indent: str) -> list[str]:
    if not isinstance(content, Mapping):
        return [f"{indent}{part}" for part in (content if isinstance(content, list) else [content])]
    out = []
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            out += [f"{indent}{key}:", *_pairs(value, indent + "  ")]
        elif isinstance(value, list) and any(" " in str(part) for part in value):
            out += [f"{indent}{key}:", *(f"{indent}  {part}" for part in value)]
        elif isinstance(value, list):
            out.append(f"{indent}{key}: {', '.join(map(str, value)) or '-'}")
        else:
            out.append(f"{indent}{key}: {'-' if value is None else value}")
    return out


if __name__ == "__main__":
    sys.exit(main())
