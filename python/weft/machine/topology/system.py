"""Limits, GPUDirect, IOMMU, kernel and driver."""

from __future__ import annotations

import re

from weft.machine.topology import parse
from weft.machine.topology.cpus import PROCESS_FILE
from weft.machine.topology.model import GpuDirect, HugePages, Limits, System
from weft.machine.topology.tree import Tree

__all__ = ["MODULES", "read_gpu_direct", "read_limits", "read_system"]

# Beginnings of names that matter here.
MODULES = ("bnxt_re", "efa", "gdrdrv", "ib_", "irdma", "mlx", "nv_peer_mem", "nvidia", "rdma_")
_HUGE = "/sys/kernel/mm/hugepages"
_DMA_BUF_KERNEL = (5, 12)


def read_limits(tree: Tree) -> Limits:
    """Limits of the process and of shared memory."""
    process = tree.json(PROCESS_FILE)
    memlock = process.get("memlock_bytes")
    known = "memlock_bytes" in process
    unlimited = memlock == "unlimited"
    binding = process.get("can_bind_memory")
    return Limits(
        memlock_bytes=parse.real_integer(memlock),
        memlock_unlimited=unlimited if known and (unlimited or parse.real_integer(memlock) is not None) else None,
        max_files=parse.real_integer(process.get("max_files")),
        shm_bytes=parse.real_integer(process.get("shm_bytes")),
        shm_free_bytes=parse.real_integer(process.get("shm_free_bytes")),
        huge_pages=_huge_pages(tree),
        transparent_huge_pages=_chosen(tree.text("/sys/kernel/mm/transparent_hugepage/enabled")),
        can_bind_memory=binding if isinstance(binding, bool) else None,
        why={} if known else {"memlock_bytes": f"{PROCESS_FILE} does not say"},
    )


def _huge_pages(tree: Tree) -> tuple[HugePages, ...]:
    found = []
    for name in tree.names(_HUGE):
        match = re.fullmatch(r"hugepages-(\d{1,12})kB", name, re.ASCII)
        if match:
            total, free = (parse.integer(tree.text(f"{_HUGE}/{name}/{kind}_hugepages")) for kind in ("nr", "free"))
            found.append(HugePages(int(match[1]), total, free))
    return tuple(found)


def _chosen(text: str | None) -> str | None:
    """The word in brackets of "always [madvise] never"."""
    match = re.search(r"\[(\w+)\]", text or "")
    return match[1] if match else None


def _modules(tree: Tree) -> tuple[str, ...] | None:
    """What is loaded of MODULES; those built in are in /sys/module only."""
    text = tree.text("/proc/modules")
    listed = {line.split()[0] for line in (text or "").splitlines() if line.split()} | set(tree.names("/sys/module"))
    return (
        tuple(sorted(name for name in listed if name.startswith(MODULES)))
        if text is not None or tree.exists("/sys/module")
        else None
    )


def read_gpu_direct(tree: Tree, system: System, has_gpu: bool) -> GpuDirect:
    """Whether NICs can reach GPU memory. nvidia-peermem is a module; dma-buf needs the open kernel modules and Linux
    5.12."""
    version = tree.text("/proc/driver/nvidia/version")
    is_open = None if version is None else "Open Kernel Module" in version
    kernel = _kernel_version(system.kernel)
    if not has_gpu or is_open is None:
        dma_buf, why = None, "no NVIDIA driver found" if version is None else "no GPU"
    elif kernel is None:
        dma_buf, why = None, "kernel version unknown"
    else:
        dma_buf = is_open and kernel >= _DMA_BUF_KERNEL
        why = f"inferred: {'open' if is_open else 'closed'} kernel modules, Linux {kernel[0]}.{kernel[1]} (needs 5.12)"
    modules = system.modules
    return GpuDirect(
        peermem=None if modules is None else "nvidia_peermem" in modules or "nv_peer_mem" in modules,
        dma_buf=dma_buf,
        gdrcopy=None if modules is None else "gdrdrv" in modules,
        open_kernel_modules=is_open,
        why={"dma_buf": why},
    )


def _kernel_version(text: str | None) -> tuple[int, int] | None:
    match = re.match(r"(\d{1,4})\.(\d{1,6})", text or "", re.ASCII)
    return (int(match[1]), int(match[2])) if match else None


def read_system(tree: Tree, driver: str | None, cuda_driver: str | None) -> System:
    """Kernel, driver, IOMMU and modules. `driver` as NVML says."""
    iommu, why = _iommu(tree)
    version = tree.text("/proc/driver/nvidia/version")
    match = re.search(r"\b(\d{3,4}(?:\.\d+){1,2})\b", version or "", re.ASCII)
    process = tree.json(PROCESS_FILE)
    devices = tree.text("/proc/devices")
    channels = tree.names("/dev/nvidia-caps-imex-channels")
    return System(
        kernel=tree.text("/proc/sys/kernel/osrelease"),
        driver=driver or (match[1] if match else None),
        cuda_driver=cuda_driver,
        architecture=process["architecture"] if isinstance(process.get("architecture"), str) else None,
        iommu=iommu,
        modules=_modules(tree),
        imex_channel=bool(channels) if devices is not None and "nvidia-caps-imex-channels" in devices else None,
        why={"iommu": why},
    )


def _iommu(tree: Tree) -> tuple[str | None, str]:
    """ "off", "passthrough" or "translating": the type of the groups' domains."""
    groups = tree.names("/sys/kernel/iommu_groups")
    if not groups:
        if tree.exists("/sys/class/iommu") and not tree.names("/sys/class/iommu"):
            return "off", "no IOMMU in /sys/class/iommu"
        return ("off", "no IOMMU groups") if tree.exists("/sys/kernel/iommu_groups") else (None, "not visible")
    types = [tree.text(f"/sys/kernel/iommu_groups/{group}/type") for group in groups[:64]]
    known = {kind for kind in types if kind}
    if not known:
        return None, "groups without a readable type"
    return ("passthrough" if known == {"identity"} else "translating"), f"domains of type {', '.join(sorted(known))}"
