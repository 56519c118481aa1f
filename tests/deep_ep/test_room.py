"""Guards against windows that do not grow with a rank's tokens, or that cost an exchange where nothing has to grow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from room_cases import dispatched, grows

import weft
from weft import deep_ep, routing
from weft.call.room import NeedsRoom


@pytest.mark.parametrize("worst", [0, 20000])
def test_windows_grow_in_the_call(worst: int) -> None:
    weft.spawn(grows, 3, (worst,), device="cpu")


def records(comm: weft.Communicator) -> None:
    buffer, num_experts = deep_ep.Buffer(comm), 2 * comm.num_ranks
    for count in (3, 600 + comm.rank, 4):
        x = torch.ones((count, 32), dtype=torch.float32, device="cpu")
        ids = (torch.arange(2 * count, dtype=torch.int64, device="cpu") % num_experts).view(count, 2)
        dispatched(buffer, x, ids, num_experts)


def test_a_call_that_grows_its_windows_is_recorded_once(tmp_path: Path) -> None:
    with routing.record(tmp_path / "t.npz"):
        weft.spawn(records, 2, device="cpu")
    trace = routing.load_trace(tmp_path / "t.npz")
    for rank in range(2):
        its, *of_buffer = [len(each.topk_idx) for each in trace.dispatches[rank]]
        assert its == 1  # in the first call the ranks tell each other T
        assert of_buffer == [3, 600 + rank, 4]


def needs(comm: weft.Communicator) -> int:
    """The call ends on every rank alike, and the next one is right; a late rank is waited for."""
    with weft.ExpertParallel(comm, num_experts=3, top_k=1, hidden=16, max_tokens_per_rank=4) as ep:
        ep.calls.tell_need()
        found = 0
        for turn in range(4):
            count = 5 + comm.rank if turn % 2 == 0 else 4
            x = torch.ones((count, 16), dtype=torch.bfloat16, device="cpu")
            ids = torch.zeros((count, 1), dtype=torch.int64, device="cpu")
            if turn == 2 and comm.rank == 1:
                time.sleep(0.3)
            if turn % 2:
                r = ep.dispatch(x, ids)
                assert torch.equal(ep.combine(r.x, r.handle), x)
                continue
            with pytest.raises(NeedsRoom) as caught:
                ep.dispatch(x, ids)
            found = caught.value.num_tokens
    return found


def test_every_rank_knows_who_needs_most() -> None:
    assert weft.spawn(needs, 3, device="cpu") == [7, 7, 7]


def differs(comm: weft.Communicator) -> None:
    """Rank 0 needs room; rank 1, and with it nobody else, makes another call: no rank goes on alone."""
    with weft.ExpertParallel(comm, num_experts=3, top_k=1, hidden=16, max_tokens_per_rank=4) as ep:
        ep.calls.tell_need()
        ids = torch.zeros((8, 1), dtype=torch.int64, device="cpu")
        x = torch.ones((8, 16), dtype=torch.bfloat16, device="cpu")
        r = ep.dispatch(x[:4], ids[:4])
        others = [
            lambda: ep.combine(r.x, r.handle),
            lambda: ep.dispatch(x[:4], handle=r.handle),
            lambda: ep.dispatch(x[:4], ids[:4], layout="expert_major"),
            lambda: ep.dispatch(x, ids, layout="expert_major"),
        ]
        for other in others:
            count = 8 if comm.rank == 0 else 4
            call = other if comm.rank == 1 else lambda count=count: ep.dispatch(x[:count], ids[:count])
            with pytest.raises(weft.InvalidArgument) as caught:
                call()
            assert str(caught.value).count("dispatch") + str(caught.value).count("combine") >= 2
            assert "rank 0" in str(caught.value) or "rank 1" in str(caught.value)
        assert torch.equal(ep.combine(r.x, r.handle), x[:4])


def test_another_call_beside_a_need_is_refused_on_every_rank() -> None:
    weft.spawn(differs, 3, device="cpu")


def heaps_of_rows_by_pick(comm: weft.Communicator) -> list[int]:
    """How many results of 1024 tokens with 8 picks the heaps of Hybrid's and V2's windows have room for."""
    found, top_k, hidden, most = [], 8, 2048, 1024
    of_one = most * top_k * (2 * hidden + 4 + 4)
    x = torch.ones((4, hidden), dtype=torch.bfloat16, device="cpu")
    ids = torch.arange(4 * top_k, dtype=torch.int64, device="cpu").view(4, top_k) % 8
    hybrid = deep_ep.HybridEPBuffer(comm, hidden, most, 8 // comm.num_ranks)
    elastic = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=most)
    for buffer, dispatch in (
        (hybrid, lambda: hybrid.dispatch_with_permute(hidden=x, topk_idx=ids, num_of_experts=8)),
        (elastic, lambda: elastic.dispatch(x, ids, num_experts=8, do_expand=True)),
    ):
        window = buffer._ranks.window

        def noted(window: Any = window, **arguments: Any) -> Any:
            if arguments["heap_bytes"]:  # else of words between ranks
                found.append(arguments["heap_bytes"] // of_one)
            return window(**arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(buffer._ranks, "window", noted)
            dispatch()
    return found


def test_heaps_have_room_for_a_row_a_pick() -> None:
    """Else a result goes beside the one before it to ordinary tensors, by a kernel more."""
    assert weft.spawn(heaps_of_rows_by_pick, 1, device="cpu") == [[2, 1]]
