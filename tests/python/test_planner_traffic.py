"""Guards against a planner that counts the wrong rows: copies of a token by rank and domain, for every routing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import weft
from weft.planner import traffic
from weft.planner.model import load_of

torch = pytest.importorskip("torch")


def counted(picks: np.ndarray, num_experts: int, num_parts: int) -> np.ndarray:
    """The share of tokens that reach each part, counted token by token."""
    found = np.zeros(num_parts)
    for token in picks.tolist():
        for part in {expert // (num_experts // num_parts) for expert in token if expert >= 0}:
            found[part] += 1
    return found / len(picks)


@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "topk_groups", "domains", "rows", "ranks"),
    [
        (16, 256, None, 1.99, 1.00, 6.52),
        (32, 256, None, 3.61, 2.71, 7.27),
        (64, 256, 4, 3.98, 3.49, 7.47),
        (64, 512, None, 5.27, 4.61, 7.63),
        (128, 256, None, 6.52, 6.12, 7.89),
        (256, 256, None, 7.27, 7.04, 8.00),
        (512, 512, None, 7.63, 7.51, 8.00),
    ],
)
def test_rows_are_those_of_the_design(
    num_ranks: int, num_experts: int, topk_groups: int | None, domains: float, rows: float, ranks: float
) -> None:
    num_domains = num_ranks // 8
    if topk_groups is None:
        reach = traffic.uniform(num_experts, 8, num_ranks, 8)
    else:
        groups = {"num_groups": num_domains, "topk_groups": topk_groups}
        reach = traffic.group_limited(num_experts, 8, num_ranks, 8, **groups)
    assert reach.domains == pytest.approx(domains, abs=0.006)
    assert reach.ranks == pytest.approx(ranks, abs=0.006)
    load = load_of(reach, num_tokens=1000, row_bytes=1.0)
    assert load.network_rows / 1000 == pytest.approx(rows, abs=0.006)
    assert load.network_rows == pytest.approx(load.ring_rows)  # as much comes as goes


def test_uniform_is_what_uniform_routing_does() -> None:
    picks = weft.routing.uniform(20000, 32, 4, num_ranks=8, seed=1)[0].numpy()
    reach = traffic.uniform(32, 4, 8, 4)
    assert np.allclose(counted(picks, 32, 8), reach.by_rank, atol=0.012)
    assert np.allclose(counted(picks, 32, 2), reach.by_domain, atol=0.012)


@pytest.mark.parametrize(("num_groups", "topk_groups"), [(8, 4), (4, 2), (2, 1), (16, 3), (16, 8)])
def test_group_limited_is_near_what_the_gate_does(num_groups: int, topk_groups: int) -> None:
    options = {"num_groups": num_groups, "topk_groups": topk_groups}
    picks = weft.routing.group_limited(6000, 64, 4, num_ranks=16, seed=2, **options)[0].numpy()
    reach = traffic.group_limited(64, 4, 16, 8, **options)
    assert reach.ranks == pytest.approx(counted(picks, 64, 16).sum(), rel=0.03)
    assert reach.domains == pytest.approx(counted(picks, 64, 2).sum(), rel=0.02)


def test_group_limited_is_what_every_order_of_experts_gives() -> None:
    """All 720 orders of 6 experts in 3 groups, 2 allowed; parts of 3 experts hold a group and a half."""
    import itertools

    picks = []
    for order in itertools.permutations(range(6)):
        groups = list(dict.fromkeys(expert // 2 for expert in order))[:2]
        picks.append([expert for expert in order if expert // 2 in groups][:3])
    for num_parts in (2, 3, 6):
        reach = traffic.group_limited(6, 3, num_parts, 1, num_groups=3, topk_groups=2)
        assert np.allclose(reach.by_rank, counted(np.array(picks), 6, num_parts))


def test_all_groups_allowed_is_uniform() -> None:
    limited = traffic.group_limited(64, 8, 16, 8, num_groups=8, topk_groups=8)
    even = traffic.uniform(64, 8, 16, 8)
    assert np.allclose(limited.by_rank, even.by_rank)
    assert np.allclose(limited.by_domain, even.by_domain)


def test_an_even_histogram_is_uniform() -> None:
    even = traffic.uniform(256, 8, 64, 8)
    found = traffic.from_histogram([3.0] * 256, 8, 64, 8)
    assert np.allclose(found.by_rank, even.by_rank)
    assert np.allclose(found.by_domain, even.by_domain)


def test_a_histogram_gives_the_rows_of_the_routing_it_comes_from() -> None:
    picks = weft.routing.zipf(20000, 64, 4, num_ranks=8, seed=3, alpha=0.7)[0].numpy()
    loads = np.bincount(picks.ravel(), minlength=64).tolist()
    reach = traffic.from_histogram(loads, 4, 8, 4)
    assert np.allclose(counted(picks, 64, 8), reach.by_rank, atol=0.01)
    assert np.allclose(counted(picks, 64, 2), reach.by_domain, atol=0.01)
    busiest = max(reach.by_rank) * 8 / reach.ranks
    assert busiest > 1.1
    even = load_of(traffic.uniform(64, 4, 8, 4), num_tokens=100, row_bytes=1.0)
    assert load_of(reach, num_tokens=100, row_bytes=1.0).nvlink_rows > even.nvlink_rows


def test_a_histogram_with_an_expert_of_every_token() -> None:
    picks = weft.routing.uniform(20000, 15, 3, num_ranks=1, seed=4)[0].numpy() + 1
    picks = np.concatenate([np.zeros((20000, 1), dtype=np.int64), picks], axis=1)
    loads = np.bincount(picks.ravel(), minlength=16).tolist()
    reach = traffic.from_histogram(loads, 4, 4, 2)
    assert reach.by_rank[0] == 1.0
    assert np.allclose(counted(picks, 16, 4), reach.by_rank, atol=0.012)


def test_a_trace_is_counted(tmp_path: Path) -> None:
    def record(rank: int) -> np.ndarray:
        idx, _ = weft.routing.zipf(500, 32, 4, rank=rank, num_ranks=4, seed=5)
        idx[::7, 3] = -1
        return idx.numpy()

    files = []
    for rank in range(2):
        idx = record(rank).astype(np.int32)
        files.append(idx)
        np.savez(
            tmp_path / f"t.rank{rank}.npz",
            version=np.int64(1),
            rank=np.int64(rank),
            num_tokens=np.array([500]),
            top_k=np.array([4]),
            num_experts=np.array([32]),
            topk_idx=idx.ravel(),
            topk_weights=np.zeros(idx.size, np.float32),
        )
    reach = traffic.from_trace(tmp_path / "t", 8, 4)
    picks = np.concatenate(files)
    assert (reach.num_experts, reach.top_k) == (32, 4)
    assert np.allclose(reach.by_rank, counted(picks, 32, 8))
    assert np.allclose(reach.by_domain, counted(picks, 32, 2))
    planned = weft.plan(num_ranks=32, trace=tmp_path / "t")
    assert (planned.num_experts, planned.top_k, planned.routing) == (32, 4, "trace")
    with pytest.raises(weft.InvalidArgument, match="num_experts=64"):
        weft.plan(num_ranks=32, trace=tmp_path / "t", num_experts=64)


@pytest.mark.parametrize(
    ("loads", "text"),
    [
        ([1.0] * 31 + [-1.0], "negative"),
        ([1.0] * 31 + [float("nan")], "not finite"),
        ([1.0] * 31 + [31.0], "expert 31 .* at most 25.0%"),
        ([1.0] * 3 + [0.0] * 29, "fewer than top_k=4"),
        ([1.0] * 30, "multiple of num_ranks=8"),
    ],
)
def test_histograms_that_no_routing_gives_are_refused(loads: list[float], text: str) -> None:
    with pytest.raises(weft.InvalidArgument, match=text):
        traffic.from_histogram(loads, 4, 8, 4)


def test_the_busiest_domain_decides() -> None:
    """All tokens go to one domain of four: it takes the rows of the three others."""
    reach = traffic.Reach("by hand", (0.0,) * 6 + (1.0,) * 2, (0.0, 0.0, 0.0, 1.0), 8, 2)
    load = load_of(reach, num_tokens=10, row_bytes=1.0)
    assert load.network_rows == 30
    assert load.ring_rows == 10
    assert load.store_rows == 80  # two ranks want all tokens of four sources of the rail
    assert load.nvlink_rows == 40
