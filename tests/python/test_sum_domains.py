"""Guards against sums by domain whose bits are not those of the written order, and domains that change sums where there
are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_sum_orders import HIDDEN, NUM_EXPERTS, NUM_TOKENS, TOP_K, Job, combined
from torch import Tensor

import weft
from weft import reference

LAYOUTS = ("rank_major", "expert_major", "masked")
ROUNDINGS = [(None, torch.bfloat16), (None, torch.float32), ("fp8", torch.bfloat16)]


def written_down(job: Job, sum_domain: int, order: str, wire: str | None) -> Tensor:
    """Token by token: picks of a rank by k, ranks of a domain, domains."""
    ids, weights, bias = torch.cat(job.ids), torch.cat(job.weights), torch.cat(job.biases).float()
    num_local = NUM_EXPERTS // job.num_ranks
    wanted = torch.zeros_like(bias)
    for token in range(NUM_TOKENS):
        of_rank: dict[int, Tensor] = {}
        last: dict[int, int] = {}
        for k in range(TOP_K):
            if ids[token, k] >= 0:
                rank = int(ids[token, k]) // num_local
                product = weights[token, k] * job.rows[token, k].float()
                of_rank[rank] = of_rank.get(rank, torch.zeros(HIDDEN, device="cpu", dtype=torch.float32)) + product
                last[rank] = k
        total = torch.zeros(HIDDEN, device="cpu", dtype=torch.float32)
        if order == "last_pick":
            total = total + bias[token]
        for first in range(0, job.num_ranks, sum_domain):
            ranks = [rank for rank in range(first, first + sum_domain) if rank in of_rank]
            if order == "last_pick":
                ranks.sort(key=lambda rank: last[rank])
            domain = torch.zeros_like(total)
            for rank in ranks:
                domain = domain + of_rank[rank].to(job.dtype).float()
            if ranks:
                total = total + (reference.through_fp8(domain) if wire == "fp8" else domain.to(job.dtype).float())
        wanted[token] = total if order == "last_pick" else total + bias[token]
    return wanted.to(job.dtype)


@pytest.mark.parametrize(("wire", "dtype"), ROUNDINGS)
@pytest.mark.parametrize("order", ["rank", "last_pick"])
def test_the_reference_is_what_is_written_down(order: str, wire: str | None, dtype: torch.dtype) -> None:
    for num_ranks, sum_domain in ((4, 2), (8, 2), (8, 3), (8, 4)):
        job = Job(num_ranks, dtype)
        options: dict[str, Any] = {"order": order, "wire": wire, "biases": job.biases}
        flat = combined(job, "expert_major", **options)
        for layout in ("expert_major", "masked"):
            found = combined(job, layout, **options, sum_domain=sum_domain)
            assert torch.equal(found, written_down(job, sum_domain, order, wire)), (num_ranks, sum_domain, layout)
            assert not torch.equal(found, flat), "or the values show nothing"


@pytest.mark.parametrize(("wire", "dtype"), ROUNDINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_domains_of_one_rank_or_of_all_change_nothing(layout: str, wire: str | None, dtype: torch.dtype) -> None:
    for num_ranks in (1, 2, 4, 8):
        job = Job(num_ranks, dtype)
        for order in ("rank", "last_pick"):
            flat = combined(job, layout, order=order, wire=wire, biases=job.biases)
            for sum_domain in (1, num_ranks):
                found = combined(job, layout, order=order, wire=wire, biases=job.biases, sum_domain=sum_domain)
                assert torch.equal(found, flat), (num_ranks, sum_domain, order)


def engine(comm: weft.Communicator, dtype: torch.dtype, heap_bytes: int | None) -> None:
    """Against the reference, along one dispatch by layout."""
    job, rank = Job(comm.num_ranks, dtype), comm.rank
    for sum_domain in {1, 2, 3, comm.num_ranks}:
        with weft.ExpertParallel(
            comm, num_experts=NUM_EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=NUM_TOKENS, dtype=dtype,
            heap_bytes=heap_bytes, sum_domain=sum_domain,
        ) as ep:  # fmt: skip
            for layout in LAYOUTS:
                results = job.dispatched(layout)
                outputs = [job.outputs(results, each) for each in range(comm.num_ranks)]
                options: dict[str, Any] = {"capacity": NUM_TOKENS * TOP_K} if layout == "masked" else {}
                r = ep.dispatch(job.xs[rank], job.ids[rank], job.weights[rank], layout=layout, **options)
                sides = [torch.full_like(each.topk_weights, 1.0 + number) for number, each in enumerate(results)]
                for order in ("rank", "last_pick") + (() if layout == "rank_major" else ("pick",)):
                    has_more = order == "last_pick"
                    biases, given = (job.biases, sides) if has_more else (None, None)
                    wanted = reference.combine(
                        outputs, results, biases=biases, sides=given, order=order, sum_domain=sum_domain
                    )[rank]  # type: ignore[call-overload]
                    y = ep.combine(
                        outputs[rank], r.handle, bias=job.biases[rank] if has_more else None,
                        side=sides[rank] if has_more else None, order=order,
                    )  # fmt: skip
                    if has_more:
                        assert torch.equal(y[1], wanted[1]), (layout, order)
                        y, wanted = y[0], wanted[0]
                    assert torch.equal(y, wanted), (sum_domain, layout, order)


@pytest.mark.parametrize("heap_bytes", [None, 0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_engine_has_the_bits_of_the_reference(dtype: torch.dtype, heap_bytes: int | None) -> None:
    weft.spawn(engine, 4, (dtype, heap_bytes), device="cpu")


def compiled(comm: weft.Communicator) -> None:
    """In a compiled call, and its gradient: both are the object's sums."""
    job, rank = Job(comm.num_ranks, torch.bfloat16), comm.rank
    results = job.dispatched("expert_major")
    outputs = [job.outputs(results, each) for each in range(comm.num_ranks)]
    with weft.ExpertParallel(
        comm, num_experts=NUM_EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=NUM_TOKENS, sum_domain=2
    ) as ep:

        @torch.compile(backend="eager")
        def layer(x: Tensor, ids: Tensor, weights: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
            r = ep.dispatch(x, ids, weights, layout="expert_major")
            return ep.combine(output, r.handle), r.x

        x = job.xs[rank].requires_grad_()
        y, rows = layer(x, job.ids[rank], job.weights[rank], outputs[rank])
        assert torch.equal(y, reference.combine(outputs, results, sum_domain=2)[rank])
        rows.backward(outputs[rank])
        assert x.grad is not None
        assert torch.equal(x.grad, reference.dispatch_backward(outputs, results, sum_domain=2)[0][rank])


def test_compiled_calls_and_gradients() -> None:
    weft.spawn(compiled, 4, device="cpu")


def refusals(comm: weft.Communicator) -> None:
    shape: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden": 32, "max_tokens_per_rank": 3}
    for value in (0, -1, 4, 1.0, True, "2"):
        with pytest.raises(weft.InvalidArgument, match=r"sum_domain is .*allowed: None, or 1 to the number of ranks"):
            weft.ExpertParallel(comm, **shape, sum_domain=value)
    with pytest.raises(weft.InvalidArgument, match="sum_domain"):  # on every rank
        weft.ExpertParallel(comm, **shape, sum_domain=2 if comm.rank else None)


def test_what_is_no_domain_is_refused() -> None:
    weft.spawn(refusals, 2, device="cpu")
    assert weft.supports(num_ranks=4, num_experts=8, sum_domain=3)
    assert not weft.supports(num_ranks=4, num_experts=8, sum_domain=5)
    assert not weft.supports(sum_domain=0)
