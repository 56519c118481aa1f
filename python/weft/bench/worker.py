"""A rank's part of a benchmark: check the results against weft.reference, then time them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

import weft
from weft import reference, routing
from weft.bench.baseline import AllToAll
from weft.bench.options import Options
from weft.machine import where
from weft.verify.cases import loaded_trace
from weft.verify.check import DTYPES, Mismatch, expect_equal

_COPY_BYTES = 64 << 20
_COPY_ITERS = 12
_BARRIER_S = 300.0


class Barrier(Protocol):
    """Waits until every rank of the machine has come here; multiprocessing's and threading's barriers do."""

    def wait(self, timeout: float | None = None, /) -> int: ...


@dataclass(frozen=True)
class Timed:
    """Calls of one operation on one rank, back to back."""

    call_us: list[float]  # per call: inputs ready to outputs usable
    total_us: float  # first start to last end
    gpu_us: list[float] | None = None  # per call, between events on the stream; None on a CPU


@dataclass
class RankReport:
    """What one rank measured. `timed` is by library and operation: ("weft", "dispatch"), ..."""

    started_at_ns: int
    engine: str
    device: str
    placement: weft.Placement
    first_call_s: float = 0.0
    timed: dict[tuple[str, str], Timed] = field(default_factory=dict)
    copy_from_ns: int = 0
    copy_to_ns: int = 0
    copied_bytes: int = 0
    num_tokens: int = 0
    rows_received: int = 0
    rows_sent: int = 0  # to other ranks: what crosses a wire, one row per (token, rank)
    rows_kept: int = 0  # to this rank itself
    dispatch_row_bytes: int = 0
    combine_row_bytes: int = 0
    dispatch_result_bytes: int = 0
    combine_result_bytes: int = 0
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One rank's inputs and the results every library must give."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    outputs: Tensor  # what the experts are said to have computed: x's layout
    want: reference.Dispatched
    want_y: Tensor


def run_rank(comm: weft.Communicator, options: Options, barrier: Barrier, store_port: int) -> RankReport:
    """Everything one rank does. Collective. Raises Mismatch if a result is wrong."""
    report = RankReport(time.monotonic_ns(), str(comm.engine), str(comm.device), comm.placement)
    say = where.say if comm.rank == 0 else _say_nothing
    say("inputs, and what the reference makes of them")
    job = _make_job(comm, options)
    report.num_tokens = len(job.x)
    barrier.wait(_BARRIER_S)
    from_ns = time.monotonic_ns()
    ep = weft.ExpertParallel(
        comm,
        num_experts=options.experts,
        top_k=options.top_k,
        hidden=options.hidden,
        max_tokens_per_rank=max(1, _max_tokens(options)),
        dtype=DTYPES[options.dtype],
        num_sms=options.num_sms,
    )
    with ep:
        say("first call of Weft, compared with the reference")
        weft_calls = WeftCalls(ep, options, job)
        weft_calls.dispatch()
        report.first_call_s = (time.monotonic_ns() - from_ns) / 1e9
        _check_weft(weft_calls, job)
        _count(report, options, job, weft_calls, comm.rank)
        operations = {
            "dispatch": weft_calls.dispatch,
            "combine": weft_calls.combine_heap,
            "combine_ordinary": weft_calls.combine_ordinary,
            "both": weft_calls.both,
        }
        for name, call in operations.items():
            say(f"{options.iters} calls of Weft: {name}")
            report.timed["weft", name] = _time_calls(call, options, comm.device, barrier)
        if options.baseline:
            say(f"{options.iters} calls of all_to_all_single for each operation")
            _run_baseline(report, comm, options, job, barrier, store_port)
        say("memory copies")
        _measure_copies(report, options, comm.device, barrier)
        report.stats = dict(ep.stats())
        weft_calls.drop()
    barrier.wait(_BARRIER_S)
    return report


def _say_nothing(text: str) -> None:
    """Only rank 0 tells how far it is."""


def _max_tokens(options: Options) -> int:
    if options.trace is None:
        return options.tokens
    dispatches = loaded_trace(options.trace).dispatches
    return max(len(recorded[0].topk_idx) for recorded in dispatches.values())


def _make_job(comm: weft.Communicator, options: Options) -> Job:
    """Inputs of every rank, as each rank can make them, and this rank's share of the reference's results."""
    trace = {} if options.trace is None else {"trace": loaded_trace(options.trace)}
    num_tokens: Any = options.tokens if options.trace is None else None
    xs, idxs, weights = [], [], []
    for rank in range(options.ranks):
        topk_idx, topk_weights = routing.make(
            options.routing,
            num_tokens,
            options.experts,
            options.top_k,
            rank=rank,
            num_ranks=options.ranks,
            seed=options.seed,
            **trace,
        )
        generator = torch.Generator().manual_seed(options.seed * 1009 + rank)
        xs.append(
            torch.randn((len(topk_idx), options.hidden), generator=generator, dtype=torch.float32, device="cpu").to(
                DTYPES[options.dtype]
            )
        )
        idxs.append(topk_idx)
        weights.append(topk_weights)
    expected = reference.dispatch(
        xs,
        idxs,
        weights,
        num_experts=options.experts,
        layout=options.layout,
        alignment=options.alignment,
        quantize=None if options.quantize == "none" else options.quantize,
        capacity=options.capacity,
    )
    outputs = []
    for rank, part in enumerate(expected):
        shape = part.x.shape if isinstance(part.x, Tensor) else part.x.data.shape
        generator = torch.Generator().manual_seed(options.seed * 1009 + 500 + rank)
        outputs.append(
            torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(DTYPES[options.dtype])
        )
    rank, device = comm.rank, comm.device
    y: Any = reference.combine(outputs, expected)[rank]  # no sides: a tensor
    return Job(
        x=xs[rank].to(device),
        topk_idx=idxs[rank].to(device),
        topk_weights=weights[rank].to(device),
        outputs=outputs[rank].to(device),
        want=expected[rank],
        want_y=y,
    )


class WeftCalls:
    """The public calls that are timed. Results of the call before are dropped first: one result is alive at a time."""

    def __init__(self, ep: weft.ExpertParallel, options: Options, job: Job) -> None:
        self.ep, self.job, self.options = ep, job, options
        self.quantize = None if options.quantize == "none" else options.quantize
        self.received: weft.Dispatched | None = None
        self.y: Tensor | None = None
        self._kept: weft.Dispatched | None = None
        self._heap_output: Tensor | None = None

    def dispatch(self) -> None:
        """ep.dispatch."""
        self.received = None
        self.received = self._dispatch()

    def _dispatch(self) -> weft.Dispatched:
        options = self.options
        return self.ep.dispatch(
            self.job.x,
            self.job.topk_idx,
            self.job.topk_weights,
            layout=options.layout,
            alignment=options.alignment,
            quantize=self.quantize,
            capacity=options.capacity,
            mode=options.mode,
        )

    def keep_output(self) -> None:
        """Put the expert outputs into a heap tensor, for every later combine. Collective (dispatches)."""
        self._kept = self._dispatch()
        self._heap_output = self.ep.empty_output(self._kept)
        self._heap_output.copy_(self.job.outputs)

    def combine_heap(self) -> None:
        """ep.combine of a heap tensor."""
        self._combine(self._kept, self._heap_output)

    def combine_ordinary(self) -> None:
        """ep.combine of an ordinary tensor."""
        self._combine(self._kept, self.job.outputs)

    def both(self) -> None:
        """ep.dispatch, then ep.combine with its handle; the expert outputs lie in the heap already."""
        self.dispatch()
        self._combine(self.received, self._heap_output)

    def _combine(self, received: weft.Dispatched | None, outputs: Tensor | None) -> None:
        if received is None or outputs is None:
            raise TypeError("combine before dispatch")
        self.y = None
        self.y = self.ep.combine(outputs, received.handle, mode=self.options.mode)

    def drop(self) -> None:
        """Let go of every tensor."""
        self.received = self.y = self._kept = self._heap_output = None


def _check_weft(calls: WeftCalls, job: Job) -> None:
    calls.dispatch()
    if calls.received is None:
        raise TypeError("no result")
    _expect_rows("weft dispatch", calls.received.x, job.want)
    calls.keep_output()
    for call in (calls.combine_heap, calls.combine_ordinary, calls.both):
        call()
        if calls.y is not None:
            expect_equal(f"weft {call.__name__}: y", calls.y, job.want_y)


def _expect_rows(
    name: str, got: Tensor | weft.Quantized, want: reference.Dispatched, scales: Tensor | None = None
) -> None:
    """Compare rows; FP8 may come as bytes. masked and bounded rows that hold nothing are not compared."""
    data = got if isinstance(got, Tensor) else got.data
    scales = scales if isinstance(got, Tensor) else got.scales
    want_data = want.x if isinstance(want.x, Tensor) else want.x.data
    want_scales = None if isinstance(want.x, Tensor) else want.x.scales
    filled = _filled(want, want_data)
    expect_equal(f"{name}: x", filled(_plain(data)), filled(_plain(want_data)))
    if want_scales is not None:
        if scales is None:
            raise Mismatch(f"{name}: no scales")
        expect_equal(f"{name}: scales", filled(_plain(scales)), filled(_plain(want_scales)))


def _plain(values: Tensor) -> Tensor:
    values = values.detach().cpu()
    return values.view(torch.uint8) if values.element_size() == 1 else values


def _filled(want: reference.Dispatched, rows: Tensor) -> Callable[[Tensor], Tensor]:
    if rows.ndim == 2:
        num_rows = int(want.num_rows)
        return lambda part: part[:num_rows]
    mask = torch.arange(rows.shape[1], dtype=torch.int64, device="cpu")[None, :] < want.num_tokens_per_expert[:, None]
    return lambda part: part[mask]


def _count(report: RankReport, options: Options, job: Job, calls: WeftCalls, me: int) -> None:
    """Rows and bytes that the counting rules need, from the routing alone."""
    num_local = options.experts // options.ranks
    owner = torch.where(job.topk_idx >= 0, job.topk_idx // num_local, -1).cpu()
    for rank in range(options.ranks):
        num_rows = int((owner == rank).any(dim=1).sum())
        report.rows_sent += num_rows * (rank != me)
        report.rows_kept += num_rows * (rank == me)
    x = job.want.x
    data, scales = (x, None) if isinstance(x, Tensor) else (x.data, x.scales)
    report.rows_received = int(job.want.num_rows)
    scale_bytes = 0 if scales is None else scales.shape[-1] * scales.element_size()
    report.dispatch_row_bytes = options.hidden * data.element_size() + scale_bytes
    report.combine_row_bytes = options.hidden * job.outputs.element_size()
    report.dispatch_result_bytes = result_bytes(calls.received)
    report.combine_result_bytes = 0 if calls.y is None else calls.y.nbytes


def result_bytes(received: weft.Dispatched | None) -> int:
    """Of the tensors that a dispatch returned."""
    if received is None:
        return 0
    got = (received.x,) if isinstance(received.x, Tensor) else (received.x.data, received.x.scales)
    parts = (*got, received.topk_idx, received.topk_weights, received.num_tokens_per_expert, received.offsets)
    return sum(part.nbytes for part in parts if part is not None)


def _run_baseline(
    report: RankReport, comm: weft.Communicator, options: Options, job: Job, barrier: Barrier, store_port: int
) -> None:
    """Check the baseline's results, then time it. Its process group lives only here."""
    on_gpu = comm.device.type == "cuda"
    if on_gpu and torch.cuda.device_count() < options.ranks:
        have, need = f"{torch.cuda.device_count()} GPUs", f"{options.ranks}, one a rank for NCCL; or --no-baseline"
        raise weft.Unsupported("the all_to_all_single baseline", have, need)
    backend = "nccl" if on_gpu else "gloo"
    store = TCPStore("127.0.0.1", store_port, is_master=False)
    dist.init_process_group(backend, store=store, rank=comm.rank, world_size=options.ranks)
    try:
        library = AllToAll(
            num_experts=options.experts,
            layout=options.layout,
            alignment=options.alignment,
            quantize=None if options.quantize == "none" else options.quantize,
            capacity=options.capacity,
        )
        received = library.dispatch(job.x, job.topk_idx, job.topk_weights)
        _expect_rows("all_to_all dispatch", received.x, job.want, received.scales)
        y = library.combine(job.outputs, received, len(job.x))
        expect_equal("all_to_all combine: y", y, job.want_y)

        def dispatch() -> None:
            library.dispatch(job.x, job.topk_idx, job.topk_weights)

        def combine() -> None:
            library.combine(job.outputs, received, len(job.x))

        def both() -> None:
            library.combine(job.outputs, library.dispatch(job.x, job.topk_idx, job.topk_weights), len(job.x))

        for name, call in {"dispatch": dispatch, "combine": combine, "both": both}.items():
            report.timed["all_to_all", name] = _time_calls(call, options, comm.device, barrier)
    finally:
        dist.destroy_process_group()


def _time_calls(call: Callable[[], None], options: Options, device: torch.device, barrier: Barrier) -> Timed:
    """Warm up, meet, then time calls back to back: nothing but the calls between the first start and the last end."""
    for _ in range(options.warmup):
        call()
    on_gpu = device.type == "cuda"
    events = [(_event(), _event()) for _ in range(options.iters if on_gpu else 0)]
    if on_gpu:
        torch.cuda.synchronize(device)
    barrier.wait(_BARRIER_S)
    stamps = [time.perf_counter_ns()]
    for i in range(options.iters):
        if on_gpu:
            events[i][0].record()
        call()
        if on_gpu:
            events[i][1].record()
        stamps.append(time.perf_counter_ns())
    if on_gpu:
        torch.cuda.synchronize(device)
    total_us = (time.perf_counter_ns() - stamps[0]) / 1e3
    call_us = [(end - start) / 1e3 for start, end in itertools.pairwise(stamps)]
    return Timed(call_us, total_us, [a.elapsed_time(b) * 1e3 for a, b in events] if on_gpu else None)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _measure_copies(report: RankReport, options: Options, device: torch.device, barrier: Barrier) -> None:
    """Copy 64 MiB again and again, all ranks at once; the parent sees when the first starts and the last ends."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    target.copy_(source)
    barrier.wait(_BARRIER_S)
    report.copy_from_ns = time.monotonic_ns()
    num_copies = min(_COPY_ITERS, options.iters)
    for _ in range(num_copies):
        target.copy_(source)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    report.copy_to_ns = time.monotonic_ns()
    report.copied_bytes = num_copies * _COPY_BYTES
