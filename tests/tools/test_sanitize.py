"""Guards against a sanitizer script that stops at the first tool that fails, or calls what has errors clean."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from soak_rounds import draw, pools_of

SCRIPT = Path(__file__).parents[2] / "tools" / "sanitize.sh"
SOAK = '{"kind": "soak", "calls": 25, "words": 9, "problems": []}'


def run(folder: Path, tool: str, *args: str) -> subprocess.CompletedProcess[str]:
    """With `tool` as the text of a compute-sanitizer, and a Python that does nothing."""
    for name, text in (("compute-sanitizer", tool), ("python", "true")):
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": str(folder / "python")}
    return subprocess.run([SCRIPT, *args], env=env, capture_output=True, text=True, timeout=600, check=False)


def rows(done: subprocess.CompletedProcess[str]) -> list[tuple[object, ...]]:
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [(row["tool"], row["calls"], row["status"], row["errors"]) for row in found]


def test_clean_tools(tmp_path: Path) -> None:
    done = run(tmp_path, f"echo '{SOAK}'; echo '===== ERROR SUMMARY: 0 errors'")
    assert (done.returncode, done.stderr) == (0, "")
    assert rows(done) == [(tool, 25, 0, 0) for tool in ("memcheck", "synccheck", "initcheck")]


def test_every_tool_runs_though_the_first_fails_at_length(tmp_path: Path) -> None:
    done = run(tmp_path, "seq 9999; echo '===== ERROR SUMMARY: 7 errors'; exit 99")
    assert done.returncode == 1
    assert rows(done) == [(tool, None, 99, 7) for tool in ("memcheck", "synccheck", "initcheck")]
    assert len(done.stderr) == 3 * 6000


@pytest.mark.parametrize("text", ['echo \'{"problems": ["a word"]}\'', f"echo '{SOAK}'; echo 'ERROR SUMMARY: 1 error'"])
def test_a_wrong_word_or_an_error_is_a_failure(tmp_path: Path, text: str) -> None:
    assert run(tmp_path, text, "1", "5", "initcheck").returncode == 1


def test_tools_by_name(tmp_path: Path) -> None:
    assert [row[0] for row in rows(run(tmp_path, f"echo '{SOAK}'", "1", "5", "synccheck"))] == ["synccheck"]
    refused = run(tmp_path, f"echo '{SOAK}'", "1", "5", "sinccheck")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "no tool sinccheck" in refused.stderr


def test_rounds_taken_without_a_seed_have_every_kind_of_kernel() -> None:
    """What a seed draws changes with tools/soak_rounds.py."""
    text = SCRIPT.read_text()
    (rounds,) = re.findall(r"rounds=\$\{1:-(\d+)\}", text)
    seeds = dict(re.findall(r"^check (\w+) \d (\d+)", text, re.MULTILINE))
    for tool, num_ranks in (("memcheck", 2), ("synccheck", 2), ("initcheck", 1)):
        drawn = [draw(int(seeds[tool]) + idx, num_ranks, pools_of("cuda")) for idx in range(int(rounds))]
        assert max(each.pool.max_tokens for each in drawn) < 1000, "minutes under a tool"
        large = [each for each in drawn if sum(each.tokens) > 30]
        throughput = [each for each in large if each.mode == "throughput"]
        assert {each.layout for each in throughput} == {"rank_major", "expert_major", "masked"}
        assert {each.wire for each in throughput} == {None, "fp8"}
        small = {each.layout for each in large if each.mode in ("latency", "staged", "mixed")}
        if num_ranks > 1:
            by_rank = [each for each in throughput if each.layout == "rank_major" and each.wire is None]
            assert {each.in_heap for each in by_rank} == {False, True}, "pushed and pulled"
            assert small >= {"rank_major", "masked"}
        else:
            assert small >= {"expert_major", "masked"}
        assert "staged" in {each.mode for each in large}
        assert {each.quantize is None for each in throughput} == {False, True}
