"""The name `deep_ep`: the same module objects as `weft.deep_ep`, however a program comes by it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from weft._version import __version__
from weft.errors import InvalidState

__all__ = ["become", "folder", "install", "other_owners"]

_NAME, _HOME = "deep_ep", "weft.deep_ep"
_DISTRIBUTION = "weft-deep-ep"
_OTHERS = ("deep_ep", "deep-ep", "sgl-deep-ep", "sgl-deepep", "deepep")


class _Aliases:
    """Finds `deep_ep.utils` in weft.deep_ep, and so on: the same module under both names."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(f"{_NAME}.") or sys.modules.get(_NAME) is not sys.modules.get(_HOME):
            return None
        home = _HOME + name.removeprefix(_NAME)
        try:
            found = importlib.util.find_spec(home)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return None
        spec = ModuleSpec(name, _Aliases, is_package=found.submodule_search_locations is not None)  # type: ignore[arg-type]
        spec.loader_state = home
        return spec

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.loader_state)
        spec.loader_state = (module.__spec__, module.__loader__)
        return module

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.loader is _Aliases:  # type: ignore[comparison-overlap]
            module.__spec__, module.__loader__ = spec.loader_state


def folder() -> Path:
    """What PYTHONPATH needs: the folder in which `import deep_ep` finds Weft's."""
    return Path(__file__).with_name("top_level")


def install() -> None:
    """Make `import deep_ep` find this package, in this process. May be called twice.

    Raises:
        InvalidState: another deep_ep is imported already.
    """
    package = importlib.import_module(_HOME)
    before = sys.modules.get(_NAME)
    if before is not None and before is not package:
        raise InvalidState(
            f"deep_ep is imported already, from {getattr(before, '__file__', None)}; weft.deep_ep.install() would put "
            f"{package.__file__} in its place: call it before the first import of deep_ep"
        )
    _become(package)


def become(file: str) -> None:
    """What the file of the top-level package calls: its module becomes `weft.deep_ep`.

    Raises:
        ImportError: the distribution weft-deep-ep is of another version than Weft.
    """
    if not Path(file).resolve().is_relative_to(Path(__file__).resolve().parent):
        _check_distribution()
    _become(importlib.import_module(_HOME))


def _become(package: ModuleType) -> None:
    sys.modules[_NAME] = package
    if not any(each is _Aliases for each in sys.meta_path):
        sys.meta_path.insert(0, _Aliases)  # before the one that would load files again


def _check_distribution() -> None:
    try:
        version = importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return
    if version != __version__:
        raise ImportError(
            f"weft-deep-ep {version} is installed with weft {__version__}; both must be of one version: "
            f"pip install weft-deep-ep=={__version__}"
        )
    others = other_owners()
    if others:
        warnings.warn(
            f"deep_ep: {', '.join(others)} and weft-deep-ep both own the folder deep_ep: pip uninstall "
            f"{' '.join(others)} weft-deep-ep, then pip install weft-deep-ep",
            stacklevel=3,
        )


def other_owners() -> list[str]:
    """Installed distributions, by name, that bring a deep_ep of their own."""
    found = []
    for name in _OTHERS:
        for each in importlib.metadata.distributions(name=name):
            if "+weft." not in each.version and each.metadata["Name"] not in found:
                found.append(each.metadata["Name"])
    return found
