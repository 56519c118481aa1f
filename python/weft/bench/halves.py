"""A rank's part of `weft bench --halves`: calls that send and receive apart, while the GPU does other work between.

What is timed is exposed: the two halves, not the work that hides the wire. Eager, each half lies between two events on
the stream. In a CUDA graph, where there is no event between, it is the time of a graph with both less that of one with
the work alone, replayed in turn. The work holds one SM and touches no memory: work that fills the GPU or its links
slows what it hides. The cpu engine does all in the first half, so nothing is hidden there.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import weft
from weft.bench.cases import CALLS_IN_GRAPH, Case
from weft.bench.rank import BenchRank
from weft.bench.small_worker import Calls
from weft.bench.timing import replays_in_turn, time_calls
from weft.verify.check import DTYPES, Mismatch

__all__ = ["run_halves"]

_LEAST_WORK_US = 200.0  # between halves: the host is ahead of the GPU with it, too
_WORK_OVER_CALL = 4  # the work takes so many times what a call takes that waits for its wire
_TRIAL_CYCLES = 2_000_000
_TRIALS, _TRIAL_WARMUP = 10, 3
_SAMPLES = 50  # of replays; the work makes them long


def run_halves(worker: BenchRank, case: Case) -> dict[str, Any]:
    """Check, then time: this rank's figures, or why such a call is `unsupported` on some rank. Collective.

    Raises:
        Mismatch: a result is wrong.
    """
    with contextlib.ExitStack() as stack:
        refused, timed = "", None
        try:
            timed = stack.enter_context(_halves(worker, case))
        except weft.Unsupported as error:
            refused = str(error)
        refusals = [text for text in map(json.loads, worker.meeting.gather(json.dumps(refused))) if text]
        if refusals or timed is None:
            return {"unsupported": refusals[0]}
        return {**timed(), **worker.samples.row_counts(case)}


@contextlib.contextmanager
def _halves(worker: BenchRank, case: Case) -> Iterator[Callable[[], dict[str, Any]]]:
    """What times a call in two halves, after its results were right. With an object of its own, whose small batches may
    have as many tokens as the case. Collective.

    The figures of a rank: `gpu_us`, of each call both halves; eager also `send_us` and `receive_us`, of a graph
    `work_gpu_us`, of the work alone, which is to be subtracted; `host_us`; `work_us`, of the work before each half,
    None on a CPU.

    Raises:
        Unsupported: what refuses such a call, on all ranks alike; a graph on a CPU.
        Mismatch: a result is wrong.
    """
    if case.is_graphed and not worker.on_gpu:
        raise weft.Unsupported("a CUDA graph", str(worker.comm.device), "a GPU")
    ep = weft.ExpertParallel(
        worker.comm,
        num_experts=case.experts,
        top_k=case.top_k,
        hidden=case.hidden,
        max_tokens_per_rank=max(1, case.tokens),
        dtype=DTYPES[case.dtype],
        heap_bytes=worker.heap_bytes(case),
        small_tokens=max(1, case.tokens),
        deadline_s=worker.deadline_s,
        node_ranks=worker.options.node_ranks,
    )
    with ep, contextlib.ExitStack() as stack:
        calls = Halves(worker, case, ep, worker.samples.capacity(case))
        stack.callback(calls.drop)
        calls.once()
        wrong = _wrong_after(calls, calls.once, worker)
        work = _Work(_work_us(worker, calls)) if worker.on_gpu else None
        timed: Callable[[], dict[str, Any]] = _Eager(worker, calls, work).time
        if case.is_graphed and work is not None:
            graphs = _Graphs(worker, calls, work)
            stack.callback(graphs.reset)
            wrong += _wrong_after(calls, graphs.with_calls.replay, worker)
            timed = graphs.time
        if wrong:
            raise wrong[0]
        worker.note_memory(ep, None if case.op == "combine" else calls.received, calls.y)
        yield timed


class Halves(Calls):
    """dispatch or combine, each in two halves."""

    sent: weft.Staged | None = None  # a combine that has not received

    def dispatch(self) -> None:
        """Both halves."""
        self._send_rows()
        self.result().wait()

    def once(self) -> None:
        """Both halves."""
        self.send()
        self.receive()

    def send(self) -> None:
        """The half that sends."""
        if self.case.op == "dispatch":
            self._send_rows()
            return
        self.y = None
        self.sent = self.ep.combine(self.outputs, self.result().handle, staged=True, **self.options)

    def receive(self) -> None:
        """The half that receives."""
        if self.sent is not None:
            self.y, self.sent = self.sent.wait(), None
            return
        self.result().wait()

    def drop(self) -> None:
        """As Calls.drop."""
        self.sent = None
        super().drop()

    def _send_rows(self) -> None:
        self.received = None
        x, ids, weights = self.samples.x(self.case.rows), self.samples.topk_idx, self.samples.topk_weights
        self.received = self.ep.dispatch(x, ids, weights, staged=True, **self.dispatch_options)


def _wrong_after(calls: Halves, call: Callable[[], object], worker: BenchRank) -> list[Mismatch]:
    """What is wrong in results that were overwritten before."""
    calls.poison()
    call()
    worker.settle()
    return calls.problems()


class _Work:
    """Keeps one SM busy for so many microseconds, on the current stream."""

    def __init__(self, us: float) -> None:
        self.us = us
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(2):  # the first one wakes the GPU up
            begin.record()
            torch.cuda._sleep(_TRIAL_CYCLES)
            end.record()
            end.synchronize()
        self._cycles = max(1, round(us / (begin.elapsed_time(end) * 1e3) * _TRIAL_CYCLES))

    def __call__(self) -> None:
        torch.cuda._sleep(self._cycles)


def _work_us(worker: BenchRank, calls: Halves) -> float:
    """Enough for the rows of the slowest rank to arrive, equal on all ranks."""
    device, meet = worker.comm.device, worker.meeting.wait
    times = time_calls(calls.once, iters=_TRIALS, warmup=_TRIAL_WARMUP, device=device, meet=meet)
    mine = statistics.median(times.gpu_us)
    return max(_LEAST_WORK_US, _WORK_OVER_CALL * max(map(float, worker.meeting.gather(repr(mine)))))


class _Eager:
    """Halves with work before each, between events of their own."""

    def __init__(self, worker: BenchRank, calls: Halves, work: _Work | None) -> None:
        self._worker, self._calls, self._work = worker, calls, work

    def time(self) -> dict[str, Any]:
        """The figures of `_halves`."""
        options, halves_of_call = self._worker.options, (self._calls.send, self._calls.receive)
        self._worker.settle()
        self._worker.meeting.wait()
        for _ in range(options.warmup):
            self._both(halves_of_call)
        timed = [self._both(halves_of_call) for _ in range(options.iters)]
        self._worker.settle()
        host_us = [[us for us, _ in both] for both in timed]
        gpu_us = host_us
        if self._work is not None:
            gpu_us = [[begin.elapsed_time(end) * 1e3 for _, (begin, end) in both] for both in timed]
        return {
            "gpu_us": [sum(both) for both in gpu_us],
            "host_us": [sum(both) for both in host_us],
            "send_us": [both[0] for both in gpu_us],
            "receive_us": [both[1] for both in gpu_us],
            "work_us": None if self._work is None else self._work.us,
        }

    def _both(self, halves_of_call: tuple[Callable[[], None], ...]) -> list[tuple[float, Any]]:
        """Of each half the time on the host, and the events around it on a GPU."""
        noted = []
        for half in halves_of_call:
            events = None
            if self._work is not None:
                self._work()
                events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                events[0].record()
            start = time.perf_counter_ns()
            half()
            host_us = (time.perf_counter_ns() - start) / 1e3
            if events is not None:
                events[1].record()
            noted.append((host_us, events))
        return noted


class _Graphs:
    """A graph of calls whose halves have work before each, and one of the work alone."""

    def __init__(self, worker: BenchRank, calls: Halves, work: _Work) -> None:
        self._worker, self._work = worker, work
        self.with_calls, self._alone = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        meeting = worker.meeting
        # One rank at a time: torch.cuda.graph begins by synchronising the GPU, which other ranks may share.
        for rank in range(meeting.num_ranks):
            worker.settle()
            meeting.wait()
            if rank == meeting.rank:
                self._capture(self.with_calls, (work, calls.send, work, calls.receive))
                self._capture(self._alone, (work, work))
        meeting.wait()

    def _capture(self, graph: torch.cuda.CUDAGraph, parts: tuple[Callable[[], None], ...]) -> None:
        stream = torch.cuda.Stream(self._worker.comm.device)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(CALLS_IN_GRAPH):
                for part in parts:
                    part()

    def time(self) -> dict[str, Any]:
        """The figures of `_halves`."""
        graphs = [(graph.replay, CALLS_IN_GRAPH) for graph in (self.with_calls, self._alone)]
        with_calls, alone = replays_in_turn(graphs, samples=_SAMPLES, meet=self._worker.meeting.wait)
        return {
            "gpu_us": with_calls.gpu_us,
            "host_us": with_calls.host_us,
            "work_gpu_us": alone.gpu_us,
            "work_us": self._work.us,
        }

    def reset(self) -> None:
        """Give the graphs back, when they have run."""
        self._worker.settle()
        for graph in (self.with_calls, self._alone):
            graph.reset()
