"""Guards against lab/emulated_nic.py setting something else than NCCL and the software NIC read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import emulated_nic
import pytest

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


def shown(*arguments: str) -> dict[str, str]:
    command = [sys.executable, emulated_nic.__file__, *arguments, "--", sys.executable, "-c", SHOW]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_the_command_is_given_card_and_plugin(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.so"
    plugin.touch()
    found = shown(
        f"--plugin={plugin}",
        "--gb-s=5",
        "--spread-us=0",
        "--nodes-of=2",
        f"--faults={tmp_path}/faults",
        f"--report={tmp_path}/report",
    )
    assert found["NCCL_RMA_PLUGIN"] == str(plugin)
    assert found["NCCL_GIN_TYPE"] == "2"
    assert found["NCCL_LSA_TEAM_SIZE"] == "2"
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in found
    expected = f"ports=2,gb_s=5.0,latency_us=8.4,spread_us=0.0,seed=1,faults={tmp_path}/faults,report={tmp_path}/report"
    assert found["SOFTWARE_NIC"] == expected  # tests/native/lab/rma_plugin_test.cc reads such a text
    assert shown(f"--plugin={plugin}", "--threads")["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"


def test_a_rate_of_nothing_is_no_limit() -> None:
    options = emulated_nic.parse(["--gb-s", "0", "--", "true"])
    assert "gb_s=0.0," in emulated_nic.variables(options, Path("plugin.so"))["SOFTWARE_NIC"]


@pytest.mark.parametrize(
    "bad",
    [
        ["--gb-s=-1"],
        ["--gb-s=nan"],
        ["--gb-s=inf"],
        ["--gb-s=fast"],
        ["--latency-us=-1"],
        ["--spread-us=2e6"],
        ["--ports=0"],
        ["--ports=9"],
        ["--seed=-1"],
        ["--nodes-of=0"],
    ],
)
def test_what_the_card_would_refuse_is_said_at_once(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Within NCCL it would be a plugin that does not load."""
    with pytest.raises(SystemExit) as refused:
        emulated_nic.parse([*bad, "--", "true"])
    assert refused.value.code == 2
    assert bad[0].split("=")[0] in capsys.readouterr().err


def test_nothing_to_run_is_said() -> None:
    with pytest.raises(SystemExit):
        emulated_nic.parse(["--ports", "1", "--"])
