"""Guards against a host that gives NCCL, or kernels that post to it, wrong words: calls of the Python API.

A stand-in takes NCCL's place. Windows load it as they would load NCCL; its network keeps no order of puts
(tests/native/engine/nvlink/fake_nccl.cc).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Any

import pytest
from emulated_gpu import EmulatedRanks, gpu
from kernels import HERE, INCLUDE
from node_calls import NODE, SMALL, check_calls, check_late_rank, opened
from small_node_calls import check_small_calls

import weft
from pool import RankFailed, RankState
from weft import _load
from weft.scaleout import network

NEWEST, FIRST, OLD = 23203, 23007, 22907
NO_NIC, PROXY, EFA = 0, 2, 5
NO_CLASS = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT


class FakeNccl:
    """The stand-in, as a library of its own."""

    def __init__(self) -> None:
        root = HERE.parents[1]
        folders = (root / "src", INCLUDE, HERE / "include")
        source = root / "tests" / "native" / "engine" / "nvlink" / "fake_nccl.cc"
        options = ["-Wl,-soname,libnccl.so.2", *(f"-I{each}" for each in folders), str(source)]
        self.path = str(gpu()._compiler.library("libnccl.so.2", options))
        self._library = ctypes.CDLL(self.path)

    def has(self, version: int = NEWEST, node_ranks: int = NODE, gin_type: int = PROXY) -> None:
        """What it says from now on."""
        self._library.fake_nccl_set(version, node_ranks, gin_type)

    @property
    def traffic_class(self) -> int:
        """That the newest window has asked for."""
        number: int = self._library.fake_nccl_traffic_class()
        return number

    @property
    def num_alive(self) -> int:
        """Communicators that nobody has ended."""
        number: int = self._library.fake_nccl_alive()
        return number


@pytest.fixture(scope="module")
def library() -> FakeNccl:
    """Loaded once."""
    return FakeNccl()


@pytest.fixture
def nccl(library: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNccl]:
    """The network of all windows; no communicator is left."""
    library.has()
    paths = _load.native().NcclPaths(library=library.path, prologue="", includes=[])
    monkeypatch.setattr(network, "paths", lambda: paths)
    monkeypatch.setenv("WEFT_NETWORK", "nccl")
    yield library
    end = time.monotonic() + 60  # threads of the library give memory back
    while library.num_alive > 0 and time.monotonic() < end:
        time.sleep(0.01)
    assert library.num_alive == 0


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """They share one GPU."""
    return EmulatedRanks(monkeypatch)


@pytest.mark.parametrize(("num_ranks", "layout"), [(4, "rank_major"), (4, "masked"), (3, "rank_major")])
def test_calls(ranks: Any, nccl: FakeNccl, num_ranks: int, layout: str) -> None:
    """Of whole nodes, and of nodes that are not: all ranks are connected there."""
    check_calls(ranks, SMALL, num_ranks, layout)


@pytest.mark.parametrize("staged", [False, True], ids=["one launch", "two"])
@pytest.mark.parametrize(("num_ranks", "layout"), [(4, "masked"), (3, "rank_major")])
def test_small_calls(ranks: Any, nccl: FakeNccl, num_ranks: int, layout: str, staged: bool) -> None:
    """Of small batches."""
    check_small_calls(ranks, SMALL, num_ranks, layout, staged=staged)


def test_a_rebuild_has_another_generation(ranks: Any, nccl: FakeNccl) -> None:
    """A mate stands in for the rank that was late."""
    check_late_rank(ranks, SMALL)


def between(state: RankState, _: None) -> tuple[str, str]:
    """What a communicator says with a window, and without."""
    with opened(state, SMALL):
        said = repr(state.comm)
    return said, repr(state.comm)


@pytest.mark.parametrize(
    ("num_ranks", "version", "node_ranks", "words"),
    [
        (4, NEWEST, NODE, "PROXY over RAIL connections of NCCL 2.32.3"),
        (4, FIRST, NODE, "PROXY over RAIL connections of NCCL 2.30.7"),
        (3, NEWEST, NODE, "PROXY over FULL connections of NCCL 2.32.3"),
        (4, NEWEST, 1, "PROXY over FULL connections of NCCL 2.32.3"),
    ],
)
def test_the_communicator_says_what_leads_between_nodes(
    ranks: Any, nccl: FakeNccl, num_ranks: int, version: int, node_ranks: int, words: str
) -> None:
    """Along rails alone only where NCCL's nodes are those of the window."""
    nccl.has(version, node_ranks)
    for said, after in ranks.run(num_ranks, between, [None] * num_ranks):
        assert f"network={words}, " in said
        assert "network=" not in after


def of_class(state: RankState, traffic_class: int | None) -> None:
    """A window of that class."""
    with opened(state, SMALL, traffic_class=traffic_class):
        pass


@pytest.mark.parametrize(("given", "told"), [(None, NO_CLASS), (0, 0), (106, 106)])
def test_the_class_of_what_crosses(ranks: Any, nccl: FakeNccl, given: int | None, told: int) -> None:
    """It goes to NCCL as it is; who says nothing has NCCL's own."""
    ranks.run(4, of_class, [given] * 4)
    assert nccl.traffic_class == told


def refused(state: RankState, _: None) -> str:
    """The error."""
    with pytest.raises(weft.Unsupported) as error, opened(state, SMALL):
        pass
    return str(error.value)


@pytest.mark.parametrize(
    ("version", "gin_type", "words"),
    [
        (OLD, PROXY, "NCCL 2.29.7 in "),
        (NEWEST, NO_NIC, "NCCL 2.32.3 offers NONE as a network for kernels; need: PROXY or GDAKI"),
        (NEWEST, EFA, "NCCL 2.32.3 offers EFA_GDA as a network for kernels; need: PROXY or GDAKI"),
    ],
)
def test_an_nccl_that_does_not_do(ranks: Any, nccl: FakeNccl, version: int, gin_type: int, words: str) -> None:
    """All ranks raise alike."""
    nccl.has(version, gin_type=gin_type)
    for text in ranks.run(4, refused, [None] * 4):
        assert words in text


def test_a_rank_without_a_network(ranks: Any, nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says why, the others which rank it is; none waits for a window that is not made."""
    paths, left = network.paths(), ["no copy here"]

    def of_one_rank() -> Any:
        if left:
            raise weft.Unsupported(left.pop())
        return paths

    monkeypatch.setattr(network, "paths", of_one_rank)
    texts = ranks.run(4, refused, [None] * 4)
    assert sorted("an error on rank" in text for text in texts) == [False, True, True, True]
    assert all("no copy here is not supported" in text for text in texts)


def test_a_word_that_is_none(ranks: Any, nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named."""
    monkeypatch.setenv("WEFT_NETWORK", "verbs")
    with pytest.raises(RankFailed, match="WEFT_NETWORK is 'verbs' in the environment; allowed are block, nccl"):
        ranks.run(4, between, [None] * 4)
