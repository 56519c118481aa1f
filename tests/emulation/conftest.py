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
