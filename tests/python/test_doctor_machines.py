"""Guards against findings about recorded machines other than those expected, and against machines that make it raise.

`doctor.json` beside each tree holds them: `complaints` are all of status warn or fail, `told` texts of checks that are
ok, `not_applicable` the checks that are n/a. Checks of the running process say nothing of a recording.
"""

from __future__ import annotations

import copy
import json
import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_lines import rows_of, weft_command
from machines import MACHINES, NAMES, machine

from weft.machine.doctor import Finding, diagnose, facts_of
from weft.machine.placement import place
from weft.machine.topology import Machine
from weft.machine.topology.matrix import LEGEND, matrix
from weft.machine.topology.picture import draw

RECORDED = "a recording"


def diagnosed(root: Path) -> list[Finding]:
    return [finding for finding in diagnose(facts_of(root)) if not finding.found.startswith(RECORDED)]


@pytest.mark.parametrize("name", NAMES)
def test_expected_findings(name: str) -> None:
    findings = diagnosed(MACHINES / name)
    expected = json.loads((MACHINES / name / "doctor.json").read_text(encoding="utf-8"))
    complaints = [[one.check, one.status, one.found] for one in findings if one.status in ("warn", "fail")]
    assert complaints == expected["complaints"]
    assert [one.check for one in findings if one.status == "n/a"] == expected["not_applicable"]
    told = {one.check: one.found for one in findings if one.status == "ok"}
    assert {check: told.get(check) for check in expected["told"]} == expected["told"]
    assert len(expected["told"]) >= 5


@pytest.mark.parametrize(("name", "code"), [("dgx-h100", 0), ("launcher-one-core", 0), ("container-one-socket", 1)])
def test_exit_code_and_json_of_the_command(name: str, code: int) -> None:
    done = weft_command("doctor", "--root", str(MACHINES / name), "--json")
    assert done.returncode == code, done.stderr
    *checks, summary = rows_of(done.stdout)
    complaints = json.loads((MACHINES / name / "doctor.json").read_text(encoding="utf-8"))["complaints"]
    assert [
        [row["check"], row["status"], row["found"]] for row in checks if row["status"] in ("warn", "fail")
    ] == complaints
    assert all(row["fix"] or row["cost"] for row in checks if row["status"] in ("warn", "fail"))
    assert (summary["ok"], summary["failed"] + summary["warned"]) == (code == 0, len(complaints))
    shown = weft_command("doctor", "--root", str(MACHINES / name))
    assert shown.returncode == code
    assert all(f"{status}: {check}: {found}\n" in shown.stdout for check, status, found in complaints)


@pytest.mark.parametrize("name", NAMES)
def test_picture_and_matrix(name: str) -> None:
    drawn = machine(name)
    nics = {entry.gpu: [choice.name for choice in entry.nics] for entry in place(drawn) if entry.gpu is not None}
    for picture in (draw(drawn), draw(drawn, nics)):
        texts = [element.text for element in ElementTree.fromstring(picture).iter() if element.tag.endswith("text")]
        for nic in drawn.nics:
            assert texts.count(nic.name[:15]) == 1
        assert all(texts.count(f"GPU {gpu.idx}") == 1 for gpu in drawn.gpus)
        assert all(texts.count(f"NUMA node {node.idx}") == 1 for node in drawn.cpus.cpu_nodes)
    words = {
        word.rstrip("0123456789")
        for rows in (matrix(drawn).gpu_gpu, matrix(drawn).gpu_nic)
        for row in rows
        for word in row
    }
    assert words <= {word.rstrip("#") for word in LEGEND} | {"X"}


def test_the_example_of_the_page_is_what_is_printed() -> None:
    page = (MACHINES.parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    name, example = re.findall(r"doctor --root tests/data/machines/([\w-]+)`\):\n```text\n(.*?)```", page, re.DOTALL)[0]
    printed = weft_command("doctor", "--root", str(MACHINES / name)).stdout
    findings, verdict = example.rsplit("doctor:", 1)
    assert printed.startswith(findings)
    assert printed.endswith("doctor:" + verdict)


def test_the_picture_of_the_page_is_what_is_drawn(tmp_path: Path) -> None:
    weft_command("topo", "--root", str(MACHINES / "dgx-h100"), "--svg", str(tmp_path / "drawn.svg"))
    page = MACHINES.parents[2] / "docs" / "pictures" / "dgx-h100.svg"
    assert (tmp_path / "drawn.svg").read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


def test_nics_that_are_left_out_look_left_out() -> None:
    drawn = machine("dgx-h100")
    placed = place(drawn)
    used = {choice.name for entry in placed for choice in entry.nics}
    assert used < {nic.name for nic in drawn.nics}
    picture = draw(
        drawn, {entry.gpu: [choice.name for choice in entry.nics] for entry in placed if entry.gpu is not None}
    )
    boxes = re.findall(r'<rect class="(nic|off)"[^>]*><title>(\S+) ', picture)
    assert {name for kind, name in boxes if kind == "nic"} == used
    assert {name for kind, name in boxes if kind == "off"} == {nic.name for nic in drawn.nics} - used
    assert picture.count("not used</text>") == len(drawn.nics) - len(used)


def test_the_legend_explains_what_is_there_and_no_more() -> None:
    for name in NAMES:
        drawn = draw(machine(name))
        assert ("farther</text>" in drawn) == ('<line class="far" ' in drawn), name
        assert ("NIC not used, or its port is not active</text>" in drawn) == ('class="off" ' in drawn), name
        assert ("NVLink</text>" in drawn) == any(pair.num_nvlinks for pair in machine(name).pairs), name


def test_a_shared_nic_is_drawn_under_the_nearest_gpu() -> None:
    drawn = machine("two-gpus-per-nic-port-down")
    nics = {entry.gpu: [choice.name for choice in entry.nics] for entry in place(drawn) if entry.gpu is not None}
    picture = draw(drawn, nics)
    assert (picture.count('<line class="near"'), picture.count('<line class="far"')) == (
        4,
        4,
    )  # the legend's are "near key"


@pytest.mark.parametrize(
    ("name", "environment", "words", "mends"),
    [
        ("azure-nd-h100-v5", {"NVSHMEM_HCA_LIST": "mlx5_ib0:1"}, "is set, but ignored", "weft topo --settings"),
        ("azure-nd-h100-v5", {"NCCL_IB_HCA": "mlx5"}, "NCCL_IB_HCA=mlx5 is set", "export NCCL_IB_HCA='=mlx5_ib0:1,"),
        ("dgx-h100", {"NCCL_IB_HCA": "mlx5_1"}, "NCCL_IB_HCA=mlx5_1 is set", "export NCCL_IB_HCA='=mlx5_0:1,"),
        ("gcp-a3-ultra", {"NCCL_RUNTIME_CONNECT": "1"}, "NCCL_RUNTIME_CONNECT=1", "export NCCL_RUNTIME_CONNECT=0"),
        ("aws-p5", {"NCCL_IB_HCA": "rdmap"}, "EFA devices, which it has no effect on", "weft topo --settings"),
    ],
)
def test_settings_that_disagree(name: str, environment: dict[str, str], words: str, mends: str) -> None:
    findings = [one for one in diagnose(facts_of(MACHINES / name, environment=environment)) if one.check == "conflicts"]
    assert [one.status for one in findings if words in one.found and one.fix.startswith(mends)] == ["warn"], findings


def test_settings_that_agree() -> None:
    environment = {"NCCL_IB_HCA": "=" + ",".join(f"mlx5_ib{idx}:1" for idx in range(8)), "NCCL_DEBUG": "INFO"}
    facts = facts_of(MACHINES / "azure-nd-h100-v5", environment=environment)
    assert [one.status for one in diagnose(facts) if one.check in ("conflicts", "left-over")] == ["ok", "ok"]


def test_topo_prints_settings_for_a_shell() -> None:
    shown = weft_command("topo", "--root", str(MACHINES / "gcp-a3-ultra"), "--settings").stdout
    assert "\nexport NCCL_RUNTIME_CONNECT=0  # " in shown
    (row,) = rows_of(weft_command("topo", "--root", str(MACHINES / "gcp-a3-ultra"), "--json").stdout)
    assert "NCCL_RUNTIME_CONNECT" in [item["name"] for item in row["settings"]["items"]]


def test_topo_says_why_and_warns() -> None:
    shown = weft_command("topo", "--root", str(MACHINES / "h200-x4")).stdout
    assert "why: ranks 0-3: one NUMA node: a split, not affinity; every core is equally far from every GPU\n" in shown
    assert "warning:" not in shown
    shown = weft_command("topo", "--root", str(MACHINES / "container-one-socket")).stdout
    assert "warning: ranks 4-7: no allowed CPU on node 1: the rank runs on another node's cores\n" in shown


def test_topo_places_ranks_on_visible_gpus_only() -> None:
    here = str(MACHINES / "dgx-h100")  # stands for the machine that the command runs on
    code = f"from weft import topology\nread = topology.read\ntopology.read = lambda root: read({here!r})\n"
    code += "from weft.cli import main; main()"
    (row,) = rows_of(weft_command("topo", "--json", code=code, CUDA_VISIBLE_DEVICES="5,4").stdout)
    assert [placement["gpu"] for placement in row["placements"]] == [5, 4]
    assert {item["name"]: item["value"] for item in row["settings"]["items"]}["NCCL_IB_HCA"] == "=mlx5_9:1,mlx5_6:1"


def test_the_headline_fits_into_the_picture() -> None:
    for drawn in (Machine(), machine("gcp-a3-mega")):
        picture = ElementTree.fromstring(draw(drawn))
        title = next(element for element in picture.iter() if element.get("class") == "title")
        assert float(title.get("x", 0)) + 7 * len(title.text or "") <= float(picture.get("width", 0))


def test_topo_prints_the_matrix_of_the_azure_machine() -> None:
    (row,) = rows_of(weft_command("topo", "--root", str(MACHINES / "azure-nd-h100-v5"), "--json").stdout)
    assert row["gpu_gpu"][0] == ["X", *["NV18"] * 7]
    distances = dict(zip(row["nics"], row["gpu_nic"][4], strict=True))
    assert (distances["mlx5_ib3"], distances["mlx5_ib4"]) == ("SYS", "NODE")
    assert [placement["nics"][0]["name"] for placement in row["placements"]] == [f"mlx5_ib{idx}" for idx in range(8)]
    shown = weft_command("topo", "--root", str(MACHINES / "azure-nd-h100-v5")).stdout
    assert "not used: mlx5_an0: it can't do PCIe atomics" in shown
    assert shown.count("NV18") == 56


def tree(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((MACHINES / name / "tree.json").read_text(encoding="utf-8"))
    return loaded


def entries(node: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all files and directories."""
    for key, value in node.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from entries(value, (*path, key))


def set_at(node: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value


def found_after(name: str, changes: dict[str, Any], folder: Path) -> set[tuple[str, str]]:
    """Complaints about a machine in whose tree every path that ends so was changed."""
    changed = tree(name)
    for ending, value in changes.items():
        paths = [path for path in entries(tree(name)) if "/".join(path).endswith(ending)]
        assert paths, ending
        for path in paths:
            set_at(changed, path, value)
    (folder / "tree.json").write_text(json.dumps(changed), encoding="utf-8")
    return {(one.check, one.status) for one in diagnosed(folder) if one.status in ("warn", "fail")}


DOWNSTREAM = {"@hex": {"6": "10", "34": "60", "60": "100062", "84": "40", "100": "0d0001001f000c00"}, "@size": 4096}


@pytest.mark.parametrize(
    ("name", "changes", "complaints"),
    [
        ("dgx-h100", {"0000:1a:00.0/config": DOWNSTREAM}, {("acs", "warn")}),
        ("dgx-h100", {"0000:18:00.0/current_link_width": "8"}, {("slots", "fail")}),
        ("dgx-h100", {"0000:18:00.0/current_link_speed": "16.0 GT/s PCIe"}, {("slots", "fail")}),
        (
            "dgx-h100",
            {"proc/modules": "nvidia\nmlx5_ib", "nvidia/version": "NVRM version: x 580.1"},
            {("gpudirect", "fail")},
        ),
        ("dgx-h100", {"infiniband_verbs": {}}, {("device-nodes", "fail")}),
        ("dgx-h100", {"ports/1/state": "2: INIT"}, {("ports", "fail")}),
        ("dgx-h100", {"mlx5_0/ports/1/state": "1: DOWN"}, {("ports", "warn")}),
        ("dgx-h100", {"weft/nvml.json": {"@json": {"error": "driver mismatch"}}}, {("gpus", "fail")}),
        ("gcp-a3-ultra", {"/mtu": "1500"}, {("mtu", "warn")}),
        ("gcp-a3-ultra", {"gid_attrs/types/3": "IB/RoCE v1"}, {("gids", "fail")}),
        ("dual-port-roce-bond", {"bonding/mode": "balance-rr 0"}, {("bonds", "fail")}),
        ("dual-port-roce-bond", {"ens24f0np0/operstate": "down"}, {("bonds", "warn")}),
        ("gb200-nvl72-tray", {"nvidia-caps-imex-channels": {}}, {("imex", "warn")}),
    ],
    ids=lambda value: next(iter(value)).rsplit("/", 1)[-1] if isinstance(value, dict) else None,
)
def test_a_broken_part_is_found_in_the_files(
    name: str, changes: dict[str, Any], complaints: set[tuple[str, str]], tmp_path: Path
) -> None:
    assert complaints <= found_after(name, changes, tmp_path)


GARBAGE = [
    "",
    "\x00\xff",
    "-1",
    "99999999999999999999",
    "a" * 300,
    "0-4294967295",
    {"@error": "EACCES"},
    {},
    {"@link": "/"},
]


@pytest.mark.parametrize("name", ["dgx-h100", "dual-port-roce-bond", "gb200-nvl72-tray", "aws-p5"])
def test_broken_trees_never_raise(name: str, tmp_path: Path) -> None:
    """Random parts of a machine gone or nonsense: every check still answers, and the picture is still XML."""
    whole, draws = tree(name), random.Random(name)
    paths = list(entries(whole))
    for trial in range(12):
        changed = copy.deepcopy(whole)
        for path in draws.sample(paths, 1 + trial * 8):
            try:
                set_at(changed, path, draws.choice(GARBAGE))
            except (KeyError, TypeError):
                continue  # a part of something that is already gone
        (tmp_path / "tree.json").write_text(json.dumps(changed), encoding="utf-8")
        facts = facts_of(tmp_path)
        findings = list(diagnose(facts))
        assert not [one for one in findings if "could not be checked" in one.found], f"trial {trial}"
        ElementTree.fromstring(draw(facts.machine))
        matrix(facts.machine)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"sys": 3}', b"\xff\xfe", b'{"@base": "tree.json"}'])
def test_a_tree_that_is_no_tree(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_bytes(content)
    done = weft_command("doctor", "--root", str(tmp_path), "--json")
    assert done.returncode in (0, 1), done.stderr
    assert rows_of(done.stdout)[-1]["kind"] == "summary"
