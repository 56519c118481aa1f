"""Guards against calls of weft.deep_ep on GPUs that differ from those of the cpu engine: the same cases, compared bit
for bit with weft.reference; graphs that replay old rows; calls that do not wait for what their streams were given."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from case_table import pairs, run_case
from gpu_steps import ASYNC, STEPS, USUAL, Inputs, make, on_device, random_steps
from refusal_cases import with_a_lost_rank
from test_matrix import pool  # noqa: F401  a fixture

import weft
from gpu_ranks import NUM_GPUS, ProcessRanks
from pool import RankState
from weft import deep_ep


def run(pool: Any, num_ranks: int, function: Any, argument: Any) -> list[Any]:  # noqa: F811
    """On `num_ranks` ranks; processes have a GPU each."""
    if isinstance(pool, ProcessRanks) and num_ranks > NUM_GPUS:
        pytest.skip(f"{num_ranks} processes, {NUM_GPUS} GPUs")
    return pool.run(num_ranks, function, [argument] * num_ranks)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "num_ranks"), pairs((1, 2, 4)))
def test_cases_of_every_engine(pool: Any, name: str, num_ranks: int) -> None:  # noqa: F811
    run(pool, num_ranks, run_case, name)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("seed", range(2))
def test_random_shapes(pool: Any, num_ranks: int, seed: int) -> None:  # noqa: F811
    run(pool, num_ranks, random_steps, (seed, 6))


def refill(places: Inputs, given: Inputs) -> None:
    """The same tensors with other values."""
    for place, values in zip(places, given, strict=True):
        place.copy_(values)


def replays(state: RankState, name: str) -> None:
    """Captured once; each replay reads new rows, ids and weights from the same places."""
    comm = state.comm
    first = make(comm, 0)
    places, step = on_device(comm, first), STEPS[name](comm, USUAL)
    stream, graph = torch.cuda.Stream(comm.device), torch.cuda.CUDAGraph()
    torch.cuda.current_stream(comm.device).synchronize()
    with torch.cuda.stream(stream):
        out = step(places)
        stream.synchronize()
        out.check(first, comm.rank)
        graph.capture_begin(capture_error_mode="thread_local")
        out = step(places)
        graph.capture_end()
        for seed in range(4):
            given = make(comm, seed)
            refill(places, on_device(comm, given))
            graph.replay()
            stream.synchronize()
            out.check(given, comm.rank)
            if seed == 1:  # an ordinary call between replays takes its own turn
                between = step(places)
                stream.synchronize()
                between.check(given, comm.rank)
        stream.synchronize()
        graph.reset()
    del out, step
    gc.collect()


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_graphs(pool: Any, name: str, num_ranks: int) -> None:  # noqa: F811
    run(pool, num_ranks, replays, name)


def first_call_in_a_capture(state: RankState, _: object) -> str:
    """Refused before anything starts; the ranks meet in the call after it."""
    comm = state.comm
    given = make(comm, 0)
    places = on_device(comm, given)
    buffer = deep_ep.Buffer(comm, low_latency_mode=True)
    stream, graph, text = torch.cuda.Stream(comm.device), torch.cuda.CUDAGraph(), ""
    torch.cuda.current_stream(comm.device).synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            buffer.low_latency_dispatch(places.x, places.ids, 16, given.num_experts)
        except weft.InvalidState as error:
            text = str(error)
        graph.capture_end()
        stream.synchronize()
    recv, _, handle, _, _ = buffer.low_latency_dispatch(places.x, places.ids, 16, given.num_experts, use_fp8=False)
    buffer.low_latency_combine(recv, places.ids, places.weights, handle)
    torch.cuda.current_stream(comm.device).synchronize()
    return text


def test_the_first_call_is_not_captured(pool: Any) -> None:  # noqa: F811
    for text in run(pool, 2, first_call_in_a_capture, None):
        assert "run this call once before capturing it" in text


def behind_busy_streams(state: RankState, name: str) -> None:
    """Inputs come late on the current stream; results are used behind the event; everything may be dropped."""
    comm = state.comm
    step = ASYNC[name](comm, USUAL)
    for seed in range(3):
        given = make(comm, seed)
        values = on_device(comm, given)
        late = Inputs(*(torch.zeros_like(each) for each in values))
        torch.cuda.current_stream(comm.device).synchronize()
        torch.cuda._sleep(20_000_000)
        refill(late, values)
        out = step(late)
        del late, values
        torch.cuda.current_stream(comm.device).synchronize()
        out.check(given, comm.rank)


@pytest.mark.parametrize("name", ASYNC)
def test_calls_on_the_communication_stream(pool: Any, name: str) -> None:  # noqa: F811
    run(pool, 2, behind_busy_streams, name)


def events(state: RankState, _: object) -> None:
    """What stands for an event, and the hook after the wait."""
    comm = state.comm
    given = make(comm, 0)
    places = on_device(comm, given)
    buffer = deep_ep.Buffer(comm)
    assert buffer.get_comm_stream().device == comm.device
    captured = deep_ep.Buffer.capture()
    assert captured.event is not None
    plain = torch.cuda.Event()
    plain.record()
    for previous in (None, deep_ep.EventHandle(), captured, deep_ep.EventOverlap(), plain):
        per_rank, _, per_expert, in_rank, event = buffer.get_dispatch_layout(
            places.ids, given.num_experts, previous_event=previous, async_finish=True
        )
        called: list[int] = []
        event.register_hook_after_wait(lambda called=called: called.append(1))
        with event:
            assert called == []
        assert called == [1]
        recv, _, _, _, handle, event = buffer.dispatch(
            places.x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
            topk_idx=places.ids, topk_weights=places.weights, previous_event=previous,
        )  # fmt: skip
        assert event.event is None  # synchronous
        buffer.combine(recv, handle, previous_event=previous)
    with pytest.raises(weft.InvalidArgument, match="previous_event"):
        buffer.get_dispatch_layout(places.ids, given.num_experts, previous_event="now")
    elastic = deep_ep.ElasticBuffer(comm, num_bytes=1 << 20)
    for number in range(20):
        elastic.barrier(use_comm_stream=number % 2 == 0, with_cpu_sync=number % 5 == 0)
    torch.cuda.current_stream(comm.device).synchronize()


def test_events(pool: Any) -> None:  # noqa: F811
    run(pool, 2, events, None)


def defaults_of_torch(state: RankState, _: object) -> None:
    """As DeepEP's own tests set them."""
    comm = state.comm
    given = make(comm, 0)
    places = on_device(comm, given)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda")
    try:
        with torch.inference_mode():
            outs = [kind(comm, USUAL)(places) for kind in STEPS.values()]
            torch.cuda.current_stream(comm.device).synchronize()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    for out in outs:
        out.check(given, comm.rank)


def test_default_device_and_dtype_of_processes(processes: ProcessRanks) -> None:
    run(processes, 2, defaults_of_torch, None)


def loses_a_rank(state: RankState, kind: str) -> str:
    """The survivor is told whom it has lost, and goes on alone."""
    return with_a_lost_rank(state.comm, kind)


@pytest.mark.parametrize("kind", ["v1", "low", "v2", "hybrid"])
def test_a_lost_rank_is_named_by_processes(kind: str) -> None:
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is in use in this process: run the tests of processes alone")
    ranks = ProcessRanks()  # of its own: it loses a rank
    try:
        assert ranks.run(2, loses_a_rank, [kind] * 2, may_die=[1]) == ["named", None]
    finally:
        ranks.stop()
