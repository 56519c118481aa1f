"""Guards against rows and sums between nodes that are not the reference's: nodes of one size and of several, each
layout and form of rows, chunks that fill rings again and again, results without room in the heap, and after deaths."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import property_cases
import pytest
import torch
from property_cases import Case
from test_property import CALL, CASE, checked, checked_gradients
from test_sum_orders import HIDDEN, NUM_EXPERTS, NUM_TOKENS, TOP_K, Job

import weft
from pool import Pool
from weft import reference

LAYOUTS = ("rank_major", "expert_major", "masked")
SHAPES = [(4, 2), (6, 4), (8, 4), (12, 4), (8, 3), (4, 1)]  # ranks, and ranks of a node


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(max_ranks=12) as ranks:
        yield ranks


def nodes(num_ranks: int, node_ranks: int, tokens: tuple[int, ...] = (17, 0, 40, 9), **changed: Any) -> Case:
    """`tokens` go round the ranks."""
    changed.setdefault("capacity", "met" if changed.get("layout") == "masked" else None)
    call = replace(
        CALL,
        tokens=tuple(tokens[rank % len(tokens)] for rank in range(num_ranks)),
        biases=tuple(CALL.biases[rank % 4] for rank in range(num_ranks)),
        ids_are_int64=tuple(rank % 3 != 1 for rank in range(num_ranks)),
        **changed,
    )
    return replace(CASE, num_ranks=num_ranks, num_local=2, node_ranks=node_ranks, calls=(call,))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_ranks", "node_ranks"), SHAPES)
def test_shapes(pool: Pool, num_ranks: int, node_ranks: int, layout: str) -> None:
    """With weights, bias and side; a repetition with other rows; pulled and pushed; gradients."""
    case = nodes(num_ranks, node_ranks, layout=layout)
    checked(pool, case)
    checked_gradients(pool, case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [rows for rows in property_cases.ROWS if rows != "plain"])
def test_forms_of_rows(pool: Pool, layout: str, rows: str) -> None:
    checked(pool, nodes(6, 4, layout=layout, rows=rows))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_in_fp8(pool: Pool, layout: str) -> None:
    """Whole and broken groups of 128; nodes of one rank, whose contribution is the sum."""
    for num_ranks, node_ranks in ((6, 4), (4, 1)):
        for hidden, output_dtype in ((656, "bfloat16"), (144, "float32")):
            case = nodes(num_ranks, node_ranks, layout=layout, wire="fp8", ids="distinct", output_dtype=output_dtype)
            checked(pool, replace(case, hidden=hidden))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("capacity", ["met", "exceeded", "ample", "zero"])
def test_capacity(pool: Pool, layout: str, capacity: str) -> None:
    """Enough tokens that the sums of a node that kept nothing come to slots in which rows were before."""
    case = nodes(6, 4, (150, 3, 0, 70), layout=layout, capacity=capacity, alignment=4, side=None)
    checked(pool, case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ids", property_cases.IDS)
def test_ids(pool: Pool, layout: str, ids: str) -> None:
    checked(pool, nodes(4, 2, layout=layout, ids=ids))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heap", ["none", "full_on_one", "small"])
def test_heap_without_room(pool: Pool, layout: str, heap: str) -> None:
    """With long rows staging rings are full in the middle of a chunk."""
    case = replace(nodes(6, 4, (300, 2, 0, 100), layout=layout), heap=heap)
    checked(pool, replace(case, hidden=2048) if heap == "none" else case)


def sizes(comm: weft.Communicator) -> None:
    """Calls of many sizes on one object: chunks that are full, broken, and none."""
    job_tokens = (0, 1, 16, 17, 65, 200)
    with weft.ExpertParallel(comm, num_experts=12, top_k=3, hidden=16, max_tokens_per_rank=200, node_ranks=4) as ep:
        for number, most in enumerate(job_tokens * 2):
            generator = torch.Generator(device="cpu").manual_seed(number)
            xs, ids = [], []
            for rank in range(comm.num_ranks):
                count = most if (rank + number) % 3 else most // 2
                xs.append(torch.randn((count, 16), generator=generator, device="cpu", dtype=torch.float32).bfloat16())
                draw: Any = {"generator": generator, "dtype": torch.int64, "device": "cpu"}
                ids.append(torch.randint(-1, 12, (count, 3), **draw))
            wanted = reference.dispatch(xs, ids, num_experts=12)
            r = ep.dispatch(xs[comm.rank], ids[comm.rank])
            assert torch.equal(r.x, wanted[comm.rank].x)
            outputs = [each.x for each in wanted]
            sums = reference.combine(outputs, wanted, sum_domain=4)
            assert torch.equal(ep.combine(r.x, r.handle), sums[comm.rank]), most
        assert ep.stats()["windows"]


def test_calls_of_many_sizes() -> None:
    weft.spawn(sizes, 6, device="cpu")


def orders(comm: weft.Communicator) -> None:
    job, rank = Job(comm.num_ranks, torch.float32), comm.rank
    shape: dict[str, Any] = {
        "num_experts": NUM_EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens_per_rank": NUM_TOKENS,
        "dtype": torch.float32,
    }  # fmt: skip
    with weft.ExpertParallel(comm, **shape, node_ranks=2) as ep:
        for layout in LAYOUTS:
            results = job.dispatched(layout)
            outputs = [job.outputs(results, each) for each in range(comm.num_ranks)]
            options: dict[str, Any] = {"capacity": NUM_TOKENS * TOP_K} if layout == "masked" else {}
            r = ep.dispatch(job.xs[rank], job.ids[rank], job.weights[rank], layout=layout, **options)
            for order in ("rank", "last_pick"):
                wanted = reference.combine(outputs, results, order=order, sum_domain=2)[rank]
                assert torch.equal(ep.combine(outputs[rank], r.handle, order=order), wanted), (layout, order)
        with pytest.raises(weft.Unsupported, match="pick"):
            ep.combine(outputs[rank], r.handle, order="pick")
        x = torch.zeros((1, HIDDEN), dtype=torch.float32, device="cpu")
        ids = torch.zeros((1, TOP_K), dtype=torch.int64, device="cpu")
        with pytest.raises(weft.InvalidArgument, match="different things"):  # seen by all, across nodes
            ep.dispatch(x, ids, layout="expert_major", alignment=2 if rank == 3 else 1)
        r = ep.dispatch(x, torch.full((1, TOP_K), NUM_EXPERTS - 1, dtype=torch.int64, device="cpu"))
        assert r.num_rows.item() == (comm.num_ranks if rank == comm.num_ranks - 1 else 0)
    with pytest.raises(weft.InvalidArgument, match="allowed with node_ranks=2: None, or the same"):
        weft.ExpertParallel(comm, **shape, node_ranks=2, sum_domain=3)
    with pytest.raises(weft.InvalidArgument, match="node_ranks"):  # on every rank
        weft.ExpertParallel(comm, **shape, node_ranks=2 if rank else None)


def test_orders_and_what_is_refused() -> None:
    weft.spawn(orders, 8, device="cpu")  # sums of two nodes show no order
    assert weft.supports(num_ranks=6, num_experts=12, node_ranks=4)
    assert not weft.supports(num_ranks=6, num_experts=12, node_ranks=4, sum_domain=3)
    assert not weft.supports(num_ranks=6, num_experts=12, node_ranks=7)


def rows_sent(comm: weft.Communicator) -> int:
    """Each token goes to all ranks."""
    with weft.ExpertParallel(comm, num_experts=6, top_k=6, hidden=16, max_tokens_per_rank=10, node_ranks=4) as ep:
        x = torch.ones((10, 16), dtype=torch.bfloat16, device="cpu")
        r = ep.dispatch(x, torch.arange(6, dtype=torch.int64, device="cpu").expand(10, 6).contiguous())
        assert torch.equal(ep.combine(r.x, r.handle), 6 * x)
        sent: int = ep.stats()["windows"][0]["rows_sent"]
        return sent


def test_a_row_crosses_to_a_node_once() -> None:
    assert weft.spawn(rows_sent, 6, device="cpu") == [40, 40, 40, 40, 20, 20]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def checked_call(comm: weft.Communicator, ep: weft.ExpertParallel, node_ranks: int, number: int, dies: str) -> None:
    """A dispatch and a combine beside the reference of those who are left."""
    generator = torch.Generator(device="cpu").manual_seed(number)
    draw: Any = {"generator": generator, "dtype": torch.int64, "device": "cpu"}
    xs, ids = [], []
    for _ in range(comm.num_ranks):
        count = int(torch.randint(0, 41, (), **draw))
        xs.append(torch.randn((count, 16), generator=generator, device="cpu", dtype=torch.float32).bfloat16())
        ids.append(torch.randint(-1, 12, (count, 3), **draw))
    layout, rank = ("rank_major", "expert_major")[number % 2], comm.rank
    wanted = reference.dispatch(xs, ids, num_experts=12, layout=layout, active_ranks=comm.active_ranks)
    r = ep.dispatch(xs[rank], ids[rank], layout=layout)
    assert torch.equal(r.x[: r.num_rows.item()], wanted[rank].x[: r.num_rows.item()]), number
    if dies == "between":
        die()
    sums = reference.combine([each.x for each in wanted], wanted, sum_domain=node_ranks)
    assert torch.equal(ep.combine(r.x, r.handle), sums[rank]), number


def call_for_long(comm: weft.Communicator, ep: weft.ExpertParallel, node_ranks: int, first: int, dies: str) -> None:
    if dies == "anywhere":
        threading.Timer(0.1, die).start()
    for number in range(first, first + 10_000):
        if dies == "before" and number == first + 3:
            die()
        checked_call(comm, ep, node_ranks, number, dies if number == first + 3 else "")


Deaths = tuple[tuple[int, str], ...]  # who dies, and when


def go_on_without(comm: weft.Communicator, node_ranks: int, deaths: Deaths) -> list[weft.Change]:
    """Calls go on until each of `deaths` has ended one; those left recover and begin their calls anew."""
    changes = []
    shape: dict[str, Any] = {"num_experts": 12, "top_k": 3, "hidden": 16, "max_tokens_per_rank": 40}
    with weft.ExpertParallel(comm, **shape, node_ranks=node_ranks) as ep:
        for turn, (victim, when) in enumerate(deaths):
            with pytest.raises(weft.PeerLost) as caught:
                call_for_long(comm, ep, node_ranks, turn * 10_000, when if comm.rank == victim else "")
            assert caught.value.ranks == (victim,)
            changes.append(comm.recover(caught.value.ranks))
        for number in range(100_000, 100_004):
            checked_call(comm, ep, node_ranks, number, "")
    return changes


@pytest.mark.parametrize(
    ("node_ranks", "deaths"),
    [
        pytest.param(4, ((5, "between"), (1, "anywhere")), id="4+2, 4+1, 3+1"),
        pytest.param(4, ((4, "before"), (0, "between")), id="index 0 of each node"),
        pytest.param(2, ((2, "between"), (3, "before"), (5, "anywhere")), id="2+2+2, 2+1+2, 2+2, 2+1"),
    ],
)
def test_deaths(node_ranks: int, deaths: Deaths) -> None:
    seen = weft.spawn(go_on_without, 6, args=(node_ranks, deaths), device="cpu", on_failure="return")
    gone = [victim for victim, _ in deaths]
    for rank, changes in enumerate(seen):
        if rank in gone:
            assert isinstance(changes, weft.PeerLost)
            continue
        assert [change.lost + change.evicted for change in changes] == [(victim,) for victim in gone]
        assert changes[-1].active == tuple(each for each in range(6) if each not in gone)


def test_a_late_rank_is_named_with_its_rail() -> None:
    """Rank 3 doesn't come to the second call; the others go on without it."""
    reader, writer = os.pipe()

    def calls(comm: weft.Communicator) -> str:
        with weft.ExpertParallel(comm, num_experts=12, top_k=3, hidden=16, max_tokens_per_rank=40, node_ranks=2) as ep:
            checked_call(comm, ep, 2, 0, "")
            if comm.rank == 3:
                os.read(reader, 1)
                with pytest.raises((weft.PeerTimeout, weft.Evicted)):
                    checked_call(comm, ep, 2, 1, "")
                return ""
            x = torch.ones((1, 16), dtype=torch.bfloat16, device="cpu")
            ids = torch.zeros((1, 3), dtype=torch.int64, device="cpu")
            with pytest.raises(weft.PeerTimeout) as caught:
                ep.dispatch(x, ids, deadline_s=4.0 if comm.rank == 0 else 60.0)
            assert caught.value.peers == (3,)
            assert comm.recover(caught.value.peers).active == (0, 1, 2)
            os.write(writer, b"." if comm.rank == 0 else b"")
            for number in range(4):
                checked_call(comm, ep, 2, number, "")
        return str(caught.value)

    texts = weft.spawn(calls, 4, device="cpu")
    assert all("rank 3: node 1, rail 1" in text for text in texts[:3]), texts
    os.close(reader)
    os.close(writer)


def beside_a_newcomer(comm: weft.Communicator, end: str) -> None:
    if not comm.is_member:
        while not os.path.exists(end):
            time.sleep(0.01)
        return
    while comm.membership.joining != (2,):
        time.sleep(0.01)
    with (
        weft.ExpertParallel(comm, num_experts=12, top_k=3, hidden=16, max_tokens_per_rank=40, node_ranks=1) as ep,
        weft.ExpertParallel(
            comm, num_experts=12, top_k=3, hidden=64, max_tokens_per_rank=40, max_heap_bytes=8 << 20
        ) as other,
    ):
        checked_call(comm, ep, 1, 0, "")
        other.resize(heap_bytes=8 << 20)
        checked_call(comm, ep, 1, 1, "")
    open(end, "w").close()


def test_a_newcomer_that_only_connects_changes_nothing(tmp_path: Path) -> None:
    weft.spawn(beside_a_newcomer, 2, (str(tmp_path / "end"),), device="cpu", standby=1)
