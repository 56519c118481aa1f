"""Guards against a `weft verify` that is blind, or whose failures can't be repeated."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from cli_lines import assert_documented, rows_of, weft_command
from typer.testing import CliRunner

import weft
import weft.verify.kill as killing
from weft.cli import app
from weft.machine.placement import local
from weft.verify import Fixed, TrialResult, draw_case, repeat_command, run_trials
from weft.verify.check import Mismatch, expect_equal
from weft.verify.kill_board import Board
from weft.verify.kill_calls import OPERATIONS, draw_kill_case
from weft.verify.rejoin import slope


def test_right_results_pass() -> None:
    result = CliRunner().invoke(app, ["verify", "--trials", "12", "--seed", "100", "--json"])
    assert result.exit_code == 0, result.output
    *trials, summary = rows_of(result.stdout)
    assert_documented([*trials, summary])
    assert [trial["kind"] for trial in trials] == ["trial"] * 12
    assert all(trial["ok"] and trial["num_words"] > 0 for trial in trials)
    assert summary["kind"] == "summary"
    assert summary["num_words"] == sum(trial["num_words"] for trial in trials)


FLAGS = ["--ranks", "2", "--tokens", "9", "--hidden", "64", "--experts", "4", "--top-k", "2", "--trials", "1", "--json"]


def flip_a_bit(tensor: torch.Tensor) -> None:
    tensor.view(torch.uint8).view(-1)[-1] ^= 1


@pytest.mark.parametrize("part", ["y", "x", "topk_weights", "num_tokens_per_expert"])
def test_one_wrong_bit_on_one_rank_is_found(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch, combine = weft.ExpertParallel.dispatch, weft.ExpertParallel.combine

    def wrong_dispatch(self: Any, *args: Any, **options: Any) -> weft.Dispatched:
        result = dispatch(self, *args, **options)
        if self.comm.rank == 1 and part != "y":
            flip_a_bit(getattr(result, part))
        return result

    def wrong_combine(self: Any, *args: Any, **options: Any) -> Any:
        result = combine(self, *args, **options)
        if self.comm.rank == 1 and part == "y":
            flip_a_bit(result[0] if isinstance(result, tuple) else result)
        return result

    monkeypatch.setattr(weft.ExpertParallel, "dispatch", wrong_dispatch)
    monkeypatch.setattr(weft.ExpertParallel, "combine", wrong_combine)
    args = [*FLAGS, "--layout", "expert_major", "--quantize", "none", "--routing", "uniform", "--seed", "3"]
    result = CliRunner().invoke(app, ["verify", *args])
    assert result.exit_code == 1, result.output
    trial, summary = rows_of(result.stdout)
    assert not trial["ok"]
    assert summary["failed"] == 1
    assert any(problem.startswith("rank 1: ") and part in problem for problem in trial["problems"])
    assert not any(problem.startswith("rank 0: ") for problem in trial["problems"])


def test_an_error_on_a_rank_is_a_failed_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, *args: object, **options: object) -> None:
        raise weft.InternalError("made up")

    monkeypatch.setattr(weft.ExpertParallel, "combine", refuse)
    results = list(run_trials(trials=3, seed=0, fixed=Fixed(ranks=2)))
    assert len(results) == 3
    assert all("InternalError: made up" in result.problems[0] for result in results)


def test_a_failure_tells_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command printed must draw the same case, whatever was fixed."""
    fixed = Fixed(ranks=4, hidden=64, layout="masked")
    case = draw_case(17, fixed)
    words = shlex.split(repeat_command(case, fixed, "cpu"))[1:]
    seen: list[Any] = []

    def run(*, trials: int, seed: int, fixed: Fixed, device: str) -> list[TrialResult]:
        seen.append(draw_case(seed, fixed))
        assert (trials, device) == (1, "cpu")
        return []

    monkeypatch.setattr("weft.verify.run_trials", run)
    assert CliRunner().invoke(app, words).exit_code == 0
    assert seen == [case]


def test_cases_are_possible_and_obey_what_is_fixed() -> None:
    for seed in range(200):
        check_case_of(seed)


def check_case_of(seed: int) -> None:
    case = draw_case(seed, Fixed())
    assert case == draw_case(seed, Fixed())
    assert case.experts % case.ranks == 0
    assert len(case.tokens) == case.ranks
    options = dataclasses.asdict(case)
    quantize = None if case.quantize == "none" else case.quantize
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[case.dtype]
    assert weft.supports(
        **{name: options[name] for name in ("hidden", "top_k", "layout", "capacity", "alignment")},
        num_experts=case.experts,
        num_ranks=case.ranks,
        quantize=quantize,
        dtype=dtype,
    )
    fixed = Fixed(experts=12, hidden=24, layout="rank_major", dtype="fp16")
    case = draw_case(seed, fixed)
    assert (case.experts, case.hidden, case.layout, case.dtype, case.quantize) == (12, 24, "rank_major", "fp16", "none")
    assert 12 % case.ranks == 0


def test_words_are_compared_bit_by_bit() -> None:
    nan, other_nan = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    assert expect_equal("x", nan, other_nan) == 1
    with pytest.raises(Mismatch, match="x"):
        expect_equal("x", torch.tensor([0.0]), torch.tensor([-0.0]))
    with pytest.raises(Mismatch, match="float32"):
        expect_equal("x", torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(Mismatch, match=r"\[2\]"):
        expect_equal("x", torch.zeros(2), torch.zeros(3))


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    file = tmp_path / "trace.npz"
    with weft.routing.record(file):
        weft.spawn(dispatch_once, num_ranks=2)
    result = CliRunner().invoke(app, ["verify", "--trace", str(file), "--trials", "3", "--json"])
    assert result.exit_code == 0, result.output
    case = json.loads(result.stdout.splitlines()[0])["case"]
    assert (case["ranks"], case["experts"], case["top_k"], case["tokens"]) == (2, 6, 3, [5, 6])


def dispatch_once(comm: weft.Communicator) -> None:
    topk_idx, topk_weights = weft.routing.uniform(5 + comm.rank, 6, 3, rank=comm.rank, num_ranks=2)
    with weft.ExpertParallel(comm, num_experts=6, top_k=3, hidden=16, max_tokens_per_rank=8) as ep:
        ep.dispatch(torch.zeros((5 + comm.rank, 16), dtype=torch.bfloat16), topk_idx, topk_weights)


@pytest.mark.slow
def test_kills_are_seen_and_survived() -> None:
    result = CliRunner().invoke(app, ["verify", "--kill", "--trials", "10", "--ranks", "3", "--json"])
    assert result.exit_code == 0, result.output
    rows = rows_of(result.stdout)
    assert_documented(rows)
    kills = [row for row in rows if row["kind"] == "kill"]
    assert len(kills) == 10
    for kill in kills:
        assert kill["ok"], kill["problems"]
        assert len(kill["detection_us"]) == 2
        assert all(detection_us > 0 for detection_us in kill["detection_us"])
    check_counts(rows, {"throughput": 3, "small": 5, "small staged": 2})  # on CPUs graphs are plain calls
    assert {row["what"] for row in rows if row["kind"] == "times"} >= {"detection", "rebuild"}


@pytest.mark.slow
def test_ranks_are_killed_and_others_join() -> None:
    """Spares and new processes take the places; a rank that is never killed holds no more afterwards."""
    flags = ["verify", "--kill", "--rejoin", "--trials", "6", "--ranks", "3", "--device", "cpu", "--json"]
    done = weft_command(*flags)
    assert done.returncode == 0, done.stdout
    rows = rows_of(done.stdout)
    assert_documented(rows)
    kills = [row for row in rows if row["kind"] == "rejoin"]
    assert [kill["trial"] for kill in kills] == list(range(6))
    assert {kill["by"] for kill in kills} == {"spare", "new"}
    for kill in kills:
        assert kill["ok"], kill["problems"]
        assert 0 < kill["notice_us"] <= kill["out_us"] <= kill["right_us"] <= kill["full_us"]
        assert kill["victim"] != 2  # the witness
        assert kill["witness"]["fds"] == kills[0]["witness"]["fds"]
    assert rows[-1]["kind"] == "summary"


def test_rejoin_has_its_limits() -> None:
    """Refused before a process is started."""
    for flags, text in (
        (["--rejoin"], "--kill only"),
        (["--kill", "--rejoin", "--device", "cuda"], "newcomers on GPUs"),
        (["--kill", "--rejoin", "--ranks", "1"], "2 to 31"),
    ):
        result = CliRunner().invoke(app, ["verify", *flags])
        assert result.exit_code != 0
        assert text in result.output


def test_the_slope_of_memory() -> None:
    """Of a line, whatever lies around it."""
    assert slope([]) == slope([5.0]) == 0.0
    assert slope([1.0, 3.0, 5.0, 7.0]) == pytest.approx(2.0)
    assert abs(slope([0.0, 1.0, 0.0, 1.0, 0.0])) < 0.1


def check_counts(rows: list[dict[str, Any]], kills: dict[str, int]) -> None:
    """Kills are counted by what the victim was doing."""
    counts = [row for row in rows if row["kind"] == "count"]
    by_mode: Counter[str] = Counter()
    for count in counts:
        of_kills = [(row["mode"], row["operation"]) for row in rows if row["kind"] == "kill"]
        assert count["kills"] == of_kills.count((count["mode"], count["operation"]))
        assert count["operation"] in ("dispatch", "combine")
        by_mode[count["mode"]] += count["kills"]
    assert by_mode == kills


@pytest.mark.parametrize(
    ("mode", "kinds"),
    [
        ("throughput", {("throughput", "dispatch"), ("throughput", "combine")}),
        ("mixed", {("throughput", "dispatch"), ("small", "combine")}),
        ("staged", {("small staged", "dispatch"), ("small staged", "combine")}),
    ],
)
def test_a_kill_names_the_kernels_and_the_call(mode: str, kinds: set[tuple[str, str]]) -> None:
    """What the victim noted last, in every mode that can be asked for."""
    flags = ["verify", "--kill", "--trials", "2", "--ranks", "2", "--mode", mode, "--json"]
    result = CliRunner().invoke(app, flags)
    assert result.exit_code == 0, result.output
    kills = [row for row in rows_of(result.stdout) if row["kind"] == "kill"]
    assert {(kill["mode"], kill["operation"]) for kill in kills} <= kinds


def test_what_a_victim_was_doing_survives_it() -> None:
    """Each operation that is noted comes back, and the case of a trial fits its kernels."""
    board = Board(2)
    for number, (mode, operation) in enumerate(OPERATIONS):
        board.note_doing(1, number)
        plan = killing._Plan(victims=(1,), delays_s=(0.0,))
        result = killing._result(0, draw_case(0, Fixed(ranks=2)), plan, 0, board, killing._Seen([], []))
        assert (result.mode, result.operation) == (mode, operation)
    cases = [draw_kill_case(seed, Fixed(ranks=4, tokens=16)) for seed in range(4)]
    assert [(case.mode, in_graph) for case, in_graph in cases] == [
        ("throughput", False), ("latency", False), ("staged", False), ("latency", True),
    ]  # fmt: skip
    assert all(case.capacity is not None for case, _ in cases[2:])
    assert draw_kill_case(1, Fixed(ranks=4, tokens=4096))[0].mode == "throughput"
    assert CliRunner().invoke(app, ["verify", "--mode", "graph", "--trials", "1"]).exit_code == 2


def test_ranks_die_one_after_the_other() -> None:
    """Each death is seen by those that are left, who rebuild and meet the next one."""
    flags = ["verify", "--kill", "--trials", "2", "--ranks", "4", "--deaths", "3", "--json"]
    result = CliRunner().invoke(app, flags)
    assert result.exit_code == 0, result.output
    kills = [row for row in rows_of(result.stdout) if row["kind"] == "kill"]
    assert [(kill["trial"], kill["death"], kill["ranks"]) for kill in kills] == [
        (trial, death, 4 - death) for trial in range(2) for death in range(3)
    ]
    for trial in range(2):
        assert len({kill["victim"] for kill in kills if kill["trial"] == trial}) == 3
    for kill in kills:
        assert len(kill["detection_us"]) == len(kill["rebuild_us"]) == kill["ranks"] - 1
    refused = CliRunner().invoke(app, ["verify", "--kill", "--ranks", "3", "--deaths", "3", "--json"])
    assert refused.exit_code == 2
    assert "deaths=3" in refused.output


@pytest.mark.parametrize("is_back", [True, False])
def test_gpu_memory_of_the_dead_is_waited_for(is_back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has it back some time after the survivors have rebuilt; memory that stays is a problem."""
    before, left, lasting = 7 << 30, 3 << 20, 2 << 30
    plan, board = killing._Plan(victims=(0,), delays_s=(0.0,)), Board(2)
    victim = multiprocessing.get_context("fork").Process(target=run_until_killed, args=(board,))
    victim.start()
    board.note_running(1, 0)
    board.note_through(1, 0)
    looks = 0

    def gpu_memory() -> dict[int, int]:
        nonlocal looks
        looks += 1
        victim.join()
        assert not board.is_over(0), "survivors must not go on before"
        return {0: before + (left if is_back and looks > 3 else lasting), 1: 0}

    monkeypatch.setattr(killing, "_gpu_memory", gpu_memory)
    monkeypatch.setattr(killing, "_MEMORY_BACK_S", 30.0 if is_back else 0.05)
    killing._kill(board, plan, 2, {0: before, 1: 0})
    assert victim.exitcode == -signal.SIGKILL
    assert board.is_over(0)
    result = killing._result(0, draw_case(0, Fixed(ranks=2)), plan, 0, board, killing._Seen([], []))
    assert result.ok == is_back
    assert result.memory_left_bytes == (left if is_back else lasting)
    assert (result.memory_back_us is not None) == is_back
    assert is_back or "2048 MiB left on the GPU of rank 0" in result.problems[0]


def test_gpu_memory_is_that_of_the_gpus_that_cuda_has(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")
    gpus = tuple(SimpleNamespace(idx=idx, uuid=None) for idx in range(4))
    monkeypatch.setattr(local, "machine_here", lambda: SimpleNamespace(gpus=gpus))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda idx: idx)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda idx: SimpleNamespace(used=100 * idx))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert killing._gpu_memory() == {0: 0, 1: 100, 2: 200, 3: 300}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert killing._gpu_memory() == {0: 300, 1: 100}


def test_memory_of_a_gpu_that_survivors_share_is_not_held_against_the_dead() -> None:
    plan, board = killing._Plan(victims=(0,), delays_s=(0.0,)), Board(2)
    victim = multiprocessing.get_context("fork").Process(target=run_until_killed, args=(board,))
    victim.start()
    board.note_running(1, 0)
    board.note_through(1, 0)
    killing._kill(board, plan, 2, {0: 0})
    assert board.is_over(0)
    result = killing._result(0, draw_case(0, Fixed(ranks=2)), plan, 0, board, killing._Seen([], []))
    assert result.ok
    assert result.memory_left_bytes is None


def run_until_killed(board: Board) -> None:
    board.note_running(0, 0)
    time.sleep(60)


@pytest.mark.parametrize("flags", [[], ["--kill"]])
def test_a_bad_variable_is_a_usage_error_before_any_trial(flags: list[str]) -> None:
    command = [sys.executable, "-m", "weft.cli", "verify", *flags, "--trials", "2", "--json"]
    done = subprocess.run(
        command, env={**os.environ, "WEFT_SPIN_US": "abc"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 2, done.stderr
    (row,) = rows_of(done.stdout)
    assert (row["kind"], row["type"]) == ("error", "InvalidArgument")
    assert "WEFT_SPIN_US is 'abc'; allowed: 0..1000000" in row["text"]


def test_cuda_without_a_gpu_exits_3() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = CliRunner().invoke(app, ["verify", "--device", "cuda", "--trials", "1", "--json"])
    assert result.exit_code == 3, result.output
    assert json.loads(result.stdout.splitlines()[-1])["type"] == "Unsupported"


def test_commands_are_registered() -> None:
    group: Any = typer.main.get_command(app)
    assert set(group.commands) >= {"demo", "verify", "bench", "size"}
