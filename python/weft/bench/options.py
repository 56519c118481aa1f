"""What a benchmark runs: a shape and how often. No torch here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from weft.bench.cases import EXPERTS, HIDDEN, ONE_SHAPE, SUITES, TOKENS, Case, node_goal
from weft.errors import InvalidArgument
from weft.limits import MAX_SMALL_TOKENS


@dataclass(frozen=True, kw_only=True)
class Options:
    """One shape and how to time it.

    `capacity`: as in dispatch; masked takes twice the mean load if it is None. `nodes`: of equal size, that the ranks
    are in (docs/protocols/nodes.md); 1: none. `isolation`: "process", "thread", or "auto": threads where ranks of nodes
    share a GPU. `preset`: the machine of which `weft plan` says a time for each call. `halves`: dispatch and combine
    are timed in two halves, too, with the wire hidden (weft.bench.halves).
    """

    ranks: int = 4
    tokens: int = 1024
    hidden: int = 2048
    experts: int = 64
    top_k: int = 8
    dtype: str = "bf16"
    layout: str = "rank_major"
    alignment: int = 1
    quantize: str = "none"
    capacity: int | None = None
    routing: str = "uniform"
    trace: str | None = None
    seed: int = 0
    device: str = "auto"
    placement: Literal["auto", "process", "off"] = "process"
    iters: int = 50
    warmup: int = 5
    num_sms: int | None = None
    mode: str = "auto"
    baseline: bool = True
    nodes: int = 1
    isolation: Literal["auto", "process", "thread"] = "auto"
    preset: str | None = None
    halves: bool = False

    @property
    def node_ranks(self) -> int | None:
        """As in ExpertParallel."""
        return self.ranks // self.nodes if self.nodes > 1 else None

    def complete(self) -> Options:
        """The same with a trace's experts, top_k and routing, and a capacity for masked. Raises InvalidArgument."""
        options = self
        if self.nodes < 1 or self.ranks % self.nodes:
            raise InvalidArgument(f"nodes={self.nodes}: allowed are divisors of ranks={self.ranks}")
        if self.baseline and (self.nodes > 1 or self.isolation == "thread"):
            what = f"nodes={self.nodes}" if self.nodes > 1 else f"isolation={self.isolation!r}"
            raise InvalidArgument(f"{what}: the baseline is of ranks that are processes on one node; add --no-baseline")
        if self.halves and self.mode == "throughput":
            raise InvalidArgument(
                "mode='throughput' with halves, which are of small batches: allowed are auto, latency"
            )
        if self.halves and self.mode == "latency" and self.tokens > MAX_SMALL_TOKENS:
            raise InvalidArgument(
                f"mode='latency' with tokens={self.tokens}: in it whole calls have at most {MAX_SMALL_TOKENS}"
            )
        if self.trace is not None:
            from weft.verify.cases import loaded_trace

            dispatches = loaded_trace(self.trace).dispatches
            first = dispatches[min(dispatches)][0]
            top_k = first.topk_idx.shape[1]
            options = dataclasses.replace(self, routing="trace", experts=first.num_experts, top_k=top_k)
        if options.experts % options.ranks:
            raise InvalidArgument(f"experts={options.experts}: must be a multiple of ranks={options.ranks}")
        if options.layout == "masked" and options.capacity is None:
            mean = options.ranks * options.tokens * options.top_k / options.experts
            options = dataclasses.replace(options, capacity=max(1, int(2 * mean)))
        if options.layout != "masked" and options.capacity is not None and options.baseline:
            raise InvalidArgument(f"capacity={options.capacity}: the baseline has it only in masked; add --no-baseline")
        return options


def one_shape(options: Options) -> tuple[Case, ...]:
    """The operations of one shape, of complete options: dispatch, combine of either tensor, and both; then, if they
    are asked for, dispatch and combine in two halves, eager and in a CUDA graph.
    """
    dispatch = Case(
        suite=ONE_SHAPE,
        op="dispatch",
        layout=options.layout,
        alignment=options.alignment,
        quantize=options.quantize,
        sizes="exact" if options.capacity is None else "capacity",
        num_sms=options.num_sms or 0,
        mode=options.mode,
        tokens=options.tokens,
        routing=options.routing,
        routing_options={} if options.trace is None else {"trace": options.trace},
        hidden=options.hidden,
        experts=options.experts,
        top_k=options.top_k,
        dtype=options.dtype,
        capacity=options.capacity,
    )
    later = (("combine", "heap"), ("combine", "ordinary"), ("both", "heap"))
    chosen = [dispatch, *(dataclasses.replace(dispatch, op=op, source=source) for op, source in later)]
    if options.halves:
        half = dataclasses.replace(dispatch, sizes="capacity", is_halved=True)
        both = (half, dataclasses.replace(half, op="combine", source="ordinary"))
        chosen += [*both, *(dataclasses.replace(case, is_graphed=True) for case in both)]
    goals = [node_goal(case, ranks=options.ranks, nodes=options.nodes) for case in chosen]
    return tuple(dataclasses.replace(case, goal=goal) for case, goal in zip(chosen, goals, strict=True))


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """Which suites to run, and how often. Their shape is that of the targets; fewer tokens or columns: a quick run."""

    suites: tuple[str, ...] = SUITES
    ranks: int = 4
    tokens: int = TOKENS
    hidden: int = HIDDEN
    trace: str | None = None
    seed: int = 0
    device: str = "auto"
    placement: Literal["auto", "process", "off"] = "process"
    iters: int = 100
    warmup: int = 5
    baseline: bool = True
    node_ranks: ClassVar[None] = None
    isolation: ClassVar[str] = "process"

    def __post_init__(self) -> None:
        for suite in self.suites:
            if suite not in SUITES:
                raise InvalidArgument(f"suite={suite!r}: allowed are {', '.join(SUITES)}, with commas between")
        if self.hidden % 128:
            raise InvalidArgument(f"hidden={self.hidden}: the suites need a multiple of 128")
        if EXPERTS % self.ranks:
            raise InvalidArgument(f"ranks={self.ranks}: the suites have {EXPERTS} experts, a multiple is needed")
