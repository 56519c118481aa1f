"""Guards against side values that are summed over other ranks than was asked for: lanes whose id is of no expert here,
rows that were dropped, ranks that have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import reference

EXPERTS, TOP_K, HIDDEN, MOST = 12, 3, 40, 16


def checked_lanes(comm: weft.Communicator) -> None:
    """Against the reference, bit for bit, of both orders and kinds of kernels, with a capacity and without."""
    generator = torch.Generator(device="cpu").manual_seed(3)
    tokens = [(16, 0, 7, 11)[rank % 4] for rank in range(comm.num_ranks)]
    xs = [torch.randn((n, HIDDEN), generator=generator, dtype=torch.float32, device="cpu").bfloat16() for n in tokens]
    ids = [torch.randint(-1, EXPERTS, (n, TOP_K), generator=generator, dtype=torch.int64, device="cpu") for n in tokens]
    with weft.ExpertParallel(comm, num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=MOST) as ep:
        for mode in ("throughput", "latency"):
            for capacity, order in ((None, "rank"), (9, "rank"), (comm.num_ranks * MOST, "last_pick")):
                wanted = reference.dispatch(xs, ids, num_experts=EXPERTS, capacity=capacity)
                sides = [
                    torch.randn(each.topk_weights.shape, generator=generator, dtype=torch.float32, device="cpu")
                    for each in wanted
                ]
                r = ep.dispatch(xs[comm.rank], ids[comm.rank], capacity=capacity, mode=mode)
                outputs = [plain(each.x) for each in wanted]
                side = sides[comm.rank].to(comm.device)
                for lanes in ("all", "own"):
                    pair = ep.combine(r.x, r.handle, side=side, side_lanes=lanes, order=order, mode=mode)
                    want = reference.combine(outputs, wanted, sides=sides, side_lanes=lanes, order=order)[comm.rank]
                    for seen, each in zip(pair, want, strict=True):
                        assert torch.equal(seen.cpu(), each), (mode, capacity, lanes)


def plain(x: Any) -> Tensor:
    assert isinstance(x, Tensor)
    return x


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_lanes(num_ranks: int) -> None:
    weft.spawn(checked_lanes, num_ranks, device="cpu", isolation="thread")


def test_lanes_as_they_are_written_down() -> None:
    """Every rank that holds the token adds what it has in the lane, whatever the id there."""
    ids = [torch.tensor([[0, 1, 3], [2, -1, -1], [-1, -1, -1]]), torch.tensor([[3, 3, 3]])]
    xs = [torch.zeros((len(each), 8), device="cpu").bfloat16() for each in ids]
    results = reference.dispatch(xs, ids, num_experts=4)
    sides = [torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[10.0, 20.0, 40.0], [0.5, 0.25, 0.125], [3.0, 5.0, 7.0]])]
    sums = reference.combine([plain(each.x) for each in results], results, sides=sides, side_lanes="all")
    assert sums[0][1].tolist() == [[11.0, 22.0, 44.0], [0.5, 0.25, 0.125], [0.0, 0.0, 0.0]]
    assert sums[1][1].tolist() == [[3.0, 5.0, 7.0]]


def test_refusals() -> None:
    def work(comm: weft.Communicator) -> None:
        x, ids = torch.zeros((2, HIDDEN), device="cpu").bfloat16(), torch.zeros((2, TOP_K), dtype=torch.int64)
        with weft.ExpertParallel(comm, num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=MOST) as ep:
            r = ep.dispatch(x, ids)
            with pytest.raises(weft.InvalidArgument, match="side_lanes is 'all' with no side"):
                ep.combine(r.x, r.handle, side_lanes="all")
            with pytest.raises(weft.InvalidArgument, match="side_lanes is 'some'; allowed: own, all"):
                ep.combine(r.x, r.handle, side_lanes="some")
            by_pick = ep.dispatch(x, ids, layout="expert_major")
            with pytest.raises(weft.InvalidArgument, match="'all' with layout 'expert_major'"):
                ep.combine(by_pick.x, by_pick.handle, side=by_pick.topk_weights, side_lanes="all")
        with weft.ExpertParallel(
            comm, num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=MOST, node_ranks=1
        ) as ep:
            r = ep.dispatch(x, ids)
            with pytest.raises(weft.Unsupported, match="side values of all ranks between nodes"):
                ep.combine(r.x, r.handle, side=r.topk_weights, side_lanes="all")

    weft.spawn(work, 2, device="cpu", isolation="thread")
    assert weft.supports(layout="rank_major", side_lanes="all")
    assert not weft.supports(layout="masked", side_lanes="all")
