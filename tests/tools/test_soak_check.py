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
from weft import reference
from weft.kernels import prebuild

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
    sizes = tuple(len(part) for part in ids)
    shape = soak_check.Shape(sizes, LOCAL, TOP_K, layout, alignment, capacity)
    found = [soak_check.places(torch.cat(ids), torch.cat(weights), rank, shape) for rank in range(RANKS)]
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
    names = [soak_check.row_names(torch.arange(len(got.row_token)), rank) for rank, got in enumerate(found)]
    outputs = [
        soak_check.values(name, HIDDEN, 99, torch.bfloat16).view(*part.topk_weights.shape[: part.x.dim() - 1], HIDDEN)
        for name, part in zip(names, want, strict=True)
    ]
    sides = [soak_check.side_of(output, TOP_K, layout) for output in outputs]
    biases = [soak_check.values(torch.arange(size), HIDDEN, 7, torch.bfloat16) for size in sizes]
    for weighted, wire, bias in ((True, None, None), (False, None, biases), (True, "fp8", biases)):
        how = soak_check.Sum(RANKS, layout == "rank_major", weighted, wire)
        summed = reference.combine(outputs, want, weighted=weighted, wire=wire, sides=sides, biases=bias)
        for rank, (y, side) in enumerate(summed):
            tokens = shape.tokens_of(rank)
            picks = soak_check.picks_of(tokens, found, torch.cat(weights), is_rank_major=how.is_rank_major)
            back = soak_check.rows_back(picks, HIDDEN, 99, torch.bfloat16)
            assert torch.equal(soak_check.sums(back, picks, how, bias and bias[rank]), y)
            assert torch.equal(soak_check.side_sums(back, picks, is_rank_major=how.is_rank_major), side)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_differ_by_row_column_and_call(dtype: torch.dtype) -> None:
    names = torch.arange(300)
    rows = soak_check.values(names, 64, 5, dtype).to(torch.float32)
    assert (((rows >= 1) & (rows < 2)) | ((rows <= -2) & (rows > -4))).all()
    assert len(rows.unique(dim=0)) == 300
    assert len(rows.unique(dim=1).T) == 64
    mantissas = soak_check.MANTISSA_BITS[dtype]
    assert len(rows.unique()) > min(2 ** (mantissas + 1) - 1, 8000)
    for seed in range(6, 40):
        other = soak_check.values(names, 64, seed, dtype)
        assert (other == rows).float().mean() < 0.02
        assert not (other[:, None, :4] == rows[None, :, :4]).all(-1).float().mean() > 0.001


def test_what_is_dropped_is_overwritten() -> None:
    def work(comm: weft.Communicator) -> None:
        ep = weft.ExpertParallel(comm, num_experts=LOCAL, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=9)
        x = soak_check.values(torch.arange(9), HIDDEN, 1, torch.bfloat16)
        for layout, quantize in (("rank_major", None), ("expert_major", "fp8"), ("masked", "fp8_ue8m0")):
            form = {"quantize": quantize, "scale_layout": "column_major" if quantize else "row_major"}
            ids = torch.arange(9 * TOP_K).view(9, TOP_K) % LOCAL
            r = ep.dispatch(x, ids, torch.rand(9, TOP_K), layout=layout, capacity=27, **form)
            soak_check.poison(r.x)
            soak_check.poison_handle(r.handle)
            rows = [r.x] if isinstance(r.x, torch.Tensor) else [r.x.data, r.x.scales.mT.contiguous()]
            tensors = [*rows, r.topk_weights, r.topk_idx, r.handle.sizes, r.handle.send_plan, r.handle.recv_plan]
            assert (r.topk_idx is None) == (layout != "rank_major")
            for part in tensors:
                assert part is None or (part.view(torch.uint8) == soak_check.POISON).all()

    weft.spawn(work, num_ranks=1, device="cpu")


def test_sets_of_graphs_have_all_there_is() -> None:
    drawn = [soak_rounds.draw_graphs(seed, 4) for seed in range(240)]
    for start in range(0, len(drawn), 12):
        part = drawn[start : start + 12]
        assert len({(each.mode, each.layout) for each in part}) == 12
        assert len({(each.pool, each.layout) for each in part}) == 12
    decode = [each for each in drawn if soak_rounds.GRAPH_POOLS[each.pool] == soak_rounds.DECODE]
    assert {each.mode for each in decode[:12]} == set(soak_rounds.GRAPH_MODES)
    for kind in (decode, [each for each in drawn if each.mode == "staged"]):
        assert len({(each.has_side, each.bias) for each in kind}) == 2 * 3
        assert len({(each.num_dispatches, each.id_dtype) for each in kind}) == 2 * 2
        assert len({(each.quantize, each.in_heap) for each in kind}) == 5 * 2


def run_soak(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "soak.py"), "--device", "cpu", "--ranks", "2", *flags]
    env = {"PYTHONPATH": str(Path(weft.__file__).parents[1]), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)


@pytest.mark.slow
def test_a_run_counts_its_calls_and_says_where_to_go_on() -> None:
    done = run_soak("--rounds", "24", "--repeats", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = (json.loads(line) for line in done.stdout.splitlines())
    assert (row["kind"], row["problems"], row["next_seed"], row["rounds"]) == ("soak", [], 24, 24)
    assert row["calls"] >= 24 * 8
    assert row["words"] > 100_000


@pytest.mark.slow
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


def spoilt(word: str, result: Any, *, is_again: bool) -> torch.Tensor | None:
    """What of a call's result is to have a wrong word; None: this one is left alone."""
    if word in ("sum", "side"):
        parts = result if isinstance(result, tuple) else result.wait() if isinstance(result, weft.Staged) else result
        parts = parts if isinstance(parts, tuple) else (parts,)
        return parts[0] if word == "sum" else next((part for part in parts[1:] if isinstance(part, torch.Tensor)), None)
    if word in ("row", "repeated row"):
        rows = result.x if isinstance(result.x, torch.Tensor) else result.x.data
        return rows if is_again == (word == "repeated row") else None
    parts = {"weight": result.topk_weights, "id": result.topk_idx, "count": result.num_tokens_per_expert}
    return None if is_again else parts[word]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["rounds", "graphs"])
@pytest.mark.parametrize("word", ["sum", "side", "row", "repeated row", "weight", "id", "count"])
def test_a_wrong_word_ends_a_run(part: str, word: str) -> None:
    soak = loaded_soak()
    name = "combine" if word in ("sum", "side") else "dispatch"
    call = getattr(weft.ExpertParallel, name)
    num_calls = 0

    def wrong(self, *args, **options):
        nonlocal num_calls
        result = call(self, *args, **options)
        if self.comm.rank == 1 and len(args) + len(options) > 2:  # not when ranks agree on an end
            num_calls += 1  # in this process: of this rank
            words = spoilt(word, result, is_again="handle" in options) if num_calls > 15 else None
            if words is not None and words.numel():
                words.view(torch.uint8).view(-1)[0] ^= 2  # not the bit that each run plants itself
        return result

    setattr(weft.ExpertParallel, name, wrong)
    try:
        options = soak.argparse.Namespace(seed=0, rounds=64, repeats=3, seconds=100.0, traffic=False, progress=None)
        options.graph_seconds, options.graph_sets, options.set_replays, options.turns = 0.0, 12, 20, 3
        if part == "graphs":
            options.rounds, options.graph_seconds = 0, 100.0
        results = weft.spawn(soak.run_rank, num_ranks=2, args=(options,), device="cpu")
    finally:
        setattr(weft.ExpertParallel, name, call)
    problems = [result["problems"] for result in results]
    assert problems[1] or (part == "graphs" and problems[0])  # whose experts give back what they got
    assert not problems[0] or name == "dispatch"


def test_what_the_soak_compiles_ahead_can_be_rendered() -> None:
    for pool in {*soak_rounds.pools_of("cuda"), *soak_rounds.GRAPH_POOLS}:
        shape = soak_rounds.kernel_shape(pool, 4)
        named = dict(prebuild.kernels(shape, prebuild.ARCHITECTURES["sm_90"]))
        for num_sms in (16, 32, 64) if pool.num_sms is None else (pool.num_sms,):
            assert any(f".num_blocks = {num_sms}" in source for source in named.values())


def test_a_soak_that_is_cut_off_leaves_what_it_had_done(tmp_path: Path) -> None:
    file = tmp_path / "progress.jsonl"
    assert run_soak("--rounds", "20", "--repeats", "1", "--progress", str(file)).returncode == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {16, 20} <= {row["next_seed"] for row in rows if "calls" in row}
    assert all(row["problems"] == [] for row in rows)
