"""One compiler for all emulated kernels of a session."""

import shutil
import sys
from collections.abc import Iterator

import pytest
from kernels import Compiler


@pytest.fixture(scope="session")
def compiler() -> Iterator[Compiler]:
    """Compiles each kernel once."""
    if shutil.which("g++") is None or not sys.platform.startswith("linux"):
        pytest.skip("emulated kernels need g++ and Linux")
    compiler = Compiler()
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def runs_long(request: pytest.FixtureRequest) -> bool:
    """Whether tests of this file that are marked long run: if not, kernels of theirs need not be compiled ahead."""
    path = request.node.path
    return any(item.path == path and item.get_closest_marker("long") for item in request.session.items)
