"""What a PCI function's configuration space says: port type, atomics, access control.

Offsets as in Linux's pci_regs.h. Without root the kernel shows the first 64 bytes only: then everything is unknown,
which is not "no".
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.machine.topology.pci_model import AccessControl, AtomicOps

__all__ = ["ConfigFacts", "minimal_config", "parse_config"]

_STATUS, _STATUS_HAS_LIST, _FIRST_CAPABILITY = 0x06, 1 << 4, 0x34
_PCIE_ID, _ACS_ID = 0x10, 0x000D
_DEVCAP2, _DEVCTL2 = 0x24, 0x28
_MAX_CAPABILITIES = 48
_PCIE_BYTES = 0x3C
_EXTENDED, _SIZE = 0x100, 4096
_PORT_TYPES = {0: "endpoint", 1: "endpoint", 4: "root port", 5: "upstream", 6: "downstream", 9: "endpoint"}

_UNKNOWN = AtomicOps()


@dataclass(frozen=True)
class ConfigFacts:
    """`atomics_why` and `acs_why` say why a part is unknown."""

    port_type: str | None = None
    atomics: AtomicOps = _UNKNOWN
    acs: AccessControl | None = None
    atomics_why: str = ""
    acs_why: str = ""


def parse_config(data: bytes | None) -> ConfigFacts:
    """The facts in a `config` file, None: it could not be read."""
    if data is None:
        return ConfigFacts(atomics_why="configuration space not readable", acs_why="configuration space not readable")
    if len(data) <= 64:
        why = f"only {len(data)} bytes of configuration space are visible: root sees the rest"
        return ConfigFacts(atomics_why=why, acs_why=why)
    at = _find_pcie(data)
    if at is None:
        return ConfigFacts(atomics_why="no PCIe capability", acs_why="no PCIe capability")
    flags = _u16(data, at + 2)
    port_type = _PORT_TYPES.get(flags >> 4 & 0xF, "other")
    atomics, atomics_why = _UNKNOWN, "PCIe capability of version 1: no word about atomics"
    if flags & 0xF >= 2 and at + _DEVCTL2 + 2 <= len(data):
        atomics, atomics_why = _atomics(_u32(data, at + _DEVCAP2), _u16(data, at + _DEVCTL2)), ""
    if len(data) <= _EXTENDED:
        return ConfigFacts(port_type, atomics, None, atomics_why, "no extended configuration space visible")
    acs = _find_acs(data)
    return ConfigFacts(port_type, atomics, acs, atomics_why, "" if acs else "no ACS capability")


def _atomics(capability: int, control: int) -> AtomicOps:
    has = [bool(capability >> bit & 1) for bit in (6, 7, 8, 9)]
    return AtomicOps(has[0], has[1], has[2], has[3], bool(control >> 6 & 1), bool(control >> 7 & 1))


def _find_pcie(data: bytes) -> int | None:
    if not _u16(data, _STATUS) & _STATUS_HAS_LIST:
        return None
    at = data[_FIRST_CAPABILITY] & 0xFC
    for _ in range(_MAX_CAPABILITIES):
        if at < 0x40 or at + 4 > len(data):
            return None
        if data[at] == _PCIE_ID:
            return at
        at = data[at + 1] & 0xFC
    return None


def _find_acs(data: bytes) -> AccessControl | None:
    at = _find_acs_at(data)
    if at is None:
        return None
    control = _u16(data, at + 6)
    return AccessControl(*(bool(control >> bit & 1) for bit in (0, 2, 3, 4)))


def _find_acs_at(data: bytes) -> int | None:
    at = _EXTENDED
    for _ in range((_SIZE - _EXTENDED) // 8):
        if at < _EXTENDED or at + 8 > len(data):
            return None
        header = _u32(data, at)
        if header & 0xFFFF == _ACS_ID:
            return at
        at = header >> 20
    return None


def _u16(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 2], "little")


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def minimal_config(data: bytes) -> bytes:
    """A space of the same length with the identity, the PCIe capability and the ACS one only: no serial number, no
    addresses."""
    if len(data) < 64:
        return data
    kept = bytearray(len(data))
    kept[:0x10] = data[:0x10]  # vendor, device, command, status, class
    if len(data) == 64:
        return bytes(kept)
    at = _find_pcie(data)
    if at is None:
        kept[_STATUS] &= ~_STATUS_HAS_LIST & 0xFF
        return bytes(kept)
    size = min(_PCIE_BYTES, len(kept) - at)
    kept[_FIRST_CAPABILITY] = at
    kept[at : at + size] = data[at : at + size]
    kept[at + 1] = 0  # the last one
    found = _find_acs_at(data)
    if found is not None:
        header = _ACS_ID | _u32(data, found) & 0xF0000  # the last one, same version
        kept[_EXTENDED : _EXTENDED + 4] = header.to_bytes(4, "little")
        kept[_EXTENDED + 4 : _EXTENDED + 8] = data[found + 4 : found + 8]
    return bytes(kept)
