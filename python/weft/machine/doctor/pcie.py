"""The way between GPU and NIC: ACS, IOMMU, GPUDirect."""

from __future__ import annotations

from collections.abc import Iterable

from weft.machine.doctor.model import Answer, Check, Facts, fail, ok, skip, warn

__all__ = ["CHECKS"]

_NO_PAIR = "no GPU and RDMA device to join"


def _acs(facts: Facts) -> Iterable[Answer]:
    bridges = facts.machine.bridges
    if not (facts.gpus and facts.rdma):
        return [skip(_NO_PAIR)]
    if not bridges:
        return [skip("no PCIe switch is visible above GPUs and NICs")]
    redirecting = sorted(
        address
        for address, bridge in bridges.items()
        if bridge.port_type == "downstream" and bridge.acs is not None and bridge.acs.redirect
    )
    if redirecting:
        found = f"ACS redirects peer traffic on {len(redirecting)} switch ports: {', '.join(redirecting)}"
        cost = "traffic between GPU and NIC goes up to the root complex and back, at a fraction of the switch's rate"
        fix = "; ".join(f"sudo setpci -s {address} ECAP_ACS+0x6.w=0000" for address in redirecting)
        return [warn(found, cost=cost, fix=fix + "  # until the next boot; for good: ACS off in the BIOS")]
    # Without the type of a port its configuration space was not read that far.
    unknown = [bridge for bridge in bridges.values() if bridge.port_type is None]
    if unknown:
        why = unknown[0].why.get("acs", "not known")
        return [skip(f"ACS of {len(unknown)} bridges can't be read: {why} (sudo weft doctor)")]
    num_ports = sum(bridge.port_type == "downstream" for bridge in bridges.values())
    if not num_ports:
        return [skip("GPUs and NICs are on root ports: no PCIe switch")]
    return [ok(f"no ACS redirect on {num_ports} switch ports")]


def _iommu(facts: Facts) -> Iterable[Answer]:
    state = facts.machine.system.iommu
    if not facts.gpus:
        return [skip("no GPU")]
    if state is None:
        return [skip(facts.machine.system.why.get("iommu", "not known"))]
    if state == "translating":
        cost = "transfers between devices are translated, and may go through the root complex"
        fix = "add iommu=pt to the kernel's command line (GRUB_CMDLINE_LINUX), sudo update-grub, reboot"
        return [warn("the IOMMU translates device addresses", cost=cost, fix=fix)]
    return [ok(f"IOMMU {state}")]


def _gpu_direct(facts: Facts) -> Iterable[Answer]:
    direct = facts.machine.gpu_direct
    if not (facts.gpus and facts.rdma):
        return [skip(_NO_PAIR)]
    if direct.available is None:
        return [skip(f"not known: {'; '.join(direct.why.values()) or 'neither way could be looked at'}")]
    if not direct.available:
        cost = "no scale-out from GPU memory: NICs can't reach it"
        fix = "sudo modprobe nvidia_peermem  # or dma-buf: Linux 5.12 or later, the driver's open kernel modules"
        return [fail("neither dma-buf nor nvidia-peermem is there", cost=cost, fix=fix)]
    ways = [name for name, there in (("dma-buf", direct.dma_buf), ("nvidia-peermem", direct.peermem)) if there]
    return [ok(" and ".join(ways) + (", gdrcopy too" if direct.gdrcopy else ""))]


CHECKS = (
    Check("pcie", "acs", "Access control may send traffic between a GPU and the NIC beside it through the root.", _acs),
    Check("pcie", "iommu", "A translating IOMMU is in the way of transfers between devices.", _iommu),
    Check("pcie", "gpudirect", "NICs read and write GPU memory through dma-buf or nvidia-peermem.", _gpu_direct),
)
