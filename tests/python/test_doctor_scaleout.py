"""Guards against a machine that is called ready for several machines without the libraries, or broken for no reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from doctor_machines import machine, nic

from weft.machine.doctor import Facts, Finding, diagnose, scaleout
from weft.scaleout import nccl, network

MLX5 = Facts(machine(), live=True)
EFA = Facts(machine(nics=tuple(dataclasses.replace(nic(idx), name=f"rdmap{idx}s0") for idx in range(4))), live=True)
NO_RDMA = Facts(machine(nics=()), live=True)
NO_GPU = Facts(dataclasses.replace(MLX5.machine, gpus=(), pairs=()), live=True)


def finding(name: str, facts: Facts) -> Finding:
    (only,) = diagnose(facts, [check for check in scaleout.CHECKS if check.name == name])
    return only


@pytest.mark.parametrize("name", [check.name for check in scaleout.CHECKS])
def test_neither_a_recording_nor_a_machine_without_rdma_is_asked(name: str) -> None:
    assert finding(name, dataclasses.replace(MLX5, live=False)).found.startswith("a recording")
    assert finding(name, NO_RDMA).status == "n/a"


VERBS, OTHER = "libibverbs.so.1.14.50.0", "libibverbs.so.1.14.39.0"


@pytest.mark.parametrize(
    ("facts", "answer", "status", "words"),
    [
        (MLX5, {"libibverbs": VERBS, "libmlx5": "libmlx5.so.1.24.50.0"}, "ok", "libmlx5 of rdma-core 50.0"),
        (MLX5, {"libibverbs": OTHER, "libmlx5": "libmlx5.so.1.24.50.0"}, "warn", "libibverbs of rdma-core 39.0"),
        (MLX5, {"libibverbs": VERBS, "libmlx5": None}, "fail", "libmlx5 can't be loaded"),
        (MLX5, {"libibverbs": None, "libmlx5": None}, "fail", "libibverbs and libmlx5 can't be loaded"),
        (EFA, {"libibverbs": VERBS, "libmlx5": None}, "ok", "libibverbs of rdma-core 50.0"),
        (EFA, {"libibverbs": "libibverbs.so.1", "libmlx5": None}, "ok", "libibverbs.so.1"),
        (MLX5, {"error": "no answer in 10 s"}, "n/a", "no answer in 10 s"),
    ],
)
def test_rdma_core(monkeypatch: pytest.MonkeyPatch, facts: Facts, answer: Any, status: str, words: str) -> None:
    monkeypatch.setattr(scaleout, "ask", lambda code: answer)
    found = finding("rdma-core", facts)
    assert (found.status, words in found.found) == (status, True)


def test_the_child_answers() -> None:
    """Here too, where there may be no such library."""
    assert set(scaleout.ask(scaleout._LIBRARIES)) == {"libibverbs", "libmlx5"}


def test_an_nccl_that_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a machine without RDMA devices, too: the emulated NIC is none."""
    monkeypatch.setenv("WEFT_NETWORK", "nccl")
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nccl, "loaded", lambda: None)
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_header_directory", lambda name: None)
    network.cuda_folders.cache_clear()
    found = finding("nccl", MLX5)
    assert (found.status, "no header cuda_fp8.h of CUDA" in found.found) == ("fail", True)
    monkeypatch.setattr(network, "cuda_folders", tuple)
    found = finding("nccl", NO_RDMA)
    assert (found.status, found.fix) == ("warn", "weft scaleout fetch")
    (tmp_path / "nccl-2.32.3").mkdir()
    found = finding("nccl", NO_RDMA)
    assert (found.status, found.fix) == ("fail", "weft scaleout fetch")
    copy = nccl.Nccl(tmp_path / "libnccl.so.2", nccl.PINNED, tmp_path, is_of_process=False)
    monkeypatch.setattr(nccl, "fetched", lambda cache: copy)
    assert finding("nccl", MLX5).found.startswith("WEFT_NETWORK=nccl: NCCL 2.32.3 (Weft's own copy")
    monkeypatch.setenv("WEFT_CACHE_DIR", "")
    assert finding("nccl", MLX5).found.startswith("WEFT_CACHE_DIR is empty")


def test_doorbells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parameters = tmp_path / "params"
    monkeypatch.setattr(scaleout, "_PARAMETERS", parameters)
    assert finding("doorbells", MLX5).status == "n/a"
    parameters.write_text('EnableStreamMemOPs: 1\nRegistryDwords: ""\n')
    assert finding("doorbells", MLX5).status == "warn"
    parameters.write_text('RegistryDwords: "PeerMappingOverride=1;"\n')
    assert finding("doorbells", MLX5).status == "ok"
    assert finding("doorbells", EFA).status == finding("doorbells", NO_GPU).status == "n/a"


def test_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None, a copy, another's file in its place, and no cache at all."""
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    assert finding("nccl", MLX5).found.startswith("no copy of Weft's own; a program that loads NCCL 2.30.7 or newer")
    copy = nccl.Nccl(tmp_path / "libnccl.so.2", nccl.PINNED, tmp_path, is_of_process=False)
    with monkeypatch.context() as patch:
        patch.setattr(nccl, "fetched", lambda cache: copy)
        assert finding("nccl", MLX5).found == "2.32.3, Weft's own copy"
    nccl._folder(str(tmp_path)).mkdir(mode=0o700)
    found = finding("nccl", MLX5)
    assert (found.status, found.fix) == ("fail", "weft scaleout fetch")
    monkeypatch.setenv("WEFT_CACHE_DIR", "")
    assert finding("nccl", MLX5).status == "ok"


def test_congestion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both ends must be on, for one priority at least."""
    interfaces = sorted(name for nic in MLX5.used_nics for name in nic.netdevs)
    assert len(interfaces) == 4
    monkeypatch.setattr(scaleout, "_INTERFACES", tmp_path)
    assert finding("congestion", MLX5).status == "n/a"  # another driver
    for name in interfaces:
        for end in ("roce_np", "roce_rp"):
            (tmp_path / name / "ecn" / end / "enable").mkdir(parents=True)
            for priority in range(8):
                on = priority == 3 or (priority == 5 and end == "roce_np")
                (tmp_path / name / "ecn" / end / "enable" / str(priority)).write_text(f"{int(on)}\n")
    assert finding("congestion", MLX5).found == "ECN for priority 3 on 4 interfaces"
    (tmp_path / interfaces[1] / "ecn" / "roce_rp" / "enable" / "3").write_text("0\n")
    found = finding("congestion", MLX5)
    assert (found.status, found.found) == ("warn", f"ECN is off for all priorities: {interfaces[1]}")
    assert f"/sys/class/net/{interfaces[1]}/ecn/" in found.fix
