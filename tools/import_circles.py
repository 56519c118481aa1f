"""Circles of imports among the modules of python/weft; for checks.py."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath


def module_name(path: str) -> str:
    """`weft.call.spec` of python/weft/call/spec.py."""
    name = str(PurePosixPath(path).relative_to("python").with_suffix("")).replace("/", ".")
    return name.removesuffix(".__init__")


def imported(text: str, modules: set[str]) -> set[str]:
    """Those of the modules that a file imports, anywhere in it, for types too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & modules) | ({node.module} if names - modules else set())
    return found & modules


def circles(texts: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Circles among modules given by path: the path of one module, and the way back to it."""
    paths = {module_name(path): path for path in texts}
    imports = {name: _loaded(name, imported(texts[path], set(paths))) & set(paths) for name, path in paths.items()}
    while imports := _without_leaves(imports):
        way = [min(imports)]
        while (following := min(imports[way[-1]])) not in way:
            way.append(following)
        circle = way[way.index(following) :]
        yield paths[following], [*circle, following]
        imports = {name: needs - set(circle) for name, needs in imports.items() if name not in circle}


def _loaded(name: str, modules: set[str]) -> set[str]:
    """The modules and their packages, which are loaded first; without what `name` itself lies in."""
    names = {
        str(parent).replace("/", ".") for each in modules for parent in PurePosixPath(each.replace(".", "/")).parents
    }
    own = {name[:idx] for idx, letter in enumerate(f"{name}.") if letter == "."}
    return (modules | names - own) - {name}


def _without_leaves(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """What is left when modules that import nothing else are taken away, again and again."""
    while leaves := {name for name, needs in imports.items() if not needs}:
        imports = {name: needs - leaves for name, needs in imports.items() if name not in leaves}
    return imports
