"""`weft.Placement`: where one rank runs, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.machine.topology.parse import format_cpus

__all__ = ["LeftOut", "NicChoice", "Placement"]


@dataclass(frozen=True)
class NicChoice:
    """A NIC port that a rank is to use: device name, port number, distance to the rank's GPU ("PIX", ...), the share of
    its rate that is left if other ranks use it too, and why it was chosen."""

    name: str
    port: int = 1
    distance: str = "UNKNOWN"
    share: float = 1.0
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.port}"


@dataclass(frozen=True)
class LeftOut:
    """A NIC that no rank uses, and why."""

    name: str
    address: str | None
    reason: str


@dataclass(frozen=True)
class Placement:
    """Where one rank of this machine runs. Given to a `Communicator` it is the explicit placement: `cpus` and
    `memory_node` are then bound as they stand.

    Attributes: `mode` "auto" (Weft's own threads are bound), "process" (the whole process), "off"; `local_rank` of
    `num_local_ranks`; `gpu` index in NVML's order and its PCI address, None without one; `cpus` to bind to, ascending,
    empty: leave the mask alone; `num_cores` whole or partial cores in them; `node` the NUMA node they are on;
    `memory_node` preferred for memory, None: not bound; `nics` best first; `left_out` what no rank uses; `reasons` and
    `warnings` are sentences; `applied` what was done to this process, empty before it is bound.
    """

    mode: str = "process"
    local_rank: int = 0
    num_local_ranks: int = 1
    gpu: int | None = None
    gpu_address: str | None = None
    cpus: tuple[int, ...] = ()
    num_cores: int = 0
    node: int | None = None
    memory_node: int | None = None
    nics: tuple[NicChoice, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    reasons: tuple[str, ...] = field(default=())
    warnings: tuple[str, ...] = field(default=())
    applied: tuple[str, ...] = field(default=())

    def describe(self) -> str:
        """Cores, memory and NICs in one line."""
        if self.mode == "off":
            return "not placed"
        parts = [f"CPUs {format_cpus(self.cpus)}" if self.cpus else "CPUs as they were"]
        if self.cpus and self.node is not None:
            parts[0] += f" of node {self.node}"
        if self.memory_node is not None:
            parts.append(f"memory of node {self.memory_node}")
        if self.gpu is not None:
            parts.append(f"GPU {self.gpu} ({self.gpu_address})")
        if self.nics:
            parts.append("NIC " + " ".join(str(nic) for nic in self.nics))
        return ", ".join(parts)
