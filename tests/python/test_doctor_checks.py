"""Guards against checks that pass what is broken, or complain about a healthy machine."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from doctor_machines import REDIRECT, findings_of, gpu, machine, nic, port, replaced
from machines import machine as topology_of

from weft.machine.doctor import CHECKS, Check, Facts, Finding, diagnose, measure
from weft.machine.topology import (
    Core,
    Fabric,
    GpuDirect,
    HugePages,
    Limits,
    Machine,
    NetDevice,
    PciDevice,
    PcieLink,
    System,
)

BASE = machine()
CPUS = BASE.cpus


def changed(**changes: Any) -> Machine:
    return dataclasses.replace(BASE, **changes)


def cpus(**changes: Any) -> dict[str, Any]:
    return {"cpus": dataclasses.replace(CPUS, **changes)}


def limits(**changes: Any) -> dict[str, Any]:
    return {"limits": dataclasses.replace(BASE.limits, **changes)}


def gpus(idx: int, **changes: Any) -> dict[str, Any]:
    return {"gpus": replaced(BASE.gpus, idx, **changes)}


def nics(idx: int, **changes: Any) -> dict[str, Any]:
    return {"nics": replaced(BASE.nics, idx, **changes)}


def fabric(**changes: Any) -> Fabric:
    return dataclasses.replace(BASE.gpus[0].fabric, **changes)


def link(speed: float, width: int, **changes: Any) -> PciDevice:
    pci = BASE.nics[0].pci
    assert pci is not None
    return dataclasses.replace(pci, link=PcieLink(speed, width, 32.0, 16), **changes)


DOWN = tuple(dataclasses.replace(entry, active=entry.idx != 3) for entry in BASE.gpus[0].nvlinks or ())
TWO_PORTS = tuple(dataclasses.replace(BASE.nics[idx], card="one card") for idx in (0, 1))
BOND = {"bond": ("eth0", "eth9"), "bond_mode": "802.3ad 4"}
VF = dataclasses.replace(link(32.0, 16), address="0000:04:00.1", physical_function="0000:04:00.0")
C2C = tuple(dataclasses.replace(entry, is_c2c=True) for entry in BASE.gpus)
OLD_DRIVER = dataclasses.replace(BASE.system, driver="535.104.05", cuda_driver="12.2")
EFA = tuple(nic(idx, kind="efa") for idx in range(4))

# check, status, words of what was found, changes to the healthy machine
BROKEN: list[tuple[str, str, str, dict[str, Any]]] = [
    ("driver", "fail", "no NVIDIA driver", {"system": System(modules=())}),
    ("driver", "fail", "up to 12.2; the nvlink engine needs 12.4", {"system": OLD_DRIVER}),
    ("open-files", "warn", "256 open files", limits(max_files=256)),
    ("gpus", "fail", "does not answer: NVML", {"nvml": "NVML: version mismatch"}),
    ("gpus", "warn", "1 x NVIDIA H200", gpus(3, name="NVIDIA H200")),
    ("gpus", "warn", "no GPU is seen", {"gpus": (), "pairs": (), "nvml": "not found"}),
    ("mig", "fail", "GPU 2", gpus(2, is_mig=True)),
    ("nvlink", "fail", "GPU 1: 17 of 18 NVLinks active, down: 3", gpus(1, nvlinks=DOWN)),
    ("nvlink", "warn", "no active NVLink", {"gpus": tuple(gpu(idx, nvlinks=()) for idx in range(4))}),
    ("pairs", "warn", "not joined: 0-1", {"pairs": replaced(BASE.pairs, 0, num_nvlinks=0)}),
    (
        "p2p",
        "fail",
        "0-2 (write chipset not supported)",
        {"pairs": replaced(BASE.pairs, 1, p2p_write="chipset not supported")},
    ),
    ("fabric", "fail", "GPU 0: fabric state in progress", gpus(0, fabric=fabric(state="in progress"))),
    ("fabric", "fail", "with status Insufficient", gpus(0, fabric=fabric(status="Insufficient Resources"))),
    ("fabric", "fail", "2 NVLink domains", gpus(0, fabric=fabric(clique_id=7))),
    ("fabric", "warn", "degraded bandwidth", gpus(0, fabric=fabric(health_mask=0b10101001))),
    ("fabric", "warn", "clique 0", {"gpus": C2C}),
    ("imex", "warn", "no IMEX channel", {"gpus": C2C, "system": dataclasses.replace(BASE.system, imex_channel=False)}),
    ("gpu-numa", "warn", "GPU 2", gpus(2, numa_node=None)),
    ("gpu-cores", "warn", "no allowed CPU on node 1: ranks of GPUs 2-3", cpus(allowed=(0, 1, 2, 3))),
    ("gpu-cores", "warn", "on node 0 1 allowed core for 2 ranks (GPUs 0-1)", cpus(allowed=(0, 4, 5, 6, 7))),
    ("launcher-mask", "warn", "one core (5)", cpus(allowed=(5,))),
    ("quota", "warn", "a quota of 2.5 CPUs", cpus(quota=2.5)),
    ("memory-nodes", "warn", "on node 1", cpus(memory_nodes=(0,))),
    ("locked-memory", "fail", "8,192 KiB", limits(memlock_unlimited=False, memlock_bytes=8 << 20)),
    ("locked-memory", "warn", "4,194,304 KiB", limits(memlock_unlimited=False, memlock_bytes=4 << 30)),
    ("dev-shm", "warn", "64 MiB", limits(shm_bytes=64 << 20)),
    (
        "acs",
        "warn",
        "0000:02:01.0",
        {"bridges": {**BASE.bridges, "0000:02:01.0": PciDevice("0000:02:01.0", port_type="downstream", acs=REDIRECT)}},
    ),
    ("iommu", "warn", "translates", {"system": dataclasses.replace(BASE.system, iommu="translating")}),
    ("gpudirect", "fail", "neither", {"gpu_direct": GpuDirect(peermem=False, dma_buf=False)}),
    ("ports", "fail", "mlx5_0 port 1 is INIT", nics(0, ports=port(state="INIT"))),
    ("ports", "warn", "beside GPU 1 is down (mlx5_1)", nics(1, ports=port(state="DOWN"))),
    ("slots", "fail", "400 Gb/s in a slot of 16 GT/s x16 (252 Gb/s)", nics(0, pci=link(16.0, 16))),
    ("slots", "fail", "32 GT/s x8", nics(0, pci=link(32.0, 8))),
    ("slots", "warn", "800 Gb/s together", {"nics": (*TWO_PORTS, *BASE.nics[2:])}),
    ("mtu", "warn", "mlx5_0 1500", nics(0, ports=port(mtu=1500))),
    (
        "gids",
        "fail",
        "mlx5_0 has no RoCE v2 GID",
        nics(0, ports=port(gids=(dataclasses.replace(BASE.nics[0].ports[0].gids[0], type="IB/RoCE v1"),))),
    ),
    (
        "gids",
        "fail",
        "mlx5_0",
        nics(0, ports=port(gids=(dataclasses.replace(BASE.nics[0].ports[0].gids[0], kind="link-local"),))),
    ),
    ("atomics", "fail", "mlx5_0, mlx5_1", {"nics": tuple(nic(idx, atomics=False) for idx in range(4))}),
    ("atomics", "warn", "from mlx5_2 to the root", nics(2, atomics_path=False)),
    ("distance", "warn", "GPU 2 reaches its NIC mlx5_0 across sockets", {"nics": BASE.nics[:2]}),
    ("nic-numa", "warn", "mlx5_3", nics(3, numa_node=None)),
    ("device-nodes", "fail", "mlx5_0", {"nics": tuple(nic(idx, has_verbs_node=False) for idx in range(4))}),
    ("bonds", "fail", "balance-rr", nics(0, **BOND | {"bond_mode": "balance-rr 0"})),
    ("bonds", "warn", "eth9 of its bond is down", nics(0, **BOND) | {"netdevs": (NetDevice("eth9", state="down"),)}),
    (
        "functions",
        "warn",
        "mlx5_9 of mlx5_0",
        {"nics": (*BASE.nics, dataclasses.replace(nic(0), name="mlx5_9", pci=VF))},
    ),
    ("efa", "warn", "3 EFA devices for 4 GPUs", {"nics": EFA[:3]}),
]


def of_check(findings: list[Finding], check: str) -> list[Finding]:
    return [finding for finding in findings if finding.check == check]


def test_a_healthy_machine_has_nothing_to_mend() -> None:
    findings = findings_of(BASE)
    assert not [finding for finding in findings if finding.status in ("warn", "fail")]
    assert {"nvlink", "p2p", "gpu-cores", "acs", "gpudirect", "atomics", "distance", "slots", "gids"} <= {
        finding.check for finding in findings if finding.status == "ok"
    }


@pytest.mark.parametrize(("check", "status", "words", "changes"), BROKEN, ids=lambda value: str(value)[:24])
def test_what_is_broken_is_found(check: str, status: str, words: str, changes: dict[str, Any]) -> None:
    found = of_check(findings_of(changed(**changes)), check)
    matching = [finding for finding in found if finding.status == status and words in finding.found]
    assert matching, found
    assert all(finding.why for finding in matching)
    assert all(finding.fix for finding in matching)
    fine = {finding.status for finding in of_check(findings_of(BASE), check)}
    assert not fine & {"warn", "fail"}


def test_every_check_that_can_complain_of_a_recording_was_seen_complaining() -> None:
    of_this_process = {"python", "torch", "nvrtc", "native-module", "memfd", "unix-socket", "pidfd", "ptrace"}
    of_this_process |= {
        "kernel-cache",
        "left-over",
        "conflicts",
        "deep-ep",
        "nccl",
        "rdma-core",
        "congestion",
        "doorbells",
    }
    never = {"allowed-cpus", "smt", "huge-pages", "multicast", "nics", "left-out"}  # they only tell
    assert {check.name for check in CHECKS} - of_this_process - never == {name for name, *_ in BROKEN}


def test_links_that_are_off_on_all_gpus_are_how_the_model_is_made() -> None:
    of_all = tuple(dataclasses.replace(entry, nvlinks=DOWN) for entry in BASE.gpus)
    (told,) = of_check(findings_of(changed(gpus=of_all)), "nvlink")
    assert (told.status, told.found.startswith("17 NVLinks active on each of 4 GPUs")) == ("ok", True)


def test_smt_siblings_left_out_are_told() -> None:
    pairs = tuple(Core((cpu, cpu + 4), 0, 0) for cpu in range(4))
    (told,) = of_check(findings_of(changed(**cpus(cores=pairs, allowed=(0, 1, 4)))), "smt")
    assert (told.status, told.found.split(" are ")[0]) == ("ok", "SMT siblings of 1 of 2 cores")


def test_a_container_of_one_core_is_not_called_wide() -> None:
    for changes in (cpus(allowed=(5,), cgroup=(5,)), {**cpus(allowed=(5,)), "gpus": BASE.gpus[:1]}):
        (told,) = of_check(findings_of(changed(**changes)), "launcher-mask")
        assert (told.status, told.found.split(":")[0]) == ("ok", "one core (5) is allowed")


def test_gpus_of_unknown_nodes_have_no_verdict_on_their_cores() -> None:
    lost = tuple(dataclasses.replace(entry, numa_node=None) for entry in BASE.gpus)
    (told,) = of_check(findings_of(changed(gpus=lost)), "gpu-cores")
    assert (told.status, told.found) == ("n/a", "the NUMA nodes of the GPUs are not known")


def test_the_list_that_leaves_out_what_has_no_atomics_is_not_ignored_and_not_empty() -> None:
    some = (nic(0, atomics=False), *(nic(idx, atomics=None) for idx in (1, 2, 3)))
    (told,) = of_check(findings_of(changed(nics=some)), "atomics")
    assert told.fix == "export NVSHMEM_ENABLE_NIC_PE_MAPPING=1 NVSHMEM_HCA_LIST=^mlx5_0"
    (told,) = of_check(findings_of(changed(nics=tuple(nic(idx, atomics=False) for idx in range(4)))), "atomics")
    assert told.fix.startswith("sudo mlxconfig -d 0000:04:00.0 query PCI_ATOMIC_MODE")


def test_no_switch_is_not_called_a_switch_without_ports() -> None:
    bridges = {address: PciDevice(address, port_type="root port") for address in BASE.bridges}
    assert of_check(findings_of(changed(bridges=bridges)), "acs")[0].status == "n/a"


def test_small_huge_pages_have_a_size() -> None:
    pages = (HugePages(64, 3, 3), HugePages(2048, 0, 0), HugePages(1 << 20, 2, 2))
    (told,) = of_check(findings_of(changed(**limits(huge_pages=pages))), "huge-pages")
    assert told.found.startswith("reserved: 3 of 64 KiB, 2 of 1024 MiB; ")


def test_gids_that_could_not_be_read_are_not_counted() -> None:
    blind = nic(0, ports=port(gids=()))
    (told,) = of_check(findings_of(changed(nics=(blind, *BASE.nics[1:]))), "gids")
    assert told.found == "RoCE v2 GIDs with an address on 3 devices"
    (told,) = of_check(findings_of(changed(nics=(blind,))), "gids")
    assert told.status == "n/a"


def test_an_instance_that_lacks_the_same_number_of_efa_devices_for_every_gpu() -> None:
    whole = topology_of("aws-p5")
    kept = tuple(entry for idx, entry in enumerate(whole.nics) if idx % 4)
    (found, _) = of_check(findings_of(dataclasses.replace(whole, nics=kept)), "efa")
    assert (found.status, found.cost) == ("warn", "25 % of the network's rate")
    assert found.found == "24 EFA devices for 8 GPUs, 32 make it whole"


def test_a_nic_of_unknown_state_beside_a_gpu_is_not_called_down() -> None:
    """Only one that is known to be down makes the GPU use a farther one."""

    def is_told(of: Machine) -> bool:
        return any("the NIC beside GPU 0 is down" in each.found for each in findings_of(of))

    assert is_told(changed(**nics(0, ports=port(state="DOWN"))))
    for ports in (port(state=None), (), (*port(state=None), *port(state="DOWN"))):
        assert not is_told(changed(**nics(0, ports=ports)))


def test_a_nic_across_the_root_complex_is_not_beside_a_gpu() -> None:
    far = PciDevice("0000:93:00.0", path=("pci0000:90", "0000:90:01.0"))
    both_down = tuple(nic(idx, ports=port(state="DOWN")) for idx in (0, 1)) + BASE.nics[2:]
    told = [each.found for each in findings_of(changed(**gpus(0, pci=far), nics=both_down))]
    assert any("the NIC beside GPU 1 is down" in each for each in told)
    assert not any("beside GPU 0" in each for each in told)


def test_unknown_is_not_broken() -> None:
    assert not [found for found in findings_of(Machine()) if found.status in ("warn", "fail")]
    blank = Machine(gpus=tuple(dataclasses.replace(gpu(idx), nvlinks=None, name=None) for idx in range(2)), nics=())
    complaints = {found.check for found in findings_of(blank) if found.status in ("warn", "fail")}
    assert complaints == {"driver"}


def test_an_upstream_port_or_a_root_port_may_redirect() -> None:
    for kind in ("upstream", "root port"):
        bridges = {**BASE.bridges, "0000:02:00.0": PciDevice("0000:02:00.0", port_type=kind, acs=REDIRECT)}
        assert of_check(findings_of(changed(bridges=bridges)), "acs")[0].status == "ok"


def test_unreadable_configuration_space_is_not_called_fine() -> None:
    bridges = {"0000:02:00.0": PciDevice("0000:02:00.0", why={"acs": "64 bytes only"})}
    (told,) = of_check(findings_of(changed(bridges=bridges)), "acs")
    assert (told.status, "64 bytes only" in told.found) == ("n/a", True)
    (told,) = of_check(findings_of(changed(nics=tuple(nic(idx, atomics=None) for idx in range(4)))), "atomics")
    assert told.status == "n/a"


def test_settings_left_over_from_debugging() -> None:
    found = of_check(findings_of(BASE, CUDA_LAUNCH_BLOCKING="1", NCCL_P2P_DISABLE="0"), "left-over")
    assert [(one.status, one.fix) for one in found] == [("warn", "unset CUDA_LAUNCH_BLOCKING")]


def test_a_check_that_raises_is_not_applicable() -> None:
    def look(facts: Facts) -> Any:
        raise KeyError("x")

    (finding,) = diagnose(Facts(BASE), [Check("group", "name", "why", look)])
    assert (finding.status, finding.found) == ("n/a", "could not be checked: KeyError: 'x'")


def test_limits_do_not_matter_without_rdma() -> None:
    small = Limits(memlock_bytes=8 << 20, memlock_unlimited=False)
    assert of_check(findings_of(changed(nics=(), limits=small)), "locked-memory")[0].status == "n/a"


def test_the_page_names_every_check() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    table = page.split("## The checks")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)
    assert listed == [check.name for check in (*CHECKS, *measure.CHECKS)]
