"""Prints requirements for pip, one a line: `requirements.py [--missing] [GROUP ...]`.

Groups are `dependencies` and the extras of pyproject.toml; without one all are printed. With --missing only those not
met here. They are read from pyproject.toml, so that they are named there only. Needs nothing but Python 3.10 (which
has no tomllib): pyproject.toml keeps each list of requirements in the plain form that `read_requirements` knows.
"""

import importlib.metadata
import re
import sys
from pathlib import Path


def read_requirements(text: str, groups: list[str] | None = None) -> list[str]:
    """Return the requirements of `groups` (none: of all) in the text of a pyproject.toml, but those on weft itself."""
    found: list[str] = []
    section = ""
    inside = False
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[] ")
        starts = re.match(r"([\w-]+) = \[", line)
        if starts:
            inside = section == "project.optional-dependencies" or (section, starts[1]) == ("project", "dependencies")
            inside = inside and (not groups or starts[1] in groups)
        if inside:
            found += re.findall(r'"([^"]+)"', line.split("#")[0])
        if line.rstrip().endswith("]"):
            inside = False
    return [name for name in dict.fromkeys(found) if not name.startswith("weft[")]


def is_met(requirement: str) -> bool:
    """Tell whether a requirement of the form `name` or `name>=version` is met by what is installed."""
    name, _, least = requirement.partition(">=")
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False

    def numbers(text: str) -> list[int]:
        return [int(part) for part in re.match(r"[\d.]*", text)[0].split(".") if part]  # type: ignore[index]

    return not least or numbers(version) >= numbers(least)


if __name__ == "__main__":
    groups = [argument for argument in sys.argv[1:] if argument != "--missing"]
    requirements = read_requirements((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(), groups)
    if not requirements:
        sys.exit(f"pyproject.toml has no requirements in {', '.join(groups)}")
    if "--missing" in sys.argv[1:]:
        requirements = [requirement for requirement in requirements if not is_met(requirement)]
    print("\n".join(requirements))
