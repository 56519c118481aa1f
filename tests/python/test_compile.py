"""Guards against graph breaks, operators that the compiler drops or swaps, and wrong gradients of compiled layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from test_autograd import HIDDEN, LAYOUTS, NUM_EXPERTS, TOP_K, Inputs, make_ep
from torch import Tensor, nn

import weft
from weft.call import ops
from weft.call.spec import Call


class Layer(nn.Module):
    """Gate, dispatch, experts, combine: what a user would compile."""

    def __init__(self, ep: weft.ExpertParallel, layout: str) -> None:
        super().__init__()
        self.ep, self.layout = ep, layout
        torch.manual_seed(0)
        self.gate, self.expert = nn.Linear(HIDDEN, NUM_EXPERTS), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        topk_weights, topk_idx = torch.softmax(self.gate(x), -1).topk(TOP_K)
        r = self.ep.dispatch(x, topk_idx, topk_weights, **LAYOUTS[self.layout])
        h = torch.tanh(self.expert(r.x))
        if self.layout.startswith("rank_major"):
            h = h * r.topk_weights.sum(1, keepdim=True)
        y: Tensor = self.ep.combine(h, r.handle)
        return x + y

    def run(self, call: Any, x: Tensor) -> list[Tensor]:
        self.zero_grad()
        x = x.clone().requires_grad_()
        y = call(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(parameter.grad.clone() for parameter in self.parameters())]


def compare(layer: Layer, backend: Any, x: Tensor) -> None:
    torch._dynamo.reset()
    expected = layer.run(layer, x)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for got, want in zip(layer.run(compiled, x), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected[0], rtol=1e-4, atol=1e-5)


# ---- operators


def arguments(ep: weft.ExpertParallel, layout: str, **changes: Any) -> dict[str, Any]:
    """Arguments of the operators by name, with gradients where they may be."""
    inputs = Inputs(0)
    options = LAYOUTS[layout]
    layout_code = ("rank_major", "expert_major", "masked").index(options["layout"])
    call = Call(layout_code, options.get("alignment", 1), options.get("capacity", -1), 64, deadline_s=10.0, window=0)
    numbers = {"call": call.numbers, "deadline_s": call.deadline_s}
    given = {"x": inputs.x, "scales": None, "topk_idx": inputs.topk_idx, "topk_weights": inputs.topk_weights}
    return {**given, "token": ep.calls.token, **numbers, **changes}


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_opcheck(ep: weft.ExpertParallel, layout: str) -> None:
    ep.calls.results.keep = True  # opcheck runs receive several times with one ticket
    sent = {**arguments(ep, layout), "quantize": 0}
    call = {name: sent[name] for name in ("call", "deadline_s")}
    torch.library.opcheck(ops.dispatch, (), {**sent, "x": sent["x"].detach(), "topk_weights": None, "clear_tail": True})
    ticket = ops.dispatch(**sent, clear_tail=True)
    fetched = {"ticket": ticket, **sent, "num_ranks": 1, "num_local_experts": NUM_EXPERTS, "plans_on_device": False}
    torch.library.opcheck(ops.receive, (), fetched)
    r = weft.call.received.Received(*(part.detach() for part in ops.receive(**fetched)))  # type: ignore[attr-defined]
    plans = {"send_plan": r.send_plan, "recv_plan": r.recv_plan, "tie": r.tie, "sizes": r.sizes}
    again = {"x": sent["x"], "scales": None, "weights": r.topk_weights, **plans, **call, "clear_tail": True}
    torch.library.opcheck(ops.dispatch_again, (), {**again, "quantize": 0})
    if layout != "masked":  # there the scales beyond the last row are undefined, and opcheck compares them
        torch.library.opcheck(ops.dispatch_again, (), {**again, "x": sent["x"].detach(), "quantize": 2})
    combined = {
        "y": r.x.clone().requires_grad_(), "weights": r.topk_weights.clone().requires_grad_(), **plans,
        "bias": torch.ones(HIDDEN).requires_grad_(), "side": r.topk_weights, "top_k": TOP_K, "num_tokens": 5, **call,
        "weighted": True, "clear_tail": True,
    }  # fmt: skip
    torch.library.opcheck(ops.combine, (), combined)


def test_results_are_fetched_once(ep: weft.ExpertParallel) -> None:
    ticket = ops.dispatch(**arguments(ep, "rank_major"), quantize=0, clear_tail=False)
    given = {**arguments(ep, "rank_major"), "num_ranks": 1, "num_local_experts": NUM_EXPERTS}
    given |= {"plans_on_device": False, "quantize": 0}
    ops.receive(ticket, **given)
    with pytest.raises(weft.InternalError, match="fetched before"):
        ops.receive(ticket, **given)


def test_operator_of_a_closed_object(ep: weft.ExpertParallel) -> None:
    given = arguments(ep, "rank_major")
    ep.close()
    with pytest.raises(weft.InvalidState, match="closed"):
        ops.dispatch(**given, quantize=0, clear_tail=False)
    with pytest.raises(weft.InvalidState, match="gone"):
        ops.dispatch(**{**given, "token": given["token"] + 10**6}, quantize=0, clear_tail=False)


# ---- whole layers


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_layer(ep: weft.ExpertParallel, layout: str) -> None:
    compare(Layer(ep, layout), "aot_eager", Inputs(0).x.detach())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["expert_major", "rank_major_capacity"])
def test_layer_compiled_by_inductor(ep: weft.ExpertParallel, layout: str) -> None:
    compare(Layer(ep, layout), "inductor", Inputs(0).x.detach())


def test_options_compile(ep: weft.ExpertParallel) -> None:
    inputs = Inputs(0)

    def step(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        r = ep.dispatch(x, topk_idx, topk_weights, layout="expert_major")
        again = ep.dispatch(x * 2, handle=r.handle)
        y, side = ep.combine(r.x + again.x, r.handle, weighted=False, side=r.topk_weights, bias=bias)
        narrow = ep.dispatch(x, topk_idx, quantize="fp8_ue8m0")
        wide = narrow.x.data.float() * narrow.x.scales.float()
        powers = ep.dispatch(x, topk_idx, quantize="fp8_pow2").x.scales
        return y, side, wide, powers, r.num_tokens_per_expert

    given = (inputs.x.detach(), inputs.topk_idx, inputs.topk_weights.detach(), inputs.bias.detach())
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(*given), step(*given), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_column_major_scales_compile(ep: weft.ExpertParallel, backend: str) -> None:
    def step(x: Tensor, topk_idx: Tensor) -> list[Tensor]:
        first = ep.dispatch(x, topk_idx, quantize="fp8", scale_layout="column_major")
        again = ep.dispatch(x, handle=first.handle, quantize="fp8_ue8m0", scale_layout="column_major")
        return [first.x.scales, again.x.scales]  # type: ignore[union-attr,list-item]

    given = (Inputs(0).x.detach(), Inputs(0).topk_idx)
    torch._dynamo.reset()
    for got, want in zip(torch.compile(step, backend=backend, fullgraph=True)(*given), step(*given), strict=True):
        assert torch.equal(got, want)
        assert got.stride() == want.stride()
        assert got.stride(0) == 1


def test_refusals_inside_a_compiled_function(ep: weft.ExpertParallel) -> None:
    inputs = Inputs(0)
    compiled = torch.compile(lambda x: ep.dispatch(x, inputs.topk_idx, layout="flat").x, backend="aot_eager")
    with pytest.raises(weft.InvalidArgument, match="layout is 'flat'"):
        compiled(inputs.x.detach())


def test_one_graph_serves_all_layers_and_batch_sizes(solo: weft.Communicator) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    with torch.no_grad():
        layers = [Layer(make_ep(solo), "expert_major") for _ in range(4)]
        compiled = [torch.compile(layer, backend=counter, fullgraph=True) for layer in layers]
        for num_tokens in (5, 7, 9, 33):
            x = Inputs(0, num_tokens).x.detach()
            for layer, call in zip(layers, compiled, strict=True):
                torch.testing.assert_close(call(x), layer(x))
    assert counter.frame_count == 2, "one for the first size, one for any"


def test_ranks_in_one_compiled_layer() -> None:
    """Different numbers of tokens, none on one rank; the compiled ranks meet an eager one."""

    def rank(comm: weft.Communicator) -> None:
        with make_ep(comm) as ep:
            layer = Layer(ep, "expert_major")
            x = Inputs(comm.rank, (5, 8, 0, 3)[comm.rank]).x.detach()
            expected = layer.run(layer, x)
            call = layer if comm.rank == 1 else torch.compile(layer, backend="aot_eager", fullgraph=True)
            for got, want in zip(layer.run(call, x), expected, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

    weft.spawn(rank, 4)


def test_unused_results_are_not_dropped() -> None:
    """Every rank must take part, whatever it does with the result."""

    def rank(comm: weft.Communicator) -> int:
        with make_ep(comm) as ep:
            inputs = Inputs(comm.rank)

            def step(x: Tensor, topk_idx: Tensor) -> Tensor:
                ep.dispatch(x, topk_idx)
                r = ep.dispatch(x, topk_idx, layout="expert_major")
                y: Tensor = ep.combine(r.x, r.handle)
                return x if comm.rank == 1 else x + y

            compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
            for _ in range(3):
                compiled(inputs.x.detach(), inputs.topk_idx)
            assert len(ep.calls.results._waiting) <= ep.calls.results.MAX
            return int(ep.stats()["num_dispatches"])

    assert weft.spawn(rank, 2) == [6, 6]
