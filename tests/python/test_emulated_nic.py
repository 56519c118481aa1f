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


def test_nothing_to_run_is_said() -> None:
    with pytest.raises(SystemExit):
        emulated_nic.parse(["--ports", "1", "--"])
