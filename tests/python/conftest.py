"""Fixtures for all Python tests."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import weft

sys.path.insert(0, str(Path(__file__).parent))  # helper modules beside the tests

import hung_ranks

torch.set_num_threads(1)  # ranks are forked: a pool of OpenMP threads does not survive that


@pytest.fixture
def solo(monkeypatch: pytest.MonkeyPatch) -> Iterator[weft.Communicator]:
    """A communicator of one rank, in this process."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with weft.Communicator.from_env() as comm:
        yield comm


@pytest.fixture
def ep(solo: weft.Communicator) -> Iterator[weft.ExpertParallel]:
    """8 experts, top 2, hidden 16, up to 64 tokens, fp32."""
    with weft.ExpertParallel(
        solo, num_experts=8, top_k=2, hidden=16, max_tokens_per_rank=64, dtype=torch.float32
    ) as made:
        yield made


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, here and in what is started: a background job's parent may have it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def hung_ranks_watch() -> hung_ranks.Watch:
    return hung_ranks.Watch()


@pytest.fixture(autouse=True)
def hung_ranks_speak(hung_ranks_watch: hung_ranks.Watch) -> Iterator[None]:
    """A test that reaches its limit says where its ranks hang."""
    hung_ranks_watch.begin()
    yield
    hung_ranks_watch.end()
