"""Public names with their signatures, and texts of errors: what users see and code may come to depend on.

    python tools/public_surface.py           # what tests/data/public_*.txt would say
    python tools/public_surface.py --write   # after a change that is meant

A test checks that what the two files list is still there; new names and texts may come.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NAMES, TEXTS = ROOT / "tests/data/public_names.txt", ROOT / "tests/data/public_errors.txt"
_MADE_BY_WEFT = (
    "Communicator",
    "Dispatched",
    "Event",
    "Handle",
    "Staged",
    "Topology",
)  # constructors are no one else's
_OF_CALLERS = ("*.py", "call/*.py", "group/*.py", "kernels/*.py", "routing/*.py", "machine/*/*.py")
_RAISED = {
    "Aborted", "CapacityExceeded", "CompileError", "CudaError", "Evicted", "InternalError", "InvalidArgument",
    "InvalidState", "PeerLost", "PeerTimeout", "Unsupported",
}  # fmt: skip


def public_names() -> list[str]:
    """`weft.NAME`, the public attributes of classes, and a line for each parameter."""
    import weft

    lines = []
    for name in sorted(weft.__all__):
        value = getattr(weft, name)
        lines += _lines(f"weft.{name}", None if name in _MADE_BY_WEFT else value)
        if inspect.isclass(value):
            for each, attribute in _attributes(value):
                lines += _lines(f"weft.{name}.{each}", attribute)
        elif inspect.ismodule(value) and hasattr(value, "__all__"):
            for each in value.__all__:
                lines += _lines(f"weft.{name}.{each}", getattr(value, each)) if each[0] != "_" else []
    return lines


def _attributes(kind: type) -> Iterator[tuple[str, Any]]:
    found: dict[str, Any] = dict.fromkeys(getattr(kind, "__dataclass_fields__", ()))
    for base in reversed(kind.__mro__):
        found |= vars(base) if base.__module__.split(".")[0] == "weft" else {}
    for name, value in sorted(found.items()):
        if not name.startswith("_"):
            yield name, value.__func__ if isinstance(value, (classmethod, staticmethod)) else value


def _lines(name: str, value: Any) -> Iterator[str]:
    yield name
    if not callable(value) or inspect.ismodule(value):
        return
    try:
        found = inspect.signature(value)
    except ValueError:
        return
    for each in found.parameters.values():
        if each.name not in ("self", "cls"):
            default = "" if each.default is inspect.Parameter.empty else f" = {each.default!r}"
            by_name = ", by name" if each.kind is inspect.Parameter.KEYWORD_ONLY else ""
            yield f"{name}: {each.name}{default}{by_name}"


def error_texts() -> list[str]:
    """Texts of typed errors of what programs import, and of the native module, values shown as {}."""
    texts: set[str] = set()
    for path in (each for pattern in _OF_CALLERS for each in (ROOT / "python/weft").glob(pattern)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _RAISED:
                shown = [_shown(argument) for argument in node.args]
                texts.add(f"{node.func.id}: {' | '.join(shown)}")
    for path in (*(ROOT / "src").rglob("*.cc"), *(ROOT / "src").rglob("*.h")):
        for kind, arguments in re.findall(r"throw_(\w+)\(((?:[^;\"]|\"(?:\\.|[^\"\\])*\")*)\);", path.read_text()):
            parts = re.findall(r"\"((?:\\.|[^\"\\])*)\"", arguments)
            if parts:
                texts.add(f"throw_{kind}: {'{}'.join(parts)}")
    return sorted(texts)


def _shown(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _shown(node.left) + _shown(node.right)
    return "{}"


def main(arguments: list[str]) -> int:
    """Print both lists, or write them."""
    for path, lines in ((NAMES, public_names()), (TEXTS, error_texts())):
        text = "".join(line + "\n" for line in lines)
        if "--write" in arguments:
            path.write_text(text)
        else:
            print(text, end="")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "python"))
    sys.exit(main(sys.argv[1:]))
