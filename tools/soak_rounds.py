"""What a round of tools/soak.py does, drawn from its seed: the same on every rank."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

import torch

import weft
from weft import env
from weft.kernels import prebuild
from weft.limits import LAYOUTS, SCALE_LAYOUTS
from weft.verify.cases import MODES

DEADLINE_S = 20.0
GRAPH_MODES = ("latency", "staged", "mixed", "throughput")


@dataclass(frozen=True)
class Pool:
    """What is compiled into kernels, or allocated: few of them, so that a run calls more than it compiles."""

    experts: int
    top_k: int
    hidden: int
    num_sms: int | None
    heap_bytes: int
    dtype: torch.dtype
    max_tokens: int = 192


POOLS = (  # experts: of each rank. The heap of the last is often full, then rows come through the landing
    Pool(experts=64, top_k=8, hidden=1024, num_sms=8, heap_bytes=256 << 20, dtype=torch.bfloat16),
    Pool(experts=16, top_k=2, hidden=896, num_sms=3, heap_bytes=64 << 20, dtype=torch.float32),
    Pool(experts=24, top_k=5, hidden=272, num_sms=16, heap_bytes=1 << 20, dtype=torch.float16),
)
# In graphs only: the decode shape of DeepSeek-V3, with the SMs that the library chooses.
DECODE = Pool(experts=64, top_k=8, hidden=7168, num_sms=None, heap_bytes=1 << 30, dtype=torch.bfloat16, max_tokens=128)
GRAPH_POOLS = (POOLS[0], DECODE, *POOLS[1:])
# On GPUs only, and in no graphs: batches of training.
LARGE = Pool(experts=64, top_k=8, hidden=7168, num_sms=16, heap_bytes=2 << 30, dtype=torch.bfloat16, max_tokens=4096)


def pools_of(device_type: str) -> tuple[Pool, ...]:
    """What rounds on such devices draw from."""
    return (*POOLS, LARGE) if device_type == "cuda" else POOLS


@dataclass(frozen=True)
class Round:
    """One round's choices; equal on all ranks."""

    seed: int
    pool: Pool
    tokens: tuple[int, ...]
    layout: str
    alignment: int
    capacity: int | None
    quantize: str | None  # of dispatch; "given": rows are FP8 before
    weighted: bool
    wire: str | None
    bias: str | None  # "row": one for all tokens, "full": one for each
    has_side: bool
    in_heap: bool
    async_op: bool
    id_dtype: str
    absent: float  # share of ids that are -1
    mode: str  # of weft.verify.cases.MODES
    scale_layout: str  # where rows are quantised
    zero_holes: bool


def draw(seed: int, num_ranks: int, pools: tuple[Pool, ...]) -> Round:
    """The round of a seed."""
    rng = random.Random(f"weft soak {seed}")
    mode = rng.choice(MODES)
    pool = rng.choice(pools)
    if pool == LARGE and mode != "auto":
        mode = "throughput"
    layout = rng.choice(("rank_major", "expert_major", "masked"))
    most = pool.max_tokens
    tokens = tuple(rng.choice((0, 1, 33, most, rng.randint(2, most))) for _ in range(num_ranks))
    mean = sum(tokens) * pool.top_k // (pool.experts * num_ranks) + 1
    capacity = None
    if layout == "masked":
        capacity = rng.choice((mean, 2 * mean + 8))
    elif rng.random() < 0.5:
        all_rows = max(tokens) * num_ranks * pool.top_k
        capacity = rng.choice((3 * sum(tokens) if pool == LARGE else all_rows, sum(tokens) // 2 + 1))
    return Round(
        seed=seed,
        pool=pool,
        tokens=tokens,
        layout=layout,
        alignment=rng.choice((1, 8, 128)) if layout == "expert_major" else 1,
        capacity=capacity,
        quantize=rng.choice((None, None, "fp8", "fp8_ue8m0", "fp8_pow2", "given")),
        weighted=rng.random() < 0.7,
        wire=rng.choice((None, None, "fp8")),
        bias=rng.choice((None, None, "row", "full")),
        has_side=rng.random() < 0.3,
        in_heap=rng.random() < 0.5,
        async_op=rng.random() < 0.3 and mode != "staged",
        id_dtype=rng.choice(("int32", "int64")),
        absent=rng.choice((0.0, 0.0, 0.1, 0.9)),
        mode=mode,
        scale_layout=rng.choice(SCALE_LAYOUTS),
        zero_holes=rng.random() < 0.7,
    )


@dataclass(frozen=True)
class GraphSet:
    """Graphs of several sizes that share one ExpertParallel; equal on all ranks."""

    seed: int
    pool: int
    tokens: tuple[tuple[int, ...], ...]  # of each graph: of each rank
    layout: str
    alignment: int
    is_tight: bool  # the capacity drops picks
    num_dispatches: int  # of a replay: the second with the handle of the first, a combine after each
    quantize: str | None  # "given": rows are FP8 before
    weighted: bool
    wire: str | None
    bias: str | None  # "row": one for all tokens, "full": one for each
    has_side: bool
    in_heap: bool  # expert outputs
    id_dtype: str
    absent: float
    mode: str  # of GRAPH_MODES
    scale_layout: str  # where rows are FP8


def draw_graphs(seed: int, num_ranks: int) -> GraphSet:
    """The graphs of a seed. Twelve, from a multiple of twelve on, have each mode and each pool with each layout."""
    rng = random.Random(f"weft soak graphs {seed}")
    layout = LAYOUTS[seed % len(LAYOUTS)]
    sizes = []
    for most in rng.sample((1, 2, 7, 32, 64, 128), 3):
        tokens = [rng.choice((0, most // 2, most, most)) for _ in range(num_ranks)]
        tokens[rng.randrange(num_ranks)] = most
        sizes.append(tuple(tokens))
    return GraphSet(
        seed=seed,
        pool=(seed // len(LAYOUTS) + seed // (len(LAYOUTS) * len(GRAPH_MODES))) % len(GRAPH_POOLS),
        tokens=tuple(sizes),
        layout=layout,
        alignment=rng.choice((1, 8)) if layout == "expert_major" else 1,
        is_tight=rng.random() < 0.3,
        num_dispatches=rng.choice((1, 2)),
        quantize=rng.choice((None, None, None, "fp8", "fp8_ue8m0", "fp8_pow2", "given")),
        weighted=rng.random() < 0.7,
        wire=rng.choice((None, None, "fp8")),
        bias=rng.choice((None, None, "row", "full")),
        has_side=rng.random() < 0.4,
        in_heap=rng.random() < 0.5,
        id_dtype=rng.choice(("int32", "int64")),
        absent=rng.choice((0.0, 0.0, 0.1)),
        mode=GRAPH_MODES[seed % len(GRAPH_MODES)],
        scale_layout=rng.choice(SCALE_LAYOUTS),
    )


def kernel_shape(pool: Pool, num_ranks: int) -> prebuild.KernelShape:
    """What the kernels of a pool are compiled for."""
    shape = prebuild.KernelShape(
        ranks=num_ranks,
        experts=pool.experts * num_ranks,
        top_k=pool.top_k,
        hidden=pool.hidden,
        tokens=pool.max_tokens,
        dtype={torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[pool.dtype],
    )
    if pool.num_sms is None:  # those that are chosen where ranks have a GPU each
        return shape
    return dataclasses.replace(shape, num_sms=pool.num_sms, small_num_sms=(pool.num_sms,))


def compile_kernels(arch: str | None, num_ranks: int, pools: tuple[Pool, ...]) -> None:
    """Most of what calls on these pools need, on all CPUs at once; ranks would compile one kernel after the other."""
    if arch not in prebuild.ARCHITECTURES or not env.cache_folder():
        return
    for pool in pools:
        prebuild.prebuild(kernel_shape(pool, num_ranks), [arch], env.cache_folder())


def agree(ep: weft.ExpertParallel, *, stop: bool) -> bool:
    """Whether any rank wants to stop: each sends a token to everyone, with its wish in it."""
    num_ranks, per_rank = ep.num_ranks, ep.num_experts // ep.num_ranks
    wish = torch.full((num_ranks, ep.hidden), float(stop), dtype=ep.dtype, device=ep.device)
    idx = torch.full((num_ranks, ep.top_k), -1, device=ep.device)
    idx[:, 0] = torch.arange(num_ranks, device=ep.device) * per_rank
    received = ep.dispatch(wish, idx)
    return bool((received.x != 0).any())
