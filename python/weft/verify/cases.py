"""What `weft verify` tries: one frozen Case a trial, drawn from the trial's seed. No torch here."""

from __future__ import annotations

import dataclasses
import functools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.errors import InvalidArgument
from weft.limits import MAX_SMALL_TOKENS, SCALE_LAYOUTS

if TYPE_CHECKING:
    from weft.routing.traces import Trace

ROUTINGS = ("uniform", "zipf", "all_to_one", "empty_rank", "group_limited")
LAYOUTS = ("rank_major", "expert_major", "masked")
QUANTIZES = ("none", "fp8", "fp8_ue8m0", "fp8_pow2")
DTYPES = ("bf16", "fp16", "fp32")
# mixed: small batches behind a throughput dispatch; staged: small batches in two halves.
MODES = ("auto", "throughput", "latency", "mixed", "staged")

_TINY_HEAP = 4096  # bytes: next to nothing fits, so rows take the way through staging


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """The values a user fixed; None is drawn anew in every trial. `trace` is a file of weft.routing.record."""

    ranks: int | None = None
    tokens: int | None = None
    hidden: int | None = None
    experts: int | None = None
    top_k: int | None = None
    layout: str | None = None
    quantize: str | None = None
    dtype: str | None = None
    routing: str | None = None
    mode: str | None = None
    trace: str | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One trial, complete: the same Case gives the same data and, on every engine, the same bits."""

    seed: int
    ranks: int
    tokens: tuple[int, ...]  # per rank
    hidden: int
    experts: int
    top_k: int
    layout: str
    quantize: str
    dtype: str
    routing: str
    trace: str | None
    alignment: int
    capacity: int | None
    weighted: bool
    side: bool
    bias: str  # "none", "row" [H] or "full" [T, H]
    id_bits: int  # topk_idx is int32 or int64
    heap_bytes: int | None
    heap_output: bool  # the expert outputs lie in the heap (ep.empty_output) or in an ordinary tensor
    special_values: bool  # NaN, infinities, subnormals and -0 among the rows
    odd_ids: bool  # some ids -1, some twice in a row
    mode: str  # one of MODES
    scale_layout: str  # of weft.limits.SCALE_LAYOUTS

    @property
    def num_local_experts(self) -> int:
        """Experts of one rank."""
        return self.experts // self.ranks

    @property
    def dispatch_mode(self) -> dict[str, Any]:
        """`mode` and `staged` of a dispatch with a routing of its own."""
        return dispatch_options(self.mode, has_capacity=self.capacity is not None)

    @property
    def later_mode(self) -> dict[str, Any]:
        """The same of what follows it."""
        return later_options(self.mode)

    def summary(self) -> str:
        """One line with every value."""
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self))


def dispatch_options(mode: str, *, has_capacity: bool) -> dict[str, Any]:
    """`mode` and `staged` of a dispatch with a routing of its own; `mode`: one of MODES."""
    first = {"mixed": "throughput", "staged": "latency"}.get(mode, mode)
    return {"mode": first, "staged": mode == "staged" and has_capacity}


def later_options(mode: str) -> dict[str, Any]:
    """The same of what follows it: repetitions and combines."""
    return {"mode": "latency" if mode in ("mixed", "staged") else mode, "staged": mode == "staged"}


def check_fixed(fixed: Fixed) -> None:
    """Raise InvalidArgument if no case can have these values."""
    if fixed.experts is not None and fixed.ranks is not None and fixed.experts % fixed.ranks != 0:
        raise InvalidArgument(f"experts={fixed.experts}: must be a multiple of ranks={fixed.ranks}")
    if fixed.mode not in (None, "auto", "throughput") and (fixed.tokens or 0) > MAX_SMALL_TOKENS:
        raise InvalidArgument(f"tokens={fixed.tokens}: at most {MAX_SMALL_TOKENS} with mode={fixed.mode}")
    if fixed.hidden is not None:
        unit = 16 if fixed.quantize not in (None, "none") else 8 if fixed.dtype in ("bf16", "fp16") else 4
        if fixed.hidden % unit != 0:
            raise InvalidArgument(
                f"hidden={fixed.hidden}: must be a multiple of {unit} with dtype={fixed.dtype or 'any'} and "
                f"quantize={fixed.quantize or 'any'}"
            )


def check_environment() -> None:
    """Raise InvalidArgument if the native module refuses a variable: ranks would report that as a failed case."""
    from weft import _load

    native = _load.native()
    native.Communicator.local(native.LocalHub(1), 0).close()


def _with_trace(seed: int, fixed: Fixed) -> tuple[Fixed, tuple[int, ...] | None]:
    """Lay experts, top_k, ranks and tokens of a recorded trace under `fixed`; the seed chooses the dispatch."""
    if fixed.trace is None:
        return fixed, None
    dispatches = loaded_trace(fixed.trace).dispatches
    recorded = [dispatches[rank][seed % len(dispatches[rank])] for rank in sorted(dispatches)]
    ranks = fixed.ranks if fixed.ranks is not None else len(recorded)
    tokens = tuple(len(recorded[rank % len(recorded)].topk_idx) for rank in range(ranks))
    experts, top_k = recorded[0].num_experts, recorded[0].topk_idx.shape[1]
    fixed = dataclasses.replace(fixed, ranks=ranks, experts=fixed.experts or experts, top_k=fixed.top_k or top_k)
    check_fixed(fixed)
    return fixed, tokens


@functools.lru_cache(maxsize=1)
def loaded_trace(file: str) -> Trace:
    """The trace in `file`, read once."""
    from weft.routing import load_trace

    return load_trace(file)


def draw_case(seed: int, fixed: Fixed) -> Case:
    """Draw the case of `seed`. All is drawn before `fixed` is laid over it: the same draws, whatever is fixed."""
    fixed, traced_tokens = _with_trace(seed, fixed)
    rng = random.Random(f"weft verify {seed}")
    ranks = rng.choice([r for r in (1, 2, 3, 4, 4, 5, 8) if fixed.experts is None or fixed.experts % r == 0])
    ranks = fixed.ranks if fixed.ranks is not None else ranks
    free = random.Random(f"weft verify free {seed}")
    local_experts = free.randint(1, 8)
    tokens = tuple(free.choice((0, 1, 2, 7, 16, free.randint(0, 60), free.randint(60, 150))) for _ in range(64))[:ranks]
    units = free.choice((1, 2, 3, 5, 9, 17, 33, 64))
    quantize = free.choice(("none", "none", "fp8", "fp8_ue8m0"))
    if quantize == "fp8_ue8m0" and random.Random(f"weft verify powers {seed}").random() < 0.5:
        quantize = "fp8_pow2"
    top_k_share = free.random()
    layout = free.choice(LAYOUTS)
    dtype = free.choice(DTYPES)
    routing = free.choice(ROUTINGS)

    if fixed.hidden is not None:
        quantize = quantize if fixed.hidden % 16 == 0 else "none"
        dtype = dtype if fixed.hidden % 8 == 0 else "fp32"
    quantize = fixed.quantize or quantize
    hidden = fixed.hidden if fixed.hidden is not None else units * (16 if quantize != "none" else 8)
    experts = fixed.experts if fixed.experts is not None else ranks * local_experts
    top_k = fixed.top_k if fixed.top_k is not None else 1 + int(top_k_share * min(experts, 12))
    layout = fixed.layout or layout
    if fixed.tokens is not None:
        tokens = (fixed.tokens,) * ranks
    elif traced_tokens is not None:
        tokens = traced_tokens
    return Case(
        seed=seed,
        ranks=ranks,
        tokens=tokens,
        hidden=hidden,
        experts=experts,
        top_k=min(top_k, 128),
        layout=layout,
        quantize=quantize,
        dtype=fixed.dtype or dtype,
        routing="trace" if fixed.trace is not None else fixed.routing or routing,
        trace=fixed.trace,
        alignment=free.choice((1, 1, 8, 16)) if layout == "expert_major" else 1,
        capacity=_draw_capacity(free, layout, tokens, top_k, experts),
        weighted=free.random() < 0.7,
        side=free.random() < 0.4,
        bias=free.choice(("none", "none", "row", "full")),
        id_bits=free.choice((32, 64)),
        heap_bytes=free.choice((None, None, _TINY_HEAP)),
        heap_output=free.random() < 0.5,
        special_values=free.random() < 0.3,
        odd_ids=free.random() < 0.5 and fixed.trace is None,
        mode=_draw_mode(free, fixed, tokens),
        scale_layout="row_major" if quantize == "none" else free.choice(SCALE_LAYOUTS),
    )


def _draw_mode(rng: random.Random, fixed: Fixed, tokens: tuple[int, ...]) -> str:
    """More tokens than small batches have go to the others."""
    mode = rng.choice(MODES)
    return fixed.mode or (mode if max(tokens) <= MAX_SMALL_TOKENS else "throughput")


def _draw_capacity(rng: random.Random, layout: str, tokens: tuple[int, ...], top_k: int, experts: int) -> int | None:
    """None, or a capacity around the mean load: sometimes met, sometimes exceeded. masked must have one."""
    share = rng.choice((0.5, 1.0, 2.0, 4.0))
    bounded = rng.random() < 0.3
    if layout == "masked":
        return 1 + int(share * sum(tokens) * top_k / experts)
    picks_a_rank = sum(tokens) * (top_k if layout == "expert_major" else min(top_k, 1.5)) / len(tokens)
    return 1 + int(share * picks_a_rank) if bounded else None


def repeat_command(case: Case, fixed: Fixed, device: str) -> str:
    """The command line that runs this case again."""
    words = ["weft", "verify", "--trials", "1", "--seed", str(case.seed), "--device", device]
    for field in dataclasses.fields(fixed):
        value = getattr(fixed, field.name)
        if value is not None:
            words += ["--" + field.name.replace("_", "-"), str(value)]
    return " ".join(words)
