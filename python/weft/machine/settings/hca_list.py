"""Lists of RDMA devices as NCCL and NVSHMEM read them, and what they select on a machine."""

from __future__ import annotations

from weft.machine.topology.model import Machine

__all__ = ["nccl_selects", "nvshmem_selects"]


def nccl_selects(text: str, machine: Machine) -> set[str]:
    """Ports that NCCL_IB_HCA takes: entries `hca[:port]`, by the beginning of the name; a leading "=" wants the whole
    name, "^" excludes."""
    excludes = text.startswith("^")
    rest = text[1:] if excludes else text
    is_exact = rest.startswith("=")
    entries = [entry.split(":") for entry in (rest[1:] if is_exact else rest).split(",") if entry]
    found = set()
    for name, port in _active_ports(machine):
        matches = any(
            (name == entry[0] if is_exact else name.startswith(entry[0])) and (len(entry) < 2 or entry[1] in ("", port))
            for entry in entries
        )
        if matches != excludes:
            found.add(f"{name}:{port}")
    return found


def nvshmem_selects(text: str, machine: Machine) -> set[str]:
    """Ports that NVSHMEM_HCA_LIST takes: whole names, "^" excludes; there is no "="."""
    excludes = text.startswith("^")
    entries = [entry.split(":") for entry in text.lstrip("^").split(",") if entry]
    found = set()
    for name, port in _active_ports(machine):
        matches = any(name == entry[0] and (len(entry) < 2 or entry[1] in ("", port)) for entry in entries)
        if matches != excludes:
            found.add(f"{name}:{port}")
    return found


def _active_ports(machine: Machine) -> list[tuple[str, str]]:
    return [(nic.name, str(port.number)) for nic in machine.nics for port in nic.ports if port.is_active]
