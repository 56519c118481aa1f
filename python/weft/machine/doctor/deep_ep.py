"""Which `deep_ep` would be imported, and who else brings one. Nothing is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from weft.machine.doctor.model import Answer, Check, Facts, ok, skip, warn

__all__ = ["CHECKS", "is_wefts", "origin", "owners"]

_NAME, _OURS = "deep_ep", "weft-deep-ep"


def origin() -> str | None:
    """The file that `import deep_ep` would load, None for none."""
    spec = importlib.util.find_spec(_NAME)
    return None if spec is None else spec.origin or "a folder without code"


def is_wefts(file: str | None) -> bool:
    """Whether it is the one that leads to weft.deep_ep, or weft.deep_ep itself (installed in this process)."""
    try:
        return file is not None and "weft.deep_ep" in Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def owners() -> list[str]:
    """Installed distributions that bring a top-level deep_ep, but weft-deep-ep."""
    found = importlib.metadata.packages_distributions().get(_NAME, [])
    return sorted({each for each in found if each.lower().replace("_", "-") != _OURS})


def _deep_ep(facts: Facts) -> Iterable[Answer]:
    if not facts.live:
        return [skip("a recording: says nothing of this process")]
    file, others = origin(), owners()
    if file is None:
        return [skip("none can be imported; python -m weft.deep_ep run program.py lends Weft's to a program")]
    if not is_wefts(file):
        return [ok(f"import deep_ep finds {file}, which is not Weft's")]
    if others:
        return [
            warn(
                f"import deep_ep finds Weft's, and {', '.join(others)} brings one, too",
                cost="which one is found depends on the order of folders; pip may overwrite one by the other",
                fix=f"pip uninstall {' '.join(others)}",
            )
        ]
    return [ok(f"import deep_ep finds Weft's: {file}")]


CHECKS = (Check("software", "deep-ep", "Programs written for DeepEP use whichever they find.", _deep_ep),)
