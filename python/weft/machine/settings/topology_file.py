"""NCCL_TOPO_FILE against the kernel. Published files have had the CPU masks of two NUMA nodes swapped."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from pathlib import Path

from weft.machine.topology.model import Machine
from weft.machine.topology.parse import format_cpus

__all__ = ["warnings"]

_MAX_BYTES = 4 << 20
_WORD_BITS = 32


def warnings(machine: Machine, environment: Mapping[str, str]) -> Iterator[str]:
    """Contradictions between the file and the kernel's NUMA nodes; Weft believes the kernel."""
    name = environment.get("NCCL_TOPO_FILE")
    if not name:
        return
    try:
        with Path(name).open("rb") as file:
            data = file.read(_MAX_BYTES)
        if b"<!ENTITY" in data:  # a topology needs none, and they can be made to grow without end
            raise ValueError("it declares entities")
        root = ElementTree.fromstring(data)
    except (OSError, ValueError, ElementTree.ParseError) as error:
        yield f"NCCL_TOPO_FILE={name} can't be read: {error}"
        return
    nodes = {node.idx: set(node.cpus) for node in machine.cpus.cpu_nodes}
    for cpu in root.iter("cpu"):
        number, mask = cpu.get("numaid", ""), parse_mask(cpu.get("affinity", ""))
        if not number.isdecimal() or mask is None or int(number) not in nodes:
            continue
        if mask != nodes[int(number)]:
            yield (
                f"NCCL_TOPO_FILE={name} gives NUMA node {number} the CPUs {format_cpus(mask)}, the kernel says "
                f"{format_cpus(nodes[int(number)])}: NCCL binds its threads by the file"
            )


def parse_mask(text: str) -> set[int] | None:
    """ "00000000,0000ffff,ffffffff": words of 32 CPUs, the highest first."""
    found: set[int] = set()
    for place, word in enumerate(reversed(text.split(","))):
        try:
            bits = int(word, 16)
        except ValueError:
            return None
        found |= {place * _WORD_BITS + bit for bit in range(_WORD_BITS) if bits >> bit & 1}
    return found
