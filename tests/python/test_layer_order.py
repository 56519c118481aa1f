"""Guards against layers of equal shape that are called in another order on one rank: their rows would go through the
experts of the wrong layer, and nobody would see it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft

SHAPE: dict[str, Any] = {
    "num_experts": 4, "top_k": 2, "hidden": 16, "max_tokens_per_rank": 8, "dtype": torch.float32, "deadline_s": 60.0
}  # fmt: skip


def parts(comm: weft.Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([[0, 2], [3, 1], [1, 2]], dtype=torch.int64, device="cpu")
    return torch.full((3, 16), float(comm.rank + 1), dtype=torch.float32, device="cpu"), ids


def refused(call: Any) -> str:
    with pytest.raises(weft.InvalidArgument, match="ranks called different things") as caught:
        call()
    return str(caught.value)


def swapped(comm: weft.Communicator) -> list[str]:
    first, second = (weft.ExpertParallel(comm, **SHAPE) for _ in range(2))
    x, ids = parts(comm)
    mine = (first, second) if comm.rank == 0 else (second, first)
    made = [ep.dispatch(x, ids) for ep in (first, second)]
    wanted = [ep.combine(r.x, r.handle) for ep, r in zip((first, second), made, strict=True)]
    texts = []
    for ep in mine:  # a first dispatch, a repeated one, a combine
        r = made[0 if ep is first else 1]
        texts.append(refused(lambda ep=ep: ep.dispatch(x, ids)))
        texts.append(refused(lambda ep=ep, r=r: ep.dispatch(x, handle=r.handle)))
        texts.append(refused(lambda ep=ep, r=r: ep.combine(r.x, r.handle)))
    for ep, r, y in zip((first, second), made, wanted, strict=True):  # and all goes on
        assert torch.equal(ep.combine(r.x, r.handle), y)
    return texts


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_layers_in_another_order(isolation: str) -> None:
    """Every rank raises, naming both objects; the calls after it are right."""
    for rank, texts in enumerate(weft.spawn(swapped, 2, device="cpu", isolation=isolation)):
        assert len(texts) == 6
        for at, text in enumerate(texts):
            mine = int(at >= 3) ^ rank
            assert f"rank {rank} {'combine' if at % 3 == 2 else 'dispatch'}(" in text
            assert f" of ExpertParallel {mine}, rank {1 - rank} " in text
            assert f" of ExpertParallel {1 - mine}. Objects of one shape" in text


def autograd_swapped(comm: weft.Communicator) -> None:
    layers = [weft.ExpertParallel(comm, **SHAPE) for _ in range(2)]
    x, ids = parts(comm)
    for call in ("dispatch", "combine"):
        outs = []
        for ep in layers:
            given = x.clone().requires_grad_()
            r = ep.dispatch(given, ids)
            outs.append((r.x if call == "dispatch" else ep.combine(r.x, r.handle)).sum())
        first, last = outs if comm.rank == 0 else outs[::-1]
        refused(first.backward)
        del last
        layers[0].check()


def test_backwards_in_another_order() -> None:
    """A backward belongs to its object, too."""
    weft.spawn(autograd_swapped, 2, device="cpu", isolation="thread")


def numbered(comm: weft.Communicator) -> list[list[int]]:
    first = weft.ExpertParallel(comm, **SHAPE)
    other = weft.ExpertParallel(comm, **SHAPE | {"top_k": 1})  # of a window of its own
    second = weft.ExpertParallel(comm, **SHAPE | {"num_windows": 2})
    second.close()
    if comm.rank == 1:  # as after a constructor that has failed on this rank alone, behind its last exchange
        first.calls.windows[0].next_object -= 1
    third = weft.ExpertParallel(comm, **SHAPE)
    x, ids = parts(comm)
    third.combine(third.dispatch(x, ids).x, third.dispatch(x, ids).handle)
    return [ep.calls.numbers for ep in (first, other, second, third)]


def test_numbers_are_equal_on_all_ranks() -> None:
    """Also when the ranks have not the same objects left."""
    for numbers in weft.spawn(numbered, 2, device="cpu", isolation="thread"):
        assert numbers == [[0], [0], [1, 0], [2]]
