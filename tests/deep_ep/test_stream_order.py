"""Guards against a call on the communication stream that does not wait for all it was given, or whose temporaries are
made on another stream: with streams that only note what is asked of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import deep_ep_cases as cases
import weft
from weft import deep_ep
from weft.deep_ep import buffer as buffer_module
from weft.deep_ep import streams


class Event:
    pass


class Stream:
    """`inside`: whether work is given to it."""

    def __init__(self, *args: Any) -> None:
        self.waited: list[Any] = []
        self.inside = False

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)

    wait_event = wait_stream


class Outside(TorchDispatchMode):
    """Names what runs on the caller's stream."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._stream.inside:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def noted(monkeypatch: pytest.MonkeyPatch, buffer: Any) -> Stream:
    """The buffer's communication stream from now on."""
    made = Stream()

    @contextlib.contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        stream.inside = True
        yield
        stream.inside = False

    buffer._streams = streams.Streams(torch.device("cuda"))
    buffer._streams._stream = made
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(weft.Dispatched, "record_stream", lambda self, stream: None)
    return made


def both_events(comm: weft.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    given = cases.make(1)
    buffer = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=16)
    stream = noted(monkeypatch, buffer)
    first, second = Event(), Event()
    both = {"previous_event": first, "previous_event_before_epilogue": second}
    recv, _, _, handle, _ = buffer.dispatch(given.xs[0], given.ids[0], num_experts=given.num_experts, **both)
    assert stream.waited == [first, second]
    buffer.combine(recv, handle, **both)
    assert stream.waited == [first, second] * 2
    buffer.combine(recv, handle, previous_event_before_epilogue=second)
    assert stream.waited[4:] == [second]


def test_a_call_waits_for_both_events(monkeypatch: pytest.MonkeyPatch) -> None:
    weft.spawn(both_events, 1, (monkeypatch,), device="cpu")


def temporaries(comm: weft.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    given = cases.make(1, hidden=128)
    x, ids, weights = given.xs[0], given.ids[0], given.weights[0]
    v2 = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=16)
    v1 = deep_ep.Buffer(comm, low_latency_mode=True)
    parts = tuple(torch.ones((len(x), width), dtype=torch.int32, device="cpu") for width in (16, 2, 1))
    _, _, per_expert, in_rank, _ = v1.get_dispatch_layout(ids, given.num_experts)
    layout = {"is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    rows, _, low_handle, _, _ = v1.low_latency_dispatch(x, ids, 16, given.num_experts, use_fp8=False)
    recv, _, _, handle, _ = v2.dispatch(x, ids, num_experts=given.num_experts)
    calls: list[tuple[Any, Callable[[], Any]]] = [
        (v2, lambda: v2.combine(recv, handle, bias=(x, x), async_with_compute_stream=True)),
        (v2, lambda: v2.dispatch(parts, ids, num_experts=given.num_experts, async_with_compute_stream=True)),
        (v1, lambda: v1.dispatch(parts, **layout, topk_idx=ids, topk_weights=weights, async_finish=True)),
        (v1, lambda: v1.low_latency_dispatch(x, ids, 16, given.num_experts, async_finish=True)),
        (v1, lambda: v1.low_latency_combine(rows, ids, weights, low_handle, async_finish=True)),
    ]
    for number, (buffer, call) in enumerate(calls):
        stream = noted(monkeypatch, buffer)
        with Outside(stream) as outside:
            call()
        assert len(stream.waited) == 1
        assert outside.found == [], number


def test_temporaries_are_made_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    weft.spawn(temporaries, 1, (monkeypatch,), device="cpu")


def later_and_larger(comm: weft.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a graph capture: the host asks nobody."""
    given = cases.make(1, tokens=600)
    buffer = deep_ep.Buffer(comm)

    def call(num_tokens: int) -> Any:
        ids = given.ids[0][:num_tokens]
        _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, given.num_experts)
        return buffer.dispatch(
            given.xs[0][:num_tokens], is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=ids,
            topk_weights=given.weights[0][:num_tokens], num_worst_tokens=2,
        )  # fmt: skip

    call(1)
    monkeypatch.setattr(buffer_module, "is_capturing", lambda: True)
    with pytest.raises(weft.InvalidArgument, match="num_worst_tokens"):
        call(600)
    handle = call(9)[4]
    with pytest.raises(weft.CapacityExceeded):
        handle.ep.check()


def test_worst_tokens_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    weft.spawn(later_and_larger, 1, (monkeypatch,), device="cpu")
