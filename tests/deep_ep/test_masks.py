"""Guards against masks of low-latency calls that are local: ranks that go by different ones give wrong words. And
against a masked rank that hangs, or comes back out of step."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nixl_cases import HIDDEN, LOCAL, TOP_K, M, Step, run

import weft
from weft import deep_ep

LIMIT = 10_000


def status(buffer: Any) -> list[int]:
    """Who is masked, as the buffer says."""
    found = torch.full((buffer.group_size,), -1, dtype=torch.int32, device="cpu")
    buffer.low_latency_query_mask_buffer(found)
    return found.tolist()


def run_until(buffer: Any, wanted: tuple[int, ...], number: int) -> int:
    """Steps until these ranks take part, on each of them in the same one; the number of the next step."""
    for at in range(number, number + LIMIT):
        if run(buffer, at, buffer.group_size) == wanted:
            return at + 1
    raise AssertionError(f"{buffer.rank}: never {wanted}")


def _masked(comm: weft.Communicator, who_says: tuple[int, ...]) -> None:
    """Rank 2 is masked by `who_says`, works alone, and comes back."""
    buffer = deep_ep.Buffer(comm, low_latency_mode=True, enable_shrink=True, explicitly_destroy=True)
    everybody = tuple(range(comm.num_ranks))
    left = tuple(rank for rank in everybody if rank != 2)
    for number in range(3):
        assert run(buffer, number, comm.num_ranks) == everybody
    with pytest.raises(weft.InvalidArgument, match="rank_to_mask"):
        buffer.low_latency_update_mask_buffer(comm.rank, True)
    assert status(buffer) == [0] * comm.num_ranks
    if comm.rank in who_says:
        buffer.low_latency_update_mask_buffer(2, True)
    if comm.rank == 2:
        run_until(buffer, (2,), 3)
        assert status(buffer) == [int(rank != 2) for rank in everybody]
        buffer.low_latency_update_mask_buffer(0, False)  # wants to take part: its next dispatch waits for that
    else:
        run_until(buffer, left, 3)
        assert status(buffer) == [int(rank == 2) for rank in everybody]
        for number in range(50_000, 50_004):  # whatever was said of rank 2 has come to all
            assert run(buffer, number, comm.num_ranks) == left
        if comm.rank in who_says:
            buffer.low_latency_clean_mask_buffer()
    back = 0
    for _ in range(LIMIT):
        step = Step(buffer, 100_000, comm.num_ranks)  # a constant: rank 2 does not know which step this is
        step.check_dispatch(buffer.low_latency_dispatch(**step.dispatch_arguments()))
        step.check_combine(buffer.low_latency_combine(**step.combine_arguments())[0])
        back += step.active == everybody
        if back == 3:
            break
    assert status(buffer) == [0] * comm.num_ranks
    buffer.destroy()


@pytest.mark.parametrize("who_says", [(0,), (0, 1, 3)])
def test_a_masked_rank_is_masked_on_all(who_says: tuple[int, ...]) -> None:
    """From one step on, whoever said so, every word right on both sides; and so it comes back."""
    weft.spawn(_masked, 4, args=(who_says,), device="cpu", max_ranks=4)


def _two_in_flight(comm: weft.Communicator) -> None:
    buffer = deep_ep.Buffer(comm, low_latency_mode=True, enable_shrink=True, explicitly_destroy=True)
    if comm.rank == 0:
        buffer.low_latency_update_mask_buffer(1, True)
    for number in range(0, LIMIT, 2):
        first, second = Step(buffer, number, 3), Step(buffer, number + 1, 3)
        for step in (first, second):
            step.check_dispatch(buffer.low_latency_dispatch(**step.dispatch_arguments()))
        assert first.active == second.active  # no change between them
        for step in (first, second):
            step.check_combine(buffer.low_latency_combine(**step.combine_arguments())[0])
        if len(first.active) < 3:
            break
    assert first.active == ((1,) if comm.rank == 1 else (0, 2))
    buffer.destroy()


def test_no_change_comes_between_a_dispatch_and_its_combine() -> None:
    """Of two micro-batches neither."""
    weft.spawn(_two_in_flight, 3, device="cpu", max_ranks=3)


def _refused_once(comm: weft.Communicator) -> None:
    """Rank 1 alone repeats a dispatch; then rank 0 masks rank 2."""
    buffer = deep_ep.Buffer(comm, low_latency_mode=True, enable_shrink=True, explicitly_destroy=True)
    if comm.rank == 1:
        ids = torch.zeros((1, 129), dtype=torch.int64, device="cpu")
        x = torch.zeros((1, HIDDEN), dtype=torch.bfloat16, device="cpu")
        for _ in range(3):
            with pytest.raises(weft.InvalidArgument, match="top_k"):
                buffer.low_latency_dispatch(x, ids, M, comm.num_ranks * LOCAL, use_fp8=False)
    run(buffer, 0, comm.num_ranks)
    if comm.rank == 0:
        buffer.low_latency_update_mask_buffer(2, True)
    wanted = (2,) if comm.rank == 2 else (0, 1)
    at = run_until(buffer, wanted, 1)
    run(buffer, at, comm.num_ranks)
    buffer.destroy()


def test_a_dispatch_that_is_repeated_is_one_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the ranks of a later mask go by it in different dispatches."""
    monkeypatch.setenv("WEFT_DEEP_EP_TIMEOUT_S", "30")
    weft.spawn(_refused_once, 3, device="cpu", max_ranks=3)


def _two_buffers(comm: weft.Communicator) -> None:
    """While rank 2 is masked both buffers of the others meet a new shape, the second one's first; then all use them."""
    buffers = [deep_ep.Buffer(comm, enable_shrink=True, explicitly_destroy=True) for _ in range(2)]
    run(buffers[0], 0, 3)
    if comm.rank == 0:
        buffers[0].low_latency_update_mask_buffer(2, True)
    run_until(buffers[0], (2,) if comm.rank == 2 else (0, 1), 1)
    if comm.rank == 2:
        buffers[0].low_latency_update_mask_buffer(0, False)
    else:
        assert run(buffers[1], 1, 3, top_k=2) == run(buffers[0], 2, 3, top_k=1) == (0, 1)
        if comm.rank == 0:
            buffers[0].low_latency_update_mask_buffer(2, False)
    while run(buffers[0], 3, 3) != (0, 1, 2):  # a constant: rank 2 does not know which step this is
        pass
    for _ in range(2):
        for top_k in (1, 2, 3):
            for buffer in buffers:
                assert run(buffer, 4, 3, top_k) == (0, 1, 2)
        buffers.append(deep_ep.Buffer(comm, enable_shrink=True, explicitly_destroy=True))
        buffers.pop(0).destroy()  # the others go on
    for buffer in buffers:
        buffer.destroy()


def test_what_a_masked_rank_lacks_is_for_every_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it makes an object of the others alone, once it takes part again."""
    monkeypatch.setenv("WEFT_DEEP_EP_TIMEOUT_S", "30")
    weft.spawn(_two_buffers, 3, device="cpu", max_ranks=3)


def _of_a_group(comm: weft.Communicator, folder: pathlib.Path) -> None:
    store = dist.FileStore(str(folder / "store"), comm.num_ranks)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.num_ranks)
    group = dist.group.WORLD
    plain = deep_ep.Buffer(group, explicitly_destroy=True)
    with pytest.raises(deep_ep.NotSupported, match="enable_shrink"):
        plain.low_latency_update_mask_buffer(1, True)
    buffer = deep_ep.Buffer(group, low_latency_mode=True, enable_shrink=True, explicitly_destroy=True)
    assert buffer.comm is not plain.comm
    if comm.rank == 1:
        buffer.low_latency_update_mask_buffer(0, True)
    run_until(buffer, (0,) if comm.rank == 0 else (1,), 0)
    run(plain, 7, 2)  # not masked
    buffer.destroy()
    plain.destroy()
    dist.destroy_process_group()


def test_a_buffer_of_a_torch_group(tmp_path: pathlib.Path) -> None:
    """With masks, beside one without."""
    weft.spawn(_of_a_group, 2, args=(tmp_path,), device="cpu")


def _refused(comm: weft.Communicator) -> None:
    with pytest.raises(deep_ep.NotSupported, match="max_ranks"):
        deep_ep.Buffer(comm, enable_shrink=True)
    buffer = deep_ep.Buffer(comm)
    x = torch.zeros((1, HIDDEN), dtype=torch.bfloat16, device="cpu")
    ids = torch.zeros((1, TOP_K), dtype=torch.int64, device="cpu")
    buffer.low_latency_dispatch(x, ids, M, comm.num_ranks * LOCAL)
    assert status(buffer) == [0] * comm.num_ranks


def test_masks_of_a_fixed_group_are_refused() -> None:
    """And nothing else is."""
    weft.spawn(_refused, 2, device="cpu")
