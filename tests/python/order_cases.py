"""Combines in each order on a rank of GPUs, emulated ones too, compared bit for bit with the reference."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from test_sum_orders import HIDDEN, NUM_EXPERTS, NUM_TOKENS, TOP_K, Job

import weft
from pool import RankState
from weft import reference

__all__ = ["checked_orders"]


def checked_orders(state: RankState, dtype: torch.dtype) -> None:
    """Of every layout, by both kinds of kernels; with bias and side values, and without; staged."""
    comm = state.comm
    job, rank, device = Job(comm.num_ranks, dtype), comm.rank, comm.device
    most = NUM_TOKENS // comm.num_ranks
    mine = [each[rank].to(device) for each in (job.xs, job.ids, job.weights, job.biases, job.owner_weights)]
    x, ids, weights, bias, owner_weights = mine
    with weft.ExpertParallel(
        comm, num_experts=NUM_EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=NUM_TOKENS * TOP_K, dtype=dtype
    ) as ep:
        for layout, mode in itertools.product(("rank_major", "expert_major", "masked"), ("throughput", "latency")):
            results = job.dispatched(layout)
            outputs = [job.outputs(results, each) for each in range(comm.num_ranks)]
            sides = [
                torch.full(each.topk_weights.shape, 1.0 + number, dtype=torch.float32, device="cpu")
                for number, each in enumerate(results)
            ]
            rows: dict[str, Any] = {"capacity": NUM_TOKENS * TOP_K} if layout == "masked" else {}
            r = ep.dispatch(x, ids, weights, layout=layout, mode=mode, max_tokens=most, **rows)
            y, side = outputs[rank].to(device), sides[rank].to(device)
            calls: list[dict[str, Any]] = [{"order": "last_pick"}]
            if layout != "rank_major":
                calls += [{"order": "pick", "weighted": False}, {"order": "pick", "owner_weights": job.owner_weights}]
            for call, has_more in itertools.product(calls, (False, True)):
                options = dict(call)
                if options.pop("owner_weights", None) is not None:
                    options["weights"] = owner_weights
                biases, given = (job.biases, sides) if has_more else (None, None)
                wanted = reference.combine(outputs, results, biases=biases, sides=given, **call)[rank]
                if has_more:
                    options |= {"bias": bias, "side": side}
                found = ep.combine(y, r.handle, mode=mode, **options)
                pairs = zip(found, wanted, strict=True) if has_more else [(found, wanted)]
                for seen, want in pairs:
                    assert torch.equal(seen.cpu(), want), (layout, mode, call)
                if mode == "latency" and not has_more:
                    staged = ep.combine(y, r.handle, staged=True, **options).wait()
                    assert torch.equal(staged.cpu(), wanted), (layout, "staged", call)
            if layout == "rank_major":
                continue
            gone, left = job.gone(rank, ids.dtype if mode == "latency" else torch.int32)
            wanted = reference.combine(outputs, results, order="pick", owner_weights=left)[rank]
            of_owner = {"weights": gone[1].to(device), "topk_idx": gone[0].to(device)}
            seen = ep.combine(y, r.handle, mode=mode, order="pick", **of_owner)
            assert torch.equal(seen.cpu(), wanted), (layout, mode, "picks that have gone")
            if mode == "latency":
                half = ep.combine(y, r.handle, order="pick", staged=True, **of_owner)
                of_owner["topk_idx"].fill_(-1)  # the half that receives reads what was given before
                assert torch.equal(half.wait().cpu(), wanted), (layout, "staged", "picks that have gone")
        ep.check()
