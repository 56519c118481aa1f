"""Guards against a reader that raises: for missing files, garbage, refused files, loops. What is broken is unknown."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import machines
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weft.machine.settings
from weft.machine.placement import place
from weft.machine.topology import Machine, PciDevice, read, record, to_json

NAMES = ("azure-nd-h100-v5", "aws-p5", "dual-port-roce-bond", "gb200-nvl72-tray")


@functools.cache
def nodes(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((machines.MACHINES / name / "tree.json").read_text())
    return value


def paths(node: dict[str, Any], at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, entry in node.items():
        found.append((*at, name))
        if isinstance(entry, dict) and name != "@json":
            found += paths(entry, (*at, name))
    return found


def everything(root: Path) -> Machine:
    """Read it, place ranks on it, derive settings: nothing of it may raise."""
    machine = read(root)
    json.dumps(to_json(machine))
    placements = place(machine)
    assert len(placements) == max(len(machine.gpus), 1)
    weft.machine.settings.settings(machine, placements, {"NCCL_IB_HCA": "mlx5", "NVSHMEM_HCA_LIST": "^mlx5_1:1"})
    for placement in placements:
        assert set(placement.cpus) <= set(machine.cpus.allowed)
    return machine


def unpack(node: dict[str, Any], folder: Path) -> None:
    """An archive as real files and links."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, entry in node.items():
        path = folder / name
        if isinstance(entry, str):
            path.write_text(entry + "\n")
        elif "@link" in entry:
            path.symlink_to(entry["@link"])
        elif "@json" in entry:
            path.write_text(json.dumps(entry["@json"]))
        elif "@hex" in entry:
            data = bytearray(entry["@size"])
            for at, digits in entry["@hex"].items():
                data[int(at, 16) : int(at, 16) + len(digits) // 2] = bytes.fromhex(digits)
            path.write_bytes(bytes(data))
        elif "@error" not in entry:
            unpack(entry, path)


@pytest.mark.parametrize("name", NAMES)
def test_a_directory_says_the_same_as_the_archive(name: str, tmp_path: Path) -> None:
    unpack(nodes(name), tmp_path)
    assert dataclasses.replace(read(tmp_path), root="") == dataclasses.replace(machines.machine(name), root="")


JUNK = (
    st.text(max_size=20)
    | st.sampled_from(["-1", "0", "Unknown", "999999999999999999999", "0-3,", "\0\0", "4: DOWN", "0x"])
    | st.sampled_from(
        [
            None,
            {},
            7,
            [],
            {"@error": "EACCES"},
            {"@error": "EIO"},
            {"@error": 5},
            {"@link": "/"},
            {"@link": "."},
            {"@link": 3},
            {"@hex": "zz"},
            {"@hex": {"x": "zz"}, "@size": 9},
            {"@hex": {"0": "ff"}, "@size": -1},
            {"@json": [1]},
            {"@json": {"gpus": [1, {"pci": 5, "nvlinks": {"count": 10**9}}], "pairs": [{"a": -1}], "error": 3}},
            {"@json": {"allowed": 3, "memlock_bytes": "x", "cgroup_quota": "1 0"}},
        ]
    )
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(NAMES))
def test_damaged_trees_never_raise(data: st.DataObject, name: str, tmp_path: Path) -> None:
    tree = copy.deepcopy(nodes(name))
    known = paths(tree)
    for path in data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=12)):
        here: Any = tree
        for part in path[:-1]:
            here = here.get(part) if isinstance(here, dict) else None
        if isinstance(here, dict):
            here[path[-1]] = data.draw(JUNK)
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(tree))
    everything(file)
    record(file, tmp_path / "again")
    everything(tmp_path / "again")


@pytest.mark.parametrize("top", ["sys", "proc", "weft", "dev"])
@pytest.mark.parametrize("name", NAMES)
def test_whole_parts_missing(name: str, top: str, tmp_path: Path) -> None:
    tree = {key: entry for key, entry in nodes(name).items() if key != top}
    (tmp_path / "tree.json").write_text(json.dumps(tree))
    machine = everything(tmp_path)
    if top == "weft":
        assert machine.nvml is not None
        assert all(gpu.nvlinks is None for gpu in machine.gpus)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"sys": 1}', '{"@base": "tree.json"}', "\0"])
def test_archives_that_are_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text(text)
    everything(tmp_path)


def test_roots_that_are_none(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "missing", Path("/dev/null"), Path("/proc/self/mem")):
        machine = everything(root)
        assert machine.gpus == ()
        assert machine.nics == ()


def test_directories_with_pipes_loops_and_folders_in_place_of_files(tmp_path: Path) -> None:
    unpack(nodes("azure-nd-h100-v5"), tmp_path)
    system = tmp_path / "sys" / "devices" / "system"
    (system / "cpu" / "online").unlink()
    os.mkfifo(system / "cpu" / "online")
    (system / "node" / "node0" / "cpulist").unlink()
    (system / "node" / "node0" / "cpulist").mkdir()
    link = tmp_path / "sys" / "class" / "infiniband" / "mlx5_ib0"
    link.unlink()
    link.symlink_to("mlx5_ib0")
    (tmp_path / "weft" / "nvml.json").write_bytes(b"\xff\xfe")
    machine = everything(tmp_path)
    assert any("nvml.json" in problem for problem in machine.problems)
    assert machine.cpus.node_of(50) == 1


def test_links_do_not_leave_the_root(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "secret").write_text("Cpus_allowed_list: 1")
    root = tmp_path / "root" / "proc" / "self"
    root.mkdir(parents=True)
    (root / "status").symlink_to("../../../secret")
    assert read(tmp_path / "root").cpus.allowed == ()


def test_refused_files_are_problems_and_unknown(tmp_path: Path) -> None:
    tree = copy.deepcopy(nodes("dual-port-roce-bond"))
    tree["proc"]["driver"]["nvidia"]["version"] = {"@error": "EACCES"}
    (tmp_path / "tree.json").write_text(json.dumps(tree))
    machine = everything(tmp_path)
    assert machine.gpu_direct.dma_buf is None
    assert machine.problems == ("/proc/driver/nvidia/version: permission denied",)


def test_a_gpu_without_sysfs_is_known_from_nvml_alone(tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text(json.dumps({"weft": nodes(NAMES[0])["weft"]}))
    machine = everything(tmp_path)
    assert len(machine.gpus) == 8
    assert {gpu.num_active_links for gpu in machine.gpus} == {18}
    assert machine.gpus[0].pci == PciDevice(machine.gpus[0].pci.address, why=machine.gpus[0].pci.why)
    assert machine.cpus.allowed == tuple(range(96))


def test_gpus_are_found_without_nvml(tmp_path: Path) -> None:
    tree = copy.deepcopy(nodes("azure-nd-h100-v5"))
    tree["weft"]["nvml.json"] = {"@json": {"error": "NVMLError_LibraryNotFound"}}
    (tmp_path / "tree.json").write_text(json.dumps(tree))
    machine = everything(tmp_path)
    assert [gpu.pci.address for gpu in machine.gpus] == [
        gpu.pci.address for gpu in machines.machine("azure-nd-h100-v5").gpus
    ]
    assert all(gpu.nvlinks is None and gpu.numa_node is not None for gpu in machine.gpus)


def test_switches_are_no_gpus() -> None:
    dgx = machines.machine("dgx-h100")
    assert len(dgx.switches) == 4
    assert len(dgx.gpus) == 8


def test_the_import_is_light() -> None:
    code = (
        "import sys; import weft.machine.topology, weft.machine.placement, weft.machine.settings; "
        "heavy = {'torch', 'numpy', 'weft._native', 'pynvml', 'rich'} & set(sys.modules); assert not heavy, heavy"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(weft.__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
