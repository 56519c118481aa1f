"""Guards against a rank with more tokens than its windows hold that others wait for, that breaks the window, or of
whose number ranks think otherwise; and against a window that such a call leaves unlike before.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_gpu import EmulatedRanks
from kernels import Mutant

import weft
from pool import RankState
from weft.call.room import NeedsRoom

MOST, EXPERTS, HIDDEN = 12, 6, 48


def inputs(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids and weights of a rank."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    ids = torch.randint(-1, EXPERTS, (num_tokens, 2), generator=generator)
    return x, ids, torch.rand(num_tokens, 2, generator=generator)


def opened(state: RankState) -> weft.ExpertParallel:
    """That tells the ranks when it needs room."""
    ep = weft.ExpertParallel(
        state.comm, num_experts=EXPERTS, top_k=2, hidden=HIDDEN, max_tokens_per_rank=MOST, heap_bytes=1 << 20
    )
    ep.calls.tell_need()
    return ep


def needs(state: RankState, turns: tuple[dict[str, Any], ...]) -> list[int]:
    """What each call needs; 0: it goes well."""
    found = []
    with opened(state) as ep:
        for turn, call in enumerate(turns):
            num_tokens = call["tokens"][state.rank]
            options = {name: value for name, value in call.items() if name != "tokens"}
            x, ids, weights = inputs(num_tokens, 10 * turn + state.rank)
            try:
                r = ep.dispatch(x, ids, weights, **options)
            except NeedsRoom as need:
                found.append(need.num_tokens)
                continue
            found.append(0)
            y = ep.combine(r.x, r.handle, weighted=False)
            picks = (ids >= 0).sum(1) if options["layout"] != "rank_major" else sum(
                ((ids >= 0) & (ids // 2 == rank)).any(1) for rank in range(3)
            )  # fmt: skip
            assert torch.equal(y, (x.float() * picks[:, None]).bfloat16())
        ep.check()
    return found


@pytest.mark.parametrize("mode", ["throughput", "latency"])
@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
def test_every_rank_knows_who_needs_most(monkeypatch: pytest.MonkeyPatch, mode: str, layout: str) -> None:
    """One rank, two, all; and the calls between them go well."""
    more = {"mode": mode, "layout": layout}
    turns = tuple(
        {"tokens": tokens, **more}
        for tokens in ((3, 0, 12), (3, 13, 2), (12, 1, 5), (700, 3, 90), (13, 14, 15), (1, 1, 1), (2, 3, 4))
    )
    ranks: Any = EmulatedRanks(monkeypatch)
    assert ranks.run(3, needs, [turns] * 3) == [[0, 13, 0, 700, 15, 0, 0]] * 3


def needs_by_capacity(state: RankState, mode: str) -> list[str]:
    """The host does not wait: a later call says it on every rank, and the one behind goes well."""
    texts = []
    with opened(state) as ep:
        x, ids, weights = inputs(13 if state.rank else 4, state.rank)
        ep.dispatch(x, ids, weights, capacity=40, mode=mode)
        state.comm.meet(300)
        for _ in range(2):
            try:
                r = ep.dispatch(x[:4], ids[:4], weights[:4], capacity=40, mode=mode)
            except weft.InvalidArgument as error:
                assert not isinstance(error, NeedsRoom)
                texts.append(str(error))
        assert torch.equal(r.x[: int(r.num_rows)], ep.dispatch(x[:4], ids[:4], weights[:4], mode=mode).x)
    return texts


@pytest.mark.parametrize("mode", ["throughput", "latency"])
def test_with_a_capacity_a_later_call_says_it(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """On every rank, as an InvalidArgument."""
    ranks: Any = EmulatedRanks(monkeypatch)
    for texts in ranks.run(2, needs_by_capacity, [mode] * 2):
        assert len(texts) == 1
        assert "a rank has 13 tokens" in texts[0]


NOT_NOTED = Mutant(
    "a rank does not note what it needs itself",
    "weft/kernels/need_room.cuh",
    "view.host->seen_caller[view.rank] = need;",
    "",
)


def test_a_mistake_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that needs most thinks that another does."""
    ranks: Any = EmulatedRanks(monkeypatch, NOT_NOTED)
    turns = ({"tokens": (13, 14, 15), "mode": "throughput", "layout": "rank_major"},)
    assert ranks.run(3, needs, [turns] * 3) != [[15]] * 3
