"""Guards against a report that dies on the machine it should describe, or that tells more than it should."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_lines import rows_of, weft_command

import weft
from weft import collect_env
from weft.machine.redact import VARIABLES, redact, redact_variable

PACKAGE = Path(weft.__file__).parent
SECTIONS = [
    *("weft", "python", "packages", "torch", "system", "cpu", "memory", "limits", "gpu", "network"),
    *("kernel_modules", "environment", "doctor"),
]


def run_module(*paths: Path, arguments: tuple[str, ...] = ("--json",), **env: str) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join(map(str, (*paths, PACKAGE.parent)))
    return subprocess.run(
        [sys.executable, "-m", "weft.collect_env", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd="/",
        env={**os.environ, "PYTHONPATH": search, **env},
    )


def report_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    (row,) = rows_of(done.stdout)
    assert row.pop("kind") == "environment"
    assert list(row) == SECTIONS
    return row


def fake(folder: Path, **modules: str) -> Path:
    for name, text in modules.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(text)
    return folder


def test_a_healthy_installation() -> None:
    report = report_of(run_module())
    assert report["weft"]["version"] == weft.__version__
    assert report["weft"]["native"]["version"] == weft.__version__
    assert report["torch"]["installed"]
    assert report["packages"]["torch"] == report["torch"]["version"]
    assert report["cpu"]["logical"] == os.cpu_count()
    assert isinstance(report["doctor"], list)


@pytest.mark.parametrize("text", ["raise ImportError('undefined symbol: x')", "import os; os.abort()", "syntax error!"])
def test_a_broken_torch(tmp_path: Path, text: str) -> None:
    report = report_of(run_module(fake(tmp_path, torch=text), arguments=("--json", "--import-torch")))
    assert report["torch"]["installed"]
    assert "error" in report["torch"]["imported"]
    assert report["torch"]["imported"]["exit_code"] != 0


@pytest.mark.parametrize("text", ["import os; os.abort()", "raise RuntimeError('x')"])
def test_a_broken_nvml(tmp_path: Path, text: str) -> None:
    report = report_of(run_module(fake(tmp_path, pynvml=text)))
    assert ("exit_code" in report["doctor"]) == ("abort" in text)


def test_typer_rich_torch_and_numpy_are_not_needed(tmp_path: Path) -> None:
    gone = "raise ModuleNotFoundError(__name__)"
    done = run_module(fake(tmp_path, typer=gone, rich=gone, torch="raise SystemExit(7)", numpy=gone, pynvml=gone))
    assert report_of(done)["weft"]["version"] == weft.__version__


@pytest.mark.parametrize("garbage", [None, b"not a library"])
def test_the_native_module_missing_or_broken(tmp_path: Path, garbage: bytes | None) -> None:
    shutil.copytree(PACKAGE, tmp_path / "weft", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if garbage is not None:
        (tmp_path / "weft" / "_native.abi3.so").write_bytes(garbage)
    report = report_of(run_module(tmp_path))
    error = report["weft"]["native"]["error"]
    assert error.startswith("ModuleNotFoundError" if garbage is None else "ImportError")
    assert any("native-module" in line for line in report["doctor"])
    assert report["weft"]["native_files"] == ([] if garbage is None else ["_native.abi3.so"])
    assert str(tmp_path) not in json.dumps(report)


def test_nothing_secret_is_in_it() -> None:
    secrets = {
        "HF_TOKEN": "hf_abcdefgh",
        "NCCL_KEY": "sesame",
        "MASTER_ADDR": "login7.cluster.example",
        "NCCL_TOPO_FILE": "/scratch/projects/walrus/topo.xml",
        "NCCL_COMM_ID": "192.168.7.9:4711",
        "LD_LIBRARY_PATH": "/scratch/projects/walrus/lib",
        "CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    }
    text = run_module(NCCL_IB_HCA="=mlx5_0:1", NCCL_SOCKET_IFNAME="eth0", **secrets).stdout
    environment = json.loads(text)["environment"]
    assert environment["NCCL_IB_HCA"] == "=mlx5_0:1"
    assert environment["NCCL_SOCKET_IFNAME"] == "eth0"
    assert not {"HF_TOKEN", "NCCL_KEY"} & set(environment)
    for secret in (*secrets.values(), "walrus", "8932f937", "192.168", "login7", str(Path.home()) + "/"):
        assert secret not in text, secret
    for name in {socket.gethostname(), getpass.getuser()} - {"root", "localhost"}:
        assert f'"{name}"' not in text


def test_names_of_host_and_user_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.machine import redact as module

    monkeypatch.setattr(module.getpass, "getuser", lambda: "walrus")
    monkeypatch.setattr(module.socket, "gethostname", lambda: "gpu17.cluster.example")
    module._private_names.cache_clear()
    try:
        assert redact("walrus at gpu17: gpu17.cluster.example, walruses") == "<user> at <host>: <host>, walruses"
    finally:
        module._private_names.cache_clear()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/data/alice/lib/libtorch.so: no", "<path>/libtorch.so: no"),
        ("cannot open '/opt/secret place/x'", "cannot open '<path> place/x'"),
        ("at 10.1.2.3:80 and fe80::1:2", "at <address> and <address>"),
        ("GPU 00000000:1B:00.0, 0000:1b:00.0", "GPU 00000000:1B:00.0, 0000:1b:00.0"),
        ("0-55,112-167 N/A 400 Gb/sec", "0-55,112-167 N/A 400 Gb/sec"),
        ("see https://user:pass@host/x now", "see <url> now"),
        ("x86_64  580.1  (root@gpu17)  Thu", "x86_64  580.1  (<user>)  Thu"),
        ("~/data/x and /data", "<path> and <path>"),
        ("mlx5_0:1,mlx5_1:1", "mlx5_0:1,mlx5_1:1"),
        ("GPU-8932f937,MIG-c106 GPU-direct", "<uuid>,<uuid> GPU-direct"),
    ],
)
def test_redact(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_weft_s_own_variables_are_all_listed() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "environment.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(WEFT_[A-Z_]+)` \|", page, re.MULTILINE))
    assert documented
    assert documented <= set(VARIABLES)


def test_long_values_are_cut_and_no_variable_is_listed_twice() -> None:
    assert len(redact_variable("NCCL_DEBUG", "x" * 5000)) == 200
    assert len(set(VARIABLES)) == len(VARIABLES)
    assert not [name for name in VARIABLES if re.search("TOKEN(?!S)|KEY|SECRET", name)]


def test_broken_machines_do_not_raise(tmp_path: Path) -> None:
    report = collect_env.collect(root=str(tmp_path / "nothing here"))
    assert list(report) == SECTIONS
    (tmp_path / "proc" / "meminfo").mkdir(parents=True)
    (tmp_path / "proc" / "cpuinfo").write_bytes(bytes(range(256)))
    (tmp_path / "sys" / "class" / "infiniband" / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    report = collect_env.collect(root=str(tmp_path))
    assert report["network"]["mlx5_0"]["ports"]["1"]["gids"] == "0"
    assert not [name for name, content in report.items() if "error" in content]
    assert len(collect_env.lines(report)) > len(SECTIONS)


def test_a_section_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise RecursionError("in /data/alice/x")

    monkeypatch.setattr(collect_env, "_python", fail)
    report = collect_env.collect()
    assert report["python"] == {"error": "RecursionError: in <path>"}
    assert report["weft"]["version"] == weft.__version__


def test_a_closed_pipe_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "weft.collect_env"]
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=env, timeout=600, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_stdout_that_was_never_open_is_no_error() -> None:
    code = f"import os, sys; os.close(1); os.execv(sys.executable, {[sys.executable, '-m', 'weft.collect_env']})"
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, env=env, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_command_prints_the_same() -> None:
    code = "import sys\nfrom weft.cli import app\napp(standalone_mode=False)\nassert 'torch' not in sys.modules"
    done = weft_command("collect-env", "--json", code=code)
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(done.stdout)
    assert list(row) == ["kind", *SECTIONS]
    text = weft_command("collect-env").stdout
    assert all(f"[{section}]\n" in text for section in SECTIONS)
