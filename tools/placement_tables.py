#!/usr/bin/env python3
"""Writes tests/data/machines/PLACEMENT.md, worked examples, from the trees beside it; --check compares them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from weft.machine.placement import Placement, place  # noqa: E402
from weft.machine.settings import settings  # noqa: E402
from weft.machine.topology import read  # noqa: E402
from weft.machine.topology.parse import format_cpus  # noqa: E402

MARKER = "<!-- examples: written by tools/placement_tables.py -->"
MACHINES = ROOT / "tests" / "data" / "machines"
PAGE = MACHINES / "PLACEMENT.md"
WIDE = ("container-odd-cpus",)  # lists of every second CPU: too wide for a page


def example(folder: Path) -> Iterator[str]:
    """The section of one machine."""
    machine = read(folder)
    placements = place(machine)
    yield f"### {folder.name}\n"
    readme = (folder / "README.md").read_text().split("\n\n")
    yield f"{readme[1]} ([tree and what is assumed]({folder.name}/README.md))\n"
    yield "| rank | CPUs | node | memory | NIC ports | distance | share |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for each in placements:
        yield row(each)
    is_part = folder.name.startswith(("container", "launcher"))  # of another machine: its NICs are told there
    left = placements[0].left_out
    if left and not is_part:
        yield "\nLeft out:\n"
        yield from (f"- {entry.name} ({entry.address}): {entry.reason}" for entry in left)
    reasons = sorted({text for each in placements for text in each.warnings})
    if reasons:
        yield "\nWarnings:\n"
        yield from (f"- {text}" for text in reasons)
    lines = settings(machine, placements, {}).export_lines()
    if lines and not is_part:
        yield "\n```sh"
        yield from lines
        yield "```"
    yield ""


def row(placement: Placement) -> str:
    """A rank's line."""
    nics = placement.nics
    shares = sorted({f"{nic.share:g}" for nic in nics})
    cells = (
        str(placement.local_rank),
        format_cpus(placement.cpus),
        "-" if placement.node is None else str(placement.node),
        "-" if placement.memory_node is None else str(placement.memory_node),
        " ".join(map(str, nics)) or "-",
        " ".join(sorted({nic.distance for nic in nics})) or "-",
        " ".join(shares) or "-",
    )
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """The text of the page with fresh examples."""
    head = PAGE.read_text().split(MARKER, 1)[0]
    folders = sorted(path.parent for path in MACHINES.glob("*/tree.json"))
    sections = "\n".join(line for folder in folders if folder.name not in WIDE for line in example(folder))
    return f"{head}{MARKER}\n\n{sections.rstrip()}\n"


def main() -> int:
    """Write the page, or compare it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    text = page()
    if parser.parse_args().check:
        if PAGE.read_text() != text:
            print("PLACEMENT.md is not what the trees say: run tools/placement_tables.py")
            return 1
        return 0
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
