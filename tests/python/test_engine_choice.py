"""Guards against ranks that choose different engines, or one that can't work: the choice from what all ranks have."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import weft
import weft.engine
from weft.engine import Facts, choose_engine, choose_gpu, look

H200 = Facts("auto", "", "gpu-0", "NVIDIA H200", (9, 0), 132, ("gpu-1", "gpu-2", "gpu-3"))


def four() -> dict[int, Facts]:
    """Ranks on four GPUs that access each other."""
    names = [f"gpu-{idx}" for idx in range(4)]
    return {
        rank: replace(H200, uuid=mine, reach=tuple(name for name in names if name != mine))
        for rank, mine in enumerate(names)
    }


def test_gpus_that_access_each_other() -> None:
    choice = choose_engine(four())
    assert (choice.engine, choice.max_num_sms) == ("nvlink", 64)
    assert choice.why == "4 ranks on 4 GPUs that access each other"
    assert choose_engine({0: replace(H200, reach=())}).engine == "nvlink", "one rank needs no peer"


def test_ranks_that_share_a_gpu_share_its_sms() -> None:
    choice = choose_engine({rank: replace(H200, reach=()) for rank in range(16)})
    assert (choice.engine, choice.max_num_sms, choice.rank_sms, choice.why) == ("nvlink", 8, 8, "16 ranks on 1 GPU")


@pytest.mark.parametrize(
    ("rank", "changed", "why"),
    [
        (2, {"problem": "no NVRTC"}, "rank 2: no NVRTC"),
        (1, {"capability": (8, 0)}, "rank 1: NVIDIA H200 has compute capability 8.0, less than 9.0"),
        (3, {"reach": ("gpu-0",)}, "the GPU of rank 3 can't access that of ranks 1, 2"),
        (0, {"problem": "its tokens are in host memory"}, "rank 0: its tokens are in host memory"),
    ],
)
def test_one_rank_that_can_not(rank: int, changed: dict[str, object], why: str) -> None:
    facts = four()
    facts[rank] = replace(facts[rank], **changed)  # type: ignore[arg-type]
    choice = choose_engine(facts)
    assert (choice.engine, choice.why) == ("cpu", why)
    asked = {each: replace(fact, engine="nvlink") for each, fact in facts.items()}
    with pytest.raises(weft.Unsupported, match=r"engine 'nvlink' is not supported: have") as caught:
        choose_engine(asked)
    assert caught.value.have == why


@pytest.mark.parametrize(
    ("version", "why"), [(12020, "its driver is of CUDA 12.2, older than 12.4"), (12040, None), (13000, None)]
)
def test_a_driver_too_old_is_told(version: int, why: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weft.engine.paths, "compiler_paths", dict)
    monkeypatch.setattr(weft.engine, "_driver_version", lambda: version)
    assert weft.engine._missing() == why


def test_too_many_ranks() -> None:
    facts = {rank: replace(H200, reach=()) for rank in range(17)}
    assert choose_engine(facts).why == "17 ranks, more than 16"


def test_ranks_that_ask_for_different_engines() -> None:
    facts = {0: H200, 1: replace(H200, engine="cpu", problem="the cpu engine was asked for")}
    with pytest.raises(weft.InvalidArgument, match="'auto' on rank 0; 'cpu' on rank 1"):
        choose_engine(facts)


def test_facts_travel() -> None:
    assert Facts.from_json(json.loads(json.dumps(H200.to_json()))) == H200


def test_ranks_in_host_memory() -> None:
    cpu = torch.device("cpu")
    assert choose_engine({0: look(cpu, "auto"), 1: look(cpu, "auto")}).why == "the tokens are in host memory"
    with pytest.raises(weft.InvalidArgument, match="engine is 'fast'; allowed are 'auto', 'cpu', 'nvlink'"):
        look(cpu, "fast")


def test_spawn_says_what_it_chose() -> None:
    for text in weft.spawn(lambda comm: repr(comm), num_ranks=2, device="cpu", isolation="thread"):
        assert "engine=cpu (the tokens are in host memory)" in text
    with pytest.raises(weft.Unsupported, match="engine 'nvlink' is not supported: have the tokens are in host memory"):
        weft.spawn(lambda comm: None, num_ranks=2, device="cpu", engine="nvlink")
    with pytest.raises(weft.InvalidArgument, match="engine is 'gpu'; allowed are 'auto', 'cpu', 'nvlink'"):
        weft.spawn(lambda comm: None, engine="gpu")


def test_which_gpu_a_rank_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    assert [choose_gpu("auto", rank) for rank in (0, 3, 5)] == ["cuda:0", "cuda:3", "cuda:1"]
    assert (choose_gpu("cpu", 1), choose_gpu("cuda:2", 1)) == ("cpu", "cuda:2")
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(weft.InvalidState, match=r"used CUDA before weft\.spawn"):
        choose_gpu("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert (choose_gpu("auto", 0), choose_gpu("cuda", 0)) == ("cpu", "cuda")


def test_a_copy_to_the_host_waits_for_the_stream_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind kernels that wait for a peer it would hold up the copies of ranks that are threads."""
    done: list[str] = []

    class OnGpu:
        is_cuda, device = True, "cuda:1"

        def cpu(self) -> str:
            done.append("copied")
            return "rows"

    class Stream:
        def __init__(self, device: str) -> None:
            self.device = device

        def synchronize(self) -> None:
            done.append(f"{self.device} is idle")

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    assert weft.engine.to_host(OnGpu()) == "rows"  # type: ignore[arg-type, comparison-overlap]
    assert done == ["cuda:1 is idle", "copied"]
    here = torch.ones(2)
    assert weft.engine.to_host(here) is here
