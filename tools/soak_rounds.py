"""What a round of tools/soak.py does, drawn from its seed: the same on every rank."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

MAX_TOKENS = 192


@dataclass(frozen=True)
class Pool:
    """What is compiled into kernels, or allocated: few of them, so that a run calls more than it compiles."""

    experts: int
    top_k: int
    hidden: int
    num_sms: int
    heap_bytes: int
    dtype: torch.dtype


POOLS = (  # experts: of each rank. The heap of the last is often full, then rows come through the landing
    Pool(experts=64, top_k=8, hidden=1024, num_sms=8, heap_bytes=256 << 20, dtype=torch.bfloat16),
    Pool(experts=16, top_k=2, hidden=896, num_sms=3, heap_bytes=64 << 20, dtype=torch.float32),
    Pool(experts=24, top_k=5, hidden=272, num_sms=16, heap_bytes=1 << 20, dtype=torch.float16),
)


@dataclass(frozen=True)
class Round:
    """One round's choices; equal on all ranks."""

    seed: int
    pool: int
    tokens: tuple[int, ...]
    layout: str
    alignment: int
    capacity: int | None
    quantize: str | None
    weighted: bool
    wire: str | None
    in_heap: bool
    async_op: bool
    id_dtype: str
    absent: float  # share of ids that are -1


def draw(seed: int, num_ranks: int) -> Round:
    """The round of a seed."""
    rng = random.Random(f"weft soak {seed}")
    pool = rng.randrange(len(POOLS))
    shape = POOLS[pool]
    layout = rng.choice(("rank_major", "expert_major", "masked"))
    tokens = tuple(rng.choice((0, 1, 33, MAX_TOKENS, rng.randint(2, MAX_TOKENS))) for _ in range(num_ranks))
    mean = sum(tokens) * shape.top_k // (shape.experts * num_ranks) + 1
    capacity = None
    if layout == "masked":
        capacity = rng.choice((mean, 2 * mean + 8))
    elif rng.random() < 0.5:
        capacity = rng.choice((max(tokens) * num_ranks * shape.top_k, sum(tokens) // 2 + 1))
    return Round(
        seed=seed,
        pool=pool,
        tokens=tokens,
        layout=layout,
        alignment=rng.choice((1, 8, 128)) if layout == "expert_major" else 1,
        capacity=capacity,
        quantize=rng.choice((None, None, "fp8", "fp8_ue8m0")),
        weighted=rng.random() < 0.7,
        wire=rng.choice((None, None, "fp8")),
        in_heap=rng.random() < 0.5,
        async_op=rng.random() < 0.3,
        id_dtype=rng.choice(("int32", "int64")),
        absent=rng.choice((0.0, 0.0, 0.1, 0.9)),
    )
