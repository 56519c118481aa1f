"""Guards against checks of the running process that pass what does not work: versions, system calls, the cache."""

from __future__ import annotations

import errno
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doctor_machines import machine

from weft.machine.doctor import Facts, Finding, deep_ep, diagnose, process, software

GPUS = Facts(machine(), live=True)
NO_GPU = Facts(machine(gpus=(), pairs=()), live=True)


def finding(name: str, facts: Facts = GPUS) -> Finding:
    checks = [check for check in (*software.CHECKS, *deep_ep.CHECKS, *process.CHECKS) if check.name == name]
    (only,) = diagnose(facts, checks)
    return only


def refused(*_: Any, **__: Any) -> Any:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def version_of_torch(text: str | None) -> Callable[[str], str]:
    def version(name: str) -> str:
        if text is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return text

    return version


@pytest.mark.parametrize(
    ("version", "cuda", "facts", "status"),
    [
        (None, None, NO_GPU, "fail"),
        ("2.9.1", "13.0", GPUS, "fail"),
        ("2.10.0+cpu", None, GPUS, "warn"),
        ("2.10.0+cpu", None, NO_GPU, "ok"),
        ("2.11.0a0+git123", "13.0", GPUS, "ok"),
    ],
)
def test_torch(
    monkeypatch: pytest.MonkeyPatch, version: str | None, cuda: str | None, facts: Facts, status: str
) -> None:
    monkeypatch.setattr(software.importlib.metadata, "version", version_of_torch(version))
    monkeypatch.setattr(software, "_torch_cuda", lambda: cuda)
    found = finding("torch", facts)
    assert found.status == status
    assert status == "ok" or found.fix.startswith("pip install")


@pytest.mark.parametrize(("cuda", "status"), [("14.0", "fail"), ("13.4", "ok"), ("12.8", "ok"), (None, "ok")])
def test_driver_and_torch(monkeypatch: pytest.MonkeyPatch, cuda: str | None, status: str) -> None:
    monkeypatch.setattr(software, "_torch_cuda", lambda: cuda)
    assert finding("driver").status == status


@pytest.mark.parametrize(
    ("answer", "status"),
    [([13, 0], "ok"), ([12, 8], "ok"), ([14, 0], "fail"), ({"error": "DynamicLibNotFoundError: nvrtc"}, "fail")],
)
def test_nvrtc(monkeypatch: pytest.MonkeyPatch, answer: Any, status: str) -> None:
    monkeypatch.setattr(software, "ask", lambda code: answer)
    assert finding("nvrtc").status == status
    assert finding("nvrtc", NO_GPU).status == "n/a"


@pytest.mark.parametrize(
    ("answer", "words"),
    [({"error": "ImportError: undefined symbol"}, "does not load"), ({"version": "0.0.1"}, "is version 0.0.1")],
)
def test_native_module(monkeypatch: pytest.MonkeyPatch, answer: Any, words: str) -> None:
    assert finding("native-module").status == "ok"
    monkeypatch.setattr(software, "ask", lambda code: answer)
    found = finding("native-module")
    assert (found.status, words in found.found) == ("fail", True)


def test_deep_ep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None, Weft's, Weft's beside another, another's."""
    monkeypatch.setattr(deep_ep, "origin", lambda: None)
    assert finding("deep-ep").status == "n/a"
    ours = Path(deep_ep.__file__).parents[2] / "deep_ep/top_level/deep_ep/__init__.py"
    monkeypatch.setattr(deep_ep, "origin", lambda: str(ours))
    monkeypatch.setattr(deep_ep, "owners", list)
    assert (finding("deep-ep").status, str(ours) in finding("deep-ep").found) == ("ok", True)
    monkeypatch.setattr(deep_ep, "owners", lambda: ["sgl-deep-ep"])
    assert (finding("deep-ep").status, finding("deep-ep").fix) == ("warn", "pip uninstall sgl-deep-ep")
    other = tmp_path / "deep_ep.py"
    other.write_text("")
    monkeypatch.setattr(deep_ep, "origin", lambda: str(other))
    assert "not Weft's" in finding("deep-ep").found


def test_owners_of_deep_ep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("sgl_deep_ep", "weft_deep_ep"):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
        (info / "top_level.txt").write_text("deep_ep\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert deep_ep.owners() == ["sgl-deep-ep"]


@pytest.mark.parametrize(
    ("check", "owner", "call", "status"),
    [
        ("memfd", process.os, "memfd_create", "fail"),
        ("memfd", process.os, "pwrite", "fail"),
        ("unix-socket", process.socket.socket, "bind", "fail"),
        ("unix-socket", process.socket, "send_fds", "fail"),
        ("pidfd", process.os, "pidfd_open", "warn"),
    ],
)
def test_refused_system_calls(monkeypatch: pytest.MonkeyPatch, check: str, owner: Any, call: str, status: str) -> None:
    assert finding(check).status == "ok"
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(owner, call, refused)
    found = finding(check)
    assert (found.status, "Operation not permitted" in found.found) == (status, True)
    assert found.fix
    assert len(os.listdir("/proc/self/fd")) == before


def test_checks_leave_no_descriptor_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    list(diagnose(GPUS, process.CHECKS))
    assert len(os.listdir("/proc/self/fd")) == before


def test_kernel_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "weft"
    monkeypatch.setattr(process, "cache_folder", lambda: str(folder))
    assert (finding("kernel-cache").status, finding("kernel-cache", NO_GPU).status) == ("ok", "n/a")
    folder.mkdir(parents=True, mode=0o700)
    assert finding("kernel-cache").status == "ok"
    folder.chmod(0o770)
    assert "mode 770" in finding("kernel-cache").found
    assert finding("kernel-cache").fix.startswith("chmod 700")
    monkeypatch.setattr(process.os, "geteuid", lambda: os.getuid() + 1)
    assert "another user" in finding("kernel-cache").found
    monkeypatch.undo()
    link = tmp_path / "link"
    link.symlink_to(folder)
    monkeypatch.setattr(process, "cache_folder", lambda: str(link))
    assert finding("kernel-cache").status == "warn"
    monkeypatch.setattr(process, "cache_folder", lambda: "")
    assert "no folder is chosen" in finding("kernel-cache").found


def test_a_recording_says_nothing_of_the_process() -> None:
    recorded = Facts(machine())
    for name in (
        "python",
        "torch",
        "nvrtc",
        "native-module",
        "deep-ep",
        "memfd",
        "unix-socket",
        "pidfd",
        "ptrace",
        "kernel-cache",
    ):
        assert finding(name, recorded).status == "n/a"
