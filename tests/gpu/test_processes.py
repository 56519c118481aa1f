"""Guards against GPU ranks that are processes: a rank that is killed, the command line, and ranks on one GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import test_property
import torch
from property_cases import build, compare
from rebuild_cases import LossPlan, run_after_loss
from test_property import with_call

from gpu_ranks import ProcessRanks


def weft_command(*words: str, timeout_s: float = 240.0) -> list[dict[str, Any]]:
    """JSON lines of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "weft.cli", *words, "--json"],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_two_processes(processes: ProcessRanks, layout: str) -> None:
    """On one GPU they take turns; on two they meet over NVLink."""
    from dataclasses import replace

    case = with_call(layout=layout, tokens=(30, 17), biases=("row", "none"), ids_are_int64=(True, False))
    test_property.checked(processes, replace(case, num_ranks=2))  # type: ignore[arg-type]


@pytest.mark.parametrize("by", ["close", "kill"])
def test_a_rank_is_lost(by: str) -> None:
    """The survivors raise PeerLost that names it, rebuild, and get the right bits."""
    from dataclasses import replace

    lost, left = 1, (0, 2, 3)
    case = replace(with_call(layout="expert_major", tokens=(30, 0, 17, 9)), active_ranks=left)
    plans, wanted = build(case)
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is in use in this process: run the tests of processes alone")
    ranks = ProcessRanks()  # of its own: it loses a rank
    try:
        losses = [LossPlan(lost, by, left, plan) for plan in plans]
        seen = ranks.run(4, run_after_loss, losses, may_die=[lost] if by == "kill" else [])
    finally:
        ranks.stop()
    problems = compare(case, plans, wanted, seen)
    assert not problems, "\n".join(problems)


def test_verify_and_kill_commands() -> None:
    summary = weft_command("verify", "--device", "cuda", "--trials", "6", "--ranks", "2")[-1]
    assert summary["ok"]
    summary = weft_command("verify", "--kill", "--device", "cuda", "--trials", "1", "--ranks", "2")[-1]
    assert summary["ok"]
