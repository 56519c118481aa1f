"""Asks NVML about the GPUs, through nvidia-ml-py. Any call may say that it is not supported: then the value is left out
and "errors" says why."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from typing import Any

from weft.machine.topology import parse

__all__ = ["collect"]

_CPU_WORDS = 64  # of 64 CPUs
_NODE_WORDS = 16
_MAX_NVLINKS = 64
_DEVICE_TYPES = {0: "gpu", 1: "npu", 2: "switch"}
_FABRIC_STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
_P2P_WORDS = {
    0: "ok",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "topology not supported",
    4: "disabled by regkey",
    5: "not supported",
}


def collect() -> dict[str, Any]:
    """The content of nvml.json for this machine; {"error": why} where NVML does not answer. Never raises."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # noqa: BLE001  a broken driver may raise anything: that is a finding
        return {"error": f"{type(error).__name__}: {error}"}
    try:
        return _collect(pynvml)
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        _ask({}, "shutdown", pynvml.nvmlShutdown)


def _collect(nvml: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"error": None}
    _put(found, "driver", lambda: _text(nvml.nvmlSystemGetDriverVersion()))
    _put(found, "cuda_driver", lambda: _cuda(nvml.nvmlSystemGetCudaDriverVersion()))
    handles: list[Any] = []
    found["gpus"] = []
    for idx in range(nvml.nvmlDeviceGetCount()):
        errors: dict[str, str] = {}
        handle = _ask(errors, "handle", functools.partial(_handle, nvml, idx))
        handles.append(handle)
        found["gpus"].append(_gpu(nvml, handle) if handle is not None else {"errors": errors})
    found["pairs"] = [
        _pair(nvml, handles, first, second)
        for first in range(len(handles))
        for second in range(first + 1, len(handles))
        if handles[first] is not None and handles[second] is not None
    ]
    return found


def _handle(nvml: Any, idx: int) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(idx)


def _gpu(nvml: Any, handle: Any) -> dict[str, Any]:
    gpu: dict[str, Any] = {}
    _put(gpu, "name", lambda: _text(nvml.nvmlDeviceGetName(handle)))
    _put(gpu, "uuid", lambda: _text(nvml.nvmlDeviceGetUUID(handle)))
    _put(gpu, "pci", lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    _put(gpu, "memory_bytes", lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total))
    _put(gpu, "compute_capability", lambda: list(nvml.nvmlDeviceGetCudaComputeCapability(handle)))
    _put(gpu, "cpus", lambda: _mask(nvml.nvmlDeviceGetCpuAffinity(handle, _CPU_WORDS)))
    _put(gpu, "memory_nodes", lambda: _mask(nvml.nvmlDeviceGetMemoryAffinity(handle, _NODE_WORDS, 0)))
    _put(gpu, "own_node", lambda: int(nvml.nvmlDeviceGetNumaNodeId(handle)))
    _put(gpu, "is_mig", lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]))
    _put(gpu, "is_c2c", lambda: bool(nvml.nvmlDeviceGetC2cModeInfoV(handle).isC2cEnabled))
    _put(gpu, "fabric", lambda: _fabric(nvml, handle))
    gpu["nvlinks"] = _links(nvml, handle, gpu)
    return gpu


def _links(nvml: Any, handle: Any, gpu: dict[str, Any]) -> list[dict[str, Any]] | None:
    links: list[dict[str, Any]] = []
    for idx in range(_MAX_NVLINKS):
        try:
            active = bool(nvml.nvmlDeviceGetNvLinkState(handle, idx))
        except nvml.NVMLError_InvalidArgument:  # there is no such link
            break
        except Exception as error:  # noqa: BLE001  also a function that is missing
            if links:
                break
            gpu.setdefault("errors", {})["nvlinks"] = str(error)
            return [] if isinstance(error, nvml.NVMLError_NotSupported) else None
        link: dict[str, Any] = {"idx": idx, "active": active}
        links.append(link)
        if active:
            _fill_link(nvml, handle, link)
    return links


def _fill_link(nvml: Any, handle: Any, link: dict[str, Any]) -> None:
    idx = link["idx"]
    _put(link, "version", lambda: int(nvml.nvmlDeviceGetNvLinkVersion(handle, idx)))
    _put(link, "remote", lambda: _text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, idx).busId))
    _put(
        link,
        "remote_type",
        lambda: _DEVICE_TYPES.get(nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, idx), "unknown"),
    )
    _put(link, "speed_mbps", lambda: _speed(nvml, handle, idx))


def _speed(nvml: Any, handle: Any, idx: int) -> int:
    """The field's value is in MB/s; its scope is the link."""
    value = nvml.nvmlDeviceGetFieldValues(handle, [(nvml.NVML_FI_DEV_NVLINK_GET_SPEED, idx)])[0]
    if value.nvmlReturn != nvml.NVML_SUCCESS or not value.value.uiVal:
        value = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])[0]
    if value.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(value.nvmlReturn)
    return int(value.value.uiVal)


def _fabric(nvml: Any, handle: Any) -> dict[str, Any]:
    information = nvml.c_nvmlGpuFabricInfo_v2_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, nvml.byref(information))
    return {
        "state": _FABRIC_STATES.get(information.state, f"state {information.state}"),
        "status": "success" if information.status == 0 else str(nvml.NVMLError(information.status)),
        "cluster_uuid": str(uuid.UUID(bytes=bytes(information.clusterUuid))),
        "clique_id": int(information.cliqueId),
        "health_mask": int(information.healthMask),
    }


def _pair(nvml: Any, handles: list[Any], first: int, second: int) -> dict[str, Any]:
    pair: dict[str, Any] = {"a": first, "b": second}
    one, other = handles[first], handles[second]
    _put(pair, "ancestor", lambda: int(nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)))
    pair["p2p"] = {}
    for name, index in (("read", 0), ("write", 1), ("nvlink", 2), ("atomics", 3)):

        def status(index: int = index) -> str:
            return _P2P_WORDS.get(int(nvml.nvmlDeviceGetP2PStatus(one, other, index)), "unknown")

        _put(pair["p2p"], name, status)
    return pair


def _put(target: dict[str, Any], name: str, call: Callable[[], Any]) -> None:
    """Store what a call returns, or under "errors" why it failed."""
    errors: dict[str, str] = {}
    value = _ask(errors, name, call)
    if errors:
        target.setdefault("errors", {}).update(errors)
    else:
        target[name] = value


def _ask(errors: dict[str, str], name: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001  an old driver lacks functions, an old binding lacks names
        errors[name] = str(error) or type(error).__name__
        return None


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _mask(words: Any) -> str:
    """NVML's words, lowest first, 64 CPUs each, as a list like "0-3,8"."""
    return parse.format_cpus(
        number * 64 + bit for number, word in enumerate(words) for bit in range(64) if int(word) >> bit & 1
    )
