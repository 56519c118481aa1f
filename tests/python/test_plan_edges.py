"""Guards against calls along a plan that do otherwise than the first of their kind, where something is unusual; on the
cpu engine and on one emulated GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated_gpu import EmulatedRanks
from test_quick import inputs, make
from torch import Tensor

import weft
from pool import RankState
from weft.call.event import COMPLETE


@pytest.fixture(params=["cpu", "nvlink"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """run(work): `work(state)` on two ranks of an engine."""
    if request.param == "nvlink":
        ranks: Any = EmulatedRanks(monkeypatch)
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: -1)  # no tool listens
        return lambda work: ranks.run(2, lambda state, _: work(state), [None] * 2)  # type: ignore[return-value]

    def on_cpu(work: Any) -> None:
        weft.spawn(lambda comm: work(RankState(comm.rank, {2: comm}, 2)), 2, device="cpu", isolation="thread")

    return on_cpu  # type: ignore[return-value]


def test_gradients_of_weights_of_a_negated_view(run: Any) -> None:
    def work(state: RankState) -> None:
        x, ids, weights = inputs(state.rank)
        with make(state) as ep:

            def gradients(*, is_view: bool) -> tuple[Tensor, Tensor]:
                leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
                r = ep.dispatch(leaves[0], ids, leaves[1], layout="expert_major")
                y = torch._neg_view(r.x * 1.5) if is_view else r.x * -1.5
                ep.combine(y, r.handle).float().sum().backward()
                assert leaves[0].grad is not None
                assert leaves[1].grad is not None
                return leaves[0].grad, leaves[1].grad

            wanted = gradients(is_view=False)
            assert bool(wanted[1].any())
            for _ in range(3):
                found = gradients(is_view=True)
                assert all(torch.equal(got, want) for got, want in zip(found, wanted, strict=True))

    run(work)


class Named(torch.Tensor):
    """A tensor whose calls keep no plan."""


def test_a_dispatch_without_a_plan_leaves_its_combines_one(run: Any) -> None:
    """Each had a `Call` of its own, which no key had."""

    def work(state: RankState) -> None:
        x, ids, weights = inputs(state.rank)
        with make(state) as ep:

            def step() -> int:
                r = ep.dispatch(x.as_subclass(Named), ids, weights, layout="expert_major")
                ep.combine(ep.dispatch(x, handle=r.handle).x, r.handle)
                return len(ep.calls.plans)

            assert [step() for _ in range(4)] == [2] * 4, "of the repetition and the combine"

    run(work)


def test_a_compiled_dispatch_leaves_its_combines_a_plan(run: Any) -> None:
    def work(state: RankState) -> None:
        x, ids, weights = inputs(state.rank)
        with make(state) as ep, torch.no_grad():

            def step() -> int:
                r = ep.dispatch(x, ids, weights, capacity=16)
                handle = r.handle._changed(call=replace(r.handle.call))  # as a compiled dispatch makes it
                ep.combine(ep.dispatch(x, handle=handle).x, handle)
                return len(ep.calls.plans)

            assert [step() for _ in range(4)] == [3] * 4

    run(work)


def test_the_oldest_plan_makes_room(run: Any) -> None:
    def work(state: RankState) -> None:
        x, ids, weights = inputs(state.rank)
        with make(state) as ep:
            for number in range(260):
                ep.dispatch(x, ids, weights, capacity=16, deadline_s=30.0 + number)
            assert len(ep.calls.plans) == len(ep.calls.calls) == 256

    run(work)


def test_an_expert_output_of_inference_mode_is_refused_before_it_is_sent(run: Any) -> None:
    def work(state: RankState) -> None:
        x, ids, weights = inputs(state.rank)
        with make(state) as ep:
            r = ep.dispatch(x, ids, weights.requires_grad_(), layout="expert_major")
            with torch.inference_mode():
                y = torch.ones_like(r.x)
            for wrong in (y, y):
                with pytest.raises(weft.InvalidArgument, match=r"made under torch\.inference_mode"):
                    ep.combine(wrong, r.handle)
                ep.combine(y.clone(), r.handle)
            assert ep.stats()["num_combines"] == 2

    run(work)


def test_columns_of_scales_that_overlap_for_more_tokens(run: Any) -> None:
    """Those of four tokens had the same strides and did not."""

    def work(state: RankState) -> None:
        _, ids, weights = inputs(state.rank)
        with make(state) as ep:
            for number in (4, 8, 4, 8):
                data = torch.arange(number * 128).remainder(251).to(torch.uint8).view(number, 128)
                scales = torch.rand(number + 8).as_strided((number, 3), (1, 4))
                routing = (ids.repeat(2, 1)[:number], weights.repeat(2, 1)[:number])
                options: dict[str, Any] = {"mode": "throughput", "capacity": 32}
                r = ep.dispatch(weft.Quantized(data, scales), *routing, **options)
                want = ep.dispatch(weft.Quantized(data, scales.contiguous()), *routing, **options)
                rows = int(want.num_rows)
                assert isinstance(r.x, weft.Quantized)
                assert isinstance(want.x, weft.Quantized)
                assert r.x.scales is not None
                assert want.x.scales is not None
                assert torch.equal(r.x.scales[:rows], want.x.scales[:rows])
            assert len(ep.calls.plans) == 3, "of columns apart, of columns that overlap, and of rows"

    run(work)


def test_what_is_refused_as_an_option_is_not_kept() -> None:
    value = torch.ones(10)
    dies = weakref.ref(value)
    with weft.Communicator.from_env(device="cpu") as comm, make(RankState(0, {1: comm}, 1)) as ep:
        x, ids, _ = inputs(0)
        with pytest.raises(weft.InvalidArgument, match="capacity"):
            ep.dispatch(x, ids, capacity=value)  # type: ignore[arg-type]
    del value
    gc.collect()
    assert dies() is None


def test_an_event_is_not_that_of_a_call_of_another_thread(run: Any) -> None:
    """Which begins as soon as this one is through."""

    def work(state: RankState) -> None:
        x, ids, weights = inputs(state.rank)
        with make(state) as ep:
            real, others = ep.calls.run, []

            def run_and_be_overtaken(*args: Any, **options: Any) -> Any:
                made = real(*args, **options)
                ep.calls.run = real  # type: ignore[method-assign]
                options = {"async_op": True, "window": 1, "capacity": 16}
                with ThreadPoolExecutor(1) as pool:
                    others.append(pool.submit(ep.dispatch, x, ids, weights, **options).result().event)
                return made

            for _ in range(2):
                ep.calls.run = run_and_be_overtaken  # type: ignore[method-assign]
                event = ep.dispatch(x, ids, weights, capacity=16).event
                assert event is not others[-1] or event is COMPLETE
            assert len(others) == 2

    run(work)
