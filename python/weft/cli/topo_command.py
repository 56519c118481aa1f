"""`weft topo`: what weft.machine.topology read, as a matrix, JSON, a picture or a recording."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from weft.cli import options
from weft.cli.output import Output, command_output
from weft.env import set_among
from weft.errors import InvalidArgument
from weft.machine import topology
from weft.machine.placement import Placement, place
from weft.machine.redact import VARIABLES
from weft.machine.settings import settings
from weft.machine.topology import Machine
from weft.machine.topology.matrix import LEGEND, Matrix, matrix
from weft.machine.topology.parse import format_cpus
from weft.machine.topology.picture import draw

_ROOT_HELP = "Look at a recording (weft topo --record) in place of this machine."
_SVG_HELP = "Write a picture of the machine into this file."
_SETTINGS_HELP = "Print what NCCL and NVSHMEM should be told here, as lines for a shell, each with its reason."
_RECORD_HELP = "Save what was read, without secrets, into this folder, for --root and for tests."


def topo(
    root: Annotated[Path, typer.Option("--root", exists=True, help=_ROOT_HELP)] = Path("/"),
    svg: Annotated[Path | None, typer.Option("--svg", help=_SVG_HELP)] = None,
    record: Annotated[Path | None, typer.Option("--record", help=_RECORD_HELP)] = None,
    show_settings: Annotated[bool, typer.Option("--settings", help=_SETTINGS_HELP)] = False,
    json: options.Json = False,
) -> None:
    """Print how far GPUs and NICs are apart, and where their NUMA nodes are."""
    with command_output(json_lines=json) as output:
        machine = topology.read(root)
        distances = matrix(machine)
        environment = set_among(VARIABLES) if os.path.realpath(root) == "/" else {}
        placements = place(machine, environment=environment)
        chosen = settings(machine, placements, environment)
        found = {"machine": machine, "placements": placements, "settings": chosen}
        output.row({"kind": "topology", **dataclasses.asdict(distances), **topology.to_json(found)})
        _show(output, machine, distances)
        _show_placements(output, placements)
        if show_settings:
            notes = (f"# {text}" for text in (*chosen.all_warnings(), *chosen.notes))
            for line in [*chosen.export_lines(), *notes] or ["# nothing to set here for NCCL or NVSHMEM"]:
                output.text(line)
        if svg is not None:
            nics = {entry.gpu: [choice.name for choice in entry.nics] for entry in placements if entry.gpu is not None}
            with _writing("--svg"):
                svg.write_text(draw(machine, nics), encoding="utf-8")
            output.text(f"picture: {svg}")
        if record is not None:
            with _writing("--record"):
                output.text(f"recording: {topology.record(root, record)}")


@contextlib.contextmanager
def _writing(flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidArgument(f"{flag} can't be written: {error.strerror}: {error.filename}") from error


def _show(output: Output, machine: Machine, distances: Matrix) -> None:
    cpus = machine.cpus
    for node in cpus.cpu_nodes:
        output.text(f"node {node.idx}: CPUs {format_cpus(node.cpus)}")
    if cpus.allowed and set(cpus.allowed) != set(cpus.online):
        output.text(f"allowed to this process: CPUs {format_cpus(cpus.allowed)}")
    if not machine.gpus:
        output.text(f"no GPU{f' ({machine.nvml})' if machine.nvml else ''}")
    else:
        rows = [
            (name, *row, _unknown(gpu.numa_node), format_cpus(gpu.cpus or ()) or "?", gpu.pci.address)
            for name, row, gpu in zip(distances.gpus, distances.gpu_gpu, machine.gpus, strict=True)
        ]
        columns = ("", *distances.gpus, "node", "CPUs", "PCI address")
        output.table("GPU x GPU", columns, rows, spare=(len(columns) - 1, len(columns) - 2))
    if not machine.nics:
        output.text("no RDMA device")
    else:
        rows = []
        for idx, nic in enumerate(machine.nics):
            state = ", ".join(port.state or "?" for port in nic.ports) or "?"
            rate = f"{nic.rate_gbps:g}" if nic.rate_gbps else "?"
            facts = (nic.kind, state, rate, _unknown(nic.numa_node), nic.pci.address if nic.pci else "?")
            rows.append((escape(nic.name), *(row[idx] for row in distances.gpu_nic), *map(escape, facts)))
        columns = ("", *distances.gpus, "kind", "port", "Gb/s", "node", "PCI address")
        output.table("NIC x GPU", columns, rows, spare=[len(columns) - place for place in (1, 5, 2, 3)])
    words = {
        word.rstrip("0123456789") for rows in (distances.gpu_gpu, distances.gpu_nic) for row in rows for word in row
    }
    for word, meaning in LEGEND.items():
        if word.rstrip("#") in words:
            output.text(f"{word}: {meaning}")
    for problem in machine.problems:
        output.text(f"problem: {problem}")


def _show_placements(output: Output, placements: Sequence[Placement]) -> None:
    rows = [
        (
            f"rank {entry.local_rank}",
            "-" if entry.gpu is None else f"GPU{entry.gpu}",
            format_cpus(entry.cpus) or "-",
            str(entry.num_cores),
            "-" if entry.memory_node is None else str(entry.memory_node),
            escape(", ".join(map(str, entry.nics))) or "-",
        )
        for entry in placements
    ]
    columns = ("placement", "GPU", "CPUs", "cores", "memory node", "NICs")
    output.table("where the ranks run, one a GPU", columns, rows, left=range(6))
    left_out = {entry.name: entry.reason for placement in placements for entry in placement.left_out}
    for name, reason in left_out.items():
        output.text(f"not used: {name}: {reason}")
    for text, ranks in _ranks_by_text(entry.reasons for entry in placements).items():
        if len(ranks) > 1:  # what is said of one GPU is in its row
            output.text(f"why: ranks {format_cpus(ranks)}: {text}")
    for text, ranks in _ranks_by_text(entry.warnings for entry in placements).items():
        output.text(f"warning: rank{'s' * (len(ranks) > 1)} {format_cpus(ranks)}: {text}")


def _ranks_by_text(texts: Iterable[Sequence[str]]) -> dict[str, list[int]]:
    """The ranks of which each sentence is said; `texts` by rank."""
    ranks_of: dict[str, list[int]] = {}
    for rank, each in enumerate(texts):
        for text in each:
            ranks_of.setdefault(text, []).append(rank)
    return ranks_of


def _unknown(number: int | None) -> str:
    return "?" if number is None else str(number)
