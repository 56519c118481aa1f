"""Guards against a deep_ep package that asks the kernels of GPUs for what they do not do, or reads answers wrongly:
windows that grow in a call, and low-latency calls whose weights the owner has, on one emulated GPU; and all cases that
every engine runs. And against what torch is asked for beside the kernels of Weft's own calls.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from case_table import pairs, run_case
from emulated_gpu import EmulatedRanks
from gpu_steps import NAMES, STEPS, random_steps, run_step, step_under_a_default_device
from test_host_calls import MOST_OF_TORCH, functions_over_own

from pool import RankState
from weft import deep_ep
from weft.bench import deep_ep as bench
from weft.deep_ep.ranks import Ranks

pytestmark = pytest.mark.long
HIDDEN, EXPERTS, TOP_K = 64, 8, 2


def inputs(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids and weights of a rank."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    ids = torch.randint(-1, EXPERTS, (num_tokens, TOP_K), generator=generator)
    return x, ids, torch.randn(num_tokens, TOP_K, generator=generator)


def grows(state: RankState, _: object) -> tuple[list[int], int]:
    """Tokens that the window of each call has room for, and how often ranks told each other T before."""
    buffer, rooms, asked = deep_ep.Buffer(state.comm), [], []
    gather = buffer._ranks.gather
    buffer._ranks.gather = lambda *given: asked.append(given) or gather(*given)  # type: ignore[func-returns-value]
    for turn, count in enumerate((8, 600 if state.rank else 3, 5)):
        x, ids, weights = inputs(count, 10 * turn + state.rank)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
        recv, _, _, counts, handle, _ = buffer.dispatch(
            x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=ids,
            topk_weights=weights,
        )  # fmt: skip
        rooms.append(handle.ep.max_tokens_per_rank)
        assert counts is not None
        assert len(counts) == EXPERTS // 2
        assert torch.equal(buffer.combine(recv, handle)[0], x * in_rank.sum(1, dtype=x.dtype)[:, None])
    return rooms, len(asked)


def test_windows_grow_in_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks tell each other T before the first call alone."""
    assert hasattr(Ranks, "gather")
    ranks: Any = EmulatedRanks(monkeypatch)
    assert ranks.run(2, grows, [None] * 2) == [([512, 1024, 1024], 1)] * 2


def combines(state: RankState, call: tuple[bool, int, int]) -> None:
    """Weights of the owner, ids that have turned -1: the sums by k, bit for bit, in the caller's memory, too. With a
    hook the caller overwrites its weights before it calls that. `call`: whether there is a hook, how many tokens rank 1
    has, and the bound."""
    has_hook, of_one, most = call
    buffer = deep_ep.Buffer(state.comm, low_latency_mode=True)
    for turn in range(3):
        x, ids, weights = inputs(of_one if state.rank else 9 + turn, 10 * turn + state.rank)
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, most, EXPERTS, use_fp8=False, return_recv_hook=has_hook
        )
        assert handle.dispatched.handle.is_small or not has_hook
        if hook is not None:
            hook()
        ids[::3, 0] = -1
        given = weights.clone()
        out = torch.empty_like(x) if turn else None
        y, _, hook = buffer.low_latency_combine(rows, ids, given, handle, return_recv_hook=has_hook, out=out)
        assert out is None or y is out
        given.fill_(torch.nan)
        if hook is not None:
            hook()
        want = torch.zeros(len(x), HIDDEN)
        for k in range(TOP_K):
            is_there = (ids[:, k] >= 0)[:, None]
            want = torch.where(is_there, want + weights[:, k, None] * x.float(), want)
        assert torch.equal(y, want.bfloat16())


@pytest.mark.parametrize("of_one", [5, 0])
@pytest.mark.parametrize("has_hook", [False, True])
def test_low_latency_weights_are_the_owners(monkeypatch: pytest.MonkeyPatch, has_hook: bool, of_one: int) -> None:
    """In one go, and in halves; a rank without tokens."""
    EmulatedRanks(monkeypatch).run(2, combines, [(has_hook, of_one, 12)] * 2)


def test_more_tokens_than_small_batches_have_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both calls are in halves."""
    EmulatedRanks(monkeypatch).run(2, combines, [(True, 600, 600)] * 2)


@pytest.mark.parametrize(("name", "num_ranks"), pairs((2, 4)))
def test_cases_of_every_engine(monkeypatch: pytest.MonkeyPatch, name: str, num_ranks: int) -> None:
    EmulatedRanks(monkeypatch).run(num_ranks, run_case, [name] * num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_steps_of_gpus(monkeypatch: pytest.MonkeyPatch, name: str, num_ranks: int) -> None:
    EmulatedRanks(monkeypatch).run(num_ranks, run_step, [name] * num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_random_shapes(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    EmulatedRanks(monkeypatch).run(num_ranks, random_steps, [(num_ranks, 5)] * num_ranks)


@pytest.mark.parametrize("name", STEPS)
def test_default_device_and_dtype(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        EmulatedRanks(monkeypatch).run(2, step_under_a_default_device, [name] * 2)
    finally:
        torch.set_default_dtype(torch.float32)


def asks_of_torch(state: RankState, _: object) -> dict[str, dict[str, int]]:
    """Of every pair of the bench, over Weft's own call."""
    return {name: of_torch for name, (_, of_torch) in functions_over_own(state.comm).items()}


def test_what_known_calls_launch_beside_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the cpu engine's ask torch for, and nothing else: what it does on a GPU is a kernel or a copy."""
    monkeypatch.setattr(bench, "_HEAP_BYTES", 4 << 20)
    ranks = EmulatedRanks(monkeypatch)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: -1)  # no tool listens
    (found,) = ranks.run(1, asks_of_torch, [None])
    assert found == MOST_OF_TORCH
