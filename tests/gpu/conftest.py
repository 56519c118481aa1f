"""Fixtures for the tests on GPUs, which are skipped where there is none.

Ranks that are processes are forked, which CUDA in this process would spoil: their tests run first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_streams
import torch

import weft.kernels.tuning
from gpu_ranks import NUM_GPUS, ProcessRanks, ThreadRanks, to_host
from weft import env

# Ranks compute what they expect between calls. Threads for that, of all ranks and workers, would be far more than CPUs,
# and a rank so slow that its peers' deadlines pass.
torch.set_num_threads(1)
env.set_cuda_queues(32)  # for eight ranks that share a GPU, also where the first test has one alone


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent)
    mine = [item for item in items if str(item.path).startswith(here)]
    if NUM_GPUS == 0:
        for item in mine:
            item.add_marker(pytest.mark.skip(reason="no GPU"))
    items.sort(key=lambda item: item in mine and "processes" not in item.nodeid)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Ranks that are threads of a worker share one GPU: contexts take time. Processes, forked before, have all GPUs."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and NUM_GPUS and "processes" not in item.nodeid and not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = str(int(worker.removeprefix("gw")) % NUM_GPUS)


@pytest.fixture(scope="session")
def processes() -> Iterator[ProcessRanks]:
    """A pool of processes; it is forked by its first use."""
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is in use in this process: run the tests of processes alone")
    ranks = ProcessRanks()
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def threads() -> ThreadRanks:
    """Ranks as threads of this process."""
    return ThreadRanks()


@pytest.fixture(params=["throughput", "latency"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What "auto" is for the objects of test_streams.make, where it has a choice."""
    most = {"throughput": 0, "latency": weft.kernels.tuning.DEFAULT.most_tokens_else}[request.param]
    monkeypatch.setattr(test_streams, "TABLE", weft.kernels.tuning.Table(most_tokens_else=most))


@pytest.fixture(autouse=True)
def copies_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for the stream before they begin: see gpu_ranks.to_host."""
    monkeypatch.setattr(torch.Tensor, "cpu", to_host)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives memory full of NaN: a word that nobody writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
