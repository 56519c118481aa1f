"""Writes docs/api.md from the docstrings of the public names, weft.__all__. --check only says whether it is current.

Signatures keep the annotations as they are written in the sources, so the page does not depend on the Python version.
"""

import argparse
import enum
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
HEAD = """# API

Made from the docstrings by `make docs`; do not edit. Words are those of [glossary.md](glossary.md), what is collective
and what synchronises is in [semantics.md](semantics.md), the errors are explained in [errors.md](errors.md).
"""
MAX_COLUMNS = 100


def format_annotation(annotation: object) -> str:
    """Return an annotation as written: strings as they are, classes by name."""
    if isinstance(annotation, str):
        return annotation
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__qualname__
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")


def format_default(value: object) -> str:
    """Return a default value in a form without memory addresses."""
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, types.FunctionType | type):
        return value.__qualname__
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def format_signature(name: str, function: object) -> str:
    """Return `name(parameters) -> result`, broken into lines where it is long; empty where there is no signature."""
    try:
        signature = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return name
    parts: list[str] = []
    kinds = inspect.Parameter
    last = None
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls") and last is None:
            continue
        if parameter.kind is kinds.KEYWORD_ONLY and last not in (kinds.KEYWORD_ONLY, kinds.VAR_POSITIONAL):
            parts.append("*")
        last = parameter.kind
        text = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
        annotated = parameter.annotation is not kinds.empty
        if annotated:
            text += f": {format_annotation(parameter.annotation)}"
        if parameter.default is not kinds.empty:
            text += f"{' = ' if annotated else '='}{format_default(parameter.default)}"
        parts.append(text)
    result = signature.return_annotation
    arrow = "" if result is inspect.Signature.empty else f" -> {format_annotation(result)}"
    line = f"{name}({', '.join(parts)}){arrow}"
    if len(line) <= MAX_COLUMNS:
        return line
    return f"{name}(\n    " + ",\n    ".join(parts) + f",\n){arrow}"


def format_docstring(item: object) -> str:
    """Return the docstring, sections such as Args: as lists that Markdown shows as written."""
    text = inspect.getdoc(item) or ""
    lines: list[str] = []
    in_section = False
    for line in text.splitlines():
        if re.fullmatch(r"(Args|Arguments|Attributes|Returns|Raises|Yields|Notes?|Example|Examples):", line):
            lines += ["", f"**{line[:-1]}**", ""]
            in_section = True
        elif in_section and re.match(r" {4}\S", line):
            name, colon, rest = line.strip().partition(": ")
            names = name.split(", ")
            is_list = colon and all(re.fullmatch(r"[*\w.]+( \(.*\))?", part) for part in names)
            lines.append(f"- {', '.join(f'`{part}`' for part in names)}: {rest}" if is_list else f"- {line.strip()}")
        elif in_section and line.startswith("      "):
            lines.append("  " + line.strip())
        else:
            in_section = in_section and not line.strip()
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def code_block(text: str) -> str:
    """Return a text as a Python code block."""
    return f"```python\n{text}\n```"


def private_bases(cls: type) -> list[type]:
    """Return the bases that a class is split into: Weft's own, and no public name."""
    import weft

    public = {getattr(weft, name) for name in weft.__all__ if isinstance(getattr(weft, name), type)}
    return [base for base in cls.__mro__[1:] if base.__module__.startswith("weft") and base not in public]


def describe_members(name: str, cls: type) -> Iterator[str]:
    """Yield a section for each public method and property that the class or a base that is not public defines."""
    for member, value in [each for owner in (cls, *private_bases(cls)) for each in vars(owner).items()]:
        if member.startswith("_"):
            continue
        raw = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if isinstance(raw, property):
            result = inspect.signature(raw.fget).return_annotation if raw.fget else inspect.Signature.empty
            suffix = "" if result is inspect.Signature.empty else f": {format_annotation(result)}"
            yield f"#### `{name}.{member}{suffix}`\n\n{format_docstring(raw)}"
        elif isinstance(raw, types.FunctionType):
            yield f"#### `{name}.{member}`\n\n{code_block(format_signature(member, raw))}\n\n{format_docstring(raw)}"


def describe(name: str, item: object) -> Iterator[str]:
    """Yield the sections of one public name."""
    if isinstance(item, type):
        split = private_bases(item)
        bases = [base.__name__ for base in item.__bases__ if base is not object and base not in split]
        title = f"### `weft.{name}`" + (f" ({', '.join(bases)})" if bases else "")
        makers = ("__init__", "__dataclass_fields__")
        has_constructor = any(maker in vars(each) for each in (item, *split) for maker in makers)
        call = code_block(format_signature(f"weft.{name}", item)) + "\n\n" if has_constructor else ""
        yield f"{title}\n\n{call}{format_docstring(item)}"
        yield from describe_members(name, item)
    elif isinstance(item, types.ModuleType):
        yield f"### `weft.{name}` (module)\n\n{format_docstring(item)}"
        for member in sorted(getattr(item, "__all__", ())):
            value = getattr(item, member)
            if callable(value):
                call = code_block(format_signature(f"weft.{name}.{member}", value))
                yield f"#### `weft.{name}.{member}`\n\n{call}\n\n{format_docstring(value)}"
    elif callable(item):
        yield f"### `weft.{name}`\n\n{code_block(format_signature(f'weft.{name}', item))}\n\n{format_docstring(item)}"
    else:
        yield f"### `weft.{name}`\n\n`{type(item).__name__}`"


def generate() -> str:
    """Return the text of docs/api.md."""
    import weft

    groups: dict[str, list[str]] = {"Classes": [], "Functions": [], "Modules": [], "Errors": [], "Values": []}
    for name in sorted(weft.__all__, key=str.lower):
        item = getattr(weft, name)
        if isinstance(item, type):
            kind = "Errors" if issubclass(item, BaseException) else "Classes"
        else:
            kind = "Modules" if isinstance(item, types.ModuleType) else "Functions" if callable(item) else "Values"
        groups[kind] += [section.strip() for section in describe(name, item)]
    parts = [HEAD.strip()]
    for title, sections in groups.items():
        parts += [f"## {title}", *sections] if sections else []
    return "\n\n".join(line.rstrip() for line in parts) + "\n"


def main() -> int:
    """Write the page, or with --check compare it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether docs/api.md is current")
    text = generate()
    if parser.parse_args().check:
        if not PAGE.exists() or PAGE.read_text() != text:
            print("docs/api.md is not what the docstrings say: run `make docs`")
            return 1
        return 0
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
