"""`weft tune`: which kernels are faster up to which T here, and how many SMs small batches want.

Two rounds in ranks started for them: calls of small batches with several numbers of SMs, then, with the best of them,
both kinds of kernels for every operation, layout and form of rows. Times are those of the suite for small batches:
calls with a capacity, captured into a CUDA graph, the slowest rank. Results are not looked at; `weft bench --suite
small` does.

Between nodes small batches are not measured: there one round finds how many SMs large calls want.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from weft.bench.ahead import ROWS, Launch, compile_ahead
from weft.bench.apart import COMPILE_S, apart
from weft.bench.cases import EXPERTS, HIDDEN, SMALL_SWEEP, TOP_K
from weft.bench.ranks import isolation_of
from weft.errors import InvalidArgument, Unsupported
from weft.kernels.prebuild import KernelShape
from weft.kernels.tuning import DEFAULT, FORMS, Table, small_num_sms
from weft.limits import LAYOUTS, MAX_SMALL_TOKENS, MAX_TOKENS_PER_RANK

if TYPE_CHECKING:
    import torch

    import weft

MODES = ("latency", "throughput")
SMS = (4, 8, 16, 24, 32, 48, 64)
NODE_SMS = (4, 6, 8, 12, 16, 24, 32)
NODE_TOKENS = (512, 4096)
_CALLS_IN_GRAPH = 5
_WARMUP = 2
_TOLERANCE = 1.02  # more SMs must be better by this factor
_BARRIER_S = 300.0


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What is measured. `samples`: times of each call, whose median counts. `any_engine`: for tests; the cpu engine has
    neither SMs nor two kinds of kernels, so that a table of its times says nothing."""

    ranks: int = 4
    hidden: int = HIDDEN
    experts: int = EXPERTS
    top_k: int = TOP_K
    tokens: tuple[int, ...] = SMALL_SWEEP
    seed: int = 0
    device: str = "auto"
    placement: Literal["auto", "process", "off"] = "process"
    samples: int = 40
    any_engine: bool = False
    nodes: int = 1
    isolation: Literal["auto", "process", "thread"] = "auto"

    @property
    def node_ranks(self) -> int | None:
        """As in ExpertParallel."""
        return self.ranks // self.nodes if self.nodes > 1 else None

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks % self.nodes:
            raise InvalidArgument(f"nodes={self.nodes}: allowed are divisors of ranks={self.ranks}")
        if not self.tokens or list(self.tokens) != sorted(set(self.tokens)) or self.tokens[0] < 1:
            raise InvalidArgument(f"tokens is {list(self.tokens)}; allowed are numbers from 1 that ascend")
        most = MAX_SMALL_TOKENS if self.nodes == 1 else MAX_TOKENS_PER_RANK
        if self.tokens[-1] > most:
            raise InvalidArgument(f"tokens has {self.tokens[-1]}; allowed are up to {most}")
        if self.experts % self.ranks:
            raise InvalidArgument(f"experts={self.experts}: must be a multiple of ranks={self.ranks}")
        if self.hidden % 128:
            raise InvalidArgument(f"hidden={self.hidden}: a multiple of 128 is needed")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One call that is timed. `num_sms` 0: what Weft takes by itself."""

    op: str  # "dispatch", "combine", "both"
    layout: str
    form: str
    tokens: int
    mode: str
    num_sms: int = 0

    @property
    def wire(self) -> str | None:
        """Of a combine."""
        return "fp8" if self.op == "combine" and self.form == "quantized" else None

    @property
    def dtype(self) -> str:
        """Of the object that makes the call."""
        return "fp32" if self.form == "wide" else "bf16"


@dataclass(frozen=True)
class Tuned:
    """What was measured and what follows from it."""

    device_name: str
    times: Mapping[Point, tuple[float, ...]]  # us, of the slowest rank; calls that are refused here are missing
    table: Table


def tune(options: TuneOptions, arch: str | None = None) -> Tuned:
    """Measure and choose. `arch`: of the GPUs, whose kernels are compiled before the ranks start.

    Raises:
        Unsupported: the ranks have the cpu engine.
        What a rank raised.
    """
    if options.nodes > 1:
        return _tune_nodes(options)
    by_sms = [
        Point(op="both", layout="expert_major", form="plain", tokens=tokens, mode="latency", num_sms=num_sms)
        for tokens in options.tokens
        for num_sms in SMS
    ]
    name, times = measure(options, by_sms, arch, "numbers of SMs")
    sms = best_sms({point: statistics.median(us) for point, us in times.items()})
    table = Table(num_sms=sms, num_sms_else=sms[-1][1] if sms else DEFAULT.num_sms_else)
    _, more = measure(options, list(_by_mode(options, table)), arch, "both kinds of kernels")
    medians = {point: statistics.median(us) for point, us in more.items()}
    return Tuned(name, {**times, **more}, Table(crossovers(medians), DEFAULT.most_tokens_else, sms, table.num_sms_else))


def _tune_nodes(options: TuneOptions) -> Tuned:
    points = [
        Point(op=op, layout=layout, form="plain", tokens=tokens, mode="throughput", num_sms=num_sms)
        for tokens, layout, op, num_sms in itertools.product(options.tokens, LAYOUTS, FORMS, NODE_SMS)
    ]
    name, times = measure(options, points, None, "numbers of SMs between nodes")
    found = best_node_sms({point: statistics.median(us) for point, us in times.items()})
    node_ranks = options.node_ranks or options.ranks
    sms = tuple(((node_ranks, op, layout), num_sms) for (op, layout), num_sms in found)
    return Tuned(name, times, Table(node_num_sms=sms))


def _by_mode(options: TuneOptions, table: Table) -> list[Point]:
    return [
        Point(
            op=op,
            layout=layout,
            form=form,
            tokens=tokens,
            mode=mode,
            num_sms=small_num_sms(table, tokens) if mode == "latency" else 0,
        )
        for tokens, layout, is_wide in itertools.product(options.tokens, LAYOUTS, (False, True))
        for op, forms in FORMS.items()
        for form, mode in itertools.product(forms, MODES)
        if (form == "wide") == is_wide  # others share an object
    ]


# ---- what follows


def best_sms(times: Mapping[Point, float]) -> tuple[tuple[int, int], ...]:
    """(T, SMs) pairs: for each T the fewest SMs that are within 2 % of the best; one pair where neighbours agree."""
    pairs: list[tuple[int, int]] = []
    for tokens in sorted({point.tokens for point in times}):
        of_tokens = {point.num_sms: us for point, us in times.items() if point.tokens == tokens}
        enough = min(of_tokens.values()) * _TOLERANCE
        best = min(num_sms for num_sms, us in of_tokens.items() if us <= enough)
        if pairs and pairs[-1][1] == best:
            pairs.pop()
        pairs.append((tokens, best))
    return tuple(pairs)


def best_node_sms(times: Mapping[Point, float]) -> tuple[tuple[tuple[str, str], int], ...]:
    """For each operation and layout the fewest SMs with which its calls, added up in parts of the best time at their
    T, are within 2 % of what any number of SMs takes.
    """
    found = []
    for key in dict.fromkeys((point.op, point.layout) for point in times):
        us = {(point.num_sms, point.tokens): time for point, time in times.items() if (point.op, point.layout) == key}
        every = {tokens for _, tokens in us}
        best = {tokens: min(time for (_, of), time in us.items() if of == tokens) for tokens in every}
        whole = [sms for sms in {sms for sms, _ in us} if all((sms, tokens) in us for tokens in every)]
        loss = {sms: sum(us[sms, tokens] / best[tokens] for tokens in every) for sms in whole}
        if loss:
            enough = min(loss.values()) * _TOLERANCE
            found.append((key, min(sms for sms in whole if loss[sms] <= enough)))
    return tuple(found)


def crossovers(times: Mapping[Point, float]) -> tuple[tuple[tuple[str, str, str], int], ...]:
    """For each operation, layout and form the T up to which the kernels for small batches are taken: the one with which
    the calls that were timed lose least against the faster kind, added up in parts of its time.
    """
    found = []
    for key in dict.fromkeys((point.op, point.layout, point.form) for point in times):
        us = {(p.tokens, p.mode): time for p, time in times.items() if (p.op, p.layout, p.form) == key}
        every = sorted({tokens for tokens, _ in us if all((tokens, mode) in us for mode in MODES)})

        def loss(most: int, every: list[int] = every, us: dict[tuple[int, str], float] = us) -> float:
            chosen = [us[tokens, MODES[tokens > most]] / min(us[tokens, mode] for mode in MODES) for tokens in every]
            return sum(chosen)

        if every:
            found.append((key, min((0, *every), key=lambda most: (loss(most), -most))))
    return tuple(found)


# ---- measuring


def measure(
    options: TuneOptions, points: Sequence[Point], arch: str | None, what: str
) -> tuple[str, dict[Point, tuple[float, ...]]]:
    """Name of the device, and times of the points that are possible. `what`: said on stderr of how far it is."""
    import weft

    if arch is not None:
        apart(compile_ahead, [*of_points(options, points)], arch, timeout_s=COMPILE_S)
    isolation = isolation_of(options)
    barrier: Any = threading.Barrier(options.ranks)
    if isolation == "process":
        barrier = multiprocessing.get_context("fork").Barrier(options.ranks)
    ranks = weft.spawn(
        _run_rank,
        num_ranks=options.ranks,
        args=(options, tuple(points), barrier, what),
        device=options.device,
        isolation=isolation,
        placement=options.placement,
    )
    times = {}
    for idx, point in enumerate(points):
        per_rank = [measured[idx] for _, measured in ranks]
        if all(per_rank):
            times[point] = tuple(max(calls) for calls in zip(*per_rank, strict=True))
    return ranks[0][0], times


def of_points(options: TuneOptions, points: Sequence[Point]) -> Iterator[Launch]:
    """What the ranks will launch, for `compile_ahead`."""
    for point in points:
        shape = KernelShape(
            ranks=options.ranks,
            experts=options.experts,
            top_k=options.top_k,
            hidden=options.hidden,
            tokens=point.tokens,
            dtype=point.dtype,
            num_sms=point.num_sms or None,
            small_num_sms=(point.num_sms,),
        )
        call = (f"{point.op} {point.layout}", shape, point.layout, point.mode == "latency")
        yield Launch(*call, {"rows": "plain" if point.op == "combine" else ROWS[point.form]})
        if point.op != "dispatch":
            yield Launch(*call, {"wire": point.wire})


def _run_rank(
    comm: weft.Communicator, options: TuneOptions, points: tuple[Point, ...], barrier: Any, what: str
) -> tuple[str, list[list[float]]]:
    """Name of this rank's device, and its times of every point; none where the call is refused. Collective."""
    import torch

    from weft.engine import device_name

    if comm.engine != "nvlink" and not options.any_engine:
        raise Unsupported("weft tune", f"the {comm.engine} engine, {comm!r}", "GPUs with the nvlink engine")
    if comm.device.type == "cuda":
        torch.cuda.set_device(comm.device)
    times: list[list[float]] = []
    for key, group in itertools.groupby(points, lambda point: (point.tokens, point.layout, point.dtype)):
        mine = tuple(group)
        if comm.rank == 0:
            sys.stderr.write(
                f"{what}: {len(times)} of {len(points)} calls measured, next T = {', '.join(map(str, key))}\n"
            )
        with contextlib.closing(_Calls(comm, options, mine)) as calls:
            times += [calls.time(point, lambda: barrier.wait(_BARRIER_S)) for point in mine]
    return device_name(comm.device), times


class _Calls:
    """Calls of one T, layout and dtype, with an object of their own: what a capture takes from the heap stays taken."""

    def __init__(self, comm: weft.Communicator, options: TuneOptions, points: Sequence[Point]) -> None:
        import torch

        import weft
        from weft import reference, routing

        tokens, layout = points[0].tokens, points[0].layout
        dtype = torch.float32 if points[0].dtype == "fp32" else torch.bfloat16
        shape, ranks = (tokens, options.experts, options.top_k), options.ranks
        ids = [routing.make("uniform", *shape, rank=rank, num_ranks=ranks, seed=options.seed) for rank in range(ranks)]
        self.device, self.layout, self.options = comm.device, layout, options
        self.capacity = _capacity([topk_idx for topk_idx, _ in ids], options, layout)
        self.ids, self.weights = (part.to(comm.device) for part in ids[comm.rank])
        generator = torch.Generator().manual_seed(options.seed + comm.rank)
        self.x = torch.randn((tokens, options.hidden), generator=generator, dtype=torch.float32, device="cpu").to(
            comm.device, dtype
        )
        self.quantized = weft.Quantized(*reference.quantize_fp8(self.x))
        rows = self.capacity * (options.experts // options.ranks if layout == "masked" else 1)
        num_results = _CALLS_IN_GRAPH * sum(point.op != "combine" for point in points) + len(points) + 8
        if options.nodes > 1:  # no graphs: a result is given back before the next but one
            num_results = 4
        result_bytes = rows * (dtype.itemsize * options.hidden + 64) + 8 * options.ranks * tokens * options.top_k + 8192
        self.ep = weft.ExpertParallel(
            comm,
            num_experts=options.experts,
            top_k=options.top_k,
            hidden=options.hidden,
            max_tokens_per_rank=tokens,
            heap_bytes=num_results * result_bytes,
            dtype=dtype,
            node_ranks=options.node_ranks,
        )

    def close(self) -> None:
        """Give the object back."""
        self.ep.close()

    def time(self, point: Point, meet: Callable[[], Any]) -> list[float]:
        """Times in us; none if the call is refused, which all ranks do alike."""
        import torch

        import weft
        from weft.bench.timing import time_calls, time_replays

        try:
            call = self._call(point)
            call()
        except (weft.Unsupported, weft.InvalidArgument):
            return []
        samples = self.options.samples
        if self.device.type != "cuda" or self.options.nodes > 1:
            return time_calls(call, iters=samples, warmup=_WARMUP, device=self.device, meet=meet).gpu_us
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(_CALLS_IN_GRAPH):
                call()
        times = time_replays(graph.replay, num_calls=_CALLS_IN_GRAPH, samples=samples, meet=meet).gpu_us
        torch.cuda.current_stream(self.device).synchronize()
        graph.reset()
        return times

    def _call(self, point: Point) -> Callable[[], None]:
        import torch

        received: list[weft.Dispatched] = []
        sums: list[torch.Tensor] = []
        calls: dict[str, Any] = {"mode": point.mode, "num_sms": point.num_sms or None}
        of_dispatch = point.form if point.op != "combine" else "plain"
        x = self.quantized if of_dispatch == "bytes" else self.x
        quantize = "fp8" if of_dispatch == "quantized" else None

        def dispatch() -> None:
            received.clear()
            options: dict[str, Any] = {"layout": self.layout, "capacity": self.capacity, "quantize": quantize}
            received.append(self.ep.dispatch(x, self.ids, self.weights, **options, **calls))

        if point.op == "dispatch":
            return dispatch
        dispatch()
        rows = received[0].x
        shape = rows.shape if isinstance(rows, torch.Tensor) else rows.data.shape
        outputs = torch.zeros(shape, dtype=self.x.dtype, device=self.device)

        def combine() -> None:
            sums.clear()
            sums.append(self.ep.combine(outputs, received[0].handle, wire=point.wire, **calls))

        def both() -> None:
            dispatch()
            combine()

        return combine if point.op == "combine" else both


def _capacity(ids: Sequence[torch.Tensor], options: TuneOptions, layout: str) -> int:
    """Enough for all rows of any rank, or of any expert (masked)."""
    import torch

    counts = torch.bincount(torch.cat(list(ids)).flatten(), minlength=options.experts)
    if layout == "masked":
        return int(counts.max())
    if layout == "expert_major":
        return int(counts.view(options.ranks, -1).sum(1).max())
    return sum(len(each) for each in ids)
