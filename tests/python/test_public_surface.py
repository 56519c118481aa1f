"""Guards against public names, signatures and error texts that get lost when code moves."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools/public_surface.py"


@pytest.fixture(scope="module")
def surface() -> ModuleType:
    spec = importlib.util.spec_from_file_location("public_surface", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REMARK = "if that is meant: python tools/public_surface.py --write"


def test_public_names_stay(surface: ModuleType) -> None:
    lost = set(surface.NAMES.read_text().splitlines()) - set(surface.public_names())
    assert not lost, REMARK
    assert "weft.ExpertParallel.dispatch: handle = None, by name" in surface.public_names()


def test_error_texts_stay(surface: ModuleType) -> None:
    lost = set(surface.TEXTS.read_text().splitlines()) - set(surface.error_texts())
    assert not lost, REMARK
    assert len(surface.error_texts()) > 60
