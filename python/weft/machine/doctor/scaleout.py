"""What a network engine needs beside the NICs: NCCL with device code, RDMA libraries, doorbells that GPUs ring."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weft import env
from weft.errors import Error, Unsupported
from weft.machine.child import ask
from weft.machine.doctor.model import Answer, Check, Facts, fail, ok, skip, warn

__all__ = ["CHECKS"]

_RECORDED = "a recording: says nothing of this process"
_NO_RDMA = "no RDMA device"
_PARAMETERS = Path("/proc/driver/nvidia/params")
_INTERFACES = Path("/sys/class/net")
# By name: the file that was loaded, which is called after the version; null: it does not load.
_LIBRARIES = """
import ctypes, json
found = {}
for name in ("libibverbs", "libmlx5"):
    try:
        ctypes.CDLL(name + ".so.1")
    except OSError:
        found[name] = None
        continue
    with open("/proc/self/maps") as maps:
        found[name] = next(line.split("/")[-1].strip() for line in maps if "/" + name + ".so" in line)
print(json.dumps(found))
"""


def _nccl(facts: Facts) -> Iterable[Answer]:
    from weft.scaleout import nccl

    if not facts.live:
        return [skip(_RECORDED)]
    if env.network() == "nccl":
        return _chosen_nccl()
    if not facts.rdma:
        return [skip(f"{_NO_RDMA}: nothing would use it")]
    folder = env.cache_folder()
    try:
        copy = nccl.fetched(folder) if folder else None
    except Error as error:
        return [fail(str(error), fix="weft scaleout fetch")]
    if copy is None:
        need = ".".join(map(str, nccl.MIN_VERSION))
        return [ok(f"no copy of Weft's own; a program that loads NCCL {need} or newer, with its headers, needs none")]
    return [ok(f"{'.'.join(map(str, copy.version))}, Weft's own copy")]


def _chosen_nccl() -> Iterable[Answer]:
    """With WEFT_NETWORK=nccl, what a window would find."""
    from weft.scaleout import nccl, network

    folder, cost = env.cache_folder(), "no window with nodes opens"
    if not folder:
        found = "WEFT_CACHE_DIR is empty: there is no folder for NCCL's headers"
        return [fail(found, cost=cost, fix="unset WEFT_CACHE_DIR")]
    try:
        network.cuda_folders()
    except Error as error:
        fix = "pip install nvidia-cuda-runtime nvidia-cuda-cccl"
        return [fail(str(error), cost="kernels with nodes do not compile", fix=fix)]
    try:
        return [ok(f"WEFT_NETWORK=nccl: {nccl.find(folder)}")]
    except Unsupported as error:  # here: no program has loaded one
        cost += ", but in a program whose torch brings a newer one with its headers"
        return [warn(str(error), cost=cost, fix="weft scaleout fetch")]
    except Error as error:
        return [fail(str(error), cost=cost, fix="weft scaleout fetch")]


def _package(file: str) -> str:
    """libmlx5.so.1.24.50.0: 1.24 is the interface, 50.0 the rdma-core that it comes from."""
    found = re.search(r"\.so\.\d+\.\d+\.(\d[\d.]*)$", file)
    return found[1] if found else file


def _is_mlx5(facts: Facts) -> bool:
    return any(nic.name.startswith("mlx5") for nic in facts.rdma)


def _rdma_core(facts: Facts) -> Iterable[Answer]:
    if not facts.live:
        return [skip(_RECORDED)]
    if not facts.rdma:
        return [skip(_NO_RDMA)]
    files: dict[str, Any] = ask(_LIBRARIES)
    if "error" in files:
        return [skip(f"could not be looked at: {files['error']}")]
    wanted = ["libibverbs", "libmlx5"] if _is_mlx5(facts) else ["libibverbs"]
    missing = [name for name in wanted if files[name] is None]
    if missing:
        fix = "apt install rdma-core ibverbs-providers  # dnf install rdma-core libibverbs"
        return [fail(f"{' and '.join(missing)} can't be loaded", cost="NCCL sees no RDMA device", fix=fix)]
    versions = {name: _package(files[name]) for name in wanted}
    found = ", ".join(f"{name} of rdma-core {version}" for name, version in versions.items())
    if len(set(versions.values())) > 1:
        fix = "apt install --reinstall rdma-core ibverbs-providers  # or the vendor's set, whole"
        return [warn(f"two packages are mixed: {found}", cost="a provider may not load", fix=fix)]
    return [ok(found)]


def _doorbells(facts: Facts) -> Iterable[Answer]:
    if not facts.live:
        return [skip(_RECORDED)]
    if not facts.gpus or not _is_mlx5(facts):
        return [skip("no GPU beside an NIC of mlx5: a CPU thread posts (PROXY)")]
    try:
        text = _PARAMETERS.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return [skip(f"{_PARAMETERS}: {error.strerror}")]
    if "PeerMappingOverride=1" in text:
        return [ok("the driver maps NICs' registers to GPUs (PeerMappingOverride=1): GDAKI")]
    return [
        warn(
            "the driver does not map NICs' registers to GPUs",
            cost="a CPU thread rings for them: about 20 us one way in place of 8 (model)",
            fix="echo 'options nvidia NVreg_RegistryDwords=\"PeerMappingOverride=1;\"' "
            "| sudo tee /etc/modprobe.d/weft-gdaki.conf; sudo update-initramfs -u; reboot",
        )
    ]


def _ecn_priorities(interface: str) -> list[int] | None:
    """For which both ends of the NIC's congestion control are on; None where it has no such switches."""
    ends = [_INTERFACES / interface / "ecn" / end / "enable" for end in ("roce_np", "roce_rp")]
    if not all(end.is_dir() for end in ends):
        return None
    on = [{int(file.name) for file in end.iterdir() if file.read_text().strip() == "1"} for end in ends]
    return sorted(on[0] & on[1])


def _congestion(facts: Facts) -> Iterable[Answer]:
    if not facts.live:
        return [skip(_RECORDED)]
    interfaces = sorted({name for nic in facts.used_nics if nic.kind == "roce" for name in nic.netdevs})
    found = {name: _ecn_priorities(name) for name in interfaces}
    known = {name: on for name, on in found.items() if on is not None}
    if not known:
        return [skip("no RoCE device whose driver shows its congestion control")]
    without = [name for name, on in known.items() if not on]
    if without:
        cost = "PFC alone stops senders, and those behind them"
        fix = "; ".join(f"echo 1 | sudo tee /sys/class/net/{name}/ecn/roce_{{np,rp}}/enable/3" for name in without)
        return [warn(f"ECN is off for all priorities: {', '.join(without)}", cost=cost, fix=fix)]
    groups = Counter(", ".join(map(str, on)) for on in known.values())
    return [ok("; ".join(f"ECN for priority {on} on {count} interfaces" for on, count in groups.items()))]


CHECKS = (
    Check("scaleout", "nccl", "Rows between machines will go by NCCL's device code, which old versions lack.", _nccl),
    Check("scaleout", "rdma-core", "NCCL opens NICs with libibverbs and the library of their vendor.", _rdma_core),
    Check("scaleout", "congestion", "On RoCE marks of switches slow senders before queues are full.", _congestion),
    Check("scaleout", "doorbells", "A GPU that posts by itself writes to a register of the NIC.", _doorbells),
)
