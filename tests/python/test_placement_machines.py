"""Guards against a machine whose ranks get the wrong cores, memory or NICs, or a NIC left out for a wrong reason."""

from __future__ import annotations

import dataclasses
import itertools

import doctor_machines as healthy
import machines
import pytest

from weft.machine.placement import place
from weft.machine.topology import Distance, Gpu, PciDevice
from weft.machine.topology.distance import distance
from weft.machine.topology.parse import cpu_list, format_cpus

TWO_RANKS = ["h200-vm-no-nic"]


def test_the_machines_of_the_specification_are_there() -> None:
    wanted = {
        "aws-p5",
        "azure-nd-h100-v5",
        "container-half-cores",
        "dgx-h100",
        "dual-port-roce",
        "gb200-nvl72-tray",
        "h200-vm-no-nic",
        "two-gpus-per-nic",
    }
    assert wanted <= set(machines.NAMES)


@pytest.mark.parametrize("name", machines.NAMES)
def test_placement_is_the_expected_one(name: str) -> None:
    wanted = machines.expected(name)
    placements = place(machines.machine(name))
    found = [
        {
            "cpus": format_cpus(each.cpus),
            "node": each.node,
            "memory_node": each.memory_node,
            "nics": [str(nic) for nic in each.nics],
        }
        for each in placements
    ]
    for row in wanted["placements"]:
        row["cpus"] = format_cpus(cpu_list(row["cpus"]) or ())
    assert found == wanted["placements"]
    for rank, share in enumerate(wanted.get("shares", [])):
        assert [nic.share for nic in placements[rank].nics] == [share]


@pytest.mark.parametrize("name", machines.NAMES)
def test_what_is_left_out_has_its_reason(name: str) -> None:
    wanted = machines.expected(name)
    for each in place(machines.machine(name)):
        found = {left.name: left for left in each.left_out}
        assert set(found) == set(wanted["left_out"])
        for nic, reason in wanted["left_out"].items():
            assert reason in found[nic].reason
        for nic, address in wanted.get("left_out_address", {}).items():
            assert found[nic].address == address


@pytest.mark.parametrize("name", machines.NAMES)
def test_warnings_and_reasons(name: str) -> None:
    wanted = machines.expected(name)
    for rank, each in enumerate(place(machines.machine(name))):
        warning = wanted.get("warnings", {}).get(str(rank))
        assert bool(each.warnings) == (warning is not None), each.warnings
        if warning:
            assert any(warning in text for text in each.warnings)
        reason = wanted.get("reasons", {}).get(str(rank), "")
        assert any(reason in text for text in each.reasons)


@pytest.mark.parametrize("name", machines.NAMES)
def test_distances_are_those_of_the_matrix(name: str) -> None:
    wanted = machines.expected(name)
    machine = machines.machine(name)
    assert machine.problems == ()
    for gpu, row in zip(machine.gpus, wanted.get("matrix", [])[: len(machine.gpus)], strict=False):
        found = {nic.name: machine.nic_distance(gpu, nic).name for nic in machine.nics}
        assert list(found.values()) == row.split(), gpu.idx
    for pair in machine.pairs:
        if "num_nvlinks" in wanted:
            assert pair.num_nvlinks == wanted["num_nvlinks"]
    if "own_nodes" in wanted:
        assert [gpu.own_node for gpu in machine.gpus] == wanted["own_nodes"]
    if "quota" in wanted:
        assert machine.cpus.quota == wanted["quota"]


@pytest.mark.parametrize("name", machines.NAMES)
def test_ranks_share_no_cpu_unless_they_are_warned(name: str) -> None:
    placements = place(machines.machine(name))
    for one, other in itertools.combinations(placements, 2):
        if set(one.cpus) & set(other.cpus):
            assert one.warnings, (one.local_rank, other.local_rank)
    allowed = set(machines.machine(name).cpus.allowed)
    assert all(set(each.cpus) <= allowed for each in placements)


@pytest.mark.parametrize("name", machines.NAMES)
def test_every_gpu_has_another_list_where_the_machine_allows(name: str) -> None:
    placements = place(machines.machine(name))
    used = {nic.name for each in placements for nic in each.nics}
    if len(used) >= len(placements):
        lists = [{nic.name for nic in each.nics} for each in placements]
        assert all(not one & other for one, other in itertools.combinations(lists, 2))
        assert len({len(names) for names in lists}) == 1


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_only(name: str) -> None:
    placements = place(machines.machine(name), num_local_ranks=2)
    assert [format_cpus(each.cpus) for each in placements] == machines.expected(name)["two_ranks"]


def test_visible_gpus_are_those_of_the_environment() -> None:
    dgx = machines.machine("dgx-h100")
    for text in ("4,5", f"{dgx.gpus[4].uuid},{dgx.gpus[5].uuid}", "4,5,99,0"):
        placements = place(dgx, environment={"CUDA_VISIBLE_DEVICES": text})
        assert [each.gpu_address for each in placements] == ["0000:9d:00.0", "0000:c3:00.0"]
        assert [[str(nic) for nic in each.nics] for each in placements] == [["mlx5_6:1"], ["mlx5_9:1"]]
        assert [format_cpus(each.cpus) for each in placements] == ["48-71,144-167", "72-95,168-191"]


def test_ranks_without_gpu_are_spread_over_the_nodes() -> None:
    placements = place(machines.machine("dgx-h100"), num_local_ranks=4, gpus=())
    assert [each.node for each in placements] == [0, 0, 1, 1]
    assert format_cpus(placements[3].cpus) == "72-95,168-191"


def test_unreadable_configuration_space_is_unknown_and_the_slow_port_still_left_out() -> None:
    azure = machines.machine("azure-nd-h100-v5")
    nics = tuple(dataclasses.replace(nic, atomics=None) for nic in azure.nics)
    placements = place(dataclasses.replace(azure, nics=nics))
    assert [str(each.nics[0]) for each in placements] == [f"mlx5_ib{idx}:1" for idx in range(8)]
    assert "less than half" in placements[0].left_out[0].reason


def test_unknown_numa_nodes_are_said_to_be_unknown() -> None:
    dgx = machines.machine("dgx-h100")
    gpus = tuple(dataclasses.replace(gpu, numa_node=None, why={}) for gpu in dgx.gpus)
    placements = place(dataclasses.replace(dgx, gpus=gpus))
    assert all(any("NUMA node unknown" in text for text in each.warnings) for each in placements)
    assert format_cpus(placements[7].cpus) == "84-95,180-191"
    assert [str(each.nics[0]) for each in placements][:2] == ["mlx5_0:1", "mlx5_3:1"]  # the PCIe tree still knows


def test_isolated_cores_are_left_alone_unless_named() -> None:
    vm = machines.machine("h200-vm-no-nic")
    isolated = dataclasses.replace(vm, cpus=dataclasses.replace(vm.cpus, isolated=tuple(range(32, 64))))
    assert format_cpus(place(isolated)[3].cpus) == "24-31"
    named = dataclasses.replace(isolated.cpus, allowed=tuple(range(32, 64)), cgroup=tuple(range(32, 64)))
    assert format_cpus(place(dataclasses.replace(vm, cpus=named))[0].cpus) == "32-39"


def test_a_mask_made_for_this_rank_is_kept() -> None:
    dgx = machines.machine("dgx-h100")
    mask = tuple(range(12, 24)) + tuple(range(108, 120))
    bound = dataclasses.replace(dgx, cpus=dataclasses.replace(dgx.cpus, allowed=mask))
    each = place(bound)[1]
    assert each.cpus == mask
    assert any("the mask is kept" in text for text in each.reasons)
    assert not each.warnings


def test_distance_names() -> None:
    assert [each.name for each in sorted(Distance)] == ["SELF", "PIX", "PXB", "PHB", "NODE", "SYS", "UNKNOWN"]


def test_a_gpu_far_from_all_nics_shares_that_of_the_one_before() -> None:
    """If that one has no more to do than the others."""
    far = PciDevice("0000:93:00.0", path=("pci0000:90", "0000:90:01.0"))
    gpu = dataclasses.replace(healthy.gpu(2), pci=far, numa_node=None)
    nics = (healthy.nic(0), healthy.nic(1))

    def placed(*of: Gpu) -> list[list[str]]:
        return [[str(each) for each in one.nics] for one in place(healthy.machine(gpus=of, nics=nics, pairs=()))]

    assert placed(healthy.gpu(0), healthy.gpu(1), gpu) == [["mlx5_0:1"], ["mlx5_1:1"], ["mlx5_1:1"]]
    second, last = healthy.gpu(1), dataclasses.replace(gpu, idx=3)
    assert second.pci is not None
    beside = dataclasses.replace(second, idx=2, pci=dataclasses.replace(second.pci, address="0000:15:00.0"))
    found = [["mlx5_0:1"], ["mlx5_1:1"], ["mlx5_1:1"], ["mlx5_0:1"]]
    assert placed(healthy.gpu(0), second, beside, last) == found, "which has less to do"


def test_bridges_between_two_devices_of_a_switch() -> None:
    """As `nvidia-smi topo -m`: PIX behind one switch, PXB behind several, PHB behind ports of one root complex."""
    root, switch = "pci0000:10", ("pci0000:10", "0000:10:01.0", "0000:11:00.0")

    def device(number: int, *path: str) -> PciDevice:
        return PciDevice(f"0000:2{number}:00.0", path=path, numa_node=0)

    one = device(1, *switch, "0000:12:00.0")
    assert distance(one, one) is Distance.SELF
    assert distance(one, device(2, *switch, "0000:12:01.0")) is Distance.PIX
    assert distance(one, device(2, *switch)) is Distance.PIX
    assert distance(one, device(2, *switch, "0000:12:01.0", "0000:13:00.0")) is Distance.PXB
    assert distance(one, device(2, *switch, "0000:12:01.0", "0000:13:00.0", "0000:14:00.0")) is Distance.PXB
    assert distance(one, device(2, root, "0000:10:02.0")) is Distance.PHB
    assert distance(one, device(2, "pci0000:80")) is Distance.NODE
    assert distance(one, device(2, "pci0000:80"), 0, 1) is Distance.SYS
    assert distance(one, device(2, "pci0000:80"), 1) is distance(device(2, "pci0000:80"), one, None, 1) is Distance.SYS
    assert distance(one, PciDevice("0000:90:00.0", path=("pci0000:80",))) is Distance.UNKNOWN
