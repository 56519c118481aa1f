"""Guards against NVML answers that are lost or misread, and against calls that this driver does not have."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from weft.machine.topology import live_nvml
from weft.machine.topology.gpus import read_gpus, read_pairs
from weft.machine.topology.model import Cpus, NumaNode
from weft.machine.topology.tree import Tree

NUM_LINKS = 18
CPUS = Cpus(nodes=(NumaNode(0, tuple(range(64))), NumaNode(1, tuple(range(64, 128)))))


def not_supported(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def link_state(_: int, link: int) -> int:
    if link >= NUM_LINKS:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return int(link != 3)  # one is down


def fabric(handle: int, pointer: Any) -> int:
    information = pointer._obj
    information.state = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
    information.status = 0
    information.clusterUuid[:] = list(range(16))
    information.cliqueId = 7
    return 0


def field_values(_: int, fields: list[Any]) -> list[Any]:
    assert fields == [(pynvml.NVML_FI_DEV_NVLINK_GET_SPEED, fields[0][1])]
    return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=26562))]


ANSWERS = {
    "nvmlInit": lambda: None,
    "nvmlShutdown": lambda: None,
    "nvmlSystemGetDriverVersion": lambda: b"580.95.05",
    "nvmlSystemGetCudaDriverVersion": lambda: 13010,
    "nvmlDeviceGetCount": lambda: 2,
    "nvmlDeviceGetHandleByIndex": lambda idx: idx,
    "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
    "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
    "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=b"00000000:%02X:00.0" % (0x1B + handle)),
    "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=1 << 37),
    "nvmlDeviceGetCudaComputeCapability": lambda handle: [9, 0],
    "nvmlDeviceGetCpuAffinity": lambda handle, words: (ctypes.c_ulonglong * words)(0, 0xFFFF),
    "nvmlDeviceGetMemoryAffinity": lambda handle, words, scope: (ctypes.c_ulonglong * words)(0b10),
    "nvmlDeviceGetNumaNodeId": not_supported,
    "nvmlDeviceGetMigMode": not_supported,
    "nvmlDeviceGetC2cModeInfoV": lambda handle: SimpleNamespace(isC2cEnabled=0),
    "nvmlDeviceGetGpuFabricInfoV": fabric,
    "nvmlDeviceGetNvLinkState": link_state,
    "nvmlDeviceGetNvLinkVersion": lambda handle, link: 4,
    "nvmlDeviceGetNvLinkRemotePciInfo": not_supported,
    "nvmlDeviceGetNvLinkRemoteDeviceType": lambda handle, link: pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH,
    "nvmlDeviceGetFieldValues": field_values,
    "nvmlDeviceGetTopologyCommonAncestor": lambda one, other: 50,
    "nvmlDeviceGetP2PStatus": lambda one, other, index: 0 if index != 3 else 5,
}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A driver with two GPUs."""
    for name, answer in ANSWERS.items():
        assert hasattr(pynvml, name), name
        monkeypatch.setattr(pynvml, name, answer)
    return monkeypatch


@pytest.mark.usefixtures("driver")
def test_answers_become_facts() -> None:
    found = live_nvml.collect()
    assert (found["error"], found["driver"], found["cuda_driver"]) == (None, "580.95.05", "13.1")
    first, second = read_gpus(Tree(), CPUS, found)
    assert first.pci.address == "0000:1b:00.0"
    assert (first.cpus, first.memory_nodes, first.numa_node) == (tuple(range(64, 80)), (1,), 1)
    assert "CPU affinity of NVML" in first.why["numa_node"]
    assert first.num_active_links == NUM_LINKS - 1
    assert {link.speed_mbps for link in first.nvlinks or () if link.active} == {26562}
    assert (first.own_node, first.is_mig, first.is_c2c) == (None, None, False)
    assert "is_mig" in first.why
    assert first.fabric.state == "completed"
    assert first.fabric.cluster_uuid == "00010203-0405-0607-0809-0a0b0c0d0e0f"
    (pair,) = read_pairs((first, second), found)
    assert (pair.p2p_read, pair.p2p_atomics, pair.num_nvlinks) == ("ok", "not supported", NUM_LINKS - 1)
    assert pair.distance.name == "NODE"  # both on node 1 by affinity: that is nearer the truth than the ancestor


def test_without_driver_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert "Not Found" in live_nvml.collect()["error"]


@pytest.mark.parametrize("name", sorted(set(ANSWERS) - {"nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount"}))
def test_any_call_may_be_missing_or_refused(driver: pytest.MonkeyPatch, name: str) -> None:
    for broken in (not_supported, None):
        driver.setattr(pynvml, name, broken)
        found = live_nvml.collect()
        assert found["error"] is None
        gpus = read_gpus(Tree(), CPUS, found)
        assert len(gpus) == 2
        read_pairs(gpus, found)


def test_a_count_that_fails_is_an_error_not_an_exception(driver: pytest.MonkeyPatch) -> None:
    driver.setattr(pynvml, "nvmlDeviceGetCount", not_supported)
    assert "Not Supported" in live_nvml.collect()["error"]
