"""Guards against a table of sources that names another rank, token or pick than the one whose row it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from weft import reference

CALLS: dict[str, dict[str, Any]] = {
    "rank_major": {},
    "rank_major with capacity": {"capacity": 23},
    "expert_major": {"layout": "expert_major", "alignment": 4},
    "expert_major with capacity": {"layout": "expert_major", "capacity": 31},
    "masked": {"layout": "masked", "capacity": 9},
}


def inputs(num_ranks: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator(device="cpu").manual_seed(num_ranks)
    xs, ids = [], []
    for rank in range(num_ranks):
        num_tokens = 0 if rank == 2 else 17 - 3 * rank
        xs.append(torch.randn((num_tokens, 32), generator=generator, dtype=torch.float32, device="cpu").bfloat16())
        picked = torch.randint(-1, 3 * num_ranks, (num_tokens, 4), generator=generator, dtype=torch.int64, device="cpu")
        ids.append(picked)  # a token may pick an expert twice
    return xs, ids


def against_the_reference(comm: weft.Communicator, heap_bytes: int | None, node_ranks: int | None) -> None:
    xs, ids = inputs(comm.num_ranks)
    x, idx = xs[comm.rank], ids[comm.rank]
    shape: dict[str, Any] = {"num_experts": 3 * comm.num_ranks, "top_k": 4, "hidden": 32, "max_tokens_per_rank": 17}
    with weft.ExpertParallel(comm, **shape, heap_bytes=heap_bytes, node_ranks=node_ranks) as ep:
        kept = []
        for name, options in CALLS.items():
            wanted = reference.dispatch(xs, ids, num_experts=3 * comm.num_ranks, **options)
            kept.append((name, reference.sources(wanted)[comm.rank], ep.dispatch(x, idx, **options)))
        for name, wanted_sources, r in kept:  # after the calls that came later
            again = ep.dispatch(x, handle=r.handle)
            for found in (r.sources(), again.sources()):
                for mine, right in zip(found, wanted_sources, strict=True):
                    assert (mine is None) == (right is None), name
                    assert mine is None or torch.equal(mine, right), (name, mine, right)


@pytest.mark.parametrize("heap_bytes", [None, 0])
@pytest.mark.parametrize(("num_ranks", "node_ranks"), [(1, None), (3, None), (4, None), (5, 3)])
def test_sources_are_those_of_the_reference(num_ranks: int, node_ranks: int | None, heap_bytes: int | None) -> None:
    weft.spawn(against_the_reference, num_ranks, (heap_bytes, node_ranks), device="cpu")


def test_rows_say_where_they_came_from() -> None:
    """Without the reference: a row's values name its token."""

    def body(comm: weft.Communicator) -> None:
        x = torch.arange(8, dtype=torch.float32, device="cpu")[:, None].expand(-1, 16) + 100 * comm.rank
        idx = torch.tensor([[token % 4, 3] for token in range(8)], dtype=torch.int64, device="cpu")
        with weft.ExpertParallel(
            comm, num_experts=4, top_k=2, hidden=16, max_tokens_per_rank=8, dtype=torch.float32
        ) as ep:
            for layout in ("rank_major", "expert_major"):
                r = ep.dispatch(x.contiguous(), idx, layout=layout)
                sources = r.sources()
                assert torch.equal(100 * sources.rank + sources.token, r.x[:, 0].to(torch.int32))
                if sources.pick is not None:
                    expert = torch.bucketize(torch.arange(len(r.x), device="cpu"), r.offsets[1:], right=True)
                    assert torch.equal(torch.where(sources.pick == 1, 3, sources.token % 4), expert + 2 * comm.rank)

    weft.spawn(body, 2, device="cpu")
