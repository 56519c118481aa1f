"""What `weft.deep_ep` adds to a call: `weft bench --deep-ep` times Weft's own calls and those of its three buffers, one
after the other in one run."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.bench.options import Options
from weft.errors import InvalidArgument

if TYPE_CHECKING:
    import weft

Row = dict[str, Any]

_MOST_FEW_TOKENS = 128  # of a rank in a low-latency call
_HEAP_BYTES = 256 << 20
_DEADLINE_S = 100.0


class Pair(NamedTuple):
    """Weft's own call, and the one for it of a buffer, whose name it has. Buffers may add in another order."""

    name: str
    own: Callable[[], Any]
    theirs: Callable[[], Any]


class Timed(NamedTuple):
    """Median host time until the calls of a pair returned, in microseconds, and the kernels of each, by name; None: the
    cpu engine has none."""

    name: str
    own_us: float
    theirs_us: float
    own_kernels: list[str] | None
    their_kernels: list[str] | None


@dataclass(frozen=True)
class Overhead:
    """Of each pair the times on the rank whose own call took longest."""

    calls: tuple[Timed, ...]
    engine: str

    def rows(self) -> list[Row]:
        """JSON objects, one a call."""
        return [
            {
                "kind": "deep_ep", "call": each.name, "engine": self.engine, "weft_us": each.own_us,
                "deep_ep_us": each.theirs_us, "over_us": each.theirs_us - each.own_us,
                "weft_kernels": each.own_kernels, "deep_ep_kernels": each.their_kernels,
            }
            for each in self.calls
        ]  # fmt: skip


def deep_ep(options: Options) -> Overhead:
    """`options.iters` pairs of each call, after `options.warmup`, in every layout that the buffers have.

    Raises:
        InvalidArgument: an option that the buffers' calls do not have: a trace, a layout, FP8, other rows than BF16.
        weft.verify.check.Mismatch: a buffer's combine gave another sum than Weft's own.
    """
    import weft

    usual = Options()
    for name in ("trace", "quantize", "dtype", "layout", "alignment", "capacity", "num_sms", "mode"):
        value, allowed = getattr(options, name), getattr(usual, name)
        if value != allowed:
            raise InvalidArgument(f"{name} is {value!r}; allowed where calls of weft.deep_ep are timed: {allowed!r}")
    options = options.complete()
    ranks = weft.spawn(
        _run_rank, num_ranks=options.ranks, args=(options,), device=options.device, placement=options.placement
    )
    by_call = zip(*(timed for timed, _ in ranks), strict=True)
    return Overhead(tuple(max(timed, key=lambda each: each.own_us) for timed in by_call), ranks[0][1])


def _run_rank(comm: weft.Communicator, options: Options) -> tuple[list[Timed], str]:
    """Collective."""
    found = []
    for pair in _pairs(comm, options):
        _check(comm, pair)
        found.append(_timed(comm, pair, options))
    return found, str(comm.engine)


def _check(comm: weft.Communicator, pair: Pair) -> None:
    """Sums of the same rows, each along its own routing: the order of the rows that were received is seen, too."""
    import torch

    from weft.verify.check import Mismatch

    own, theirs = pair.own(), pair.theirs()
    if not isinstance(own, torch.Tensor):  # of a dispatch
        return
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    if own.shape != theirs.shape or not torch.allclose(own.float(), theirs.float(), rtol=0.05, atol=0.05):
        raise Mismatch(f"rank {comm.rank}: {pair.name} is not the sum of Weft's own call")


def _timed(comm: weft.Communicator, pair: Pair, options: Options) -> Timed:
    import torch

    own_us: list[float] = []
    theirs_us: list[float] = []
    own_kernels, their_kernels = kernels_of(comm, pair.own), kernels_of(comm, pair.theirs)
    comm.meet(_DEADLINE_S)
    for number in range(options.warmup + options.iters):
        turns = ((pair.own, own_us), (pair.theirs, theirs_us))
        for call, times in turns if number % 2 == 0 else turns[::-1]:
            if comm.device.type == "cuda":  # a queue that is full would make the host wait
                torch.cuda.synchronize(comm.device)
            begin = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - begin) / 1e3)
    own, theirs = (statistics.median(times[options.warmup :]) for times in (own_us, theirs_us))
    return Timed(pair.name, own, theirs, own_kernels, their_kernels)


def kernels_of(comm: weft.Communicator, call: Callable[[], Any]) -> list[str] | None:
    """Names of the kernels that a call runs on this rank's GPU, in order; copies and fills of memory are none."""
    if comm.device.type != "cuda":
        return None
    import torch

    torch.cuda.synchronize(comm.device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize(comm.device)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return names_in(events)


def names_in(events: list[dict[str, Any]]) -> list[str]:
    """Of the kernels in a trace of torch's profiler, without parameters."""
    kernels = sorted((each for each in events if each.get("cat") == "kernel"), key=lambda each: float(each["ts"]))
    return [str(each["name"]).removeprefix("void ").split("<")[0].split("(")[0] for each in kernels]


def _pairs(comm: weft.Communicator, options: Options) -> Iterator[Pair]:
    """Collective: each makes its first calls, and the next pair ends what it made."""
    import torch

    import weft
    from weft import routing
    from weft.verify.check import DTYPES

    made = (options.routing, options.tokens, options.experts, options.top_k)
    ids, weights = routing.make(*made, rank=comm.rank, num_ranks=options.ranks, seed=options.seed)
    ids, weights = ids.to(comm.device), weights.to(comm.device)
    torch.manual_seed(options.seed + comm.rank)
    x = torch.randn((len(ids), options.hidden), dtype=torch.float32, device=comm.device).to(DTYPES[options.dtype])
    with weft.ExpertParallel(
        comm, num_experts=options.experts, top_k=options.top_k, hidden=options.hidden, dtype=x.dtype,
        max_tokens_per_rank=max(1, options.tokens), heap_bytes=_HEAP_BYTES, num_windows=2,
    ) as ep:  # fmt: skip
        yield from _of_v1(comm, ep, x, ids, weights)
        few = slice(0, _MOST_FEW_TOKENS)
        yield from _of_low_latency(comm, ep, x[few], ids[few], weights[few])
        yield from _of_v2(comm, ep, x, ids, weights)
        yield from _of_hybrid(comm, ep, x, ids, weights)


def _of_v1(comm: Any, ep: Any, x: Any, ids: Any, weights: Any) -> Iterator[Pair]:
    from weft.deep_ep import Buffer

    buffer = Buffer(comm, _HEAP_BYTES)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, ep.num_experts)

    def dispatch() -> Any:
        return buffer.dispatch(
            x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=ids,
            topk_weights=weights,
        )  # fmt: skip

    own, theirs = ep.dispatch(x, ids, weights), dispatch()
    y, handle = own.x.clone(), theirs[4]
    yield Pair("Buffer.dispatch", lambda: ep.dispatch(x, ids, weights), dispatch)
    yield Pair(
        "Buffer.dispatch(handle=)", lambda: ep.dispatch(x, handle=own.handle), lambda: buffer.dispatch(x, handle=handle)
    )
    yield Pair("Buffer.combine", lambda: ep.combine(y, own.handle), lambda: buffer.combine(y, handle))


def _of_low_latency(comm: Any, ep: Any, x: Any, ids: Any, weights: Any) -> Iterator[Pair]:
    from weft.deep_ep import Buffer

    buffer, most = Buffer(comm, low_latency_mode=True), min(_MOST_FEW_TOKENS, ep.max_tokens_per_rank)
    options = {"layout": "masked", "capacity": comm.num_ranks * most, "max_tokens": most}

    def dispatch() -> Any:
        return buffer.low_latency_dispatch(x, ids, most, ep.num_experts, use_fp8=False)

    own, theirs = ep.dispatch(x, ids, weights, **options), dispatch()
    y, handle = own.x.clone(), theirs[2]
    yield Pair("Buffer.low_latency_dispatch", lambda: ep.dispatch(x, ids, weights, **options), dispatch)
    yield Pair(
        "Buffer.low_latency_dispatch(hook)",
        lambda: ep.dispatch(x, ids, weights, staged=True, **options).wait(),
        lambda: buffer.low_latency_dispatch(
            x, ids, most, ep.num_experts, use_fp8=False, return_recv_hook=True
        )[-1](),
    )  # fmt: skip
    yield Pair(
        "Buffer.low_latency_combine", lambda: ep.combine(y, own.handle),
        lambda: buffer.low_latency_combine(y, ids, weights, handle),
    )  # fmt: skip


def _of_v2(comm: Any, ep: Any, x: Any, ids: Any, weights: Any) -> Iterator[Pair]:
    from weft.deep_ep import ElasticBuffer

    buffer = ElasticBuffer(comm, _HEAP_BYTES, num_max_tokens_per_rank=ep.max_tokens_per_rank)

    def dispatch(**options: Any) -> Any:
        return buffer.dispatch(x, ids, weights, num_experts=ep.num_experts, **options)

    own, theirs = ep.dispatch(x, ids, weights), dispatch()
    y = own.x.clone()
    yield Pair("ElasticBuffer.dispatch", lambda: ep.dispatch(x, ids, weights), dispatch)
    yield Pair("ElasticBuffer.combine", lambda: ep.combine(y, own.handle), lambda: buffer.combine(y, theirs[3]))
    yield Pair(
        "ElasticBuffer.dispatch(do_expand=True)", lambda: ep.dispatch(x, ids, weights, layout="expert_major"),
        lambda: dispatch(do_expand=True),
    )  # fmt: skip


def _of_hybrid(comm: Any, ep: Any, x: Any, ids: Any, weights: Any) -> Iterator[Pair]:
    from weft.deep_ep import HybridEPBuffer

    buffer = HybridEPBuffer(comm, ep.hidden, ep.max_tokens_per_rank, ep.num_local_experts)

    def dispatch() -> Any:
        return buffer.dispatch_with_permute(
            hidden=x, topk_idx=ids, topk_weights=weights, num_of_experts=ep.num_experts, pad_multiple=16
        )

    options = {"layout": "expert_major", "alignment": 16}
    own, theirs = ep.dispatch(x, ids, weights, **options), dispatch()
    y = own.x.clone()
    yield Pair("HybridEPBuffer.dispatch_with_permute", lambda: ep.dispatch(x, ids, weights, **options), dispatch)
    yield Pair(
        "HybridEPBuffer.combine_with_unpermute", lambda: ep.combine(y, own.handle, weighted=False),
        lambda: buffer.combine_with_unpermute(hidden=y, handle=theirs[4]),
    )  # fmt: skip
