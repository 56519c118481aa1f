"""Guards against a rank that is placed by the wrong GPU: device numbers, CUDA_VISIBLE_DEVICES, launchers."""

from __future__ import annotations

import machines
import pytest
import torch

from weft.machine.placement import binding, local
from weft.machine.topology.parse import format_cpus


@pytest.fixture
def dgx(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process believes to be on a DGX H100."""
    machine = machines.machine("dgx-h100")
    monkeypatch.setattr(local, "machine_here", lambda **_: machine)
    monkeypatch.setattr(binding, "unbound_mask", lambda: frozenset(machine.cpus.allowed))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def placed(rank: int, num_ranks: int, device: str) -> tuple[str | None, str, list[str]]:
    found = local.resolve("process", local_rank=rank, num_local_ranks=num_ranks, device=torch.device(device))
    assert (found.local_rank, found.num_local_ranks) == (rank, num_ranks)
    return found.gpu_address, format_cpus(found.cpus), [str(nic) for nic in found.nics]


@pytest.mark.usefixtures("dgx")
def test_one_gpu_a_rank() -> None:
    assert placed(5, 8, "cuda:5") == ("0000:c3:00.0", "60-71,156-167", ["mlx5_9:1"])


@pytest.mark.usefixtures("dgx")
def test_the_device_decides_not_the_rank() -> None:
    assert placed(0, 2, "cuda:6")[0] == "0000:d1:00.0"
    assert placed(0, 2, "cuda:6")[2] == ["mlx5_10:1"]


@pytest.mark.usefixtures("dgx")
def test_visible_gpus_are_counted_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert placed(1, 4, "cuda:1") == ("0000:c3:00.0", "60-71,156-167", ["mlx5_9:1"])


@pytest.mark.usefixtures("dgx")
@pytest.mark.parametrize("rank", range(8))
def test_a_launcher_that_shows_each_rank_its_own_gpu(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(rank))
    wanted = machines.expected("dgx-h100")["placements"][rank]
    assert placed(rank, 8, "cuda:0")[1:] == (wanted["cpus"], wanted["nics"])


@pytest.mark.usefixtures("dgx")
def test_such_a_launcher_on_the_upper_half(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []
    for rank in range(4):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(4 + rank))
        masks.append(placed(rank, 4, "cuda:0")[1])
    assert masks == ["48-59,144-155", "60-71,156-167", "72-83,168-179", "84-95,180-191"]


@pytest.mark.usefixtures("dgx")
def test_tokens_on_the_cpu_take_no_gpu() -> None:
    assert placed(1, 2, "cpu") == (None, "48-95,144-191", [])


@pytest.mark.usefixtures("dgx")
def test_a_device_that_nvml_does_not_show_is_placed_without_gpu() -> None:
    assert placed(0, 2, "cuda:11")[0] is None


@pytest.mark.usefixtures("dgx")
def test_off_and_explicit_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(local, "machine_here")
    assert local.resolve("off", local_rank=1, num_local_ranks=2).mode == "off"
    mine = local.Placement(cpus=(3,), applied=("x",))
    found = local.resolve(mine, local_rank=1, num_local_ranks=2)
    assert (found.cpus, found.local_rank, found.applied) == ((3,), 1, ())
