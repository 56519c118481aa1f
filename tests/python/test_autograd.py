"""Guards against wrong gradients, and against a backward that one rank skips while the others wait in it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft
from weft.call.records import Sent

LAYOUTS: dict[str, dict[str, Any]] = {
    "rank_major": {"layout": "rank_major"},
    "expert_major": {"layout": "expert_major", "alignment": 4},
    "masked": {"layout": "masked", "capacity": 40},
    "rank_major_capacity": {"layout": "rank_major", "capacity": 40},
    "expert_major_capacity": {"layout": "expert_major", "capacity": 80},
}
NUM_RANKS, NUM_EXPERTS, TOP_K, HIDDEN = 4, 8, 2, 16
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def make_ep(comm: weft.Communicator, dtype: torch.dtype = torch.float32) -> weft.ExpertParallel:
    return weft.ExpertParallel(
        comm, num_experts=NUM_EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=64, dtype=dtype
    )


class Inputs:
    """One rank's tokens; a leaf for every input that has a gradient."""

    def __init__(self, rank: int, num_tokens: int | None = None) -> None:
        generator = torch.Generator().manual_seed(rank)
        num_tokens = 5 + rank if num_tokens is None else num_tokens
        self.x = torch.randn(num_tokens, HIDDEN, generator=generator).requires_grad_()
        self.topk_idx = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(TOP_K).indices
        self.topk_weights = torch.rand(num_tokens, TOP_K, generator=generator).requires_grad_()
        self.bias = torch.randn(HIDDEN, generator=generator).requires_grad_()

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.topk_weights, self.bias]


def expert_scales() -> Tensor:
    return torch.linspace(0.5, 2.0, NUM_EXPERTS)


def run_experts(r: weft.Dispatched, rank: int) -> Tensor:
    """Expert e is tanh(scale_e * x): different for each, the same in every layout."""
    num_local = NUM_EXPERTS // NUM_RANKS
    scales = expert_scales()[rank * num_local : (rank + 1) * num_local]
    assert isinstance(r.x, Tensor)
    if r.handle.layout == "masked":
        return torch.tanh(r.x * scales[:, None, None])
    if r.handle.layout == "expert_major":
        ends = r.offsets[1:].tolist()
        row_experts = [sum(row >= end for end in ends) for row in range(len(r.x))]
        return torch.tanh(r.x * torch.tensor([scales[min(e, num_local - 1)] for e in row_experts])[:, None])
    assert r.topk_idx is not None
    y = torch.zeros_like(r.x)
    for k in range(TOP_K):
        chosen = scales[r.topk_idx[:, k].clamp(min=0)][:, None]
        y = y + torch.tanh(r.x * chosen) * (r.topk_weights[:, k] * (r.topk_idx[:, k] >= 0))[:, None]
    return y


def plain(inputs: Inputs) -> Tensor:
    """The same without Weft."""
    scales = expert_scales()[inputs.topk_idx]
    rows = torch.tanh(inputs.x[:, None, :] * scales[..., None]) * inputs.topk_weights[..., None]
    return rows.sum(1) + inputs.bias


def gradients(y: Tensor, inputs: Inputs) -> list[Tensor]:
    return list(torch.autograd.grad(y.square().sum(), inputs.leaves))


# ---- right values


@each_layout
def test_gradients_are_those_of_plain_torch(layout: str) -> None:
    def rank(comm: weft.Communicator) -> None:
        with make_ep(comm) as ep:
            for num_tokens in (None, 0 if comm.rank == 1 else 3):
                inputs = Inputs(comm.rank, num_tokens)
                r = ep.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, **LAYOUTS[layout])
                y = ep.combine(run_experts(r, comm.rank), r.handle, bias=inputs.bias)
                expected = plain(inputs)
                torch.testing.assert_close(y, expected)
                for got, want in zip(gradients(y, inputs), gradients(expected, inputs), strict=True):
                    torch.testing.assert_close(got, want)

    weft.spawn(rank, NUM_RANKS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_narrow_rows(dtype: torch.dtype) -> None:
    def rank(comm: weft.Communicator) -> None:
        with make_ep(comm, dtype) as ep:
            inputs = Inputs(comm.rank)
            x = inputs.x.detach().to(dtype).requires_grad_()
            r = ep.dispatch(x, inputs.topk_idx, inputs.topk_weights, layout="expert_major")
            y = ep.combine(r.x * 2, r.handle)
            y.sum().backward()
            weights = inputs.topk_weights.sum(1, keepdim=True).expand_as(x)
            assert x.grad is not None
            assert x.grad.dtype == dtype
            torch.testing.assert_close(x.grad.float(), 2 * weights, rtol=0.02, atol=0.02)
            want = 2 * x.detach().float().sum(1, keepdim=True).expand(-1, TOP_K)
            torch.testing.assert_close(inputs.topk_weights.grad, want, rtol=1e-5, atol=1e-5)

    weft.spawn(rank, NUM_RANKS)


def test_weights_have_gradients_where_rows_have_none() -> None:
    """Quantised rows, and rows that are data: only the gate learns."""

    def rank(comm: weft.Communicator) -> None:
        with make_ep(comm) as ep:
            inputs = Inputs(comm.rank)
            x = inputs.x.detach()
            for options in ({"quantize": "fp8"}, {}):
                r = ep.dispatch(x, inputs.topk_idx, inputs.topk_weights, layout="expert_major", **options)
                rows = r.x.data.float() * r.x.scales if isinstance(r.x, weft.Quantized) else r.x
                assert not rows.requires_grad
                (grad,) = torch.autograd.grad(ep.combine(rows, r.handle).sum(), inputs.topk_weights)
                want = x.sum(1, keepdim=True).expand(-1, TOP_K)
                torch.testing.assert_close(grad, want, rtol=0.1, atol=0.3 if options else 1e-5)

    weft.spawn(rank, NUM_RANKS)


def test_repeated_dispatch_and_shared_handle() -> None:
    def rank(comm: weft.Communicator) -> None:
        with make_ep(comm) as ep:
            inputs, other = Inputs(comm.rank), torch.randn(5 + comm.rank, HIDDEN).requires_grad_()
            first = ep.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, layout="expert_major")
            second = ep.dispatch(other, handle=first.handle)
            y = ep.combine(first.x * 3, first.handle) + ep.combine(first.x, first.handle, weighted=False)
            y = y + ep.combine(second.x * 5, second.handle)
            y.sum().backward()
            total = inputs.topk_weights.detach().sum(1, keepdim=True).expand(-1, HIDDEN)
            torch.testing.assert_close(inputs.x.grad, 3 * total + 2)
            torch.testing.assert_close(other.grad, 5 * total)
            want = (3 * inputs.x + 5 * other).detach().sum(1, keepdim=True).expand(-1, TOP_K)
            torch.testing.assert_close(inputs.topk_weights.grad, want)

    weft.spawn(rank, NUM_RANKS)


def test_rows_without_data_do_not_poison_gradients() -> None:
    """With capacity the tail of a reused block holds anything; NaN * 0 in a weight gradient would be NaN."""

    def rank(comm: weft.Communicator) -> None:
        with make_ep(comm) as ep:
            expert = nn.Linear(HIDDEN, HIDDEN)
            for layout in ("masked", "expert_major_capacity", "rank_major_capacity"):
                inputs = Inputs(comm.rank)
                with torch.no_grad():
                    dirty = ep.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, **LAYOUTS[layout])
                    assert isinstance(dirty.x, Tensor)
                    dirty.x.fill_(float("nan"))
                    dirty.topk_weights.fill_(float("nan"))
                    del dirty
                r = ep.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, **LAYOUTS[layout])
                h = expert(r.x)
                if r.handle.layout == "rank_major":
                    h = h * r.topk_weights.sum(1, keepdim=True)
                ep.combine(h, r.handle).sum().backward()
                for tensor in (*expert.parameters(), inputs.x, inputs.topk_weights):
                    assert tensor.grad is not None
                    assert tensor.grad.isfinite().all()

    weft.spawn(rank, NUM_RANKS)


def test_nothing_is_recorded_without_gradients(ep: weft.ExpertParallel) -> None:
    inputs = Inputs(0)
    with torch.no_grad():
        r = ep.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
    assert not r.x.requires_grad
    r = ep.dispatch(inputs.x.detach(), inputs.topk_idx)
    assert r.handle.sent is None
    assert not ep.combine(r.x, r.handle).requires_grad
    y = ep.combine(r.x, r.handle, bias=inputs.bias)
    y.sum().backward()
    assert torch.equal(inputs.bias.grad, torch.full((HIDDEN,), 5.0))


def test_no_double_backward(ep: weft.ExpertParallel) -> None:
    inputs = Inputs(0)
    r = ep.dispatch(inputs.x, inputs.topk_idx)
    (grad,) = torch.autograd.grad(ep.combine(r.x.square(), r.handle).sum(), inputs.x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_expert_output_changed_in_place(ep: weft.ExpertParallel) -> None:
    inputs = Inputs(0)
    r = ep.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, layout="expert_major")
    h = r.x * 2
    y = ep.combine(h, r.handle)
    h.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- every rank takes part in every backward


class Model(nn.Module):
    """Three MoE layers with a gate, shared weights on all ranks; `variant` says what rank 2 does in layer 1."""

    def __init__(self, ep: weft.ExpertParallel, rank: int, layout: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.gate = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, NUM_EXPERTS)
        self.experts = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(3)])
        self.ep, self.rank, self.layout = ep, rank, layout

    def layer(self, x: Tensor, number: int, variant: str) -> tuple[Tensor, Tensor]:
        scores, topk_idx = torch.softmax(self.gate(x), -1).topk(TOP_K)
        r = self.ep.dispatch(x, topk_idx, scores, **LAYOUTS[self.layout])
        is_odd_one = number == 1 and self.rank == 2
        if is_odd_one and variant == "skipped":
            h = torch.zeros_like(r.x)
        elif is_odd_one and variant == "skipped_in_effect":
            h = self.experts[number](r.x) * 0
        else:
            h = torch.tanh(self.experts[number](r.x))
            if r.handle.layout == "rank_major":
                h = h * r.topk_weights.sum(1, keepdim=True)
        aux = h.square().sum() * 0.1 if variant.startswith("aux") else h.new_zeros(())
        y = self.ep.combine(h, r.handle)
        if is_odd_one and variant.endswith("unused"):
            return x, aux
        return x + (0 * y if is_odd_one and variant.endswith("times_zero") else y), aux

    def forward(self, x: Tensor, variant: str) -> Tensor:
        h, total = self.stem(x), x.new_zeros(())
        for number in range(3):
            h, aux = self.layer(h, number, variant)
            total = total + aux
        return h.square().sum() + total


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
@pytest.mark.parametrize(
    ("variant", "same_as"),
    [("unused", "times_zero"), ("aux_unused", "aux_times_zero"), ("skipped", "skipped_in_effect")],
)
def test_one_rank_does_otherwise(layout: str, variant: str, same_as: str) -> None:
    def rank(comm: weft.Communicator) -> None:
        with make_ep(comm) as ep:
            model = Model(ep, comm.rank, layout)
            found: list[list[Tensor | None]] = []
            for each in (variant, same_as):
                model.zero_grad(set_to_none=True)
                x = torch.randn(5 + comm.rank, HIDDEN, generator=torch.Generator().manual_seed(comm.rank))
                x.requires_grad_()
                model(x, each).backward()
                found.append([x.grad, *(parameter.grad for parameter in model.parameters())])
            for got, want in zip(*found, strict=True):
                if got is None:  # skipped experts have no gradient, multiplied by zero they have a zero one
                    got = torch.zeros_like(want)
                torch.testing.assert_close(got, want)
            gc.collect()
            assert not ep.calls.unused, "the unused graph goes once its backward has run"

    weft.spawn(rank, NUM_RANKS)


def test_two_unused_results_in_a_row_and_several_steps() -> None:
    def rank(comm: weft.Communicator) -> None:
        with make_ep(comm) as ep:
            torch.manual_seed(0)
            experts = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(4)])
            topk_idx = Inputs(comm.rank).topk_idx
            for step in range(3):
                experts.zero_grad()
                h = torch.ones(len(topk_idx), HIDDEN).requires_grad_() * 1
                for number, expert in enumerate(experts):
                    r = ep.dispatch(h, topk_idx, layout="expert_major")
                    y = ep.combine(expert(r.x), r.handle)
                    if not (comm.rank == step and number in (1, 2)):
                        h = h + y
                h.sum().backward()
                assert all(parameter.grad is not None for parameter in experts.parameters())
                gc.collect()
                assert not ep.calls.unused

    weft.spawn(rank, NUM_RANKS)


def test_no_rows_on_a_rank_whose_experts_are_left_out() -> None:
    def rank(comm: weft.Communicator) -> None:
        with make_ep(comm) as ep:
            inputs = Inputs(comm.rank)
            topk_idx = inputs.topk_idx % 2  # everything to rank 0
            expert = nn.Linear(HIDDEN, HIDDEN)
            r = ep.dispatch(inputs.x, topk_idx, inputs.topk_weights, layout="expert_major")
            h = expert(r.x) if int(r.num_rows) else torch.empty(0, HIDDEN)
            ep.combine(h, r.handle).sum().backward()
            assert inputs.x.grad is not None
            assert inputs.x.grad.abs().sum() > 0
            assert (expert.weight.grad is not None) == (comm.rank == 0)

    weft.spawn(rank, NUM_RANKS)


def test_retain_graph_runs_both_backwards() -> None:
    def rank(comm: weft.Communicator) -> None:
        with make_ep(comm) as ep:
            inputs = Inputs(comm.rank)
            r = ep.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, layout="expert_major")
            loss = ep.combine(torch.tanh(r.x), r.handle).sum()
            loss.backward(retain_graph=True)
            once = [leaf.grad.clone() for leaf in inputs.leaves[:2] if leaf.grad is not None]
            loss.backward()
            for leaf, grad in zip(inputs.leaves, once, strict=False):
                torch.testing.assert_close(leaf.grad, 2 * grad)

    weft.spawn(rank, NUM_RANKS)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layer(use_reentrant: bool) -> None:
    def rank(comm: weft.Communicator) -> None:
        with make_ep(comm) as ep:
            torch.manual_seed(0)
            expert = nn.Linear(HIDDEN, HIDDEN)

            def layer(x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
                r = ep.dispatch(x, topk_idx, topk_weights, layout="expert_major")
                return x + ep.combine(torch.tanh(expert(r.x)), r.handle)

            found = []
            for is_checkpointed in (False, True):
                expert.zero_grad()
                inputs = Inputs(comm.rank)
                given = (inputs.x, inputs.topk_idx, inputs.topk_weights)
                y = checkpoint(layer, *given, use_reentrant=use_reentrant) if is_checkpointed else layer(*given)
                y.square().sum().backward()
                found.append([inputs.x.grad, inputs.topk_weights.grad, expert.weight.grad.clone()])
            for left, right in zip(*found, strict=True):
                torch.testing.assert_close(left, right)

    weft.spawn(rank, 2)


def test_what_a_rebuild_has_overtaken_has_no_backward() -> None:
    """A forward that lost a peer leaves records behind; the step is repeated with the same x."""

    def rank(comm: weft.Communicator) -> Tensor | None:
        ep, expert = make_ep(comm), nn.Linear(HIDDEN, HIDDEN)
        nn.init.eye_(expert.weight)
        inputs = Inputs(comm.rank)

        def layer(x: Tensor) -> Tensor:
            r = ep.dispatch(x, inputs.topk_idx, inputs.topk_weights, layout="expert_major")
            return ep.combine(expert(r.x), r.handle)

        y = inputs.x + layer(inputs.x)
        if comm.rank == NUM_RANKS - 1:
            comm.close()
            return None
        try:
            layer(y)
            raise AssertionError("nobody is lost")
        except weft.PeerLost:  # whose traceback holds the graph
            comm.rebuild(range(NUM_RANKS - 1))
        y = inputs.x + layer(inputs.x)
        (y + layer(y)).sum().backward()
        return inputs.x.grad

    for grad in weft.spawn(rank, NUM_RANKS)[:-1]:
        assert grad is not None
        assert bool(torch.isfinite(grad).all())


# ---- nothing piles up


def count_records() -> int:
    gc.collect()
    return sum(type(each) is Sent for each in gc.get_objects())


def test_forwards_without_a_backward_do_not_pile_up(ep: weft.ExpertParallel) -> None:
    inputs, expert = Inputs(0), nn.Linear(HIDDEN, HIDDEN)
    for _ in range(20):
        r = ep.dispatch(inputs.x * 1, inputs.topk_idx, inputs.topk_weights, layout="expert_major")
        ep.combine(expert(r.x), r.handle)
        del r
    assert count_records() <= ep.calls.MAX_UNUSED
    ep.close()
    assert count_records() == 0
    assert not inputs.x._backward_hooks


def test_training_steps_leave_nothing(ep: weft.ExpertParallel) -> None:
    inputs, expert = Inputs(0), nn.Linear(HIDDEN, HIDDEN)
    rows = None
    for _ in range(5):
        r = ep.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, layout="expert_major")
        rows = weakref.ref(r.x)
        ep.combine(expert(r.x), r.handle).sum().backward()
        del r
    assert count_records() == 0
    assert rows is not None
    assert rows() is None
    assert ep.stats()["windows"][0]["heap_used"] == 0
