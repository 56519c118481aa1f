"""Gradients of random cases for test_property: leaves, what a rank does with them, and the comparison."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from property_cases import DTYPES, Case, RankCall, build, compare_tensor, pair
from torch import Tensor

import weft
from pool import RankState
from weft import reference

Gradients = dict[str, Tensor | None]  # by name of the leaf


@dataclass
class RankGradients:
    """Leaves and gradients of results that one rank gives, and the gradients that come back."""

    expert_parallel: dict[str, Any]
    call: RankCall
    grad_rows: Tensor
    grad_weights: Tensor
    grad_y: Tensor


def build_gradients(case: Case) -> tuple[list[RankGradients], list[Gradients]]:
    """For the first call of a case, which must have plain rows, weights, and outputs of its dtype."""
    plans, (expected,) = build(case)
    call, routing = case.calls[0], expected.dispatched[0].routing
    generator = torch.Generator().manual_seed(call.seed + 1)
    dtype = DTYPES[case.dtype]

    def normal(shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    rank_calls = [plan.calls[0] for plan in plans]
    for rank_call in rank_calls:  # finite numbers: the sums of weight gradients are compared with a tolerance
        rank_call.output = normal(rank_call.output.shape, dtype)
    grad_ys = [normal((n, case.hidden), dtype) for n in call.tokens]
    grad_rows = [normal(rank_call.output.shape, dtype) for rank_call in rank_calls]
    grad_weights = [normal(w.shape) for w in routing.weights]
    combined = reference.combine_backward(grad_ys, [c.output for c in rank_calls], routing, weighted=call.weighted)
    totals = [a + b for a, b in zip(combined.weights, grad_weights, strict=True)]
    sum_domain = case.node_ranks or case.sum_domain
    grad_x, grad_topk = reference.dispatch_backward(grad_rows, routing, totals, sum_domain=sum_domain)
    given = [
        RankGradients(
            expert_parallel=plans[rank].expert_parallel,
            call=rank_calls[rank],
            grad_rows=grad_rows[rank],
            grad_weights=grad_weights[rank],
            grad_y=grad_ys[rank],
        )
        for rank in range(case.num_ranks)
    ]
    back: list[Gradients] = [
        {
            "x": grad_x[rank],
            "topk_weights": grad_topk[rank],
            "output": combined.outputs[rank],
        }
        for rank in range(case.num_ranks)
    ]
    return given, back


def run_gradients(state: RankState, given: RankGradients) -> Gradients:
    """Forward, backward of everything at once, and the gradients of the leaves."""
    call = given.call
    assert isinstance(call.x, Tensor)
    assert call.topk_weights is not None
    ep = weft.ExpertParallel(state.comm, **given.expert_parallel)
    leaves = {"x": call.x, "topk_weights": call.topk_weights, "output": call.output}
    for leaf in leaves.values():
        leaf.requires_grad_()
    r = ep.dispatch(call.x, call.topk_idx, call.topk_weights, **call.dispatch)
    with contextlib.suppress(weft.InvalidArgument, weft.CapacityExceeded):  # looked at by the other tests
        ep.check()
    y, _ = pair(ep.combine(call.output, r.handle, weighted=call.weighted, side=call.side, **call.later))
    assert isinstance(r.x, Tensor)
    roots, gradients = [y, r.x, r.topk_weights], [given.grad_y, given.grad_rows, given.grad_weights]
    torch.autograd.backward(roots, gradients)
    ep.close()
    return {name: leaf.grad for name, leaf in leaves.items()}


def compare_gradients(
    case: Case,
    given: list[RankGradients],
    expected: list[Gradients],
    got: list[Gradients],
) -> list[str]:
    """Bit for bit, topk_weights to 1e-5 relative of the sum's terms; outputs where a pick is."""
    problems = []
    for rank in range(case.num_ranks):
        for name in ("x", "topk_weights", "output"):
            at, want, have = f"rank {rank}: gradient of {name}", expected[rank][name], got[rank][name]
            if want is None and have is None:
                continue
            if want is None or have is None or name == "x":
                problems += compare_tensor(at, want, have)
            elif name == "topk_weights":
                scale = max(1.0, case.hidden**0.5)
                if want.shape != have.shape or not torch.allclose(want, have, rtol=1e-5, atol=1e-5 * scale):
                    problems.append(f"{at}: expected {want}, got {have}")
            else:
                used = given[rank].call.used_rows
                problems += compare_tensor(at, want[used], have[used])
    return problems
