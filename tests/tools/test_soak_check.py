"""Guards against a soak test that would pass whatever the engine does: its expectations are those of weft.reference."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import soak_check
import soak_rounds
import torch

import weft
from weft import prebuild, reference

ROOT = Path(__file__).resolve().parents[2]
RANKS, LOCAL, TOP_K, HIDDEN = 3, 4, 3, 16


def made(seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [int(torch.randint(0, 30, (), generator=generator)) for _ in range(RANKS)]
    ids = [torch.randint(-1, RANKS * LOCAL, (size, TOP_K), generator=generator) for size in sizes]
    weights = [torch.rand((size, TOP_K), generator=generator) for size in sizes]
    names = torch.arange(sum(sizes)).split(sizes)
    return ids, weights, [soak_check.values(name, HIDDEN, seed, torch.bfloat16) for name in names]


@pytest.mark.parametrize(
    ("layout", "alignment", "capacity"),
    [("rank_major", 1, None), ("rank_major", 1, 20), ("expert_major", 1, None), ("expert_major", 8, None)]
    + [("expert_major", 4, 25), ("masked", 1, 3), ("masked", 1, 40)],
)
@pytest.mark.parametrize("seed", range(6))
def test_places_and_sums_are_those_of_the_reference(
    layout: str, alignment: int, capacity: int | None, seed: int
) -> None:
    ids, weights, xs = made(seed)
    options = {"num_experts": RANKS * LOCAL, "layout": layout, "alignment": alignment, "capacity": capacity}
    want = reference.dispatch(xs, ids, weights, **options)
    shape = soak_check.Shape(RANKS, LOCAL, layout, alignment, capacity)
    sizes = tuple(len(part) for part in ids)
    found = [soak_check.places(torch.cat(ids), torch.cat(weights), rank, shape, sizes) for rank in range(RANKS)]
    rows = torch.cat(xs)
    for part, got in zip(want, found, strict=True):
        assert got.num_rows == int(part.num_rows)
        assert torch.equal(got.counts.to(torch.int32), part.num_tokens_per_expert)
        assert torch.equal(got.offsets.to(torch.int32), part.offsets)
        assert torch.equal(got.row_weight.view(part.topk_weights.shape), part.topk_weights)
        if part.topk_idx is not None:
            assert torch.equal(got.row_ids, part.topk_idx)
        assert isinstance(part.x, torch.Tensor)
        expected = (
            torch.where((got.row_token >= 0)[:, None], rows[got.row_token.clamp(min=0)], 0) if len(rows) else rows
        )
        assert torch.equal(expected.view(part.x.shape), part.x)
    ys = [
        soak_check.values(torch.arange(len(got.row_token)), HIDDEN, 99 + rank, torch.bfloat16)
        for rank, got in enumerate(found)
    ]
    outputs = [y.view(part.x.shape) for y, part in zip(ys, want, strict=True)]
    sides = [y[:, :TOP_K].float() if layout == "rank_major" else y[:, 0].float() for y in ys]
    given = [side.view(*part.topk_weights.shape) for side, part in zip(sides, want, strict=True)]
    biases = [soak_check.values(torch.arange(size), HIDDEN, 7, torch.bfloat16) for size in sizes]
    for weighted, wire, bias in ((True, None, None), (False, None, biases), (True, "fp8", biases)):
        how = soak_check.Sum(layout == "rank_major", weighted, wire)
        start = 0
        summed = reference.combine(outputs, want, weighted=weighted, wire=wire, sides=given, biases=bias)
        for rank, (y, side) in enumerate(summed):
            tokens = slice(start, start + sizes[rank])
            assert torch.equal(soak_check.sums(tokens, found, ys, how, bias and bias[rank]), y)
            assert torch.equal(soak_check.side_sums(tokens, found, sides), side)
            start += sizes[rank]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_survive_powers_of_two(dtype: torch.dtype) -> None:
    rows = soak_check.values(torch.arange(100), 64, 5, dtype)
    assert ((rows >= 1) & (rows < 2)).all()
    assert len(rows.unique()) > 100
    assert torch.equal((rows * 0.25) * 4, rows)


def run_soak(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "soak.py"), "--device", "cpu", "--ranks", "2", *flags]
    env = {"PYTHONPATH": str(Path(weft.__file__).parents[1]), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)


def test_a_run_counts_its_calls_and_says_where_to_go_on() -> None:
    done = run_soak("--rounds", "24", "--repeats", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = (json.loads(line) for line in done.stdout.splitlines())
    assert (row["kind"], row["problems"], row["next_seed"]) == ("soak", [], 24)
    assert row["calls"] >= 24 * 8
    assert row["words"] > 100_000


def test_graphs_of_every_mode_and_layout() -> None:
    few = ("--graph-sets", "12", "--set-replays", "20", "--turns", "3")
    done = run_soak("--rounds", "0", "--graph-seconds", "100", *few)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = (json.loads(line) for line in done.stdout.splitlines())
    assert (row["graph_sets"], row["replays"], row["problems"]) == (12, 240, [])


def loaded_soak() -> Any:
    """tools/soak.py as a module."""
    spec = importlib.util.spec_from_file_location("soak", ROOT / "tools" / "soak.py")
    assert spec is not None
    assert spec.loader is not None
    soak = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = soak
    spec.loader.exec_module(soak)
    return soak


@pytest.mark.parametrize("part", ["rounds", "graphs"])
def test_a_wrong_word_ends_a_run(part: str) -> None:
    soak = loaded_soak()
    combine = weft.ExpertParallel.combine
    num_calls = 0

    def wrong(self, *args, **options):
        nonlocal num_calls
        num_calls += 1  # in this process: of this rank
        y = combine(self, *args, **options)
        first = y[0] if isinstance(y, tuple) else y.wait() if isinstance(y, weft.Staged) else y
        if self.comm.rank == 1 and num_calls > 15 and len(first):
            first.view(torch.uint8)[-1, 0] ^= 1
        return y

    weft.ExpertParallel.combine = wrong
    try:
        options = soak.argparse.Namespace(seed=0, rounds=16, repeats=2, seconds=100.0, traffic=False, progress=None)
        options.graph_seconds, options.graph_sets, options.set_replays, options.turns = 0.0, 12, 20, 3
        if part == "graphs":
            options.rounds, options.graph_seconds = 0, 100.0
        results = weft.spawn(soak.run_rank, num_ranks=2, args=(options,), device="cpu")
    finally:
        weft.ExpertParallel.combine = combine
    assert results[0]["problems"] == []
    assert results[1]["problems"]


def test_what_the_soak_compiles_ahead_can_be_rendered() -> None:
    for pool in soak_rounds.pools_of("cuda"):
        shape = soak_rounds.kernel_shape(pool, 4)
        named = dict(prebuild.kernels(shape, prebuild.ARCHITECTURES["sm_90"]))
        assert any(f".num_blocks = {pool.num_sms}" in source for source in named.values())


def test_a_soak_that_is_cut_off_leaves_what_it_had_done(tmp_path: Path) -> None:
    file = tmp_path / "progress.jsonl"
    assert run_soak("--rounds", "20", "--repeats", "1", "--progress", str(file)).returncode == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {16, 20} <= {row["next_seed"] for row in rows if "calls" in row}
    assert all(row["problems"] == [] for row in rows)
