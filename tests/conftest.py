"""Which tests run beside which: `pytest -n 2 --dist loadscope`, as `make test` does. And `--no-skips`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling


KERNELS = "EMULATED_KERNELS"  # tests/emulation/kernels.py reads it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped fails")


def pytest_configure(config: pytest.Config) -> None:
    """One folder for the emulated kernels of all workers, of which each compiles what no other has."""
    if KERNELS in os.environ:  # a worker, or a session that a test starts
        return
    folder = os.environ[KERNELS] = tempfile.mkdtemp(prefix="emulated-")

    def remove() -> None:
        del os.environ[KERNELS]
        shutil.rmtree(folder, ignore_errors=True)

    config.add_cleanup(remove)


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> None:
    if config.getoption("no_skips") and report.skipped and not hasattr(report, "wasxfail"):
        report.longrepr = f"skipped, which --no-skips forbids: {report.longrepr}"
        report.outcome = "failed"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _fail_if_skipped(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_skipped(report, collector.config)
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """A folder's tests run one after the other, since they share the machine's GPUs, or what was built for them.

    Those of the package and of emulated kernels do so file by file: they look at nothing but their own processes, and
    what a file compiles it uses several times.
    """
    from xdist.scheduler import LoadScopeScheduling

    class FolderScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = PurePosixPath(nodeid.split("::", 1)[0])
            return str(file if file.parent.name in ("emulation", "python") else file.parent)

    return FolderScheduling(config, log) if config.getvalue("dist") == "loadscope" else None
