"""Guards against counts of picks on a GPU that are not those of the host, also where a graph makes them again."""

from __future__ import annotations

import pytest
import torch
from test_emulated_count_picks import SHAPES, differ, ids_of

from weft.call.count_picks import count_picks

LARGE = [(4096, 8, 256, 8), (8192, 8, 64, 2)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_counts_are_those_of_the_host(dtype: torch.dtype) -> None:
    for num_tokens, top_k, num_experts, num_ranks in SHAPES + LARGE:
        ids = ids_of(num_tokens, top_k, num_experts, dtype)
        want = count_picks(ids, num_experts, num_ranks, runs_kernels=True)
        for runs_kernels in (True, False):
            found = count_picks(ids.cuda(), num_experts, num_ranks, runs_kernels=runs_kernels)
            assert all(each.is_cuda for each in found)
            assert not differ(tuple(each.cpu() for each in found), want)


def test_a_graph_counts_anew() -> None:
    ids = ids_of(300, 8, 64, torch.int64)
    given = ids.cuda()
    count_picks(given, 64, 4, runs_kernels=True)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = count_picks(given, 64, 4, runs_kernels=True)
    for turn in range(3):
        ids = ids.roll(1, 1).clamp(-1, 63 - turn)
        given.copy_(ids)
        graph.replay()
        assert not differ(tuple(each.cpu() for each in found), count_picks(ids, 64, 4, runs_kernels=True))
