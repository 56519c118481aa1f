"""What a benchmark runs on, as its first row says (docs/benchmarking.md)."""

from __future__ import annotations

import subprocess
from pathlib import Path

from weft.bench.ranks import Row
from weft.kernels.paths import nvrtc_version

__all__ = ["commit", "cpu_name", "machine_facts"]


def machine_facts(device: str) -> Row:
    """What it runs on. The GPU's facts come from NVML: no CUDA before the ranks are forked."""
    import torch

    import weft

    gpu = _gpu_facts() if device != "cpu" else {}
    num_gpus = gpu.pop("num_gpus", 0)
    return {
        "commit": commit(),
        "machine": f"{num_gpus} x {gpu['device_name']}" if gpu else cpu_name(),
        "arch": gpu.get("arch"),
        "driver": gpu.get("driver"),
        "cuda_driver": gpu.get("cuda_driver"),
        "device_name": gpu.get("device_name"),
        "torch": torch.__version__,
        "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()) if gpu else None,
        "nvrtc": nvrtc_version(),
        "weft": weft.__version__,
    }


def _gpu_facts() -> Row:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        num_gpus = pynvml.nvmlDeviceGetCount()
        if num_gpus == 0:
            return {}
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return {
            "num_gpus": num_gpus,
            "device_name": pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)),
            "arch": "sm_{}{}".format(*pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0))),
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "cuda_driver": f"{version // 1000}.{version % 1000 // 10}",
        }
    finally:
        pynvml.nvmlShutdown()


def commit() -> str | None:
    """The commit of the source tree this package lies in, "+" if it has changes; None if it lies in none."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        head = subprocess.run(
            ["git", "-C", root, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
        dirty = subprocess.run(
            ["git", "-C", root, "diff", "--quiet", "HEAD", "--", "python", "src", "include"], check=False
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if dirty.returncode else "")


def cpu_name() -> str | None:
    """Of the processor, as Linux gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
