"""Guards against what programs written for DeepEP rely on, and the originals' own traps: groups, events, empty ranks,
duplicates, growth, patched constructors, the end of a buffer, defaults of torch."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trap_cases import dispatched, forms, more_tokens, nobody_has_tokens, other_widths

import deep_ep_cases as cases
import weft
from weft import deep_ep, reference
from weft.deep_ep.buffers.elastic import EPHandle


def with_group(body: Callable[[Any], Any], num_ranks: int, store: Path) -> None:
    """body(group) on ranks of a gloo group."""

    def rank(comm: weft.Communicator) -> None:
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(store), num_ranks), rank=comm.rank, world_size=num_ranks
        )
        body(dist.new_group(list(range(num_ranks))))

    weft.spawn(rank, num_ranks, device="cpu")


def one_call(buffer: Any, rank: int, num_ranks: int) -> None:
    given = cases.make(num_ranks)
    recv, _, _, counts, handle, _ = dispatched(
        buffer, given.xs[rank], given.ids[rank], given.weights[rank], given.num_experts
    )
    wanted = reference.dispatch(given.xs, given.ids, given.weights, num_experts=given.num_experts)[rank]
    assert torch.equal(recv, wanted.x)
    assert isinstance(counts, list)
    assert len(handle) == 6


def test_a_gloo_group(tmp_path: Path) -> None:
    """Several buffers of all kinds on one group share a communicator; the group may end before them."""

    def body(group: Any) -> None:
        rank, num_ranks = dist.get_rank(), group.size()
        first = deep_ep.Buffer(group, 1 << 20, 0, explicitly_destroy=True)
        assert (first.group, first.rank, first.group_size, first.num_nvl_bytes) == (group, rank, num_ranks, 1 << 20)
        second = deep_ep.Buffer(group, low_latency_mode=True)
        third = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=16, explicitly_destroy=True)
        fourth = deep_ep.HybridEPBuffer(group, 64, 16, 3)
        assert first._ranks is second._ranks is third._ranks is fourth._ranks
        assert deep_ep.get_physical_domain_size(group) == third.get_logical_domain_size() == (1, num_ranks)
        one_call(first, rank, num_ranks)
        given = cases.make(num_ranks)
        x, ids, weights = given.xs[rank], given.ids[rank], given.weights[rank]
        recv, _, handle, _, _ = second.low_latency_dispatch(x, ids, 16, given.num_experts, use_fp8=False)
        recv2, _, _, handle2, _ = third.dispatch(x, ids, weights, num_experts=given.num_experts)
        second.low_latency_combine(recv, ids, weights, handle)
        third.combine(recv2, handle2)
        dist.destroy_process_group()
        first.destroy()
        first.destroy()
        with pytest.raises(weft.InvalidState, match="destroyed"):
            first.get_dispatch_layout(ids, given.num_experts)
        with pytest.raises(AssertionError, match="explicitly_destroy"):
            second.destroy()
        third.destroy()
        del second, fourth
        gc.collect()

    with_group(body, 2, tmp_path / "store")


def test_a_patched_constructor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = deep_ep.Buffer.__init__
    seen: list[int] = []

    def patched(self: Any, *args: Any, **named: Any) -> None:
        seen.append(len(args))
        original(self, *args, **named)

    def body(comm: weft.Communicator) -> None:
        monkeypatch.setattr(deep_ep.Buffer, "__init__", patched)
        buffer = deep_ep.Buffer(comm, 0, 0)
        assert isinstance(buffer, deep_ep.Buffer)
        assert seen == [3]
        one_call(buffer, comm.rank, comm.num_ranks)

    weft.spawn(body, 1, device="cpu")


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_forms_of_rows(num_ranks: int) -> None:
    weft.spawn(forms, num_ranks, device="cpu")


@pytest.mark.parametrize("num_ranks", [2, 6])
def test_no_tokens_and_duplicates(num_ranks: int) -> None:
    weft.spawn(nobody_has_tokens, num_ranks, device="cpu")


def test_windows_grow() -> None:
    weft.spawn(more_tokens, 2, device="cpu")


def test_widths() -> None:
    weft.spawn(other_widths, 2, device="cpu")


def defaults_of_torch(comm: weft.Communicator) -> None:
    """The package names every dtype and device: a default device on which nothing can be done would be seen."""
    given = cases.make(comm.num_ranks, even=True)
    rank, num_experts = comm.rank, given.num_experts
    x, ids, weights = given.xs[rank], given.ids[rank], given.weights[rank]
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    with torch.inference_mode():
        buffer = deep_ep.Buffer(comm)
        recv, _, w, _, handle, _ = dispatched(buffer, x, ids, weights, num_experts)
        assert len(list(handle)) == 6
        buffer.combine(recv, handle, w, bias=(x, x))
        for more in ({"use_fp8": False}, {"round_scale": True}, {"round_scale": True, "use_ue8m0": True}):
            ll = buffer.low_latency_dispatch(x, ids, 16, num_experts, **more)[2]
            assert len(list(ll)) == 5
        rows = torch.zeros((3, 16 * comm.num_ranks, 64), dtype=torch.bfloat16, device="cpu")
        buffer.low_latency_combine(rows, ids, weights, ll)
        elastic = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=16)
        elastic.barrier()
        for expand in (False, True):
            recv, _, w, v2, _ = elastic.dispatch(x, ids, weights, num_experts=num_experts, do_expand=expand)
            assert isinstance(v2, EPHandle)
            assert len(v2.recv_src_metadata) == v2.psum_num_recv_tokens_per_scaleup_rank[-1]
            assert v2.dst_buffer_slot_idx.shape == ids.shape
            elastic.combine(recv, v2, w)
        hybrid = deep_ep.HybridEPBuffer(comm, 64, 16, 3)
        rows, p, _, _, hh = hybrid.dispatch_with_permute(hidden=x, topk_idx=ids, topk_weights=weights)
        hybrid.combine_with_unpermute(hidden=rows, probs=p, handle=hh)
        list(hh)
        rows, p, _, hh = hybrid.dispatch(x, topk_idx=ids, topk_weights=weights, num_of_experts=num_experts)
        hybrid.combine(rows, p, hh)
        list(hh)
        from weft.deep_ep.utils import math

        math.per_token_cast_back(*math.per_token_cast_to_fp8(x))
    torch.set_default_device("cpu")


def test_default_device_and_dtype() -> None:
    weft.spawn(defaults_of_torch, 2, device="cpu")


def events(comm: weft.Communicator) -> None:
    given = cases.make(comm.num_ranks)
    x, ids, weights = given.xs[comm.rank], given.ids[comm.rank], given.weights[comm.rank]
    buffer = deep_ep.Buffer(comm)
    captured = deep_ep.Buffer.capture()
    assert isinstance(captured, deep_ep.EventOverlap)
    assert isinstance(deep_ep.ElasticBuffer.capture(), deep_ep.EventHandle)
    for previous in (None, deep_ep.EventHandle(), captured, deep_ep.EventOverlap()):
        event = dispatched(buffer, x, ids, weights, given.num_experts, previous_event=previous, async_finish=True)[-1]
        called: list[int] = []
        event.register_hook_after_wait(lambda called=called: called.append(1))
        with event as entered:
            assert entered is event
        event.current_stream_wait(release_handle=True)
        assert called == [1]
        assert event.event is None
        event.current_stream_wait()
        event.register_hook_after_wait(lambda called=called: called.append(2))
        with event() as entered:
            assert entered is event
            assert called == [1]
        assert called == [1, 2]
    with pytest.raises(weft.InvalidArgument, match="previous_event"):
        dispatched(buffer, x, ids, weights, given.num_experts, previous_event="now")
    with pytest.raises(weft.Unsupported, match="CUDA"):
        buffer.get_comm_stream()


def test_events() -> None:
    weft.spawn(events, 1, device="cpu")


def test_compiled_callers() -> None:
    """torch.compile leaves the calls as they are."""

    def body(comm: weft.Communicator) -> None:
        given = cases.make(1, top_k=2)
        buffer = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=16)

        def layer(x: torch.Tensor) -> torch.Tensor:
            recv, _, _, handle, _ = buffer.dispatch(x * 2, given.ids[0], num_experts=given.num_experts)
            y: torch.Tensor = buffer.combine(recv + 1, handle)[0]
            return y

        x = given.xs[0]
        assert torch.equal(torch.compile(layer, backend="eager")(x), layer(x))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weft.spawn(body, 1, device="cpu")
