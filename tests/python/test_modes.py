"""Guards against a choice of kernels that ranks could make differently, handles that meet the wrong kernels, and halves
of staged calls that are lost or overtaken. On the cpu engine and on one emulated GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_gpu import IDLE, EmulatedRanks, Noting

import weft
from weft.kernels.tuning import DEFAULT, Table, choose, choose_num_sms, most_num_sms, small_num_sms
from weft.limits import small_shared_bytes


def make(comm: weft.Communicator, **changes: Any) -> weft.ExpertParallel:
    shape = {"num_experts": 4, "top_k": 2, "hidden": 128, "max_tokens_per_rank": 600, "num_windows": 2}
    return weft.ExpertParallel(comm, **(shape | changes))  # type: ignore[arg-type]


def rows(num_tokens: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(num_tokens, 128).bfloat16(), torch.arange(2 * num_tokens).view(-1, 2) % 4


def kinds_of_calls(ep: weft.ExpertParallel) -> list[bool]:
    """Of each native call on window 0 from now on, whether it is one of a small batch."""
    seen: list[bool] = []

    def note(name: str, args: tuple[Any, ...]) -> None:
        if hasattr(args[0] if args else None, "is_small"):
            seen.append(bool(args[0].is_small))

    window = ep.calls.windows[0]
    window.native = Noting(window.native, note)
    return seen


def on_gpu(
    patch: pytest.MonkeyPatch, work: Callable[[weft.Communicator], Any], num_ranks: int = 1, **changed: Any
) -> list[Any]:
    """work(comm) on ranks that share the emulated GPU."""
    ranks = EmulatedRanks(patch, **changed)
    return ranks.run(num_ranks, lambda state, _: work(state.comm), [None] * num_ranks)


@pytest.fixture(params=["cpu", "nvlink"])
def on_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`on_ranks(work, num_ranks=1)`: work(comm) on ranks of either engine."""

    def run(work: Callable[[weft.Communicator], Any], num_ranks: int = 1) -> list[Any]:
        if request.param == "nvlink":
            return on_gpu(monkeypatch, work, num_ranks)
        return weft.spawn(work, num_ranks, device="cpu", isolation="thread")

    return run


def test_table() -> None:
    table = Table(most_tokens=((("combine", "masked", "plain"), 40),), most_tokens_else=10, num_sms=((8, 12), (64, 24)))
    assert choose(table, "combine", "masked", "plain", 40) == "latency"
    assert choose(table, "combine", "masked", "plain", 41) == "throughput"
    assert choose(table, "combine", "masked", "quantized", 11) == "throughput"
    assert [small_num_sms(table, most) for most in (0, 8, 9, 65)] == [12, 12, 24, 64]
    assert replace(table, most_tokens=()) != table
    assert choose(DEFAULT, "dispatch", "rank_major", "bytes", 1) == "latency"


@pytest.mark.parametrize(("num_windows", "num_sms"), [(1, 64), (2, 64), (4, 33), (132, 1)])
def test_small_batches_in_flight_share_the_sms(num_windows: int, num_sms: int) -> None:
    most = most_num_sms(64, 132, num_windows)
    ep: Any = SimpleNamespace(has_num_sms=False, num_sms=16, most_num_sms=most, table=DEFAULT, engine="nvlink")
    assert choose_num_sms(ep, "dispatch", "masked", 128, None, is_small=True) == num_sms
    assert choose_num_sms(ep, "dispatch", "masked", 128, 80, is_small=True) == 80


def test_between_nodes_the_network_has_an_sm_of_each_window() -> None:
    assert most_num_sms(64, 33, 1, has_nodes=True) == 32
    assert most_num_sms(64, 33, 2, has_nodes=True) == 15
    assert most_num_sms(64, 132, 1, has_nodes=True) == 64


def test_large_calls_by_expert_take_more_sms() -> None:
    def of(
        op: str, layout: str, *, most: int = 64, said: int | None = None, node_ranks: int = 0, table: Table = DEFAULT
    ) -> int:
        ep: Any = SimpleNamespace(
            has_num_sms=said is not None,
            num_sms=min(said or 16, most),
            most_num_sms=most,
            node_ranks=node_ranks,
            table=table,
            engine="nvlink",
        )
        return choose_num_sms(ep, op, layout, 4096, None, is_small=False)

    for op, by_expert in (("dispatch", 24), ("combine", 32)):
        found = [of(op, layout) for layout in ("rank_major", "expert_major", "masked")]
        assert found == [16, by_expert, by_expert]
        assert of(op, "expert_major", most=9) == of(op, "rank_major", most=9) == 9
        assert of(op, "expert_major", said=7) == 7
    table = Table(node_num_sms=(((2, "dispatch", "masked"), 12),))
    assert [of("dispatch", "masked", node_ranks=ranks, table=table) for ranks in (2, 4, 0)] == [12, 24, 24]
    assert of("combine", "masked", node_ranks=2, table=table) == 32
    assert of("dispatch", "masked", node_ranks=2, table=table, most=9) == 9


def test_windows_share_the_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """No choice of SMs lets calls of all windows wait for SMs that each other's blocks hold."""
    shape = {"num_experts": 8, "top_k": 2, "hidden": 64, "max_tokens_per_rank": 8}

    def work(comm: weft.Communicator) -> None:
        sms = comm._choice.rank_sms
        few = {**shape, "num_windows": sms // 2}
        with weft.ExpertParallel(comm, **few) as ep:
            assert ep.num_sms == sms // few["num_windows"] < 16
            text = rf"num_sms is 16 with num_windows = {few['num_windows']}; allowed are 1 to {ep.num_sms} here"
            with pytest.raises(weft.InvalidArgument, match=text):
                ep.dispatch(torch.zeros(0, 64).bfloat16(), torch.zeros(0, 2, dtype=torch.int64), num_sms=16)
        with pytest.raises(weft.InvalidArgument, match=text):
            weft.ExpertParallel(comm, **few, num_sms=16)
        with pytest.raises(weft.InvalidArgument, match=rf"num_windows is {sms + 1}; allowed are 1 to {sms} here"):
            weft.ExpertParallel(comm, **shape, num_windows=sms + 1)

    on_gpu(monkeypatch, work, 2, mutant=IDLE)


def test_staged_calls_of_many_tokens() -> None:
    """As many as the object was made for; nobody else has room for them."""

    def work(comm: weft.Communicator) -> None:
        with make(comm, small_tokens=600) as ep:
            x, ids = rows(520 if comm.rank == 0 else 3)
            r = ep.dispatch(x, ids, layout="masked", capacity=600, staged=True).wait()
            y = ep.combine(r.x, r.handle, staged=True).wait()
            assert torch.equal(y, (2 * x.float()).bfloat16())
            assert r.handle.is_small
        with make(comm, small_tokens=599) as ep, pytest.raises(weft.InvalidArgument, match=r"are 0 to 599"):
            ep.dispatch(*rows(), capacity=600, staged=True)

    weft.spawn(work, 2, device="cpu", isolation="thread")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "latency"}, "mode is 'latency' with max_tokens = 600; allowed in a small-batch call are 0 to 512"),
        ({"mode": "latency", "max_tokens": 5}, "x has 6 tokens; allowed are 0 to max_tokens = 5"),
        ({"staged": True, "capacity": 8}, "staged is True with max_tokens = 600; allowed in a small-batch call"),
        ({"staged": True, "max_tokens": 8}, "capacity is None with staged=True"),
        ({"staged": True, "capacity": 8, "mode": "throughput"}, "mode is 'throughput' with staged=True"),
        ({"staged": True, "capacity": 8, "async_op": True}, "async_op is True with staged=True"),
        ({"mode": "fast"}, "mode is 'fast'; allowed: auto, throughput, latency"),
    ],
)
def test_refusals(on_ranks: Any, options: dict[str, Any], text: str) -> None:
    def work(comm: weft.Communicator) -> None:
        ep = make(comm)
        with pytest.raises(weft.InvalidArgument, match=text):
            ep.dispatch(*rows(), **options)
        ep.close()

    on_ranks(work)


def test_supports() -> None:
    assert weft.supports(mode="latency", max_tokens=512, staged=True)
    for options in (
        {"mode": "latency", "max_tokens": 513},
        {"staged": True, "max_tokens": 9, "max_tokens_per_rank": 8},
        {"staged": True, "mode": "throughput"},
        {"staged": True, "async_op": True},
    ):
        assert not weft.supports(**options), options


def test_the_handle_decides(on_ranks: Any) -> None:
    """A small-batch dispatch is repeated and combined by small batches; any routing of few tokens may be."""

    def work(comm: weft.Communicator) -> tuple[str, list[int]]:
        ep, (x, ids) = make(comm), rows()
        seen, are_small = [], kinds_of_calls(ep)

        def num_small() -> int:
            return sum(are_small)

        small = ep.dispatch(x, ids, mode="latency", max_tokens=8)
        for refused in (ep.combine, lambda x, handle, **mode: ep.dispatch(x, handle=handle, **mode)):
            with pytest.raises(weft.InvalidArgument, match="'throughput' with the handle of a small-batch dispatch"):
                refused(small.x if refused == ep.combine else x, small.handle, mode="throughput")
        y = ep.combine(small.x, small.handle)
        seen.append(num_small())
        large = ep.dispatch(x, ids, mode="throughput", max_tokens=8)
        assert torch.equal(ep.combine(large.x, large.handle, mode="throughput"), y)
        seen.append(num_small())
        assert torch.equal(ep.combine(large.x, large.handle, mode="latency"), y)
        assert torch.equal(ep.dispatch(x, handle=large.handle, mode="latency").x, large.x)
        seen.append(num_small())
        with pytest.raises(weft.InvalidArgument, match="mode is 'latency' with max_tokens = 600"):
            ep.combine(large.x, ep.dispatch(x, ids).handle, mode="latency")
        ep.close()
        return comm.engine, seen

    for engine, seen in on_ranks(work, 2):
        assert engine == "cpu" or seen == [2, 2, 4]


def of_few(ep: weft.ExpertParallel, **options: Any) -> bool:
    """Whether a dispatch of few tokens is one of a small batch."""
    return ep.dispatch(*rows(), **{"max_tokens": 100, "capacity": 64, **options}).handle.is_small


def test_automatic_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what all ranks know."""

    def work(comm: weft.Communicator) -> None:
        ep, (x, ids) = make(comm), rows()
        ep._shape.table = Table(most_tokens=((("dispatch", "masked", "quantized"), 0),), most_tokens_else=100)
        assert of_few(ep)
        assert of_few(ep, layout="masked")
        assert of_few(ep, layout="expert_major")
        assert not of_few(ep, max_tokens=101)
        assert not of_few(ep, max_tokens=None)
        assert not of_few(ep, layout="masked", quantize="fp8")
        assert of_few(ep, num_sms=1), "places of 1 block"
        r = ep.dispatch(x, ids, mode="throughput", max_tokens=8, capacity=64)
        are_small = kinds_of_calls(ep)
        ep.combine(r.x, r.handle)
        ep._shape.table = Table(most_tokens=((("combine", "rank_major", "wide"), 0),), most_tokens_else=100)
        ep.combine(r.x.float(), r.handle)
        assert are_small[0]
        assert not any(are_small[1:])
        ep.close()
        fp32 = make(comm, dtype=torch.float32)
        fp32._shape.table = Table(most_tokens=((("dispatch", "masked", "wide"), 8),), most_tokens_else=100)
        for layout, max_tokens, expected in (("masked", 8, True), ("masked", 9, False), ("rank_major", 9, True)):
            r = fp32.dispatch(x.float(), ids, layout=layout, capacity=64, max_tokens=max_tokens)
            assert r.handle.is_small == expected
        fp32.close()
        wide = make(comm, top_k=128, num_experts=128, num_windows=1)
        wide_ids = torch.arange(6 * 128).view(6, 128) % 128
        for num_sms, expected in ((1, False), (8, True)):  # 512 * 128 * 4 bytes in one block
            r = wide.dispatch(x, wide_ids, layout="masked", capacity=6, max_tokens=8, num_sms=num_sms)
            assert r.handle.is_small == expected
        wide.close()

    on_gpu(monkeypatch, work, mutant=IDLE)


def test_automatic_choice_for_exact_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(comm: weft.Communicator) -> None:
        with make(comm) as ep:
            ep._shape.table = Table(most_tokens_else=100)
            assert of_few(ep, capacity=None)
            assert not of_few(ep, capacity=None, layout="expert_major"), "would take memory for the worst case"
            assert of_few(ep, capacity=None, layout="expert_major", mode="latency")

    on_gpu(monkeypatch, work)


def test_shared_memory_formula() -> None:
    """16 warps and two more rows of counts, one of kept picks, places."""
    assert small_shared_bytes(100, 32, 32) == (18 * 32 + 32 + 100) * 4 // 128 * 128 + 128 * (((708 * 4) % 128) > 0)


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_halves(on_ranks: Any, layout: str) -> None:
    """Inputs may be overwritten between; a window does nothing else between; another one does."""

    def work(comm: weft.Communicator) -> None:
        ep, (x, ids) = make(comm), rows()
        options: dict[str, Any] = {"layout": layout, "capacity": 32, "max_tokens": 8}
        whole = ep.dispatch(x, ids.to(torch.int32), **options)
        expected = ep.combine(whole.x, whole.handle, bias=torch.ones(128))
        given = x.clone()
        r = ep.dispatch(given, ids.to(torch.int32), staged=True, **options)
        given.fill_(9)
        with pytest.raises(weft.InvalidState, match=r"on window 0 .* call its wait\(\) first, or use another"):
            ep.dispatch(x, ids)
        with pytest.raises(weft.InvalidState, match="window 0"):
            ep.combine(whole.x, whole.handle)
        ep.dispatch(x, ids, window=1)
        assert r.wait() is r
        assert r.wait() is r
        assert torch.equal(r.num_tokens_per_expert, whole.num_tokens_per_expert)
        if layout == "rank_major":
            assert r.topk_idx is not None
            assert whole.topk_idx is not None
            assert r.topk_idx.dtype == torch.int32
            assert torch.equal(r.topk_idx[: int(r.num_rows)], whole.topk_idx[: int(r.num_rows)])
        again = ep.dispatch(x, handle=r.handle, staged=True).wait()
        out = torch.empty(6, 128, dtype=torch.bfloat16)
        half = ep.combine(again.x, r.handle, bias=torch.ones(128), out=out, side=r.topk_weights, staged=True)
        assert isinstance(half, weft.Staged)
        with pytest.raises(weft.InvalidState, match="has not been received"):
            ep.dispatch(x, handle=r.handle)
        y, side = half.wait()
        assert y is out
        assert half.wait()[1] is side
        assert half.event.query()
        assert torch.equal(y, expected)
        assert ep.stats()["num_dispatches"] == 4
        assert ep.stats()["num_combines"] == 2
        ep.close()

    on_ranks(work, 2)


def test_a_half_of_a_closed_object_can_be_received(on_ranks: Any) -> None:
    """Others share its window, which does nothing else before."""

    def work(comm: weft.Communicator) -> None:
        (ep, other), (x, ids) = (make(comm), make(comm)), rows()
        assert ep.calls.windows[0] is other.calls.windows[0]
        r = ep.dispatch(x, ids, capacity=32, max_tokens=8, staged=True)
        ep.close()
        with pytest.raises(weft.InvalidState, match="has not been received"):
            other.dispatch(x, ids)
        r.wait()
        assert torch.equal(other.dispatch(x, ids).x, r.x[: int(r.num_rows)])
        other.close()

    on_ranks(work, 2)


def test_gradients_have_no_halves(on_ranks: Any) -> None:
    def work(comm: weft.Communicator) -> None:
        ep, (x, ids) = make(comm), rows()
        options: dict[str, Any] = {"capacity": 32, "max_tokens": 8, "staged": True}
        with pytest.raises(weft.Unsupported, match="staged=True with gradients"):
            ep.dispatch(x.requires_grad_(), ids, **options)
        with torch.no_grad():
            ep.dispatch(x, ids, **options).wait()
        ep.close()

    on_ranks(work)


def test_wide_rows_have_no_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(comm: weft.Communicator) -> None:
        ep = make(comm, hidden=512)
        x, ids = torch.randn(6, 512).bfloat16(), rows()[1]
        r = ep.dispatch(x, ids, capacity=32, max_tokens=8)
        for refused in (
            lambda: ep.dispatch(x.float(), handle=r.handle, staged=True),
            lambda: ep.combine(r.x.float(), r.handle, staged=True),
        ):
            with pytest.raises(weft.Unsupported, match="travel in pieces"):
                refused()
        ep.close()

    on_gpu(monkeypatch, work, mutant=IDLE)


def test_rebuild_makes_an_end_of_halves() -> None:
    def work(comm: weft.Communicator) -> None:
        ep, (x, ids) = make(comm), rows()
        options: dict[str, Any] = {"capacity": 32, "max_tokens": 8}
        r = ep.dispatch(x, ids, staged=True, **options)
        comm.rebuild(range(2))
        with pytest.raises(weft.InvalidState, match="of epoch"):
            r.wait()
        assert int(ep.dispatch(x, ids, staged=True, **options).wait().num_rows) == 6
        ep.close()

    weft.spawn(work, 2, device="cpu", isolation="thread")


def test_choice_is_traced() -> None:
    """torch.compile sees the table's numbers, not a break in the graph."""
    table = Table(most_tokens=((("dispatch", "masked", "plain"), 5),), num_sms=((8, 12),))

    def step(x: torch.Tensor, max_tokens: int) -> torch.Tensor:
        is_small = choose(table, "dispatch", "masked", "plain", max_tokens) == "latency"
        return x + small_num_sms(table, max_tokens) if is_small else x

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    assert [float(compiled(torch.zeros(()), most)) for most in (5, 6)] == [12, 0]
