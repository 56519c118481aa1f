"""Guards against counts of picks that are not those of the ids: a token twice on a rank, ids out of range that count,
the last tokens of a warp left out, counts of the host and of the kernel that differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_gpu import EmulatedRanks, Stream, gpu
from kernels import Mutant
from torch import Tensor

from weft import _load
from weft.call.count_picks import count_picks

KERNEL = "weft/kernels/count_picks.cuh"
SHAPES = [(0, 2, 4, 2), (1, 1, 1, 1), (77, 4, 12, 3), (300, 8, 64, 64), (33, 1, 6, 6)]  # tokens, picks, experts, ranks


def ids_of(num_tokens: int, top_k: int, num_experts: int, dtype: torch.dtype) -> Tensor:
    """Some out of range, some twice in a row."""
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(-2, num_experts + 2, (num_tokens, top_k), generator=generator).to(dtype)


def wanted(ids: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """In torch, one id after the other."""
    experts, in_rank = torch.zeros(num_experts, dtype=torch.int32), torch.zeros((len(ids), num_ranks), dtype=torch.bool)
    for token, row in enumerate(ids.tolist()):
        for expert in row:
            if 0 <= expert < num_experts:
                experts[expert] += 1
                in_rank[token, expert // (num_experts // num_ranks)] = True
    return in_rank.sum(0, dtype=torch.int32), experts, in_rank


def by_kernel(ids: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """On the emulated GPU; results lie between words that nobody may touch."""
    experts, ranks = torch.zeros(num_experts + 1, dtype=torch.int32), torch.zeros(num_ranks + 1, dtype=torch.int32)
    in_rank = torch.full((len(ids) + 1, num_ranks), 7, dtype=torch.uint8)
    _load.native().count_picks(
        gpu().native, Stream().cuda_stream, len(ids), ids.shape[1], num_experts, num_ranks, ids.dtype == torch.int64,
        ids.data_ptr(), experts.data_ptr(), ranks.data_ptr(), in_rank.data_ptr(),
    )  # fmt: skip
    assert gpu().found() == ""
    assert (int(experts[-1]), int(ranks[-1]), in_rank[-1].tolist()) == (0, 0, [7] * num_ranks)
    return ranks[:-1], experts[:-1], in_rank[:-1].view(torch.bool)


def differ(found: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    """Whether anything does."""
    return any(not torch.equal(here, there) for here, there in zip(found, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_counts_are_those_of_the_ids(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    EmulatedRanks(monkeypatch)
    for num_tokens, top_k, num_experts, num_ranks in SHAPES:
        ids = ids_of(num_tokens, top_k, num_experts, dtype)
        want = wanted(ids, num_experts, num_ranks)
        assert not differ(by_kernel(ids, num_experts, num_ranks), want)
        assert not differ(count_picks(ids, num_experts, num_ranks, runs_kernels=True), want)
        if num_tokens:
            strided = torch.stack([ids, ids.flip(0)], dim=1)[:, 0]
            assert not differ(count_picks(strided, num_experts, num_ranks, runs_kernels=True), want)


MISTAKES = {
    "the largest id counts": ("id < 0 || id >= args.num_experts", "id < 0 || id > args.num_experts"),
    "a token has one rank": ("ranks |= u64{1}", "ranks = u64{1}"),
    "the last tokens are left out": (
        "first < args.num_tokens; first",
        "first + kLanes <= args.num_tokens; first",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.long
def test_mistakes_are_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    EmulatedRanks(monkeypatch, Mutant(name, KERNEL, *MISTAKES[name]))
    ids = ids_of(77, 4, 12, torch.int64)
    try:
        found: tuple[Any, ...] = by_kernel(ids, 12, 3)
    except AssertionError:
        return
    assert differ(found, wanted(ids, 12, 3))


def test_numbers_that_make_no_sense_are_refused() -> None:
    ids = torch.zeros((3, 2), dtype=torch.int64)
    for num_experts, num_ranks in ((5, 2), (4, 0), (130, 65)):
        with pytest.raises(ValueError, match="allowed: 1 to 64 ranks"):
            count_picks(ids, num_experts, num_ranks, runs_kernels=False)
