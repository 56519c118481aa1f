"""Guards against a page about training whose program does not run, and against experts that DistributedDataParallel
overwrites without a word."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import weft

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"


@pytest.mark.slow
def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text("\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)))
    package = str(Path(weft.__file__).resolve().parents[1])
    env = {**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1", "CHECKPOINTS": str(tmp_path)}
    command = [sys.executable, "-W", "error::UserWarning:weft.call.wrapped", "-m", "torch.distributed.run"]
    done = subprocess.run(
        [*command, "--standalone", "--nproc-per-node=2", str(script)], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("fine") == 10
    assert "DistributedDataParallel copies" not in done.stderr


class Layer(nn.Module):
    """Two local experts of a layer with four."""

    def __init__(self, ep: weft.ExpertParallel) -> None:
        super().__init__()
        self.ep = ep
        self.gate = nn.Linear(16, 4)
        self.shared_expert = nn.Linear(16, 16)
        self.up = nn.Parameter(torch.zeros(2, 16, 16))
        self.experts = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))


class Block(nn.Module):
    """A layer inside something dense."""

    def __init__(self, ep: weft.ExpertParallel) -> None:
        super().__init__()
        self.dense = nn.Linear(2, 2)
        self.moe = Layer(ep)


def warned(module: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        DistributedDataParallel(module)
    return [str(each.message) for each in seen if "DistributedDataParallel copies" in str(each.message)]


def wrap(comm: weft.Communicator, folder: str) -> dict[str, list[str]]:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=comm.rank, world_size=comm.num_ranks)
    with weft.ExpertParallel(comm, num_experts=4, top_k=2, hidden=16, max_tokens_per_rank=4) as ep:
        block = Block(ep)
        seen = {"all": warned(block), "gate": warned(block.moe.gate), "no layer": warned(block.dense)}
        names = ["moe.up", "moe.experts.0.weight", "moe.experts.1.weight"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(block, names)
        seen["left alone"] = warned(block)
    dist.destroy_process_group()
    return seen


def test_wrapped_experts_are_warned_of_before_they_are_overwritten(tmp_path: Path) -> None:
    for seen in weft.spawn(wrap, 2, (str(tmp_path),), device="cpu"):
        (text,) = seen.pop("all")
        assert "averages their gradients: moe.up, moe.experts.0.weight, moe.experts.1.weight. Before" in text
        assert "_set_params_and_buffers_to_ignore_for_model" in text
        assert not any(seen.values()), seen
