"""Guards against picks of a routing map on a GPU that are not those of the host, also where a graph makes them again,
and against a second kernel beside the one that makes them."""

from __future__ import annotations

import pytest
import torch
from test_emulated_picks_of_map import DTYPES, SHAPES, differ, map_of, wanted

from weft.call.maps import picks_of_map

LARGE = [(4096, 256, 8), (1023, 512, 9)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_picks_are_those_of_the_host(dtype: torch.dtype | None) -> None:
    for num_tokens, num_experts, top_k in SHAPES + LARGE:
        chosen, probs = map_of(num_tokens, num_experts, top_k)
        given = None if dtype is None else probs.to(dtype)
        want = picks_of_map(chosen, given, num_experts, top_k, runs_kernels=True)
        if num_tokens < 1000:
            assert not differ(want, wanted(chosen, given, num_experts, top_k))
        for runs_kernels in (True, False):
            ids, weights = picks_of_map(
                chosen.cuda(), None if given is None else given.cuda(), num_experts, top_k, runs_kernels=runs_kernels
            )
            assert ids.is_cuda
            assert not differ((ids.cpu(), None if weights is None else weights.cpu()), want)


def test_one_kernel_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # kernels of the fixtures
    chosen, probs = (each.cuda() for each in map_of(300, 64, 8))
    picks_of_map(chosen, probs, 64, 8, runs_kernels=True)  # loads the kernel
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        picks_of_map(chosen, probs, 64, 8, runs_kernels=True)
        torch.cuda.synchronize()
    kernels = [each.name for each in profile.events() if each.device_type.name == "CUDA"]
    assert len(kernels) == 1
    assert "picks_of_map_kernel" in kernels[0]


def test_a_graph_makes_them_anew() -> None:
    chosen, probs = map_of(300, 64, 8)
    given, of_given = chosen.cuda(), probs.cuda()
    picks_of_map(given, of_given, 64, 8, runs_kernels=True)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, weights = picks_of_map(given, of_given, 64, 8, runs_kernels=True)
    assert weights is not None
    for turn in range(3):
        now, of_now = chosen.roll(turn, 0), probs.roll(turn, 0)
        given.copy_(now)
        of_given.copy_(of_now)
        graph.replay()
        assert not differ((ids.cpu(), weights.cpu()), picks_of_map(now, of_now, 64, 8, runs_kernels=True))
