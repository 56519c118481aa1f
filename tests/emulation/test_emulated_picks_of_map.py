"""Guards against picks of a routing map that are not those of its rows: an expert behind the last whole step of a warp
left out, a row with more picks than fit that is not marked, words behind a row's picks that keep what was there."""

from __future__ import annotations

import pytest
import torch
from emulated_gpu import EmulatedRanks, Stream, gpu
from kernels import Mutant
from torch import Tensor

from weft import _load, reference
from weft.call.maps import picks_of_map

KERNEL = "weft/kernels/picks_of_map.cuh"
SHAPES = [(0, 4, 2), (1, 1, 1), (77, 12, 4), (21, 64, 40), (13, 70, 3)]  # tokens, experts, picks
DTYPES = [None, torch.float32, torch.bfloat16, torch.float16]  # of the weights


def map_of(num_tokens: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Rows of no expert, of as many as fit, and of more; weights that are no number where no pick is."""
    generator = torch.Generator().manual_seed(num_tokens)
    number = torch.randint(min(num_experts, top_k + 1) + 1, (num_tokens, 1), generator=generator)
    chosen = torch.rand((num_tokens, num_experts), generator=generator).argsort(1).argsort(1) < number
    probs = torch.randn((num_tokens, num_experts), generator=generator)
    return chosen, torch.where(chosen, probs, torch.nan)


def wanted(chosen: Tensor, probs: Tensor | None, num_experts: int, top_k: int) -> tuple[Tensor, Tensor | None]:
    """From the reference, which knows fp32 alone."""
    ids, weights = reference.picks_of_map(chosen, None if probs is None else probs.float(), num_experts, top_k)
    return ids, None if probs is None or weights is None else weights.to(probs.dtype)


def by_kernel(chosen: Tensor, probs: Tensor | None, num_experts: int, top_k: int) -> tuple[Tensor, Tensor | None]:
    """On the emulated GPU; results lie before words that nobody may touch."""
    dtype = torch.float32 if probs is None else probs.dtype
    ids = torch.full((len(chosen) + 1, top_k), 77, dtype=torch.int64)
    weights = torch.full((len(chosen) + 1, top_k), 7.0, dtype=dtype)
    _load.native().picks_of_map(
        gpu().native, Stream().cuda_stream, len(chosen), num_experts, top_k, dtype.itemsize, chosen.data_ptr(),
        0 if probs is None else probs.data_ptr(), ids.data_ptr(), 0 if probs is None else weights.data_ptr(),
    )  # fmt: skip
    assert gpu().found() == ""
    assert ids[-1].tolist() == [77] * top_k
    assert weights[-1].tolist() == [7.0] * top_k
    assert probs is not None or weights.unique().tolist() == [7.0]
    return ids[:-1], None if probs is None else weights[:-1]


def differ(found: tuple[Tensor, Tensor | None], want: tuple[Tensor, Tensor | None]) -> bool:
    """Whether anything does."""
    pairs = zip(found, want, strict=True)
    return any((here is None) != (there is None) or not _equal(here, there) for here, there in pairs)


def _equal(here: Tensor | None, there: Tensor | None) -> bool:
    if here is None or there is None:
        return here is there
    return here.dtype is there.dtype and torch.equal(here, there)


@pytest.mark.parametrize("dtype", DTYPES)
def test_picks_are_those_of_the_map(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None) -> None:
    EmulatedRanks(monkeypatch)
    for num_tokens, num_experts, top_k in SHAPES:
        chosen, probs = map_of(num_tokens, num_experts, top_k)
        given = None if dtype is None else probs.to(dtype)
        want = wanted(chosen, given, num_experts, top_k)
        assert not differ(by_kernel(chosen, given, num_experts, top_k), want)
        assert not differ(picks_of_map(chosen, given, num_experts, top_k, runs_kernels=True), want)


MISTAKES = {
    "the last experts are left out": ("first < args.num_experts; first", "first + kLanes <= args.num_experts; first"),
    "a row has a pick too many": ("is_pick && k < args.top_k", "is_pick && k <= args.top_k"),
    "picks of a step begin anew": ("num_picks += __popc(picks)", "num_picks = __popc(picks)"),
    "too many picks are not marked": ("if (num_picks <= args.top_k) return;", "return;"),
    "words behind the picks stay as they were": ("k < args.top_k; k += kLanes", "k < 0; k += kLanes"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.long
def test_mistakes_are_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    EmulatedRanks(monkeypatch, Mutant(name, KERNEL, *MISTAKES[name]))
    seen = False
    for num_tokens, num_experts, top_k in SHAPES:
        chosen, probs = map_of(num_tokens, num_experts, top_k)
        try:
            found = by_kernel(chosen, probs, num_experts, top_k)
        except AssertionError:
            return
        seen = seen or differ(found, wanted(chosen, probs, num_experts, top_k))
    assert seen
