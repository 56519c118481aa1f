"""Guards against routing inputs that are not what they say, and traces that lose, mix up or trust what they hold."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import weft
from weft import routing
from weft.errors import InvalidArgument

SHAPES = [(0, 8, 2), (1, 4, 4), (300, 64, 8), (50, 16, 40)]
OWN = [name for name in routing.GENERATORS if name != "trace"]


def expert_counts(ids: Tensor, num_experts: int) -> Tensor:
    return torch.bincount(ids[ids >= 0].flatten(), minlength=num_experts)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OWN)
def test_shapes_types_ranges_and_weights(name: str, shape: tuple[int, int, int]) -> None:
    num_tokens, num_experts, top_k = shape
    for rank in range(2):
        ids, weights = routing.make(name, num_tokens, num_experts, top_k, rank=rank, num_ranks=2, seed=3)
        assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
        expected_tokens = 0 if name == "empty_rank" and rank == 1 else num_tokens
        assert ids.shape == weights.shape == (expected_tokens, top_k)
        assert bool(((ids >= -1) & (ids < num_experts)).all())
        assert not weights[ids < 0].any()
        picked = (ids >= 0).any(dim=1)
        assert torch.allclose(weights.sum(1)[picked], torch.ones(int(picked.sum())))
        for row in ids.tolist():
            valid = [expert for expert in row if expert >= 0]
            assert len(set(valid)) == len(valid)


@pytest.mark.parametrize("name", OWN)
def test_same_seed_same_routing(name: str) -> None:
    def made(seed: int, rank: int) -> tuple[Tensor, Tensor]:
        return routing.make(name, 100, 32, 4, rank=rank, num_ranks=4, seed=seed)

    for rank in range(3):
        assert all(torch.equal(a, b) for a, b in zip(made(7, rank), made(7, rank), strict=True))
    if name != "all_to_one":
        assert not torch.equal(made(7, 0)[0], made(8, 0)[0])
        assert not torch.equal(made(7, 0)[0], made(7, 1)[0])


def test_uniform_is_even_and_zipf_is_not() -> None:
    even = expert_counts(routing.uniform(4000, 16, 2)[0], 16)
    assert int(even.sum()) == 8000
    assert int(even.min()) > 400
    assert int(even.max()) < 600
    ids, _ = routing.zipf(4000, 16, 1, alpha=1.0)
    sorted_counts = expert_counts(ids, 16).sort(descending=True).values.float()
    harmonic = sum(1 / i for i in range(1, 17))
    assert float(sorted_counts[0]) == pytest.approx(4000 / harmonic, rel=0.1)
    assert float(sorted_counts[0] / sorted_counts[7]) == pytest.approx(8, rel=0.4)


def test_zipf_ranks_agree_on_the_popular_expert() -> None:
    popular = {
        int(expert_counts(routing.zipf(500, 32, 2, rank=r, num_ranks=4, alpha=2.0)[0], 32).argmax()) for r in range(4)
    }
    assert len(popular) == 1


def test_duplicates_only_where_asked() -> None:
    ids, weights = routing.uniform(50, 4, 30, duplicates=True)
    assert bool((ids >= 0).all())
    assert bool((weights > 0).all())
    ids, _ = routing.all_to_one(5, 8, 3, target=6, duplicates=True)
    assert ids.tolist() == [[6, 6, 6]] * 5
    ids, weights = routing.all_to_one(2, 8, 3, target=6)
    assert ids.tolist() == [[6, -1, -1]] * 2
    assert weights.tolist() == [[1, 0, 0]] * 2


def test_empty_rank_gets_and_gives_nothing() -> None:
    for rank in range(4):
        ids, _ = routing.empty_rank(64, 16, 4, rank=rank, num_ranks=4, empty=1)
        assert len(ids) == (0 if rank == 1 else 64)
        assert not bool(((ids >= 4) & (ids < 8)).any())


def test_group_limited_stays_in_its_groups_and_takes_the_best() -> None:
    ids, weights = routing.group_limited(200, 32, 4, num_groups=8, topk_groups=2)
    groups = ids // 4
    assert max(len(set(row)) for row in groups.tolist()) == 2
    assert bool((ids >= 0).all())
    assert bool((weights > 0).all())
    all_groups, _ = routing.group_limited(200, 32, 4, num_groups=8, topk_groups=8)
    assert not torch.equal(ids, all_groups)
    narrow, _ = routing.group_limited(10, 32, 8, num_groups=8, topk_groups=1)  # one group of 4: 4 picks are missing
    assert bool(((narrow >= 0).sum(1) == 4).all())


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("unform", {}, "name='unform': allowed are uniform"),
        ("uniform", {"num_tokens": -1}, "num_tokens=-1"),
        ("uniform", {"num_experts": 9}, "num_experts=9: must be a positive multiple of num_ranks=2"),
        ("uniform", {"top_k": 129}, "top_k=129: allowed is 1 to 128"),
        ("uniform", {"rank": 2}, "rank=2: allowed is 0 to num_ranks - 1 = 1"),
        ("uniform", {"seed": -4}, "seed=-4"),
        ("uniform", {"alpha": 2.0}, "alpha=2.0: uniform takes duplicates"),
        ("zipf", {"alpha": -1.0}, "alpha=-1.0"),
        ("zipf", {"alpha": float("nan")}, "alpha=nan"),
        ("all_to_one", {"target": 8}, "target=8: allowed is 0 to num_experts - 1 = 7"),
        ("empty_rank", {"empty": 2}, "empty=2"),
        ("group_limited", {"num_groups": 3}, "num_groups=3: allowed are the divisors of num_experts=8"),
        ("group_limited", {"num_groups": 4, "topk_groups": 5}, "topk_groups=5: allowed is 1 to num_groups = 4"),
        ("trace", {}, "trace=None"),
    ],
)
def test_wrong_arguments_are_named(name: str, arguments: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"num_tokens": 4, "num_experts": 8, "top_k": 2, "num_ranks": 2, **arguments}
    with pytest.raises(InvalidArgument) as caught:
        routing.make(name, **given)
    assert text in str(caught.value)


def test_names_with_dashes() -> None:
    assert torch.equal(routing.make("all-to-one", 3, 4, 2)[0], routing.all_to_one(3, 4, 2)[0])


# ---- traces ----


def note(rank: int, seed: int, num_tokens: int = 6) -> tuple[Tensor, Tensor]:
    """What a dispatch does while a recorder is there."""
    ids, weights = routing.uniform(num_tokens, 8, 2, seed=seed)
    routing._note(ids, weights, rank, 8)
    return ids, weights


def test_recorded_dispatches_come_back(tmp_path: Path) -> None:
    with routing.record(tmp_path / "t.npz"):
        assert len(routing._recorders) == 1
        noted = [note(0, 1), note(0, 2, 0), note(0, 3, 9)]
        routing._note(torch.tensor([[0, 99], [-5, 7]], dtype=torch.int32), None, 1, 8)
    assert routing._recorders == []
    assert sorted(os.listdir(tmp_path)) == ["t.rank0.npz", "t.rank1.npz"]
    trace = routing.load_trace(tmp_path / "t.npz")
    for step, (ids, weights) in enumerate(noted):
        got = trace.replay(num_experts=8, top_k=2, rank=0, step=step)
        assert torch.equal(got[0], ids)
        assert torch.equal(got[1], weights)
    ids, weights = trace.replay(num_experts=8, top_k=2, rank=1)
    assert ids.tolist() == [[0, -1], [-1, 7]]
    assert weights.tolist() == [[1, 1], [1, 1]]
    assert len(routing.load_trace(tmp_path / "t.rank1.npz").dispatches[1]) == 1


def test_replay_repeats_and_cuts(tmp_path: Path) -> None:
    with routing.record(tmp_path / "t"):
        ids, weights = note(0, 1)
        note(0, 2, 0)
    trace = routing.load_trace(tmp_path / "t")
    long_ids, long_weights = routing.make("trace", 15, 8, 2, rank=3, num_ranks=4, trace=trace)
    assert torch.equal(long_ids, torch.cat([ids, ids, ids[:3]]))
    assert torch.equal(long_weights, torch.cat([weights, weights, weights[:3]]))
    assert torch.equal(routing.make("trace", 4, 8, 2, trace=tmp_path / "t", step=2)[0], ids[:4])
    assert routing.make("trace", 3, 8, 2, trace=trace, step=1)[0].tolist() == [[-1, -1]] * 3
    with pytest.raises(InvalidArgument, match="num_experts=16: the trace was recorded with 8"):
        trace.replay(3, num_experts=16, top_k=2)
    with pytest.raises(InvalidArgument, match="top_k=4: the trace was recorded with 2"):
        trace.replay(3, num_experts=8, top_k=4)


def test_tensors_may_change_after_the_dispatch(tmp_path: Path) -> None:
    ids, weights = routing.uniform(4, 8, 2)
    with routing.record(tmp_path / "t.npz"):
        routing._note(ids, weights, 0, 8)
        expected = ids.clone(), weights.clone()
        ids.fill_(3)
        weights.fill_(3)
    got = routing.load_trace(tmp_path / "t.npz").replay(num_experts=8, top_k=2)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_an_exception_in_the_block_keeps_what_was_recorded(tmp_path: Path) -> None:
    with suppress(KeyError), routing.record(tmp_path / "t.npz"):
        note(0, 1)
        raise KeyError
    assert len(routing.load_trace(tmp_path / "t.npz").dispatches[0]) == 1
    assert routing._recorders == []


def test_an_earlier_recording_does_not_mix_in(tmp_path: Path) -> None:
    for num_ranks in (3, 2):
        with routing.record(tmp_path / "t.npz"):
            for rank in range(num_ranks):
                note(rank, rank)
    assert sorted(routing.load_trace(tmp_path / "t.npz").dispatches) == [0, 1]


def test_threads_as_ranks_share_a_file(tmp_path: Path) -> None:
    all_in = threading.Barrier(4)

    def rank_main(rank: int) -> None:
        with routing.record(tmp_path / "t.npz"):
            all_in.wait(30)
            for seed in range(20):
                note(rank, seed)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    trace = routing.load_trace(tmp_path / "t.npz")
    assert {rank: len(dispatches) for rank, dispatches in trace.dispatches.items()} == dict.fromkeys(range(4), 20)


def test_forked_ranks_write_what_they_noted(tmp_path: Path) -> None:
    with routing.record(tmp_path / "t.npz"):
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                try:
                    note(rank, rank)
                    routing._finish()
                finally:
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
    assert sorted(routing.load_trace(tmp_path / "t.npz").dispatches) == [0, 1]


def test_nothing_recorded_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("weft.routing")
    logger.addHandler(caplog.handler)  # the package's logger may not propagate
    try:
        with routing.record(tmp_path / "t.npz"):
            pass
    finally:
        logger.removeHandler(caplog.handler)
    assert "no dispatch inside the block" in caplog.text
    assert os.listdir(tmp_path) == []


def test_a_missing_directory_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with (
        pytest.raises(InvalidArgument, match=r"the directory .* does not exist"),
        routing.record(tmp_path / "no" / "t.npz"),
    ):
        pass


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(OSError, match="disk full"), routing.record(tmp_path / "t.npz"):
        note(0, 1)
    assert os.listdir(tmp_path) == []
    assert routing._recorders == []


GOOD: dict[str, Any] = {
    "version": np.int64(1),
    "rank": np.int64(0),
    "num_tokens": np.array([2], np.int64),
    "top_k": np.array([2], np.int64),
    "num_experts": np.array([4], np.int64),
    "topk_idx": np.array([0, 1, -1, 3], np.int32),
    "topk_weights": np.ones(4, np.float32),
}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"version": np.int64(2)}, "version 2"),
        ({"rank": np.int64(-1)}, "rank is -1"),
        ({"rank": np.array([0, 1])}, "rank is int64 with 1 dimensions, must be int64 with 0"),
        ({"num_tokens": np.array([-2], np.int64)}, "num_tokens -2"),
        ({"num_tokens": np.array([2**62], np.int64)}, "end too early"),
        ({"num_tokens": np.array([1], np.int64)}, "more ids or weights"),
        ({"num_tokens": np.array([], np.int64)}, "one entry per dispatch"),
        ({"top_k": np.array([0], np.int64)}, "top_k 0"),
        ({"top_k": np.array([200], np.int64)}, "top_k 200"),
        ({"num_experts": np.array([0], np.int64)}, "experts 0"),
        ({"num_experts": np.array([3], np.int64)}, "expert ids -1 to 3 of 3"),
        ({"topk_idx": np.array([0, 1, -2, 3], np.int32)}, "expert ids -2 to 3 of 4"),
        ({"topk_idx": np.array([0, 1, -1, 3], np.int64)}, "topk_idx is int64"),
        ({"topk_idx": np.array([0, 1, -1], np.int32)}, "end too early"),
        ({"topk_weights": np.ones(4)}, "topk_weights is float64"),
        ({"topk_weights": np.array([{}], object)}, "not a routing trace"),
        ({"topk_weights": None}, "topk_weights is missing"),
    ],
)
def test_a_damaged_trace_is_refused(tmp_path: Path, changed: dict[str, Any], text: str) -> None:
    np.savez(tmp_path / "good.npz", **GOOD)
    assert routing.load_trace(tmp_path / "good.npz").replay(num_experts=4, top_k=2)[0].tolist() == [[0, 1], [-1, 3]]
    arrays = {name: value for name, value in {**GOOD, **changed}.items() if value is not None}
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(InvalidArgument) as caught:
        routing.load_trace(tmp_path / "bad.npz")
    assert text in str(caught.value)
    assert "bad.npz" in str(caught.value)


def test_files_that_are_no_traces_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "good.npz", **GOOD)
    whole = (tmp_path / "good.npz").read_bytes()
    for name, content in {"empty": b"", "text": b"hello", "cut": whole[: len(whole) // 2]}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidArgument, match="not a routing trace"):
            routing.load_trace(tmp_path / name)
    np.save(tmp_path / "array.npy", np.ones(3))
    with pytest.raises(InvalidArgument, match="not an npz file"):
        routing.load_trace(tmp_path / "array.npy")
    with pytest.raises(InvalidArgument, match="no such trace"):
        routing.load_trace(tmp_path / "missing.npz")
    with pytest.raises(InvalidArgument, match="no such trace"):
        routing.load_trace(tmp_path / "missing" / "t.npz")
    for rank in (0, 1):
        np.savez(tmp_path / f"twice.rank{rank}.npz", **GOOD)
    with pytest.raises(InvalidArgument, match="rank 0 is in another file too"):
        routing.load_trace(tmp_path / "twice.npz")


# ---- with the engine ----


def three_dispatches(comm: weft.Communicator, file: Path | None) -> None:
    ids, weights = routing.uniform(10, 8, 2, rank=comm.rank, num_ranks=comm.num_ranks)
    with (
        nullcontext() if file is None else routing.record(file),
        weft.ExpertParallel(comm, num_experts=8, top_k=2, hidden=16, max_tokens_per_rank=10) as ep,
    ):
        x = torch.zeros((10, 16), dtype=torch.bfloat16)
        for _ in range(3):
            r = ep.dispatch(x, ids, weights)
            ep.dispatch(x, handle=r.handle)  # has no ids of its own
            ep.combine(x.new_zeros(r.topk_weights.shape[0], 16), r.handle)


@pytest.mark.parametrize("isolation", ["process", "thread"])
@pytest.mark.parametrize("inside", [True, False])
def test_ranks_record_what_they_dispatch(tmp_path: Path, isolation: str, inside: bool) -> None:
    file = tmp_path / "t.npz"
    with nullcontext() if inside else routing.record(file):
        weft.spawn(three_dispatches, 2, args=(file if inside else None,), isolation=isolation)
    trace = routing.load_trace(file)
    assert {rank: len(dispatches) for rank, dispatches in trace.dispatches.items()} == {0: 3, 1: 3}
    for rank in range(2):
        recorded = trace.replay(num_experts=8, top_k=2, rank=rank, step=2)
        expected = routing.uniform(10, 8, 2, rank=rank, num_ranks=2)
        assert all(torch.equal(a, b) for a, b in zip(recorded, expected, strict=True))
