"""Parsers of the little formats in sysfs and procfs. None for what they do not understand; they never raise."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

__all__ = [
    "address_key",
    "cpu_list",
    "format_cpus",
    "gid_kind",
    "integer",
    "key_values",
    "leading_number",
    "pci_address",
    "port_word",
    "real_integer",
    "transfer_rate",
    "word_list",
]

MAX_CPU = 1 << 16
_PCI = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", re.ASCII | re.IGNORECASE)
_PORT_WORD = re.compile(r"\d+: (\S+)", re.ASCII)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)


def cpu_list(text: str | None) -> tuple[int, ...] | None:
    """ "0-3,8" as (0, 1, 2, 3, 8), ascending; empty text is the empty set."""
    if text is None:
        return None
    found: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part, re.ASCII)
        if not match or len(part) > 20:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last <= MAX_CPU:
            return None
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def format_cpus(cpus: Iterable[int]) -> str:
    """(0, 1, 2, 3, 8) as "0-3,8"."""
    parts: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if parts and cpu == parts[-1][1] + 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def integer(text: str | None, base: int = 10) -> int | None:
    """A whole number; base 0 takes 0x, too."""
    if text is None or len(text) > 40:
        return None
    try:
        return int(text.strip(), base)
    except ValueError:
        return None


def real_integer(value: object) -> int | None:
    """A value of a JSON file if it is a whole number."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def leading_number(text: str | None) -> float | None:
    """The number a text begins with, "400 Gb/sec (4X NDR)" as 400.0; None for 0, which drivers print for unknown."""
    match = _NUMBER.match(text.strip()) if text else None
    return float(match[0]) or None if match and len(match[0]) < 20 else None


def transfer_rate(text: str | None) -> float | None:
    """A link speed, "32.0 GT/s PCIe" as 32.0; "Unknown" is None."""
    return leading_number(text) if text and "GT/s" in text else None


def port_word(text: str | None) -> str | None:
    """The word of "4: ACTIVE"."""
    match = _PORT_WORD.match(text.strip()) if text else None
    return match[1] if match else None


def pci_address(text: object) -> str | None:
    """An address as sysfs writes it: NVML's "00000000:1B:00.0" as "0000:1b:00.0"."""
    match = _PCI.fullmatch(text.strip()) if isinstance(text, str) else None
    if not match:
        return None
    domain, bus, slot, function = (int(part or "0", 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{slot:02x}.{function}" if slot < 32 else None


def address_key(address: str) -> tuple[int, ...]:
    """A PCI address as numbers, to sort by; what is none comes last."""
    match = _PCI.fullmatch(address)
    return tuple(int(part or "0", 16) for part in match.groups()) if match else (1 << 40,)


def word_list(text: str | None) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split()) if text else ()


def key_values(text: str | None) -> dict[str, str]:
    """Lines "key: value" or "key : value", the first of equal keys."""
    found: dict[str, str] = {}
    for line in (text or "").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip(), value.strip())
    return found


def gid_kind(text: str) -> str | None:
    """ "link-local", "ipv4" (mapped) or "other"; None for an unused or senseless GID."""
    try:
        address = ipaddress.IPv6Address(text.strip())
    except ValueError:
        return None
    if int(address) & ((1 << 64) - 1) == 0:
        return None  # a prefix without an address: unused
    return "ipv4" if address.ipv4_mapped else "link-local" if address.is_link_local else "other"
