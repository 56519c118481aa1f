"""The cases of `weft bench`: which calls, at which shape, and what they are to reach. No torch here.

The reference shape is H = 7168, K = 8, E = 256, 4 ranks. Targets are microseconds with uniform routing on 4 x H200, at
T = 4096 but for those of small batches, everything inside the boundary (docs/benchmarking.md, "How Weft counts").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

HIDDEN, EXPERTS, TOP_K, TOKENS, RANKS = 7168, 256, 8, 4096, 4
CALLS_IN_GRAPH = 10  # of small batches, on a GPU
ONE_SHAPE = "one shape"  # what cases are listed under that are no suite's
SUITES = ("targets", "routings", "tokens", "sms", "step", "small")
ALIGNMENT = 128  # of expert_major groups: what grouped GEMMs in FP8 ask for
SMALL_SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # T at which both kinds of kernels are timed


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a case is to reach, in microseconds."""

    must_us: float
    stretch_us: float | None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured call. Equal on all ranks."""

    suite: str
    op: str  # "dispatch", "combine", "step"; "both": dispatch, then combine of tensors that are there
    rows: str = "bf16"  # dispatch: "bf16", or "fp8": rows that come quantised, with a scale per 128
    layout: str = "rank_major"
    alignment: int = 1
    quantize: str = "none"
    scale_layout: str = "row_major"  # dispatch: of the result's scales
    sizes: str = "exact"  # dispatch: "exact" (the host waits for counts) or "capacity" (it does not)
    is_cached: bool = False  # dispatch with a handle
    source: str | None = None  # combine: where the expert outputs lie, "heap" or "ordinary"
    wire: str | None = None  # combine: "fp8"
    num_sms: int = 16  # 0: as many as Weft takes by itself
    mode: str = "auto"
    is_graphed: bool = False  # on a GPU timed as replays of a CUDA graph
    is_halved: bool = False  # sent and received apart, with other work of the GPU between
    tokens: int = TOKENS
    routing: str = "uniform"
    routing_options: Mapping[str, Any] = field(default_factory=dict)
    goal: Goal | None = None
    is_quarter: bool = False  # T is a quarter of that of the targets, where the rate is to be nearly the same
    hidden: int = HIDDEN
    experts: int = EXPERTS
    top_k: int = TOP_K
    dtype: str = "bf16"
    capacity: int | None = None  # of dispatch; None with sizes="capacity": what the routing needs and a tenth more

    @property
    def link_kind(self) -> str:
        """How rows cross: "pull" (bulk loads by the owner) or "push" (bulk stores)."""
        is_pulled = self.op == "combine" and self.source == "heap" and self.layout == "rank_major" and self.wire is None
        return "pull" if is_pulled else "push"

    @property
    def name(self) -> str:
        """Words for tables, without T, routing and SMs."""
        form = "FP8" if self.rows == "fp8" else "BF16 to FP8" if self.quantize != "none" else "BF16"
        if self.op == "both":
            words = [form, "BF16 back", self.layout, "weighted"]
        elif self.op == "dispatch":
            words = [form, self.layout, f"aligned {self.alignment}" if self.alignment > 1 else ""]
            words += ["scales by column" if self.scale_layout == "column_major" else ""]
            words += ["cached handle" if self.is_cached else "", "capacity" if self.sizes == "capacity" else ""]
        else:
            words = ["BF16", self.layout, f"{self.source} tensor" if self.source else ""]
            words += [f"{self.wire} on the wire" if self.wire else ""]
            words += ["weighted" if self.layout != "rank_major" else ""]
        words += [self.mode if self.mode != "auto" else "", "in two halves" if self.is_halved else ""]
        return f"{self.op} {', '.join(word for word in words if word)}"


def _dispatch(**options: Any) -> Case:
    return Case(**{"suite": "targets", "op": "dispatch", **options})


def _combine(**options: Any) -> Case:
    return Case(**{"suite": "targets", "op": "combine", "source": "heap", **options})


def _goal(must_us: float, stretch_us: float | None = None) -> Goal:
    return Goal(must_us=must_us, stretch_us=stretch_us)


_BY_EXPERT: dict[str, Any] = {"layout": "expert_major", "alignment": ALIGNMENT, "num_sms": 20}


def _targets() -> Iterator[Case]:
    """Every row of the targets for T = 4096; with a capacity too, where the host does not wait."""
    for case in (
        _dispatch(rows="fp8", goal=_goal(264, 252)),
        _dispatch(rows="fp8", num_sms=8, goal=_goal(292, 282)),
        _dispatch(goal=_goal(497, 475)),
        _dispatch(num_sms=8, goal=_goal(552, 536)),
        _dispatch(quantize="fp8", goal=_goal(278, 260)),
        _dispatch(rows="fp8", goal=_goal(315, 285), **_BY_EXPERT),
    ):
        yield case
        yield dataclasses.replace(case, sizes="capacity")
    yield _dispatch(rows="fp8", scale_layout="column_major", **_BY_EXPERT)
    yield _dispatch(is_cached=True)
    yield _combine(goal=_goal(510, 495))
    yield _combine(num_sms=8, goal=_goal(610, 550))
    yield _combine(source="ordinary", goal=_goal(535, 495))
    yield _combine(source="ordinary", goal=_goal(570, 515), **_BY_EXPERT)
    yield _combine(wire="fp8", goal=_goal(300, 270))


def _with_routing(name: str, **options: Any) -> Callable[[Case], Case]:
    def change(case: Case) -> Case:
        return dataclasses.replace(case, suite="routings", routing=name, routing_options=options)

    return change


_THREE = (_dispatch(rows="fp8"), _dispatch(), _combine())
_OTHERS = (
    _dispatch(rows="fp8", **_BY_EXPERT),
    _combine(source="ordinary", **_BY_EXPERT),
    _combine(source="ordinary"),
    _combine(wire="fp8"),
)


def _routings(trace: str | None) -> Iterator[Case]:
    changes = [_with_routing("zipf", alpha=1.2), _with_routing("all_to_one"), _with_routing("group_limited")]
    if trace is not None:
        changes.append(_with_routing("trace", trace=trace))
    for change in changes:
        yield from map(change, _THREE + _OTHERS)


def _tokens() -> Iterator[Case]:
    """Those at T = 4096 are in the targets."""
    for tokens in (256, 512, 1024, 2048, 8192):
        has_all = tokens in (1024, 2048)
        for case in _THREE + _OTHERS if has_all else _THREE:
            made = dataclasses.replace(case, suite="tokens", tokens=tokens, is_quarter=4 * tokens == TOKENS)
            yield made
            if has_all and made.op == "dispatch":
                yield dataclasses.replace(made, sizes="capacity")


def _sms() -> Iterator[Case]:
    for num_sms in (4, 6, 12, 20, 24, 32):
        for case in _THREE:
            yield dataclasses.replace(case, suite="sms", num_sms=num_sms)


def _step() -> Iterator[Case]:
    yield Case(suite="step", op="step", layout="expert_major", source="ordinary", num_sms=20)


_SMALL_GOALS = {
    ("dispatch", 128): _goal(18, 15),
    ("combine", 128): _goal(25, 20),
    ("both", 128): _goal(44, 35),
    ("both", 32): _goal(28, 20),
    ("both", 8): _goal(20, 13),
}


def _small() -> Iterator[Case]:
    """Batches of decoding: the calls with targets, by what Weft chooses; then each kind of kernels over T."""
    for tokens, layout in product((128, 32, 8), ("masked", "expert_major")):
        for op, form in product(("dispatch", "combine", "both"), ({"quantize": "fp8"}, {"rows": "fp8"})):
            if op == "combine" and "rows" in form:
                continue  # the same as before
            goal = _SMALL_GOALS.get((op, tokens))
            yield _small_case("small", op, form, layout=layout, tokens=tokens, goal=goal)
    for tokens, op, mode in product(SMALL_SWEEP, ("dispatch", "combine", "both"), ("latency", "throughput")):
        yield _small_case("small_tokens", op, {"rows": "fp8"}, layout="expert_major", tokens=tokens, mode=mode)


def _small_case(suite: str, op: str, form: dict[str, str], **options: Any) -> Case:
    if op != "dispatch":
        options["source"] = "ordinary"
    if op != "combine":
        options |= form
    return Case(suite=suite, op=op, sizes="capacity", is_graphed=True, num_sms=0, **options)


# Two ranks in two nodes, 50 GB/s between them: by operation, quantize, T, and whether it is in halves, of which nothing
# has to be waited for. At T = 4096 with 8 SMs.
_NODE_GOALS = {
    ("dispatch", "fp8", TOKENS, False): _goal(680, 664),
    ("dispatch", "none", TOKENS, False): _goal(1280, 1280),
    ("combine", "none", TOKENS, False): _goal(1300, 1287),
    ("dispatch", "fp8", 128, False): _goal(60, 50),
    ("combine", "none", 128, False): _goal(80, 70),
    ("dispatch", "fp8", 128, True): _goal(25),
    ("combine", "none", 128, True): _goal(25),
}
_NODE_SMS = 8  # at T = 4096


def node_goal(case: Case, *, ranks: int, nodes: int) -> Goal | None:
    """What a call of one shape is to reach between nodes: of two ranks in two nodes, at the reference shape."""
    shape = (case.hidden, case.experts, case.top_k, case.dtype, case.layout, case.routing)
    if (ranks, nodes) != (2, 2) or shape != (HIDDEN, EXPERTS, TOP_K, "bf16", "rank_major", "uniform"):
        return None
    if case.tokens == TOKENS and case.num_sms != _NODE_SMS:
        return None
    quantize = case.quantize if case.op == "dispatch" else "none"  # sums travel as they are
    return _NODE_GOALS.get((case.op, quantize, case.tokens, case.is_halved))


def cases(
    suites: tuple[str, ...],
    *,
    tokens: int = TOKENS,
    ranks: int = RANKS,
    trace: str | None = None,
    hidden: int = HIDDEN,
) -> tuple[Case, ...]:
    """The cases of these suites in order. Fewer `tokens` than 4096 scale every T, for a quick run. Goals are of 4096
    tokens and four ranks: else nothing has one.
    """
    makers: dict[str, Callable[[], Iterator[Case]]] = {
        "targets": _targets,
        "routings": lambda: _routings(trace),
        "tokens": _tokens,
        "sms": _sms,
        "step": _step,
        "small": _small,
    }
    chosen = [dataclasses.replace(case, hidden=hidden) for suite in suites for case in makers[suite]()]
    if tokens != TOKENS:
        chosen = [dataclasses.replace(case, tokens=max(1, case.tokens * tokens // TOKENS)) for case in chosen]
    if (tokens, ranks) != (TOKENS, RANKS):
        chosen = [dataclasses.replace(case, goal=None) for case in chosen]
    return tuple(chosen)
