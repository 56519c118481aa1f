"""Guards against settings of NCCL and NVSHMEM that do not fit the machine, or that overwrite what the user set."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import machines
import pytest

from weft.machine.placement import place
from weft.machine.settings import Settings, settings
from weft.machine.settings.hca_list import nccl_selects, nvshmem_selects
from weft.machine.settings.topology_file import parse_mask

ROCE = {"NCCL_RUNTIME_CONNECT": "0", "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1", "NVSHMEM_IB_GID_INDEX": "3"}
SINGLE = {"NCCL_NVLS_ENABLE": "0", "NCCL_IB_QPS_PER_CONNECTION": "4", "NCCL_MAX_NCHANNELS": "4"}
AZURE = ",".join(f"mlx5_ib{idx}:1" for idx in range(8))
DGX = ",".join(f"mlx5_{idx}:1" for idx in (0, 3, 4, 5, 6, 9, 10, 11))
FOUR = ",".join(f"mlx5_{idx}:1" for idx in range(4))

WANTED = {
    "azure-nd-h100-v5": {
        "NCCL_IB_HCA": f"={AZURE}",
        "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1",
        "NVSHMEM_HCA_LIST": AZURE,
    },
    "dgx-h100": {"NCCL_IB_HCA": f"={DGX}", "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1", "NVSHMEM_HCA_LIST": DGX},
    "dual-port-roce": {
        **ROCE,
        "NCCL_IB_HCA": "=" + ",".join(f"mlx5_{idx}:1" for idx in range(16)),
        "NCCL_IB_MERGE_NICS": "1",
        "NVSHMEM_HCA_LIST": ",".join(f"mlx5_{idx}:1" for idx in range(0, 16, 2)),
    },
    "dual-port-roce-bond": {
        **ROCE,
        **SINGLE,
        "NCCL_IB_HCA": "=" + ",".join(f"mlx5_bond_{idx}:1" for idx in range(8)),
        "NVSHMEM_HCA_LIST": ",".join(f"mlx5_bond_{idx}:1" for idx in range(8)),
    },
    "gcp-a3-ultra": {
        **ROCE,
        **SINGLE,
        "NCCL_IB_HCA": "=" + ",".join(f"mlx5_{idx}:1" for idx in range(8)),
        "NVSHMEM_HCA_LIST": ",".join(f"mlx5_{idx}:1" for idx in range(8)),
    },
    "two-gpus-per-nic": {
        "NCCL_IB_HCA": f"={FOUR}",
        "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1",
        "NVSHMEM_HCA_PE_MAPPING": ",".join(f"mlx5_{idx}:1:2" for idx in range(4)),
    },
    "aws-p5": {
        "FI_PROVIDER": "efa",
        "NVSHMEM_REMOTE_TRANSPORT": "libfabric",
        "NVSHMEM_LIBFABRIC_PROVIDER": "efa",
    },
    "h200-vm-no-nic": {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_REMOTE_TRANSPORT": "none"},
    "gcp-a3-mega": {"NVSHMEM_REMOTE_TRANSPORT": "none"},
}


def of(name: str, **environment: str) -> Settings:
    machine = machines.machine(name)
    return settings(machine, place(machine), environment)


def conflicts(found: Settings) -> dict[str, str]:
    return {item.name: item.conflict for item in found.items if item.conflict}


@pytest.mark.parametrize("name", sorted(WANTED))
def test_settings_of_machines(name: str) -> None:
    found = of(name)
    assert found.as_dict() == WANTED[name]
    assert all(item.reason for item in found.items)
    assert not found.all_warnings()


def test_export_lines_are_what_a_shell_sets() -> None:
    found = of("azure-nd-h100-v5")
    script = "\n".join([*found.export_lines(), 'printf "%s\\n" "$NCCL_IB_HCA" "$NVSHMEM_HCA_LIST"'])
    result = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True, env={})
    assert result.stdout.split() == [f"={AZURE}", AZURE]
    assert all("  # " in line for line in found.export_lines())
    assert all(shlex.split(line, comments=True)[0] == "export" for line in found.export_lines())


def test_what_the_user_set_stays() -> None:
    environment = {"NVSHMEM_HCA_LIST": "mlx5_ib0:1"}
    found = of("azure-nd-h100-v5", **environment)
    assert found.as_dict()["NVSHMEM_HCA_LIST"] == "mlx5_ib0:1"
    assert not any("NVSHMEM_HCA_LIST" in line for line in found.export_lines())
    added = found.apply(environment)
    assert environment["NVSHMEM_HCA_LIST"] == "mlx5_ib0:1"
    assert set(added) == {"NCCL_IB_HCA", "NVSHMEM_ENABLE_NIC_PE_MAPPING"}
    assert found.apply(environment) == {}


def test_a_prefix_takes_more_than_meant() -> None:
    conflict = conflicts(of("dgx-h100", NCCL_IB_HCA="mlx5_1"))["NCCL_IB_HCA"]
    for part in ("mlx5_1:1 (next to no GPU", "beginning", "it lacks mlx5_0:1, mlx5_3:1"):
        assert part in conflict
    assert nccl_selects("mlx5_1", machines.machine("dgx-h100")) == {"mlx5_1:1", "mlx5_10:1", "mlx5_11:1"}


def test_equal_lists_in_another_spelling_are_no_conflict() -> None:
    for text in (f"={AZURE}", "mlx5_ib", "^mlx5_an0", "^=mlx5_an0:1", "=" + AZURE.replace(":1", "")):
        assert not conflicts(of("azure-nd-h100-v5", NCCL_IB_HCA=text)), text


def test_the_ethernet_function_is_warned_about_with_the_reason() -> None:
    for name, text in (("NCCL_IB_HCA", "mlx5"), ("NVSHMEM_HCA_LIST", "mlx5_an0:1,mlx5_ib0:1")):
        found = of("azure-nd-h100-v5", **{name: text, "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1"})
        assert "mlx5_an0:1 (it can't do PCIe atomics" in conflicts(found)[name]


def test_a_pe_mapping_with_a_nic_that_is_left_out() -> None:
    chosen = {"NVSHMEM_HCA_PE_MAPPING": "mlx5_3:1:4,mlx5_4:1:4", "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1"}
    conflict = conflicts(of("two-gpus-per-nic-uneven", **chosen))["NVSHMEM_HCA_PE_MAPPING"]
    assert conflict.startswith("it also takes mlx5_3:1 (next to no GPU")
    own = of("two-gpus-per-nic").as_dict()
    assert not of("two-gpus-per-nic", **own).all_warnings()


def test_a_list_that_nvshmem_ignores() -> None:
    assert "ignored" in of("dgx-h100", NVSHMEM_HCA_LIST=DGX).all_warnings()[0]
    found = of("dgx-h100", NVSHMEM_HCA_LIST=DGX, NVSHMEM_ENABLE_NIC_PE_MAPPING="0")
    assert "ignored" in conflicts(found)["NVSHMEM_ENABLE_NIC_PE_MAPPING"]
    assert of("dgx-h100", NVSHMEM_HCA_LIST=DGX, NVSHMEM_ENABLE_NIC_PE_MAPPING="1").all_warnings() == []
    assert 'no "="' in of("dgx-h100", NVSHMEM_HCA_LIST=f"={DGX}", NVSHMEM_ENABLE_NIC_PE_MAPPING="1").warnings[0]
    assert nvshmem_selects("^mlx5_0", machines.machine("two-gpus-per-nic")) == {f"mlx5_{idx}:1" for idx in (1, 2, 3)}


def test_ports_are_merged_for_collectives_and_kept_apart_for_the_device_api() -> None:
    name = "NCCL_IB_MERGE_NICS"
    assert of("dual-port-roce").as_dict()[name] == "1"
    assert of("dual-port-roce", NCCL_GIN_ENABLE="0", NCCL_GIN_TYPE="3").as_dict()[name] == "1"
    for asked in ({"NCCL_GIN_ENABLE": "1"}, {"NCCL_GIN_TYPE": "3"}):
        assert of("dual-port-roce", **asked).as_dict()[name] == "0"
        assert "GIN" in conflicts(of("dual-port-roce", **asked, NCCL_IB_MERGE_NICS="1"))[name]
        assert name not in conflicts(of("dual-port-roce", **asked, NCCL_IB_MERGE_NICS="0"))
    assert "GIN" in conflicts(of("dual-port-roce", NCCL_IB_MERGE_NICS="0"))[name]


def test_roce_conflicts() -> None:
    found = conflicts(of("dual-port-roce", NCCL_RUNTIME_CONNECT="1", NCCL_IB_MERGE_NICS="0"))
    assert "59 to 37 GB/s" in found["NCCL_RUNTIME_CONNECT"]
    assert "device of its own" in found["NCCL_IB_MERGE_NICS"]
    assert (
        "half of the bond"
        in conflicts(of("dual-port-roce-bond", NCCL_IB_QPS_PER_CONNECTION="1"))["NCCL_IB_QPS_PER_CONNECTION"]
    )
    assert not conflicts(of("dual-port-roce-bond", NCCL_IB_QPS_PER_CONNECTION="8"))


def test_class_of_traffic_is_carried_over_and_compared() -> None:
    assert of("dual-port-roce", NCCL_IB_TC="106").as_dict()["NVSHMEM_IB_TRAFFIC_CLASS"] == "106"
    both = of("dual-port-roce", NCCL_IB_TC="106", NVSHMEM_IB_TRAFFIC_CLASS="0")
    assert "differ" in both.warnings[0]
    assert of("dual-port-roce").notes
    assert not of("dual-port-roce", NCCL_IB_TC="106").notes
    back = of("dual-port-roce", NVSHMEM_IB_TRAFFIC_CLASS="106", NVSHMEM_IB_SL="3")
    assert (back.as_dict()["NCCL_IB_TC"], back.as_dict()["NCCL_IB_SL"]) == ("106", "3")
    assert not back.notes
    assert not back.all_warnings()


def test_a_gid_that_is_none() -> None:
    assert "link-local" in of("dual-port-roce", NCCL_IB_GID_INDEX="1").warnings[0]
    assert "is nothing" in of("dual-port-roce", NCCL_IB_GID_INDEX="9").warnings[0]
    assert not of("dual-port-roce", NCCL_IB_GID_INDEX="3").warnings


def test_lists_of_hcas_mean_nothing_without_verbs() -> None:
    assert "no effect" in of("aws-p5", NCCL_IB_HCA="mlx5").warnings[0]
    assert "no RDMA device" in of("h200-vm-no-nic", NCCL_IB_HCA="mlx5").warnings[0]


def test_topology_file_with_swapped_nodes(tmp_path: Path) -> None:
    low, high = "00000000,0000ffff,ffffffff", "ffffffff,ffff0000,00000000"
    file = tmp_path / "topo.xml"
    cpu = '<cpu numaid="{}" affinity="{}" arch="x86_64"></cpu>'
    file.write_text(f"<system>{cpu.format(0, low)}{cpu.format(1, high)}</system>")
    assert not of("azure-nd-h100-v5", NCCL_TOPO_FILE=str(file)).warnings
    file.write_text(f"<system>{cpu.format(0, high)}{cpu.format(1, low)}</system>")
    first, second = of("azure-nd-h100-v5", NCCL_TOPO_FILE=str(file)).warnings
    assert "gives NUMA node 0 the CPUs 48-95, the kernel says 0-47" in first
    assert "gives NUMA node 1 the CPUs 0-47" in second


@pytest.mark.parametrize("text", ["", "<system>", '<!DOCTYPE a [<!ENTITY b "c">]><a/>', "\0"])
def test_unreadable_topology_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "topo.xml"
    file.write_text(text)
    assert "can't be read" in of("dgx-h100", NCCL_TOPO_FILE=str(file)).warnings[0]
    assert "can't be read" in of("dgx-h100", NCCL_TOPO_FILE=str(tmp_path / "none")).warnings[0]


def test_masks() -> None:
    assert parse_mask("3,00000001") == {0, 32, 33}
    assert parse_mask("x") is None
