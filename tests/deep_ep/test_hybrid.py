"""Guards against a `HybridEPBuffer` whose rows, probs, counts or sums differ from Weft's reference."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hybrid_cases import by_token, grows, make_buffer, permuted, too_many

import weft
from weft import deep_ep

RANKS = (1, 3, 4, *(pytest.param(number, marks=pytest.mark.long) for number in (2, 8)))


@pytest.mark.parametrize("num_ranks", RANKS)
def test_rows_by_expert(num_ranks: int) -> None:
    weft.spawn(permuted, num_ranks, device="cpu")


@pytest.mark.parametrize("num_ranks", RANKS)
def test_rows_by_token(num_ranks: int) -> None:
    weft.spawn(by_token, num_ranks, device="cpu")


@pytest.mark.parametrize("work", [permuted, by_token])
@pytest.mark.parametrize(("num_ranks", "node_ranks"), [(4, 2), (8, 2)])
def test_several_nodes(monkeypatch: pytest.MonkeyPatch, num_ranks: int, node_ranks: int, work: Any) -> None:
    monkeypatch.setenv("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", str(node_ranks))
    weft.spawn(work, num_ranks, (node_ranks,), device="cpu")


def whose_nodes(comm: weft.Communicator) -> None:
    """The variable of Hybrid's own counts for it alone; none of them for a single node."""
    os.environ["WEFT_DEEP_EP_NODE_RANKS"] = "3"
    assert make_buffer(comm).num_of_nodes == 2
    os.environ["NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"] = "2"
    assert make_buffer(comm).num_of_nodes == 3
    assert deep_ep.ElasticBuffer(comm, num_bytes=1).num_scaleout_ranks == 2
    os.environ["NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"] = "8"
    assert make_buffer(comm).num_of_nodes == 1
    os.environ["NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"] = "4"
    with pytest.raises(deep_ep.NotSupported, match=r"HybridEPBuffer .* nodes of 4 ranks and a last one of 2"):
        make_buffer(comm)
    os.environ["NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"] = "all"
    with pytest.raises(weft.InvalidArgument, match="NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"):
        make_buffer(comm)


def test_whose_variable_counts() -> None:
    weft.spawn(whose_nodes, 6, device="cpu")


def test_more_picks_than_rows() -> None:
    weft.spawn(too_many, 2, device="cpu")


def test_windows_grow() -> None:
    weft.spawn(grows, 2, device="cpu")
