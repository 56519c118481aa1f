"""Prints every requirement of a development environment, one a line, for pip: dependencies, build tools and extras.

Reads pyproject.toml, so that they are named there only. Needs no package, and no Python newer than 3.10: without
tomllib it reads the few quoted strings it needs by itself.
"""

import re
import sys
from pathlib import Path


def read_requirements(text: str) -> list[str]:
    """Return the requirements named in the text of a pyproject.toml, without those that name weft itself."""
    found: list[str] = []
    section = ""
    inside = False
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[] ")
        starts = re.match(r"(\w+) = \[", line)
        if starts and section in ("project", "project.optional-dependencies"):
            inside = section != "project" or starts[1] == "dependencies"
        if inside:
            found += re.findall(r'"([^"]+)"', line.split("#")[0])
        if line.rstrip().endswith("]"):
            inside = False
    return [name for name in found if not name.startswith("weft[")]


if __name__ == "__main__":
    path = Path(__file__).resolve().parent.parent / "pyproject.toml"
    print("\n".join(dict.fromkeys(read_requirements(path.read_text()))))
    sys.exit(0)
