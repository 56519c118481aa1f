"""`draw`: a machine as an SVG picture: boxes for NUMA nodes, in them GPUs with the NICs beside them, and NVLinks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

from weft.machine.topology.matrix import matrix
from weft.machine.topology.model import Gpu, Machine
from weft.machine.topology.network import Nic
from weft.machine.topology.parse import format_cpus
from weft.machine.topology.pci_model import Distance

__all__ = ["draw"]

_BOX_WIDTH, _BOX_HEIGHT, _GAP, _MARGIN = 118, 44, 14, 18
_TITLE_WIDTH = 8  # of a character of the headline, at most
_NVLINK_TOP, _GPU_TOP, _NIC_TOP = 56, 118, 206
_LEGEND_HEIGHT, _SMALL_WIDTH = 30, 5.6  # of a character of a small text, about
_STYLE = """
text { font: 12px sans-serif; fill: #1b1f24 } .small { font-size: 10px; fill: #57606a } .title { font-size: 14px }
.node { fill: #f6f8fa; stroke: #d0d7de } .gpu { fill: #ddf4e4; stroke: #2da44e } .nic { fill: #ddeafb; stroke: #3474c5 }
.off { fill: #eeeeee; stroke: #8c959f; stroke-dasharray: 4 3 } .nvlink { fill: #fff3c4; stroke: #bf8700 }
line { stroke: #57606a; stroke-width: 1.5 } .nv { stroke: #bf8700; stroke-width: 3 } .far { stroke-dasharray: 4 3 }
path { fill: none; stroke: #bf8700; stroke-width: 2 }
"""


@dataclass
class _Column:
    """A NUMA node in the picture: its number (None: not known), GPUs, NICs by the GPU they are under, other NICs."""

    node: int | None
    gpus: list[Gpu] = field(default_factory=list)
    beside: dict[int, list[Nic]] = field(default_factory=dict)
    others: list[Nic] = field(default_factory=list)

    @property
    def slots(self) -> int:
        """Boxes side by side."""
        return max(1, len(self.gpus) + -(-len(self.others) // 4))

    @property
    def depth(self) -> int:
        """NICs on top of each other."""
        return max([len(nics) for nics in self.beside.values()] + [min(len(self.others), 4)], default=0)

    @property
    def width(self) -> int:
        """In pixels."""
        return self.slots * (_BOX_WIDTH + _GAP) + _GAP


def draw(machine: Machine, nics: Mapping[int, Sequence[str]] | None = None) -> str:
    """The picture, SVG text. `nics`: names of the NICs of each GPU, which are drawn under it; default: those on its
    PCIe root. Distances are written on the lines, dashed where they cross it; a grey box is a NIC that no GPU uses, or
    whose port is not active. A legend explains what was drawn.
    """
    chosen = nics if nics is not None else {gpu.idx: _on_its_root(machine, gpu) for gpu in machine.gpus}
    columns = _columns(machine, chosen)
    depth = max((column.depth for column in columns), default=0)
    bottom = _NIC_TOP + depth * (_BOX_HEIGHT + _GAP) + 38  # of the columns
    headline = _headline(machine)
    legend, legend_width = _legend(machine, columns, bottom + _MARGIN)
    height = bottom + _MARGIN + _LEGEND_HEIGHT
    of_columns = sum(column.width + _MARGIN for column in columns) + _MARGIN
    width = max(of_columns, 2 * _MARGIN + _TITLE_WIDTH * len(headline), legend_width)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(_MARGIN, 26, headline, "title"),
    ]
    left, centres = _MARGIN, {}
    body: list[str] = []
    for column in columns:
        body += _draw_column(machine, column, left, bottom)
        for idx, gpu in enumerate(column.gpus):
            centres[gpu.idx] = left + _GAP + idx * (_BOX_WIDTH + _GAP) + _BOX_WIDTH // 2
        left += column.width + _MARGIN
    parts += body
    parts += _draw_nvlink(machine, centres)
    parts += _draw_shared(machine, columns, chosen, centres)
    return "\n".join([*parts, *legend, "</svg>", ""])


def _on_its_root(machine: Machine, gpu: Gpu) -> list[str]:
    """The NICs nearer to this GPU than to those before it, if they are below the same PCIe root."""
    found = []
    for nic in machine.nics:
        near = min((machine.nic_distance(other, nic), other.idx) for other in machine.gpus)
        if near[0] <= Distance.PHB and near[1] == gpu.idx:
            found.append(nic.name)
    return found


def _columns(machine: Machine, chosen: Mapping[int, Sequence[str]]) -> list[_Column]:
    """Devices by NUMA node; a NIC of several GPUs is drawn under the nearest."""
    only = machine.cpus.cpu_nodes[0].idx if len(machine.cpus.cpu_nodes) == 1 else None
    columns: dict[int | None, _Column] = {node.idx: _Column(node.idx) for node in machine.cpus.cpu_nodes}

    def column(node: int | None) -> _Column:
        return columns.setdefault(only if node is None else node, _Column(node))

    for gpu in machine.gpus:
        column(gpu.numa_node).gpus.append(gpu)
    for nic in machine.nics:
        owners = [gpu for gpu in machine.gpus if nic.name in chosen.get(gpu.idx, ())]
        if owners:
            distances = [machine.nic_distance(gpu, nic) for gpu in owners]
            nearest = owners[distances.index(min(distances))]
            column(nearest.numa_node).beside.setdefault(nearest.idx, []).append(nic)
        else:
            column(nic.numa_node).others.append(nic)
    return list(columns.values()) or [_Column(None)]


def _draw_column(machine: Machine, column: _Column, left: int, bottom: int) -> list[str]:
    parts = [_box(left, 44, column.width, bottom - 44, "node", "")]
    cpus = next((node.cpus for node in machine.cpus.nodes if node.idx == column.node), ())
    name = f"NUMA node {column.node}" if column.node is not None else "NUMA node not known"
    parts.append(_text(left + _GAP, bottom - 26, name))
    if cpus:
        parts.append(_text(left + _GAP, bottom - 10, f"CPUs {format_cpus(cpus)}", "small"))
    for idx, gpu in enumerate(column.gpus):
        x = left + _GAP + idx * (_BOX_WIDTH + _GAP)
        model = (gpu.name or "").removeprefix("NVIDIA ")
        parts.append(_box(x, _GPU_TOP, _BOX_WIDTH, _BOX_HEIGHT, "gpu", f"{gpu.pci.address} {gpu.name or ''}"))
        parts += [_text(x + 8, _GPU_TOP + 18, f"GPU {gpu.idx}"), _text(x + 8, _GPU_TOP + 34, model[:19], "small")]
        for level, nic in enumerate(column.beside.get(gpu.idx, ())):
            y = _NIC_TOP + level * (_BOX_HEIGHT + _GAP)
            above = _GPU_TOP + _BOX_HEIGHT if level == 0 else y - _GAP
            middle = x + _BOX_WIDTH // 2
            distance = machine.nic_distance(gpu, nic)
            kind = "far" if distance > Distance.PHB else "near"
            parts.append(f'<line class="{kind}" x1="{middle}" y1="{above}" x2="{middle}" y2="{y}"/>')
            if level == 0:
                parts.append(_text(middle + 5, above + 26, distance.name, "small"))
            parts += _draw_nic(nic, x, y)
    for idx, nic in enumerate(column.others):
        x = left + _GAP + (len(column.gpus) + idx // 4) * (_BOX_WIDTH + _GAP)
        parts += _draw_nic(nic, x, _NIC_TOP + idx % 4 * (_BOX_HEIGHT + _GAP), is_used=False)
    return parts


def _legend(machine: Machine, columns: Sequence[_Column], top: int) -> tuple[list[str], int]:
    """A line that explains the shapes there are, and its width."""
    used = [(gpu, nic) for column in columns for gpu in column.gpus for nic in column.beside.get(gpu.idx, ())]
    is_far = {machine.nic_distance(gpu, nic) > Distance.PHB for gpu, nic in used}
    has_off = any(column.others for column in columns) or any(not nic.is_active for _, nic in used)
    entries = [
        ("gpu", "GPU", bool(machine.gpus)),
        ("nvlink", "NVLink", any(pair.num_nvlinks for pair in machine.pairs)),
        ("nic", "NIC of the GPU above it", any(nic.is_active for _, nic in used)),
        ("off", "NIC not used, or its port is not active", has_off),
        ("near", "below one PCIe host bridge", False in is_far),
        ("far", "farther", True in is_far),
    ]
    x, parts = _MARGIN, []
    for kind, text, is_there in entries:
        if not is_there:
            continue
        if kind in ("near", "far"):
            parts.append(f'<line class="{kind} key" x1="{x}" y1="{top + 6}" x2="{x + 18}" y2="{top + 6}"/>')
        else:
            parts.append(f'<rect class="{kind}" x="{x}" y="{top}" width="18" height="12" rx="3"></rect>')
        parts.append(_text(x + 24, top + 10, text, "small"))
        x += 24 + round(_SMALL_WIDTH * len(text)) + _MARGIN
    return parts, x


def _draw_nic(nic: Nic, x: int, y: int, *, is_used: bool = True) -> list[str]:
    rate = f"{nic.rate_gbps:g} Gb/s" if nic.rate_gbps else "rate not known"
    state = "not active" if not nic.is_active else "" if is_used else "not used"
    kind = "off" if state else "nic"
    address = nic.pci.address if nic.pci else ""
    return [
        _box(x, y, _BOX_WIDTH, _BOX_HEIGHT, kind, f"{nic.name} {address} {nic.kind} {state} {rate}"),
        _text(x + 8, y + 18, nic.name[:15]),
        _text(x + 8, y + 34, f"{nic.kind} {state or rate}"[:21], "small"),
    ]


def _draw_nvlink(machine: Machine, centres: dict[int, int]) -> list[str]:
    """One bar where every pair has the same number of links, else an arc a pair."""
    links = Counter(pair.num_nvlinks for pair in machine.pairs)
    if len(centres) < 2 or not any(links):
        return []
    low, high = min(centres.values()), max(centres.values())
    if len(links) == 1:
        text = f"NVLink: every pair NV{next(iter(links))}"
        bar = [
            _box(low - 40, _NVLINK_TOP, high - low + 80, 28, "nvlink", text),
            _text(low - 32, _NVLINK_TOP + 18, text),
        ]
        return bar + [
            f'<line class="nv" x1="{x}" y1="{_NVLINK_TOP + 28}" x2="{x}" y2="{_GPU_TOP}"/>' for x in centres.values()
        ]
    arcs = []
    for pair in machine.pairs:
        if pair.num_nvlinks and pair.first in centres and pair.second in centres:
            x, y = centres[pair.first], centres[pair.second]
            arcs.append(f'<path d="M {x} {_GPU_TOP} Q {(x + y) // 2} {_NVLINK_TOP - 20} {y} {_GPU_TOP}">')
            arcs[-1] += f"<title>GPU {pair.first} - GPU {pair.second}: NV{pair.num_nvlinks}</title></path>"
    return arcs


def _draw_shared(
    machine: Machine, columns: list[_Column], chosen: Mapping[int, Sequence[str]], centres: dict[int, int]
) -> list[str]:
    """Lines from the other GPUs of a NIC that is drawn under the nearest."""
    first = {nics[0].name: (idx, nics[0]) for column in columns for idx, nics in column.beside.items()}
    lines = []
    for gpu in machine.gpus:
        for name in chosen.get(gpu.idx, ()):
            owner, nic = first.get(name, (gpu.idx, None))
            if nic is None or owner == gpu.idx:
                continue
            start, end = centres[gpu.idx], centres[owner]
            end += (_BOX_WIDTH // 4) * (1 if start > end else -1)
            kind = "far" if machine.nic_distance(gpu, nic) > Distance.PHB else "near"
            lines.append(
                f'<line class="{kind}" x1="{start}" y1="{_GPU_TOP + _BOX_HEIGHT}" x2="{end}" y2="{_NIC_TOP}"/>'
            )
    return lines


def _headline(machine: Machine) -> str:
    names = Counter(gpu.name or "GPU" for gpu in machine.gpus)
    gpus = ", ".join(f"{count} x {name}" for name, count in names.items()) or "no GPU"
    distances = sorted({word for row in matrix(machine).gpu_gpu for word in row} - {"X"})
    nics = f"{len(machine.nics)} RDMA device{'s' * (len(machine.nics) > 1)}" if machine.nics else "no RDMA device"
    return f"{gpus}, {nics}" + (f"; GPU to GPU {', '.join(distances)}" if distances else "")


def _box(x: int, y: int, width: int, height: int, kind: str, title: str) -> str:
    shape = f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="5">'
    return f"{shape}<title>{_clean(title)}</title></rect>" if title else f"{shape}</rect>"


def _text(x: int, y: int, text: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" class={quoteattr(kind)}>{_clean(text)}</text>'


def _clean(text: str) -> str:
    """Without what XML does not allow: names come from the machine."""
    return escape(re.sub(r"[^\x20-\ud7ff\ue000-\ufffd]", "?", text))
