"""Guards against logical experts that go elsewhere than their map says: other bits than the reference, picks of experts
that nobody has, maps that differ between ranks, and handles of an earlier map."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import reference

NUM_RANKS, NUM_SLOTS, TOP_K, HIDDEN, NUM_TOKENS = 4, 12, 3, 32, 9
REPLICAS = [[0, 11, -1], [3, -1, 1], [4, 7, 10], [-1, -1, 9], [5, -1, -1], [2, 8, -1], [6, -1, -1]]  # 5: rank 1 alone
LAYOUTS = ("rank_major", "expert_major", "masked")


def a_map() -> weft.ExpertMap:
    return weft.ExpertMap(torch.tensor(REPLICAS, dtype=torch.int32, device="cpu"))


def other_map() -> weft.ExpertMap:
    return weft.ExpertMap(torch.tensor([[11 - each[0]] for each in ([0], [1], [2], [3], [4], [5], [6])], device="cpu"))


class Job:
    """Inputs of all ranks, the same on each."""

    def __init__(self, dtype: torch.dtype = torch.float32, num_ids: int = len(REPLICAS)) -> None:
        generator = torch.Generator(device="cpu").manual_seed(3)
        draw: dict[str, Any] = {"generator": generator, "device": "cpu"}
        self.xs, self.ids, self.weights, self.grads = [], [], [], []
        for rank in range(NUM_RANKS):
            shape = (NUM_TOKENS + rank, TOP_K)
            self.xs.append(torch.randn((shape[0], HIDDEN), **draw).to(dtype))
            self.ids.append(torch.randint(-1, num_ids, shape, dtype=torch.int64, **draw))
            self.weights.append(torch.rand(shape, dtype=torch.float32, **draw))
            self.grads.append(torch.randn((shape[0], HIDDEN), **draw).to(dtype))

    def options(self, layout: str) -> dict[str, Any]:
        return {"layout": layout, **({"capacity": 60} if layout == "masked" else {})}


def opened(comm: weft.Communicator, **options: Any) -> weft.ExpertParallel:
    given: dict[str, Any] = {"num_experts": NUM_SLOTS, "num_logical_experts": len(REPLICAS)}
    shape: dict[str, Any] = {"top_k": TOP_K, "hidden": HIDDEN, "max_tokens_per_rank": 16, "dtype": torch.float32}
    return weft.ExpertParallel(comm, **(given | shape | options))


def compare(ep: weft.ExpertParallel, job: Job, layout: str, **how: Any) -> None:
    """Dispatch, combine and their gradients on this rank, with the reference of all ranks."""
    rank, active, absent = ep.comm.rank, ep.comm.active_ranks, how.get("absent", "drop")
    weights = [each.clone().requires_grad_() for each in job.weights]
    given = weights
    if absent == "renormalize":
        covered = reference.covered_experts(NUM_SLOTS, NUM_RANKS, active, ep.expert_map)
        given = [reference.renormalized(*each, covered) for each in zip(weights, job.ids, strict=True)]
    wanted = reference.dispatch(
        job.xs, job.ids, job.weights, num_experts=NUM_SLOTS, active_ranks=active, expert_map=ep.expert_map,
        absent=absent, **job.options(layout),
    )  # fmt: skip
    for idx_dtype in (torch.int64, torch.int32):
        x, mine = job.xs[rank].clone().requires_grad_(), job.weights[rank].clone().requires_grad_()
        r = ep.dispatch(x, job.ids[rank].to(idx_dtype), mine, **job.options(layout), **how)
        rows: Any = slice(None)
        if layout == "masked":  # tails are undefined
            rows = torch.arange(60, device="cpu") < wanted[rank].num_tokens_per_expert[:, None]
        assert isinstance(r.x, Tensor)
        assert isinstance(wanted[rank].x, Tensor)
        assert torch.equal(r.x[rows].detach(), wanted[rank].x[rows]), layout
        assert torch.equal(r.topk_weights[rows].detach(), wanted[rank].topk_weights[rows]), layout
        for name in ("num_tokens_per_expert", "offsets", "num_rows"):
            assert torch.equal(getattr(r, name), getattr(wanted[rank], name)), (layout, name)
        if layout == "rank_major":
            assert r.topk_idx is not None
            assert torch.equal(r.topk_idx, wanted[rank].topk_idx.to(idx_dtype))  # type: ignore[union-attr]
        outputs = [2.0 * each.x for each in wanted]  # type: ignore[operator]
        y = ep.combine(2.0 * r.x, r.handle)
        assert torch.equal(y, reference.combine(outputs, wanted)[rank]), layout
        again = ep.dispatch(job.grads[rank], handle=r.handle)
        repeated = reference.repeat_dispatch(job.grads, wanted[0].routing)[rank]
        assert isinstance(again.x, Tensor)
        assert torch.equal(again.x[rows], repeated[rows]), layout  # type: ignore[index]
        y.backward(job.grads[rank])
        back = reference.combine_backward(job.grads, outputs, wanted)
        of_rows, of_weights = reference.dispatch_backward([2.0 * each for each in back.outputs], wanted, back.weights)
        assert torch.equal(x.grad, of_rows[rank]), layout  # type: ignore[arg-type]
        if absent == "renormalize" and given[rank].grad_fn is not None:
            (chained,) = torch.autograd.grad(given[rank], weights[rank], of_weights[rank], retain_graph=True)
            torch.testing.assert_close(mine.grad, chained)
        elif layout != "rank_major":
            torch.testing.assert_close(mine.grad, of_weights[rank])


def with_a_map(comm: weft.Communicator) -> None:
    job = Job()
    with opened(comm) as ep:
        assert ep.expert_map == weft.ExpertMap.spread(len(REPLICAS), NUM_SLOTS, NUM_RANKS)
        for number, expert_map in enumerate((None, a_map(), other_map())):
            if expert_map is not None:
                ep.set_expert_map(expert_map)
                assert ep.expert_map == expert_map
            assert ep.uncovered == ()
            for layout in LAYOUTS:
                compare(ep, job, layout)
            r = ep.dispatch(job.xs[comm.rank], job.ids[comm.rank])
            assert r.handle.map_number == number + 1


def test_bits_of_the_reference() -> None:
    weft.spawn(with_a_map, NUM_RANKS, device="cpu")


def after_a_loss(comm: weft.Communicator, lost: int, with_map: bool) -> None:
    num_ids = len(REPLICAS) if with_map else NUM_SLOTS
    job = Job(num_ids=num_ids)
    ep = opened(comm) if with_map else opened(comm, num_logical_experts=None)
    if with_map:
        ep.set_expert_map(a_map())
    old = ep.dispatch(job.xs[comm.rank], job.ids[comm.rank])
    if comm.rank == lost:
        comm.close()
        return
    with pytest.raises(weft.PeerLost):
        ep.dispatch(job.xs[comm.rank], job.ids[comm.rank])
    comm.recover()
    assert ep.uncovered == ((4,) if with_map else (3, 4, 5))
    for layout in LAYOUTS:
        compare(ep, job, layout)
        compare(ep, job, layout, absent="renormalize")
    with pytest.raises(weft.InvalidState, match="epoch"):
        ep.dispatch(job.xs[comm.rank], handle=old.handle)
    with pytest.raises(weft.InvalidArgument, match="absent is 'renormalize' beside handle"):
        ep.dispatch(job.xs[comm.rank], handle=ep.dispatch(job.xs[comm.rank], job.ids[comm.rank]).handle,
                    absent="renormalize")  # fmt: skip
    if with_map:  # another place for the expert that nobody had
        ep.set_expert_map(other_map())
        assert ep.uncovered == (6,)  # 5 is on rank 1
        compare(ep, job, "expert_major", absent="renormalize")
    comm.close()


@pytest.mark.parametrize("with_map", [True, False])
def test_picks_of_experts_that_nobody_has(with_map: bool) -> None:
    weft.spawn(after_a_loss, NUM_RANKS, (1, with_map), device="cpu")


def with_other_maps(comm: weft.Communicator) -> None:
    job, rank = Job(), comm.rank
    with opened(comm) as ep:
        first = ep.dispatch(job.xs[rank], job.ids[rank], layout="expert_major")
        with pytest.raises(weft.InvalidArgument, match=r"expert_map differs between ranks: .* on rank 2"):
            ep.set_expert_map(other_map() if rank == 2 else a_map())
        assert ep.expert_map == weft.ExpertMap.spread(len(REPLICAS), NUM_SLOTS, NUM_RANKS)
        compare(ep, job, "masked")
        if rank == 2:  # as a mistake of a framework would
            ep.calls.install_map(a_map())
        with pytest.raises(weft.InvalidArgument, match=a_map().digest):
            ep.dispatch(job.xs[rank], job.ids[rank])
        ep.set_expert_map(a_map())
        assert torch.equal(ep.combine(first.x, first.handle), ep.combine(first.x.clone(), first.handle))
        with pytest.raises(weft.InvalidState, match="expert map number 1, and number"):
            ep.dispatch(job.xs[rank], handle=first.handle)
        compare(ep, job, "expert_major")
        for refused in (None, torch.zeros((7, 1), dtype=torch.int32, device="cpu")):
            with pytest.raises(weft.InvalidArgument, match=r"a weft.ExpertMap is expected"):
                ep.set_expert_map(refused)  # type: ignore[arg-type]
        with pytest.raises(weft.InvalidArgument, match=r"6 logical experts; allowed is that of this ExpertParallel, 7"):
            ep.set_expert_map(weft.ExpertMap.spread(6, NUM_SLOTS, NUM_RANKS))
        with pytest.raises(weft.InvalidArgument, match=r"physical id 12; allowed are -1 to num_experts - 1 = 11"):
            ep.set_expert_map(weft.ExpertMap(torch.tensor([[each] for each in range(6, 13)], device="cpu")))
        bad = job.ids[rank].clone()
        bad[0, 0] = len(REPLICAS)
        ep.dispatch(job.xs[rank], bad)
        with pytest.raises(weft.InvalidArgument, match=r"the first 7 at token 0, pick 0; allowed are -1 to 6"):
            ep.check()
        picks = torch.zeros((NUM_TOKENS, len(REPLICAS)), dtype=torch.bool, device="cpu")
        picks[:, rank] = True
        by_map = ep.dispatch(job.xs[rank][:NUM_TOKENS], picks)
        by_ids = ep.dispatch(job.xs[rank][:NUM_TOKENS], torch.where(torch.arange(TOP_K) == 0, rank, -1).expand(
            NUM_TOKENS, -1).contiguous())  # fmt: skip
        assert torch.equal(by_map.x, by_ids.x)  # type: ignore[arg-type]
    with opened(comm, num_logical_experts=None) as ep:
        assert ep.expert_map is None
        with pytest.raises(weft.InvalidArgument, match="without num_logical_experts"):
            ep.set_expert_map(a_map())
        assert ep.dispatch(job.xs[rank], job.ids[rank]).handle.map_number == 0


def test_maps_that_differ_and_handles_of_another_one() -> None:
    weft.spawn(with_other_maps, NUM_RANKS, device="cpu")


def compiled(comm: weft.Communicator) -> None:
    job, rank = Job(), comm.rank
    with opened(comm) as ep, torch.no_grad():

        def layer(x: Tensor, idx: Tensor, weights: Tensor, **options: Any) -> Tensor:
            r = ep.dispatch(x, idx, weights, layout="expert_major", **options)
            y: Tensor = ep.combine(r.x, r.handle)  # type: ignore[arg-type]
            return y

        ep.set_expert_map(a_map())
        given = (job.xs[rank], job.ids[rank], job.weights[rank])
        fast = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(fast(*given), layer(*given))
        ep.set_expert_map(other_map())  # nothing of the old map is in the graph
        assert torch.equal(fast(*given), layer(*given))
        with pytest.raises(Exception, match="in compiled code"):
            torch.compile(layer, backend="aot_eager", fullgraph=True)(*given, absent="renormalize")


def test_compiled_code_follows_the_map() -> None:
    weft.spawn(compiled, 2, device="cpu")


@pytest.mark.parametrize(
    ("replicas", "remark"),
    [
        ([[0, 1], [2, 1]], r"physical id 1 more than once, for logical experts \[0, 1\]"),
        ([[0, 0]], r"physical id 0 more than once, for logical experts \[0\]"),
        ([[-2]], r"the id -2; allowed are -1 to"),
        ([0, 1], r"replicas is \[2\] torch.int64; allowed is a tensor \[N, R\]"),
        ([[]], r"allowed are N and R of at least 1"),
        ([[0.5]], r"torch.float32; allowed is a tensor \[N, R\] of int32 or int64"),
    ],
)
def test_what_is_no_map(replicas: Any, remark: str) -> None:
    given = torch.tensor(replicas, device="cpu")
    with pytest.raises(weft.InvalidArgument, match=remark):
        weft.ExpertMap(given if given.numel() else given.to(torch.int32))
    with pytest.raises(weft.InvalidArgument, match="replicas is"):
        weft.ExpertMap(replicas)


def test_maps_by_value() -> None:
    ours = torch.tensor(REPLICAS, dtype=torch.int32, device="cpu")
    one = weft.ExpertMap(ours)
    ours[0, 0] = 1
    assert one == a_map()
    assert hash(one) == hash(a_map())
    assert one.digest == a_map().digest
    one.replicas.zero_()
    assert one.replicas.tolist() == REPLICAS
    assert one != other_map()
    assert one.num_logical_experts == 7
    assert weft.ExpertMap.spread(8, 8, 4).replicas.flatten().tolist() == list(range(8))
    assert weft.ExpertMap.spread(5, 8, 4).replicas.flatten().tolist() == [0, 1, 2, 4, 6]
    assert weft.ExpertMap.spread(1, 8, 4).replicas.tolist() == [[0]]
    for numbers, remark in (((9, 8, 4), "allowed are 1 to 8"), ((1, 6, 4), "multiples of num_ranks = 4"),
                            ((0, 8, 4), "num_logical_experts is 0")):  # fmt: skip
        with pytest.raises(weft.InvalidArgument, match=remark):
            weft.ExpertMap.spread(*numbers)


def numbers_of_experts(comm: weft.Communicator) -> None:
    for number, slots in ((1, 2), (2, 2), (3, 4), (7, 8)):
        with opened(comm, num_experts=None, num_logical_experts=number) as ep:
            assert (ep.num_experts, ep.num_logical_experts) == (slots, number)
            idx = torch.arange(TOP_K, device="cpu").remainder(number).expand(2, -1).contiguous()
            x = torch.ones((2, HIDDEN), dtype=torch.float32, device="cpu")
            r = ep.dispatch(x, idx, layout="expert_major")
            assert torch.equal(ep.combine(r.x, r.handle), TOP_K * x)  # type: ignore[arg-type]
    for given, remark in (
        ({"num_logical_experts": 3}, "1 to num_experts = 2"),
        ({"num_logical_experts": 0}, "None, or"),
        ({"num_logical_experts": None, "num_experts": None}, "num_experts is None"),
    ):
        with pytest.raises(weft.InvalidArgument, match=remark):
            opened(comm, **({"num_experts": 2} | given))
    with pytest.raises(weft.InvalidArgument, match="num_logical_experts differs between ranks: 1 on rank 0; 2"):
        opened(comm, num_experts=2, num_logical_experts=1 + comm.rank)


def test_any_number_of_logical_experts() -> None:
    weft.spawn(numbers_of_experts, 2, device="cpu")


def test_gpus_refuse_logical_experts() -> None:
    assert weft.supports(engine="cpu", num_logical_experts=7, absent="renormalize")
    assert not weft.supports(engine="nvlink", num_logical_experts=7)
    assert not weft.supports(engine="nvlink", absent="renormalize")
    assert not weft.supports(num_experts=4, num_logical_experts=5)


class BesideAnotherThread:
    """A native window beside which a thread asks for what other ranks cover, while it is inside a dispatch."""

    def __init__(self, ep: weft.ExpertParallel, native: Any) -> None:
        self.ep, self.native, self.num_calls = ep, native, 0

    def dispatch_first(self, *places: Any) -> Any:
        experts = self.ep.calls.experts
        table = experts.table(self.ep.comm.active_ranks)
        assert table is not None
        assert places[-1] == table.data_ptr()
        kept = weakref.ref(table)
        del table
        assert experts.uncovered((0,)) != ()
        gc.collect()
        assert kept() is not None, "the table that the call reads is gone"
        self.num_calls += 1
        return self.native.dispatch_first(*places)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)


def reading_a_table(comm: weft.Communicator) -> None:
    job = Job()
    with opened(comm) as ep:
        ep.set_expert_map(a_map())
        window = ep.calls.windows[0]
        native, window.native = window.native, BesideAnotherThread(ep, window.native)
        r = ep.dispatch(job.xs[comm.rank], job.ids[comm.rank])
        assert window.native.num_calls == 1
        window.native = native
        del r


def test_a_table_that_a_call_reads_stays() -> None:
    weft.spawn(reading_a_table, NUM_RANKS, device="cpu")


def _lost(comm: weft.Communicator) -> tuple[Any, ...]:
    ep = opened(comm)
    plain = opened(comm, num_logical_experts=None)
    ep.set_expert_map(a_map())
    comm.meet(60.0)
    if comm.rank == 1:
        comm.close()
        return ()
    with pytest.raises(weft.PeerLost):
        comm.meet(60.0)
    change = comm.recover()
    assert plain.uncovered == (3, 4, 5)
    return change.uncovered, ep.uncovered


def test_a_recovery_names_experts_that_nobody_has() -> None:
    """Logical ones alone: of physical ids each rank knows."""
    assert weft.spawn(_lost, NUM_RANKS, device="cpu") == [((4,), (4,)), (), ((4,), (4,)), ((4,), (4,))]


def _least(comm: weft.Communicator) -> tuple[int, int]:
    for options, text in (
        ({"min_ranks": 0}, "min_ranks is 0; allowed are None and 1 to num_ranks = 4"),
        ({"min_ranks": 5}, "min_ranks is 5"),
        ({"min_ranks": True}, "min_ranks is True"),
        ({"min_ranks": 2, "num_experts": 9}, "min_ranks is 2; allowed is None unless"),
        ({"min_ranks": 2, "num_logical_experts": None}, "min_ranks is 2; allowed is None unless"),
    ):
        with pytest.raises(weft.InvalidArgument, match=text):
            opened(comm, **{"num_experts": None, **options})
    with opened(comm, num_experts=None, min_ranks=2) as ep, opened(comm, num_experts=None) as tight:
        return ep.num_experts, tight.num_experts


def test_room_for_all_experts_on_few_ranks() -> None:
    """E = R x ceil(N / min_ranks); without it N experts as tight as can be."""
    assert weft.spawn(_least, NUM_RANKS, device="cpu") == [(16, 8)] * NUM_RANKS


def test_a_spread_over_some_ranks() -> None:
    assert weft.ExpertMap.spread(5, 12, 4, [3, 1]).replicas.flatten().tolist() == [3, 4, 5, 9, 10]
    for ranks in ([], [0, 0], [4], [-1]):
        with pytest.raises(weft.InvalidArgument, match="ranks is"):
            weft.ExpertMap.spread(2, 8, 4, ranks)
    with pytest.raises(weft.InvalidArgument, match="allowed are 1 to 4"):
        weft.ExpertMap.spread(5, 8, 4, [0, 1])
