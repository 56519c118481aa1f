"""Guards against a NIXL-style program that does not run as it is: ranks that are connected and removed while it works
get a wrong word, disturb the others, or can't come back."""

from __future__ import annotations

import os
import pathlib
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nixl_cases import LOCAL, Step, run

import weft
from weft import deep_ep
from weft.deep_ep.nixl_meeting import MeetingPlace

NUM_RANKS, NUM_NVL_BYTES, NUM_RDMA_BYTES = 4, 0, 1 << 20


@pytest.fixture(autouse=True)
def store(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Where the ranks meet, as their environment says."""
    monkeypatch.setenv("WEFT_DEEP_EP_STORE", str(tmp_path / "store"))
    return tmp_path


def _snippet(outer: weft.Communicator) -> tuple[int, ...]:
    """The program of DeepEP's pull request 465, on each rank. Ranks 2 and 3 are new: they begin where they come in."""
    rank, num_ranks, num_experts_per_rank = outer.rank, NUM_RANKS, LOCAL
    num_nvl_bytes, num_rdma_bytes = NUM_NVL_BYTES, NUM_RDMA_BYTES
    is_new = rank > 1
    initial_ranks = [0, 1, 2, 3] if is_new else [0, 1]

    buffer = deep_ep.nixl_buffer(rank, low_latency_mode=True, explicitly_destroy=True)
    buffer.update_memory_buffers(num_ranks, num_experts_per_rank, num_nvl_bytes, num_rdma_bytes)
    buffer.connect_ranks(initial_ranks)

    if not is_new:
        for number in range(3):
            step = Step(buffer, number, 2)
            step.check_dispatch(buffer.dispatch(**step.dispatch_arguments()))
            step.check_combine(buffer.combine(**step.combine_arguments())[0])
            assert step.active == (0, 1)
        ranks = [2, 3]
        buffer.connect_ranks(ranks)

    for number in range(3, 8):
        step = Step(buffer, number, 4)
        step.check_dispatch(buffer.dispatch(**step.dispatch_arguments()))
        step.check_combine(buffer.combine(**step.combine_arguments())[0])
        assert step.active == (0, 1, 2, 3)

    ranks = [1, 3]
    buffer.remove_ranks(ranks)

    if rank not in ranks:
        for number in range(8, 11):
            step = Step(buffer, number, 3)
            step.check_dispatch(buffer.dispatch(**step.dispatch_arguments()))
            step.check_combine(buffer.combine(**step.combine_arguments())[0])
            assert step.active == (0, 2)
    active: tuple[int, ...] = step.active
    buffer.destroy()
    return active


def test_the_snippet_runs_as_it_is() -> None:
    """Two ranks, four, and two others; every word of every call."""
    seen = weft.spawn(_snippet, num_ranks=4, device="cpu")
    assert seen == [(0, 2), (0, 1, 2, 3), (0, 2), (0, 1, 2, 3)]


def _buffer(rank: int, **more: Any) -> deep_ep.NixlBuffer:
    buffer = deep_ep.nixl_buffer(rank, low_latency_mode=True, low_latency_nvlink_backend="ipc", explicitly_destroy=True)
    buffer.update_memory_buffers(**{"num_ranks": NUM_RANKS, "num_experts_per_rank": LOCAL, **more})
    return buffer


def _comes_back(outer: weft.Communicator) -> int:
    """Rank 2 is taken in, removed, and taken in again as a new buffer; meanwhile rank 3 comes, alone in its change."""
    rank = outer.rank
    if rank == 3:
        outer.meet(60.0)
    buffer = _buffer(rank)
    others = {0: [1], 1: [0], 2: [0, 1], 3: [0, 1]}
    buffer.connect_ranks(others[rank])
    if rank < 2:
        run(buffer, 0, 2)
        buffer.connect_ranks([0, 1, 2])  # those that are there already are ignored
    if rank < 3:
        assert run(buffer, 1, 3) == (0, 1, 2)
        outer.meet(60.0)
        buffer.disconnect_ranks([2])
    if rank < 2:
        buffer.disconnect_ranks([2])  # it is not there any more
        assert run(buffer, 2, 2) == (0, 1)
        buffer.connect_ranks([3])
    if rank in (0, 1, 3):
        assert run(buffer, 3, 4) == (0, 1, 3)
        buffer.connect_ranks([2])
    if rank == 2:
        with pytest.raises(weft.InvalidState, match="destroyed"):
            buffer.connect_ranks([0, 1])
        buffer = _buffer(rank)
        buffer.connect_ranks([0, 1, 3])
    for number in range(4, 8):
        assert run(buffer, number, 4) == (0, 1, 2, 3)
    buffer.barrier()
    epoch = buffer.comm.epoch
    buffer.destroy()
    return epoch


def test_a_rank_that_was_removed_comes_back() -> None:
    """With a new buffer, in its old slot."""
    assert len(set(weft.spawn(_comes_back, num_ranks=4, device="cpu"))) == 1


def _not_activated(outer: weft.Communicator) -> None:
    """Rank 2 is connected without being let in; then it is, masked, and let in again."""
    buffer = _buffer(outer.rank)
    is_new = outer.rank == 2
    if is_new:
        outer.meet(60.0)  # what it makes alone the others have made
    buffer.connect_ranks([0, 1], activate=not is_new)
    status = [-1] * NUM_RANKS
    if not is_new:
        run(buffer, 0, 2)
        outer.meet(60.0)
        buffer.connect_ranks([2], activate=False)
        for number in range(4):
            assert run(buffer, number, 2) == (0, 1)
        buffer.query_mask_buffer(masks := torch.tensor(status, dtype=torch.int32, device="cpu"))
        assert masks.tolist() == [0, 0, 1, 1]
    else:
        run(buffer, 0, 3)  # alone, as a warm-up
    for others, mask in (((0, 1, 2), False), ((0, 1), True), ((0, 1, 2), False)):
        if not is_new:
            buffer.update_mask_buffer(2, mask)
        elif not mask:
            buffer.update_mask_buffer(0, False)
        wanted = (2,) if is_new and mask else others
        while run(buffer, 5, 3) != wanted:
            pass
    for _ in range(3):
        assert run(buffer, 5, 3) == (0, 1, 2)
    buffer.destroy()


def test_a_rank_is_connected_and_let_in_later() -> None:
    """And its masks are the same on all."""
    weft.spawn(_not_activated, num_ranks=3, device="cpu")


def _removed_again(outer: weft.Communicator) -> None:
    """Two groups, one after the other, in one store: the first one lets rank 3 go, the second one rank 2."""
    rank = outer.rank
    for gone in (3, 2):
        buffer = _buffer(rank)
        buffer.connect_ranks([0, 1, 2, 3])
        assert run(buffer, 0, 4) == (0, 1, 2, 3)
        if gone == 2 and rank == 0:
            buffer._deadline_s = 0.2
            with pytest.raises(weft.PeerTimeout, match="ranks 1, 2 did not call it"):
                buffer.remove_ranks([3])
            buffer._deadline_s = 100.0
        outer.meet(60.0)
        for _ in range(2 if gone == 2 else 0):
            if rank < 2:
                with pytest.raises(weft.InvalidArgument, match="must be equal on all ranks that stay"):
                    buffer.remove_ranks([3] if rank == 1 else [2, 3])
            outer.meet(60.0)
        if rank == 1:
            time.sleep(0.3)  # what it said before is not what it says now
        if rank != gone:
            buffer.remove_ranks([gone])
            assert run(buffer, 1, 4) == tuple(each for each in range(4) if each != gone)
        outer.meet(60.0)
        buffer.destroy()
        outer.meet(60.0)


def test_what_was_said_of_an_earlier_removal_counts_no_more() -> None:
    """Of another group, of an attempt that was given up, or of one that was refused."""
    weft.spawn(_removed_again, num_ranks=4, device="cpu")


def _masked_and_removed(outer: weft.Communicator) -> None:
    """Rank 2 is masked; then it is removed, is told so, and comes back as a new buffer."""
    rank = outer.rank
    buffer = _buffer(rank, num_ranks=3)
    buffer.connect_ranks([0, 1, 2])
    if rank == 0:
        buffer.update_mask_buffer(2, True)
    while run(buffer, 0, 3) != ((2,) if rank == 2 else (0, 1)):
        pass
    outer.meet(60.0)
    if rank < 2:
        buffer.remove_ranks([2])
        buffer.clean_mask_buffer()  # does not take it in again
        for _ in range(5):
            assert run(buffer, 1, 3) == (0, 1)
    outer.meet(60.0)
    if rank == 2:
        with pytest.raises(weft.Evicted, match="while it was masked"):
            run(buffer, 1, 3)
    outer.meet(60.0)
    if rank == 2:
        buffer.destroy()
        buffer = _buffer(rank, num_ranks=3)
    buffer.connect_ranks([0, 1, 2])
    for number in range(2, 5):
        assert run(buffer, number, 3) == (0, 1, 2)
    buffer.destroy()


def test_a_masked_rank_is_removed() -> None:
    """Like one that is not."""
    weft.spawn(_masked_and_removed, num_ranks=3, device="cpu")


def _mask_under_way(outer: weft.Communicator) -> None:
    """Rank 0 wants rank 3 to take part again, which has ended meanwhile; all take rank 2 in."""
    rank = outer.rank
    buffer = _buffer(rank)
    if rank == 2:
        buffer.connect_ranks([0, 1])
    else:
        buffer.connect_ranks([1 - rank])
        run(buffer, 0, 3)
        if rank == 0:
            masks = buffer._masks
            masks._ticket = buffer.comm.propose(resume=[3])
            masks.want(1, mask=True)
        buffer.connect_ranks([2])
    wanted = (1,) if rank == 1 else (0, 2)
    while (active := run(buffer, 1, 3)) != wanted:  # other masks come afterwards
        assert active == (0, 1, 2)
    buffer.destroy()


def test_a_mask_gives_way_to_a_rank_that_comes() -> None:
    """Else the rank that wants it is refused, and the others wait for it."""
    weft.spawn(_mask_under_way, num_ranks=3, device="cpu")


def _late_newcomer(outer: weft.Communicator) -> None:
    """Nobody takes rank 2 in within its time; afterwards they do."""
    rank = outer.rank
    buffer = _buffer(rank, num_ranks=3)
    if rank == 2:
        outer.meet(60.0)
        for wrong in (2, 4):
            with pytest.raises(weft.InvalidArgument, match=f"num_ranks is {wrong} on this rank, which joins, and 3"):
                _buffer(wrong - 1, num_ranks=wrong).connect_ranks([0])
        os.environ["WEFT_DEEP_EP_TIMEOUT_S"] = "2"
        with pytest.raises(weft.PeerTimeout):
            buffer.connect_ranks([0, 1])
        with pytest.raises(weft.InvalidState, match="no ranks are connected"):
            buffer.barrier()
        del os.environ["WEFT_DEEP_EP_TIMEOUT_S"]
        outer.meet(60.0)
        buffer.connect_ranks([0, 1])
    else:
        buffer.connect_ranks([1 - rank])
        run(buffer, 0, 3)
        outer.meet(60.0)
        outer.meet(60.0)
        buffer.connect_ranks([2])
    for number in range(3):
        assert run(buffer, number, 3) == (0, 1, 2)
    buffer.destroy()


def test_a_newcomer_that_was_not_taken_in_may_come_again() -> None:
    """With the same buffer; one with other numbers is refused at once, also where it has no slot."""
    weft.spawn(_late_newcomer, num_ranks=3, device="cpu")


def _refused(outer: weft.Communicator) -> None:
    rank = outer.rank
    buffer = deep_ep.nixl_buffer(rank, explicitly_destroy=True)
    for call in (buffer.barrier, lambda: buffer.connect_ranks([0]), lambda: buffer.remove_ranks([0])):
        with pytest.raises(weft.InvalidState, match=r"connect_ranks|update_memory_buffers"):
            call()
    for wrong in ({"num_ranks": 0}, {"num_ranks": 65}, {"num_experts_per_rank": 0}):
        with pytest.raises(weft.InvalidArgument, match=next(iter(wrong))):
            _buffer(rank, **wrong)
    for named, text in (({"low_latency_nvlink_backend": "rail"}, "nvlink_backend"), ({"timeout_ms": 0}, "timeout_ms")):
        with pytest.raises(weft.InvalidArgument, match=text):
            deep_ep.nixl_buffer(rank, **named)
    with pytest.raises(deep_ep.NotSupported, match="tcp_store_group"):
        deep_ep.nixl_buffer(rank, comm=object())
    buffer = _buffer(rank)
    with pytest.raises(weft.InvalidArgument, match="remote_ranks"):
        buffer.connect_ranks([4])
    if rank == 2:
        outer.meet(60.0)
        other = _buffer(rank, num_ranks=3)
        with pytest.raises(weft.InvalidArgument, match="num_ranks is 3 on this rank, which joins, and 4"):
            other.connect_ranks([0, 1])
        other = _buffer(rank, num_experts_per_rank=3)
        with pytest.raises(weft.InvalidArgument, match="num_experts_per_rank is 3 on this rank"):
            other.connect_ranks([0, 1])
        outer.meet(60.0)
        return
    with pytest.raises(deep_ep.NotSupported, match="begin with 0"):
        buffer.connect_ranks([1, 3]) if rank == 1 else _buffer(2).connect_ranks([1])
    buffer.connect_ranks([0, 1])
    with pytest.raises(deep_ep.NotSupported, match="slots"):
        buffer.update_memory_buffers(5, LOCAL)
    buffer.update_memory_buffers(NUM_RANKS, LOCAL)
    step = Step(buffer, 0, 2)
    for wrong_count in (1, LOCAL, 5 * LOCAL):
        with pytest.raises(weft.InvalidArgument, match="num_experts"):
            buffer.dispatch(**{**step.dispatch_arguments(), "num_experts": wrong_count})
    run(buffer, 0, 2)
    outer.meet(60.0)
    outer.meet(60.0)
    assert run(buffer, 1, 2) == (0, 1)  # the newcomer that was refused has disturbed nobody
    buffer.destroy()
    buffer.destroy()


def test_wrong_use_is_named() -> None:
    """On the rank that is wrong, and nobody else is disturbed."""
    weft.spawn(_refused, num_ranks=3, device="cpu")


def _nowhere(outer: weft.Communicator) -> None:
    with pytest.raises(weft.InvalidState, match="WEFT_DEEP_EP_STORE"):
        _buffer(outer.rank).connect_ranks([])


def test_a_store_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which."""
    monkeypatch.delenv("WEFT_DEEP_EP_STORE")
    weft.spawn(_nowhere, num_ranks=1, device="cpu")


def _by_tcp(outer: weft.Communicator) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if outer.rank == 0 else None
    port = int(outer.gather(str(store.port if store else "").encode())[0])
    if store is None:
        store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    for _ in range(2):  # again in the same store
        buffer = deep_ep.nixl_buffer(outer.rank, tcp_store_group=store, explicitly_destroy=True)
        buffer.update_memory_buffers(2, LOCAL)
        buffer.connect_ranks([0, 1])
        x = torch.arange(3 * 64, device="cpu").view(3, 64).to(torch.bfloat16)
        ids = torch.tensor([[0, 3], [1, 2], [2, -1]], device="cpu")
        weights = torch.ones((3, 2), device="cpu")
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 2 * LOCAL)
        rows, _, _, _, handle, _ = buffer.dispatch(
            x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=ids,
            topk_weights=weights,
        )  # fmt: skip
        y, _, _ = buffer.combine(rows, handle)
        assert torch.equal(y, x * in_rank.sum(1, keepdim=True))
        outer.meet(60.0)
        buffer.destroy()
        outer.meet(60.0)


def test_the_meeting_has_short_waits_of_its_own() -> None:
    """A key that is taken back between the look for it and the reading is waited for."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    before = store.timeout
    place = MeetingPlace(0, store)
    assert place._store.timeout <= timedelta(seconds=1) < before == store.timeout


def test_a_tcp_store_and_normal_calls() -> None:
    """Two groups, one after the other, in one store."""
    weft.spawn(_by_tcp, num_ranks=2, device="cpu")
