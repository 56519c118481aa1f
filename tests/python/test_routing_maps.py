"""Guards against a routing map that sends tokens elsewhere than the ids it stands for, or loses a pick in silence."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import reference
from weft.call.maps import picks_of_map

NUM_EXPERTS, TOP_K = 8, 3


class _Marked(torch.Tensor):
    """Of a program that may look at every operation."""


def make(rank: int, num_tokens: int = 11, most: int = TOP_K) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 0 to `most` experts."""
    generator = torch.Generator(device="cpu").manual_seed(rank)
    scores = torch.rand((num_tokens, NUM_EXPERTS), generator=generator, dtype=torch.float32, device="cpu")
    number = torch.randint(most + 1, (num_tokens, 1), generator=generator, dtype=torch.int64, device="cpu")
    chosen = scores.argsort(dim=1).argsort(dim=1) < number
    return chosen, torch.rand(chosen.shape, generator=generator, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("top_k", [1, 3, 8, 10])
@pytest.mark.parametrize("has_probs", [True, False])
def test_picks_are_those_of_the_reference(top_k: int, has_probs: bool) -> None:
    for most in (0, 3, 8):
        chosen, probs = make(most, most=most)
        given = probs if has_probs else None
        for in_ops in (False, True):  # where gradients are asked for: by operations of torch
            wanted = probs.clone().requires_grad_() if in_ops and has_probs else given
            seen = torch.Tensor.as_subclass(chosen, _Marked) if in_ops and not has_probs else chosen
            for found, right in zip(
                picks_of_map(seen, wanted, NUM_EXPERTS, top_k, runs_kernels=False),
                reference.picks_of_map(chosen, given, NUM_EXPERTS, top_k),
                strict=True,
            ):
                assert (found is None) == (right is None)
                assert found is None or right is None or torch.equal(found, right)


def test_maps_and_weights_that_are_views() -> None:
    """Their memory is not read as it lies; weights of two bytes keep their bits."""
    chosen, probs = make(1, num_tokens=2 * NUM_EXPERTS)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = probs.to(dtype)
        want = reference.picks_of_map(chosen[::2].T, given.float()[::2].T, NUM_EXPERTS, TOP_K)
        ids, weights = picks_of_map(chosen[::2].T, given[::2].T, NUM_EXPERTS, TOP_K, runs_kernels=False)
        assert weights is not None
        assert want[1] is not None
        assert weights.dtype is dtype
        assert torch.equal(ids, want[0])
        assert torch.equal(weights.float(), want[1])
    neg = torch.complex(probs, probs).conj().imag  # its memory has the other sign
    assert neg.is_neg()
    ids, weights = picks_of_map(chosen, neg, NUM_EXPERTS, TOP_K, runs_kernels=False)
    want = reference.picks_of_map(chosen, -probs, NUM_EXPERTS, TOP_K)
    assert weights is not None
    assert want[1] is not None
    assert torch.equal(weights, want[1])


def test_numbers_that_make_no_sense_are_refused() -> None:
    chosen, _ = make(0)
    with pytest.raises(weft.InvalidArgument, match="a pick at least"):
        picks_of_map(chosen, None, NUM_EXPERTS, 0, runs_kernels=False)


def calls(comm: weft.Communicator) -> None:
    with weft.ExpertParallel(comm, num_experts=NUM_EXPERTS, top_k=TOP_K, hidden=16, max_tokens_per_rank=11) as ep:
        chosen, probs = make(comm.rank)
        x = torch.randn((11, 16), dtype=torch.float32, device="cpu").bfloat16()
        probs.requires_grad_()
        ids, weights = reference.picks_of_map(chosen, probs.detach(), NUM_EXPERTS, TOP_K)
        for layout in ("rank_major", "expert_major"):
            by_map = ep.dispatch(x, chosen, probs, layout=layout)
            by_ids = ep.dispatch(x, ids, weights, layout=layout)
            assert torch.equal(by_map.x, by_ids.x)
            assert torch.equal(by_map.topk_weights, by_ids.topk_weights)
        y = ep.combine(by_map.x, by_map.handle)
        y.float().sum().backward()
        assert probs.grad is not None
        assert torch.equal(probs.grad != 0, chosen & (x.float().sum(1) != 0)[:, None])
        for wrong in ((chosen[:, 1:], None), (chosen, probs[:, 1:].detach())):
            with pytest.raises(weft.InvalidArgument, match="map"):
                ep.dispatch(x, *wrong)
        ep.dispatch(x, make(7, most=8)[0])
        with pytest.raises(weft.InvalidArgument, match=f"first {NUM_EXPERTS} at"):
            ep.check()


def wrong(comm: weft.Communicator) -> None:
    """Refused by a typed error before anything is sent; a peer that waits is told."""
    with weft.ExpertParallel(comm, num_experts=NUM_EXPERTS, top_k=TOP_K, hidden=16, max_tokens_per_rank=11) as ep:
        chosen, probs = make(0)
        x = torch.ones((11, 16), dtype=torch.bfloat16, device="cpu")
        for routing_map, weights in (
            (chosen, probs.tolist()),
            (chosen, probs.to("meta")),
            (chosen, probs.to_sparse()),
            (chosen, probs.double()),
            (chosen.to("meta"), None),
            (chosen.to("meta"), probs),
            (chosen.to_sparse(), probs),
        ):
            comm._has_refused = False
            with pytest.raises(weft.InvalidArgument, match="topk_"):
                ep.dispatch(x, routing_map, weights)
            assert comm._has_refused  # the peers are told
        r = ep.dispatch(x, chosen, probs.bfloat16())
        assert r.topk_weights is not None


def test_wrong_maps_are_refused_and_told() -> None:
    weft.spawn(wrong, 2, device="cpu")


def test_calls_take_maps() -> None:
    weft.spawn(calls, 2, device="cpu")
