"""Guards against the trainer's loop of docs/elasticity.md: weights that are old, sums of them, or a rank that waits."""

from __future__ import annotations

import torch

import weft

VERSIONS, TRAINER = 3, 1


def _loop(comm: weft.Communicator) -> list[float]:
    """Factors that this rank's tokens came back with, of each version."""
    weights, seen = torch.ones(2), []
    with weft.ExpertParallel(comm, num_experts=6, top_k=1, hidden=16, max_tokens_per_rank=4) as ep:

        def play() -> float:
            x = torch.ones(4, 16, dtype=torch.bfloat16)
            ids = torch.arange(4).unsqueeze(1)  # of both ranks
            r = ep.dispatch(x, ids, torch.ones(4, 1))
            factor = weights[0].to(torch.bfloat16)  # every expert's
            total = ep.combine(r.x * factor, r.handle)
            assert (total == total[0, 0]).all()
            return float(total[0, 0])

        for version in range(VERSIONS):
            assert comm.boundary() is None
            seen.append(play())
            comm.sleep()
            if comm.rank == TRAINER:
                weights += version + 1
                comm.share("policy", weights)
            comm.gather(b"trained")
            if comm.rank != TRAINER:
                comm.fetch("policy", rank=TRAINER, out=weights)
            comm.wake()
        return seen


def test_each_version_is_played_with_the_weights_of_the_one_before() -> None:
    assert weft.spawn(_loop, 2, device="cpu", max_ranks=3) == [[1.0, 2.0, 4.0]] * 2
