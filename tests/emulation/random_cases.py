"""Random shapes, layouts, forms of rows and faults; the same seed is the same case."""

import dataclasses
from typing import TypeVar

import torch
from combine_cases import CombineCase
from dispatch_cases import Case
from world import DTYPES, LAYOUTS, NO_CAPACITY, Shape

T = TypeVar("T")


class Dice:
    """Random choices."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def below(self, limit: int) -> int:
        """0 .. limit - 1."""
        return int(torch.randint(0, limit, (), generator=self._generator))

    def one_of(self, *values: T) -> T:
        """One of the values."""
        return values[self.below(len(values))]

    def chance(self, percent: int) -> bool:
        """True so often."""
        return self.below(100) < percent


def random_dispatch(seed: int, *, is_small: bool) -> Case:
    """A case of the throughput dispatch or of the one for small batches."""
    dice = Dice(seed * 2 + is_small)
    num_ranks = dice.one_of(1, 2, 2, 3, 4)
    top_k = dice.one_of(1, 2, 3, 4, 8, 35) if num_ranks < 4 else dice.one_of(2, 4)
    num_blocks = dice.one_of(1, 2, 2, 3) if num_ranks <= 2 else dice.one_of(1, 2)
    small_tokens = dice.one_of(1, 3, 8, 20)
    max_tokens = max(dice.one_of(8, 33, 70), small_tokens)
    most = small_tokens if is_small else max_tokens
    rows = dice.one_of("plain", "plain", "fp8", "fp8_ue8m0", "bytes")
    dtype = dice.one_of(torch.bfloat16, torch.float16, torch.float32)
    # Rows come in pieces of 16 bytes, on the wire too.
    hidden = dice.one_of(16, 48, 144, 272, 400) if rows != "plain" else dice.one_of(8, 40, 264, 600)
    layout = dice.one_of(*LAYOUTS)
    scale_bytes = dice.one_of(0, 3, 8, 16, 48) if rows == "bytes" else 0
    has_columns = is_small and (rows.startswith("fp8") or scale_bytes > 0) and dice.chance(50)
    tokens = tuple(0 if dice.chance(20) else dice.below(most + 1) for _ in range(num_ranks))
    num_experts = num_ranks * dice.one_of(1, 3, 8, 40)
    is_crossed = is_small and dice.chance(20)  # small batches behind a throughput dispatch
    can_gather = scale_bytes % 4 == 0 and (layout == "rank_major" or (is_small and not is_crossed))
    return Case(
        seed=seed,
        shape=Shape(
            num_ranks=num_ranks,
            num_experts=num_experts,
            top_k=top_k,
            num_blocks=num_blocks,
            max_tokens=max_tokens,
            landing_row_bytes=(hidden * 4 + 127) // 16 * 16,
            small_tokens=small_tokens,
        ),
        num_blocks=num_blocks,
        tokens=tokens,
        hidden=hidden,
        dtype=dtype,
        rows=rows,
        scale_bytes=scale_bytes,
        columns_given=can_gather and dice.chance(50),
        scale_word_bytes=(8 if scale_bytes in (8, 16) else 4) if has_columns else 0,
        layout=layout,
        capacity=_capacity(dice, layout, sum(tokens) * top_k, num_ranks, num_experts),
        alignment=dice.one_of(1, 1, 4, 16) if layout == "expert_major" else 1,
        zeroes_holes=dice.chance(60),
        int32_ranks=tuple(rank for rank in range(num_ranks) if dice.chance(40)),
        has_weights=dice.chance(80),
        num_rounds=3,
        is_repeated=is_crossed or dice.chance(30),
        staged_ranks=tuple(rank for rank in range(num_ranks) if not is_small and dice.chance(25)),
        num_duplicates=dice.one_of(0, 0, 3),
        num_bad_ids=dice.one_of(0, 0, 2),
        lost_ranks=(dice.below(num_ranks),) if num_ranks > 1 and dice.chance(15) else (),
        is_small=is_small and not is_crossed,
        is_small_behind=is_crossed,
        is_split=dice.chance(30),
        shared_bytes=dice.one_of(24 << 10, 40 << 10, 64 << 10),
    )


def random_combine(seed: int, *, is_small: bool) -> CombineCase:
    """A case of the throughput combine, or of the one for small batches, behind its dispatch."""
    dispatch, dice = random_dispatch(seed, is_small=is_small), Dice(seed * 2 + is_small + 1000000)
    dtype, wire_is_fp8 = dice.one_of(*DTYPES), dice.chance(35)
    hidden = 16 * dice.one_of(1, 9, 17, 40) if wire_is_fp8 else 8 * dice.one_of(1, 7, 33, 90)
    ranks = range(dispatch.shape.num_ranks)
    wire_bytes = hidden * dtype.itemsize + 64
    return CombineCase(
        dispatch=dataclasses.replace(
            dispatch,
            is_repeated=False,
            # Slots hold a row; the landing holds all contributions or, pass by pass, some.
            shape=dataclasses.replace(
                dispatch.shape,
                landing_row_bytes=max(dispatch.shape.landing_row_bytes, wire_bytes if is_small else wire_bytes // 4),
            ),
        ),
        hidden=hidden,
        dtype=dtype,
        wire_is_fp8=wire_is_fp8,
        is_weighted=dice.chance(70),
        has_side=dice.chance(40),
        bias=dice.one_of("", "row", "rows"),
        bias_is_fp32=dice.chance(50),
        heap_ranks=tuple(rank for rank in ranks if dice.chance(50)),
        shared_bytes=dice.one_of(32 << 10, 64 << 10, 160 << 10),
        num_combines=dice.one_of(1, 1, 2, 3),
    )


def _capacity(dice: Dice, layout: str, num_picks: int, num_ranks: int, num_experts: int) -> int:
    if layout == "masked":
        return max(num_picks // num_experts + dice.below(4), 1)
    return num_picks // num_ranks * dice.one_of(50, 90, 120) // 100 + 1 if dice.chance(40) else NO_CAPACITY
