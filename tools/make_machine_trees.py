#!/usr/bin/env python3
"""Writes tests/data/machines/NAME/tree.json and README.md from the sheets; --check says whether they are current.

What is expected of each machine, expected.json beside it, is written by hand.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from machine_sheets import SHEETS, Sheet  # noqa: E402
from machine_sheets_more import MORE  # noqa: E402

from weft.topology.recorder import compact_json  # noqa: E402

MACHINES = ROOT / "tests" / "data" / "machines"


def files_of(name: str, sheet: Sheet) -> dict[Path, str]:
    """The files of a machine and their text."""
    nodes = sheet.tree.nodes
    nodes.setdefault("weft", {})["recording.json"] = {"@json": {"description": f"synthetic: {sheet.title}"}}
    readme = (
        f"# {name}\n\n{sheet.title}.\n\n**Synthetic**: no such machine was recorded; `tools/make_machine_trees.py` "
        f"wrote this tree from descriptions.\n\nKnown: {sheet.known}\n\nAssumed: {sheet.assumed}\n\n"
        "`tree.json` is what `weft.topology.read` opens, `expected.json`, written by hand, what must come out.\n"
    )
    return {MACHINES / name / "tree.json": compact_json(nodes) + "\n", MACHINES / name / "README.md": readme}


def main() -> int:
    """Write the trees, or compare them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say which files are not what the sheets say")
    check = parser.parse_args().check
    stale = []
    for name, make in {**SHEETS, **MORE}.items():
        for path, text in files_of(name, make()).items():
            if path.exists() and path.read_text() == text:
                continue
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    for path in stale:
        print(f"{'not current' if check else 'written'}: {path}")
    return bool(check and stale)


if __name__ == "__main__":
    sys.exit(main())
