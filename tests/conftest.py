"""Which tests run beside which: `pytest -n 2 --dist loadscope`, as `make test` does."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """A folder's tests run one after the other, since they look at what the machine has left over, or share its GPUs.

    Those of emulated kernels look at nothing but their own memory, and what a file compiles it uses several times.
    """
    from xdist.scheduler import LoadScopeScheduling

    class FolderScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = PurePosixPath(nodeid.split("::", 1)[0])
            return str(file if file.parent.name == "emulation" else file.parent)

    return FolderScheduling(config, log) if config.getvalue("dist") == "loadscope" else None
